"""Requested and started collectives."""

import zlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, NoReturn, TypeVar

import attrs
import torch
from torch import Tensor

from functional_ds.base.torch_private import version_of
from functional_ds.comm.table.collective import Call, CallContext, Handle, WatchedHandle
from functional_ds.comm.table.errors import WrittenError

from .group import Group, call_site, poll_all

T = TypeVar("T")
U = TypeVar("U")


class Pending(Generic[T]):
    """A started collective: ``wait()`` returns its result, the same object each time.

    It is not a tensor, and using it as one raises TypeError or AttributeError. If it is deleted, the collective still runs,
    since other ranks need this rank's part.
    """

    def __init__(self, finish: Callable[[], T] | None, poll: Callable[[float], bool], text: Callable[[], str]) -> None:
        self._finish = finish
        self._poll = poll
        self._text = text
        self._result: T

    def wait(self) -> T:
        """Waits for the result and returns it. On CUDA the current stream waits, not the host."""
        if self._finish is not None:
            self._result = self._finish()
            self._finish = None
        return self._result

    def poll(self, timeout: float = 0.0) -> bool:
        """Whether the result is available; waits up to ``timeout`` seconds for it.

        In the simulator a positive timeout lets the other ranks run until none can continue, and the answer can depend on the
        interleaving, as it depends on the network's speed elsewhere.
        """
        return self._finish is None or self._poll(timeout)

    def then(self, function: Callable[[T], U]) -> "Pending[U]":
        """A ``Pending`` of ``function(result)``, which ``wait()`` computes."""
        return Pending(lambda: function(self.wait()), self.poll, self._text)

    @staticmethod
    def of(value: U) -> "Pending[U]":
        """A completed ``Pending`` of a value.

        >>> Pending.of(2).then(lambda x: x + 1).wait()
        3
        """
        there: Pending[U] = Pending(None, lambda timeout_s: True, lambda: "a result that is there")
        there._result = value
        return there

    @staticmethod
    def all(pendings: "Sequence[Pending[Any]]") -> "Pending[list[Any]]":
        """Combines several into one, whose ``wait()`` returns the list of their results."""

        def text() -> str:
            return "; ".join(pending._text() for pending in pendings)

        return Pending(lambda: [pending.wait() for pending in pendings], partial(poll_all, pendings), text)

    if not TYPE_CHECKING:  # type checkers report such uses, because they see no such methods

        def _refuse(self, *others: object) -> NoReturn:
            raise TypeError(f"{self!r} is a result to come, no tensor; wait() gives the result")

        __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = _refuse
        __matmul__ = __rmatmul__ = __pow__ = __neg__ = __getitem__ = __iter__ = __len__ = __bool__ = _refuse
        __float__ = __int__ = __lt__ = __le__ = __gt__ = __ge__ = _refuse

        @classmethod
        def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> NoReturn:
            raise TypeError(
                f"torch.{getattr(function, '__name__', function)} of a Pending, a result to come; wait() gives the result"
            )

        def __getattr__(self, name: str) -> NoReturn:
            if name.startswith("_"):
                raise AttributeError(name)
            raise AttributeError(f"{self!r} is a result to come and has no {name!r}; wait() gives the result")

    def __repr__(self) -> str:
        return f"Pending({self._text()}, {'done' if self._finish is None else 'under way'})"


@attrs.define(eq=False)
class Request(Generic[T]):
    """A collective that has not been started.

    Attributes:
        run: performs it and returns its result.
        start: starts it and returns a ``Pending``.
    """

    run: Callable[[], T]
    start: Callable[[], Pending[T]]

    def then(self, function: Callable[[T], U]) -> "Request[U]":
        """A request whose result is ``function(result)``."""
        return Request(lambda: function(self.run()), lambda: self.start().then(function))


# -- inputs that must not be written until the wait ---------------------------------------------------------------------


def watched_inputs(handle: Handle, call: Call, tensors: Sequence[Tensor], group: Group, site: str = "") -> Handle:
    """Makes the wait for a call raise WrittenError if an input was written after its start at ``site``.

    A back end may read an input at any time until the wait. Writes are detected by torch's version counter and, on CPU, by a
    checksum, since writes through ``.data`` and NumPy are not counted. The checksum reads the tensor twice.
    """
    here, site = CallContext(call.options, group.rank, group.size), site or call_site()
    held = [(tensor, _state(tensor)) for tensor in (tensors if call.collective.reads(here) else ())]

    def checked(wait: Callable[[], list[Tensor]]) -> list[Tensor]:
        results = wait()
        for place, (tensor, before) in enumerate(held):
            if _state(tensor) != before:
                signature = call.signature([leaf for leaf, _ in held], here)
                which = f" {place}" if len(held) > 1 else ""
                raise WrittenError(
                    f"rank {group.world.rank} wrote into input{which} of {signature} on group {group.name!r} while it was "
                    f"under way: started at {site}, written before the wait at {call_site()}; what the ranks get depends on "
                    "when it is sent. Write after wait(), or pass a clone()"
                )
        held.clear()
        return results

    return WatchedHandle(handle, checked)


def _state(tensor: Tensor) -> tuple[int | None, int]:
    """The tensor's version and, for CPU tensors, a checksum of its bytes."""
    version = None if tensor.is_inference() else version_of(tensor)  # inference tensors have none
    if tensor.device.type != "cpu":
        return version, 0
    plain = tensor.detach().resolve_conj().resolve_neg().reshape(-1)
    if plain.stride(0) != 1:  # also a single element, which torch calls contiguous with any stride
        plain = plain.clone(memory_format=torch.contiguous_format)
    return version, zlib.crc32(plain.view(torch.uint8).numpy().data) if plain.numel() else 0
