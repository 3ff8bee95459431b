"""Reports of activation memory: bytes saved, recomputed, offloaded and partitioned."""

import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager

import attrs
import torch
from torch import Tensor

from .policy import Keep
from .saved_tensors import Offloaded, Resident

_HERE = threading.local()  # the reports that this thread has open


@attrs.frozen
class ReportRow:
    """The tensors of one part and category that are kept in one way.

    Attributes:
        part: the path of a module, or the name of a function.
        what: the tensors' name, "inputs", "matmuls", or "inside" for any other.
        keep: where they are kept.
        tensors: how many; storages, for those that are saved or recomputed.
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
class _SavedStorage:
    memory: "weakref.ref[torch.UntypedStorage]"
    part: str
    what: str
    bytes: int
    saved: bool = False


@attrs.define(eq=False, repr=False)
class RematReport:
    """The activation memory of the forward passes that ran while the report was open, in exact bytes.

    Each storage counts once, under the first part that recorded it. Params and sparse tensors do not count. What the autograd
    graph holds outside of any part counts only if ``T.remat`` is among the step's transforms.

    Law: saved + recomputed, plus the whole bytes of offloaded and partitioned tensors, is what plain autograd would hold, plus
    inputs that only a second run needs, plus named tensors that only spare a second run operations, plus what is held in two
    places.

    Attributes:
        saved: bytes held on the device.
        recomputed: bytes not held, because the backward pass recomputes them.
        offloaded: bytes held on the host.
        partitioned: bytes of partitioned tensors that this rank holds.
    """

    _entries: list[_SavedStorage] = attrs.field(factory=list)
    _at: dict[int, _SavedStorage] = attrs.field(factory=dict)  # by address
    _offloaded: dict[tuple[str, str, Keep], list[int]] = attrs.field(factory=dict)
    _gone: "dict[int, weakref.ref[torch.UntypedStorage]]" = attrs.field(factory=dict)  # of what was offloaded, by id
    _known: "weakref.WeakSet[Offloaded]" = attrs.field(factory=weakref.WeakSet)

    @property
    def rows(self) -> list[ReportRow]:
        """One row for each part, category and way to keep."""
        totals: dict[tuple[str, str, Keep], list[int]] = {}
        for entry in self._entries:
            if entry.saved or id(entry.memory) not in self._gone:
                key = (entry.part, entry.what, Keep.SAVE if entry.saved else Keep.RECOMPUTE)
                _add(totals.setdefault(key, [0, 0, 0]), entry.bytes, entry.bytes * entry.saved)
        return [ReportRow(*key, *numbers) for key, numbers in [*totals.items(), *self._offloaded.items()]]

    @property
    def saved(self) -> int:
        """Bytes held on the device."""
        return self._held(Keep.SAVE)

    @property
    def recomputed(self) -> int:
        """Bytes that are recomputed."""
        return sum(row.whole for row in self.rows if row.keep is Keep.RECOMPUTE)

    @property
    def offloaded(self) -> int:
        """Bytes held on the host."""
        return self._held(Keep.OFFLOAD)

    @property
    def partitioned(self) -> int:
        """Bytes of partitioned tensors that this rank holds."""
        return self._held(Keep.PARTITION)

    def __str__(self) -> str:
        lines = [f"{'part':<24} {'what':<12} {'became':<12} {'tensors':>8} {'bytes':>14} {'held':>14}"]
        for row in self.rows:
            lines.append(
                f"{row.part:<24} {row.what:<12} {row.keep.value:<12} {row.tensors:>8,} {row.whole:>14,} {row.held:>14,}"
            )
        return "\n".join([*lines, self._totals()])

    def __repr__(self) -> str:
        return f"RematReport({self._totals()})"

    def _totals(self) -> str:
        return ", ".join(f"{name} {getattr(self, name):,}" for name in ("saved", "recomputed", "offloaded", "partitioned"))

    # -- for regions ---------------------------------------------------------------------------------------------------

    def note(self, part: str, what: str, tensor: Tensor, *, saved: bool) -> None:
        """The backward pass needs this tensor's memory, which is held or recomputed."""
        if tensor.layout != torch.strided:
            return
        entry = self._entry(part, what, tensor)
        if saved and not entry.saved:
            entry.part, entry.what, entry.saved = part, what, True

    def note_kept(self, part: str, what: str, kept: Resident | Offloaded) -> None:
        """A tensor was stored."""
        if isinstance(kept, Resident):
            self.note(part, what, kept.tensor, saved=True)
            return
        self._gone[id(kept.memory)] = kept.memory  # a storage has one weak reference, which outlives it
        if kept not in self._known:
            self._known.add(kept)
            _add(self._offloaded.setdefault((part, what, kept.keep), [0, 0, 0]), kept.whole, kept.held)

    def _entry(self, part: str, what: str, tensor: Tensor) -> _SavedStorage:
        storage = tensor.untyped_storage()
        entry = self._at.get(storage.data_ptr())
        if entry is None or entry.memory() is not storage:
            entry = self._at[storage.data_ptr()] = _SavedStorage(weakref.ref(storage), part, what, storage.nbytes())
            self._entries.append(entry)
        return entry

    def _held(self, keep: Keep) -> int:
        return sum(row.held for row in self.rows if row.keep is keep)


def _add(numbers: list[int], whole: int, held: int) -> None:
    for place, more in enumerate((1, whole, held)):
        numbers[place] += more


@attrs.frozen
class Notes:
    """What one part records in a report, if one is open.

    Attributes:
        report: None for nowhere.
        part: the part's name.
        recomputed_outside: whether an enclosing part recomputes, so that what this one leaves to autograd is dropped.
    """

    report: RematReport | None
    part: str
    recomputed_outside: bool

    def saved(self, what: str, tensor: Tensor) -> None:
        """Autograd saves the tensor."""
        if self.report is not None and not self.recomputed_outside:
            self.report.note(self.part, what, tensor, saved=True)

    def kept(self, what: str, kept: Resident | Offloaded) -> None:
        """The tensor was stored."""
        if self.report is not None:
            self.report.note_kept(self.part, what, kept)


@contextmanager
def remat_report() -> Iterator[RematReport]:
    """Opens a report of activation memory for this thread, in a ``with`` block. It slows steps down.

    >>> import functional_ds as fds
    >>> x = torch.ones(4, requires_grad=True)
    >>> with remat_report() as report:
    ...     y = fds.remat(lambda x: (x * 2).exp().exp(), policy="recompute")(x * 1)
    >>> report
    RematReport(saved 16, recomputed 32, offloaded 0, partitioned 0)
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
