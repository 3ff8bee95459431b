"""Tracks the memory of gathered units: autograd saves places in it."""

from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache, partial

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from functional_ds.base.torch_private import held_elsewhere, version_of
from functional_ds.sharding.layout import Layout
from functional_ds.step.views.graph_checks import check_version


class SavedPlace:
    """What autograd saves instead of a tensor in a unit's memory: the unit, and where the tensor is in it."""

    __slots__ = ("offset", "release", "segment", "shape", "stride", "unit")

    def __init__(self, unit: int, segment: int, tensor: Tensor, release: Callable[[int], None]) -> None:
        self.unit, self.segment, self.release = unit, segment, release
        self.shape, self.stride, self.offset = tensor.shape, tensor.stride(), tensor.storage_offset()

    def __del__(self) -> None:
        self.release(self.unit)


class SavedTensor:
    """What autograd saves of any other tensor. With hooks torch does not check for later writes, so this does."""

    __slots__ = ("tensor", "version")

    def __init__(self, tensor: Tensor) -> None:
        # An output saved with its grad_fn would keep its own node alive.
        self.tensor = tensor.detach() if tensor.grad_fn is not None else tensor
        self.version = version_of(tensor)

    def unchanged(self) -> Tensor:
        """The tensor.

        Raises:
            RuntimeError: it was written to since.
        """
        if version_of(self.tensor) != self.version:
            check_version(self.tensor, self.version)
        return self.tensor


class SavedPlaces:
    """The saved-tensor hooks of one pass.

    Args:
        layout: the units.
        fetch: gives a unit's flat tensors, ``[segment.size]``, one per segment.
        unused: is called with a unit when no saved tensor refers to it any more.
    """

    def __init__(self, layout: Layout, fetch: Callable[[int], Sequence[Tensor]], unused: Callable[[int], None]) -> None:
        self._layout, self._fetch, self._unused = layout, fetch, unused
        self._homes: dict[int, tuple[int, int, StorageWeakRef]] = {}  # by ``_place``: unit, segment in it, storage
        self._saved: Counter[int] = Counter()  # unit -> saved tensors that still refer to it

    def add(self, unit: int, place: int, flat: Tensor) -> None:
        """Registers the tensor that holds a segment of a unit."""
        if flat.numel():
            storage = flat.untyped_storage()
            self._homes[_place(storage)] = (unit, place, StorageWeakRef(storage))

    def clear(self) -> None:
        """Forgets all segments."""
        self._homes.clear()

    def refers_to(self, unit: int) -> bool:
        """Whether any saved tensor refers to the unit."""
        return self._saved.get(unit, 0) > 0

    def pack(self, tensor: Tensor) -> SavedPlace | SavedTensor:
        """What to save for a tensor."""
        home = self.home(tensor)
        if home is None:
            return SavedTensor(tensor)
        self._saved[home[0]] += 1
        return SavedPlace(*home, tensor, self._released)

    def unpack(self, saved: SavedPlace | SavedTensor) -> Tensor:
        """The saved tensor."""
        if isinstance(saved, SavedTensor):
            return saved.unchanged()
        flat = self._fetch(saved.unit)[saved.segment]
        return torch.as_strided(flat, saved.shape, saved.stride, saved.offset)

    def home(self, tensor: Tensor) -> tuple[int, int] | None:
        """The unit and segment whose memory holds the tensor."""
        if tensor.layout != torch.strided or tensor.is_conj() or tensor.is_neg():
            return None
        try:
            home = self._homes.get(_place(tensor.untyped_storage()))
        except RuntimeError:  # no memory: a derivative that is known to be zero, or a subclass
            return None
        if home is None or home[2].expired():  # the address may have been reused
            return None
        unit, place, _ = home
        segment = self._layout.segments[self._layout.units[unit].segments[place]]
        return (unit, place) if segment.dtype == tensor.dtype else None

    def owner(self, tensor: Tensor) -> str | None:
        """The path of the leaf whose memory holds the tensor."""
        home = self.home(tensor)
        if home is None:
            return None
        segment, first = self._layout.segments[self._layout.units[home[0]].segments[home[1]]], int(tensor.storage_offset())
        slot = max((slot for slot in segment.slots if slot.offset <= first), key=lambda slot: slot.offset)
        return self._layout.paths[slot.leaf]

    def _released(self, unit: int) -> None:
        self._saved[unit] -= 1
        if not self._saved[unit]:
            self._unused(unit)


def _place(storage: torch.UntypedStorage) -> int:
    """The storage's address. Storages without values have none: they get the negative address of their record."""
    return (storage.device.type != "meta" and storage.data_ptr()) or -StorageWeakRef(storage).cdata


# -- leaves, whose memory comes and goes with their units -------------------------------------------------------------------


class UnitLeaves:
    """The leaves of units within a pass. A trained leaf is one tensor throughout it, so all its uses are uses of one tensor.

    When a unit is freed its leaves release their memory, and get the unit's new memory when it is fetched again.

    Attributes:
        whole: the leaves of each gathered unit, by number.
    """

    def __init__(self) -> None:
        self.whole: dict[int, dict[int, Tensor]] = {}
        self._trained: dict[int, list[Tensor]] = {}  # unit -> its trained leaves, throughout the pass
        self._empty: dict[int, set[int]] = {}  # freed unit -> which of those have no memory
        self._held: set[int] = set()  # freed units with a leaf that was still referenced
        self._nothing = cache(partial(torch.empty, 0))  # for leaves without memory

    def filled(self, unit: int, views: list[Tensor], make: Callable[[int, list[Tensor]], list[Tensor]]) -> list[Tensor]:
        """The unit's trained leaves in the memory of ``views``: those of earlier uses, or what ``make`` returns."""
        if unit not in self._trained:
            self._trained[unit] = make(unit, views)
        leaves = self._trained[unit]
        self._held.discard(unit)
        for place in self._empty.pop(unit, ()):
            leaves[place].data = views[place]
        return leaves

    def free(self, unit: int) -> None:
        """Releases the memory of a unit, except of leaves that are still referenced."""
        self.whole.pop(unit, None)
        if unit in self._trained:
            self._empty[unit] = set()
            self._held.add(unit)
            self._held = {freed for freed in self._held if not self._emptied(freed)}

    def clear(self) -> None:
        """Drops all leaves."""
        for held in (self.whole, self._trained, self._empty, self._held):
            held.clear()

    def _emptied(self, unit: int) -> bool:
        """Whether no leaf of a freed unit has memory; frees that of leaves that are no longer referenced."""
        leaves, empty = self._trained[unit], self._empty[unit]
        for place, held in enumerate(held_elsewhere(leaves)):
            if not held and place not in empty:
                leaves[place].data = self._nothing(dtype=leaves[place].dtype, device=leaves[place].device)
                empty.add(place)
        return len(empty) == len(leaves)
