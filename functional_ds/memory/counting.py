"""Bytes of tensors: each storage counts once, whoever shares it, on the device where it lies."""

from collections.abc import Hashable, Iterable
from threading import RLock
from typing import Any

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from functional_ds.base import tree
from functional_ds.base.torch_private import storage_bytes

__all__ = ["Live", "holdings", "places", "stored"]


def holdings(held: Any) -> dict[Hashable, tuple[str, int]]:
    """The memory of a tree: from an identity of each storage to the kind of its device and its bytes.

    A tensor counts with its whole storage, also where it is a view of a part. Any other leaf with ``nbytes`` counts as one
    storage, on the disk or wherever its ``place`` says. Offloaded leaves count like this.
    """
    found: dict[Hashable, tuple[str, int]] = {}
    for leaf in tree.leaves(held):
        if isinstance(leaf, Tensor):
            storage = leaf.untyped_storage()
            found[StorageWeakRef(storage)] = (storage.device.type, storage.nbytes())
        elif hasattr(leaf, "nbytes"):
            found["no tensor", id(leaf)] = (str(getattr(leaf, "place", "disk")), int(leaf.nbytes))
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
    """The storages of noted tensors that are still allocated. ``peak`` is the most bytes that were at any note."""

    def __init__(self) -> None:
        self.peak = 0
        self._sum = 0  # of all storages that were not yet seen to be freed; none has more
        self._known: dict[StorageWeakRef, int] = {}
        self._lock = RLock()  # threads of collectives note, too

    def __repr__(self) -> str:
        return f"Live({self.bytes:,} bytes, peak {self.peak:,})"

    def note(self, tensors: Iterable[Tensor], *, ahead: int = 0) -> None:
        """Adds tensors; ``ahead`` are bytes that are under way and have no tensor yet."""
        with self._lock:
            for tensor in tensors:
                storage = tensor.untyped_storage()
                key = StorageWeakRef(storage)  # while it is held, no other storage gets this identity
                if key not in self._known:
                    self._known[key] = storage.nbytes()
                    self._sum += storage.nbytes()
            if self._sum + ahead > self.peak:
                self.peak = max(self.peak, self.bytes + ahead)

    @property
    def bytes(self) -> int:
        """The bytes that are allocated now; a storage that was resized counts with what it has."""
        now = 0
        with self._lock:
            for key, size in [*self._known.items()]:
                left = storage_bytes(key)
                if left is None:
                    self._sum -= self._known.pop(key)
                else:
                    now += min(left, size)
        return now

    def holds(self) -> dict[Hashable, int]:
        """The storages that are allocated now: bytes by the identity that ``holdings`` has."""
        with self._lock:
            return {key: size for key, size in self._known.items() if not key.expired()}
