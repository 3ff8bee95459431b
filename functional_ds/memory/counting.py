"""Bytes of what is held: each piece of memory once, whoever shares it, and where it lies."""

from collections.abc import Iterable
from typing import Any

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from functional_ds.base import tree
from functional_ds.base.torch_private import storage_id

__all__ = ["Live", "holdings", "places", "stored"]


def holdings(held: Any) -> dict[int, tuple[str, int]]:
    """Each piece of memory of a tree: by an identity, where it lies and how many bytes it has.

    A tensor's is its storage, whole, also where it is a view of a part. Any other leaf with ``nbytes`` counts as one piece,
    on the disk or wherever its ``place`` says: that is how what was offloaded counts.
    """
    found: dict[int, tuple[str, int]] = {}
    for leaf in tree.leaves(held):
        if isinstance(leaf, Tensor):
            storage = leaf.untyped_storage()
            found[storage_id(storage)] = (storage.device.type, storage.nbytes())
        elif hasattr(leaf, "nbytes"):
            found[id(leaf)] = (str(getattr(leaf, "place", "disk")), int(leaf.nbytes))
    return found


def stored(held: Any) -> int:
    """The bytes of a tree.

    >>> import torch
    >>> whole = torch.zeros(4)
    >>> stored([whole, whole[1:], torch.zeros(2, dtype=torch.bfloat16)])
    20
    """
    return sum(size for _, size in holdings(held).values())


def places(held: Any) -> dict[str, int]:
    """The bytes of a tree on each kind of device."""
    found: dict[str, int] = {}
    for where, size in holdings(held).values():
        found[where] = found.get(where, 0) + size
    return found


class Live:
    """Which of the tensors that were noted still have memory; ``peak`` is the most bytes that did at any note."""

    def __init__(self) -> None:
        self.peak = 0
        self._sum = 0  # of all that were not yet seen to be gone
        self._known: dict[int, tuple[StorageWeakRef, int]] = {}

    def note(self, tensors: Iterable[Tensor], *, ahead: int = 0) -> None:
        """Tensors, and bytes that will come but have no tensor yet."""
        for tensor in tensors:
            storage = tensor.untyped_storage()
            key = storage_id(storage)
            if key in self._known and self._known[key][0].expired():
                self._sum -= self._known.pop(key)[1]
            if key not in self._known:
                self._known[key] = (StorageWeakRef(storage), storage.nbytes())
                self._sum += storage.nbytes()
        if self._sum + ahead > self.peak:
            self.peak = max(self.peak, self.bytes + ahead)

    @property
    def bytes(self) -> int:
        """What is alive now."""
        for key in [key for key, (storage, _) in self._known.items() if storage.expired()]:
            self._sum -= self._known.pop(key)[1]
        return self._sum

    def holds(self) -> dict[int, int]:
        """What is alive now: bytes by the identity that ``holdings`` has."""
        return {key: size for key, (storage, size) in self._known.items() if not storage.expired()}
