"""The values of a tree on their way into files: planned on all ranks alike, written by rank 0."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

import attrs
import torch
from torch import Tensor

from functional_ds import comm

from .format import INDEX, SINGLE, File, Spec, laid_out
from .naming import Named
from .streaming import Held, Hop, Known, chunk_bytes, stream
from .writing import Writer, refuse_existing

__all__ = ["Plan", "Transfer"]


@attrs.frozen
class Plan:
    """Which files, and where."""

    folder: Path
    files: tuple[File, ...]
    overwrite: bool

    @staticmethod
    def of(path: Path, *, specs: Sequence[Spec], limit: int | None, metadata: Mapping[str, str], overwrite: bool) -> "Plan":
        """A file if the path ends with ``.safetensors``, else a folder."""
        if path.suffix != ".safetensors":
            return Plan(path, laid_out(specs, limit=limit, metadata=metadata), overwrite)
        if limit is not None:
            raise ValueError(f"shard_bytes={limit}: path={str(path)!r} is a single file; name a folder")
        return Plan(path.parent, (File.of(path.name, specs, metadata),), overwrite)

    def check(self) -> None:
        """Refuses to replace anything that it was not told to replace."""
        names = [file.name for file in self.files]
        model = len(names) > 1 or names == [SINGLE]
        if not self.overwrite:
            refuse_existing([self.folder / name for name in (dict.fromkeys([SINGLE, INDEX, *names]) if model else names)])


@attrs.frozen(eq=False)
class Transfer:
    """Leaves and buffers, and the files that they go into."""

    plan: Plan
    named: Mapping[Known, Named]
    buffers: Mapping[str, Tensor]
    ranks: comm.Group

    def run(self, held: Sequence[Held], hops: Sequence[Hop]) -> None:
        """All ranks together; what goes wrong in writing is raised on every rank, once nobody waits for anybody."""
        hops = [hop for hop in hops if hop.leaf in self.named]
        with ExitStack() as stack:
            writer = Writer(self.plan.folder, self.plan.files, self.plan.overwrite)
            writes = self.ranks.rank == 0

            def begin() -> None:
                self.plan.check()
                stack.enter_context(writer)

            self._together(begin if writes else None)
            taking = _Taking(writer, self.named)
            stream(hops, held, group=self.ranks, take=taking, cast=self._cast, chunk=chunk_bytes(self.named))

            def end() -> None:
                taking.raise_failure()
                for name, value in self.buffers.items():
                    writer.write(name, 0, value)
                writer.commit()

            self._together(end if writes else None)

    def _cast(self, leaf: Known) -> torch.dtype:
        """In which dtype values travel: narrowed already, but widened only where they are written."""
        there = self.named[leaf].dtype
        return there if there.itemsize < leaf.dtype.itemsize else leaf.dtype

    def _together(self, work: Callable[[], None] | None) -> None:
        """Rank 0 works; if it fails, all fail."""
        failure: Exception | None = None
        try:
            if work is not None:
                work()
        except (OSError, ValueError) as error:
            failure = error
        if self.ranks.size > 1:
            told = comm.broadcast_object(failure, 0, self.ranks)
            failure = told if failure is None else failure
        if failure is not None:
            raise failure


@attrs.define(eq=False)
class _Taking:
    """Writes what arrives. After a failure it goes on taking, as the others are sending."""

    writer: Writer
    named: Mapping[Known, Named]
    failure: OSError | None = None

    def __call__(self, hop: Hop, values: Tensor) -> None:
        if self.failure is None:
            try:
                for spec in self.named[hop.leaf].specs:
                    self.writer.write(spec.name, hop.offset, values)
            except OSError as error:
                self.failure = error

    def raise_failure(self) -> None:
        """What went wrong, if anything did."""
        if self.failure is not None:
            raise self.failure
