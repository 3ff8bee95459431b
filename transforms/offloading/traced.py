"""Handles of files while their step is traced: reads and writes are nodes of the graph."""

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import attrs
import torch
from torch import Tensor

from functional_ds.base.disk.direct_io import aligned, padded
from functional_ds.comm.record.graph_notes import TracedLeaf
from functional_ds.comm.worlds.current import recorder

from .files import OffloadError
from .prefetch import Prefetched, Prefetcher
from .tensor_info import begins_with, typed


def _noting(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, whose result is the first file error among its arguments, or the one that it raises."""

    def run(*given: Any) -> Any:
        try:
            return next((x for x in given if isinstance(x, OffloadError)), None) or function(*given)
        except OffloadError as error:
            return error

    return run


def _node(function: Callable[..., Any], given: Sequence[Tensor], memory: Sequence[Tensor] = (), **like: Tensor) -> Tensor:
    into: Any = recorder()
    result: Tensor = into.host(function, given, memory, **like)
    return result


@attrs.define(eq=False)
class TracedTransfer:
    """A read or a write in the graph, with what its future offers.

    Attributes:
        token: carries the future, or its result once it is waited for.
        memory: of a read, which has the values once it is waited for.
    """

    token: Tensor
    memory: Tensor | None = None

    def result(self) -> None:
        """A node that waits for a read; writes are waited for together."""
        if self.memory is not None:
            self.token = _node(_noting(lambda read, _: read.result()), [self.token], [self.memory])
            self.memory = None

    def exception(self) -> None:
        """None: ``failed`` has the errors."""

    def done(self) -> bool:
        """Whether nothing needs to wait for it: as no one knows, never."""
        return False


@attrs.frozen(eq=False, repr=False)
class TracedOnDisk(Prefetched, TracedLeaf):
    """The handle of a tensor in a file, while a step is traced."""

    shape: torch.Size
    dtype: torch.dtype
    chunk: int
    prefetcher: Prefetcher
    token: Tensor

    def read_piece(self, index: int, *, into: Tensor, after: Sequence[TracedTransfer] = ()) -> TracedTransfer:
        """A node that starts to read a piece into memory, once ``after`` is done."""

        def read(handle: Any, *rest: Any) -> "Future[int]":
            *earlier, memory = rest
            begun: Future[int] = handle.read_piece(index, into=memory, after=earlier)
            return begun

        return TracedTransfer(_node(_noting(read), [self.token, *(one.token for one in after)], [into]), into)

    def begin(self) -> Tensor:
        """A node that starts to read all of it."""
        return _node(lambda handle: handle.begin(), [self.token])

    def end(self, begun: Tensor) -> Tensor:
        """The tensor, which a node waits for."""
        values = torch.empty(self.shape, dtype=self.dtype)
        return _node(lambda read: read.result().view(self.shape), [begun], like=values)

    def version(self) -> "TracedVersion":
        """Space for its next version."""
        return TracedVersion(self, _node(_noting(lambda handle: handle.version()), [self.token]))


@attrs.define(eq=False, repr=False)
class TracedVersion:
    """The next version of a tensor on disk, while a step is traced."""

    old: TracedOnDisk
    token: Tensor
    writes: list[TracedTransfer] = attrs.field(factory=list)

    def write(self, values: Tensor, room: Tensor) -> TracedTransfer:
        """A node that starts to write the next piece from ``room``."""
        dtype, shape = self.old.dtype, values.shape
        if not begins_with(staged := typed(room, dtype, shape), values):
            staged.copy_(values)
        write = _noting(lambda version, memory: version.write(typed(memory, dtype, shape), memory))
        self.writes.append(TracedTransfer(_node(write, [self.token], [room[: padded(staged.nbytes)]])))
        return self.writes[-1]

    def done(self) -> TracedOnDisk:
        """Its handle."""
        return attrs.evolve(self.old, token=_node(lambda version: version.done(), [self.token]))


def failed(transfers: Sequence[TracedTransfer]) -> Tensor:
    """1 if one of the transfers fails, else 0, once all are over; carries the first error."""

    def over(*futures: Any) -> None:
        for future in futures:
            if isinstance(future, Future):
                future.exception()
        for future in futures:
            if isinstance(future, Future):
                future.result()

    return _node(_noting(over), [one.token for one in transfers])


def settled(settle: Callable[[OffloadError | None, Tensor], None], failed: Tensor, count: Tensor) -> None:
    """A node that raises an error if there is one here or on other ranks, before anything of the old state is replaced."""
    _node(settle, [failed], [count])


torch.library.define("functional_ds::aligned", "(int nbytes) -> Tensor")
torch.library.impl("functional_ds::aligned", "CompositeExplicitAutograd", aligned)
torch.library.register_fake("functional_ds::aligned", lambda nbytes: torch.empty(padded(nbytes), dtype=torch.uint8))
