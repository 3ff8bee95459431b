"""The books of what backward passes need: bytes saved, recomputed, offloaded and partitioned."""

import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager

import attrs
import torch
from torch import Tensor

from .policy import Keep
from .saved_tensors import Away, Here

__all__ = ["RematReport", "Row", "open_report", "remat_report"]

_HERE = threading.local()  # the reports that this thread has open


@attrs.frozen
class Row:
    """What became of some values.

    Attributes:
        part: of the module or function: a path, or a name.
        what: the value's name, "inputs", "matmuls", or "inside" for any other.
        keep: what became of it.
        tensors: how many; pieces of memory, for those that are saved or recomputed.
        whole: their bytes.
        held: bytes that this rank, or its host, holds for them.
    """

    part: str
    what: str
    keep: Keep
    tensors: int
    whole: int
    held: int


@attrs.define(eq=False)
class _Entry:
    memory: "weakref.ref[torch.UntypedStorage]"
    part: str
    what: str
    bytes: int
    saved: bool = False


@attrs.define(eq=False)
class RematReport:
    """What became of the activations of the forward passes that ran while the report was open, to the byte.

    A piece of memory counts once, under the first part that spoke of it; params do not count, and neither does what the
    autograd graph holds outside of any part, unless ``T.remat`` is among the step's transforms.

    Law: saved + recomputed, plus the wholes of offloaded and partitioned, is what autograd alone would hold, plus inputs that
    only a second run needs, plus named values that only it is spared, plus what is held in two places.

    Attributes:
        saved: bytes held where they are.
        recomputed: bytes not held, because the backward pass computes them again.
        offloaded: bytes held on the host.
        partitioned: bytes held in pieces on this rank.
    """

    _entries: list[_Entry] = attrs.field(factory=list)
    _at: dict[int, _Entry] = attrs.field(factory=dict)  # by address
    _away: dict[tuple[str, str, Keep], list[int]] = attrs.field(factory=dict)
    _gone: "dict[int, weakref.ref[torch.UntypedStorage]]" = attrs.field(factory=dict)  # the memory of what is away, by id
    _known: "weakref.WeakSet[Away]" = attrs.field(factory=weakref.WeakSet)

    @property
    def rows(self) -> list[Row]:
        """One for each part, kind of value and fate."""
        totals: dict[tuple[str, str, Keep], list[int]] = {}
        for entry in self._entries:
            if entry.saved or id(entry.memory) not in self._gone:
                keep = Keep.SAVE if entry.saved else Keep.RECOMPUTE
                _add(
                    totals.setdefault((entry.part, entry.what, keep), [0, 0, 0]), entry.bytes, entry.bytes if entry.saved else 0
                )
        return [Row(*key, *numbers) for key, numbers in [*totals.items(), *self._away.items()]]

    @property
    def saved(self) -> int:
        """Bytes held where they are."""
        return self._held(Keep.SAVE)

    @property
    def recomputed(self) -> int:
        """Bytes that are computed again."""
        return sum(row.whole for row in self.rows if row.keep is Keep.RECOMPUTE)

    @property
    def offloaded(self) -> int:
        """Bytes held on the host."""
        return self._held(Keep.OFFLOAD)

    @property
    def partitioned(self) -> int:
        """Bytes held in pieces on this rank."""
        return self._held(Keep.PARTITION)

    def __str__(self) -> str:
        lines = [f"{'part':<24} {'what':<12} {'became':<12} {'tensors':>8} {'bytes':>14} {'held':>14}"]
        for row in self.rows:
            lines.append(
                f"{row.part:<24} {row.what:<12} {row.keep.value:<12} {row.tensors:>8,} {row.whole:>14,} {row.held:>14,}"
            )
        totals = ("saved", "recomputed", "offloaded", "partitioned")
        return "\n".join([*lines, ", ".join(f"{name} {getattr(self, name):,}" for name in totals)])

    # -- for whoever keeps ---------------------------------------------------------------------------------------------

    def note(self, part: str, what: str, tensor: Tensor, *, saved: bool) -> None:
        """The backward pass needs this tensor's memory, which is held, or will be there again."""
        entry = self._entry(part, what, tensor)
        if saved and not entry.saved:
            entry.part, entry.what, entry.saved = part, what, True

    def note_kept(self, part: str, what: str, kept: Here | Away) -> None:
        """A value was kept."""
        if isinstance(kept, Here):
            self.note(part, what, kept.tensor, saved=True)
            return
        self._gone[id(kept.memory)] = kept.memory  # a piece of memory has one weak reference, which outlives it
        if kept not in self._known:
            self._known.add(kept)
            _add(self._away.setdefault((part, what, kept.keep), [0, 0, 0]), kept.whole, kept.held)

    def _entry(self, part: str, what: str, tensor: Tensor) -> _Entry:
        storage = tensor.untyped_storage()
        found = self._at.get(storage.data_ptr())
        if found is None or found.memory() is not storage:
            found = self._at[storage.data_ptr()] = _Entry(weakref.ref(storage), part, what, storage.nbytes())
            self._entries.append(found)
        return found

    def _held(self, keep: Keep) -> int:
        return sum(row.held for row in self.rows if row.keep is keep)


def _add(numbers: list[int], whole: int, held: int) -> None:
    for place, more in enumerate((1, whole, held)):
        numbers[place] += more


@contextmanager
def remat_report() -> Iterator[RematReport]:
    """Counts what becomes of activations while the block runs, in this thread; counting takes time.

    >>> import functional_ds as fds
    >>> x = torch.ones(4, requires_grad=True)
    >>> with remat_report() as report:
    ...     y = fds.remat(lambda x: (x * 2).exp().exp(), policy="recompute")(x * 1)
    >>> report.saved, report.recomputed
    (16, 32)
    """
    reports = _HERE.__dict__.setdefault("reports", [])
    reports.append(RematReport())
    try:
        yield reports[-1]
    finally:
        reports.pop()


def open_report() -> RematReport | None:
    """The innermost open report of this thread."""
    reports = getattr(_HERE, "reports", None)
    return reports[-1] if reports else None
