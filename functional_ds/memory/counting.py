"""Bytes of tensors: each storage is counted once, on its device."""

from collections.abc import Hashable
from typing import Any

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from functional_ds.base import tree


def holdings(held: Any) -> dict[Hashable, tuple[str, int]]:
    """The memory of a tree: from an identity of each storage to its device type and bytes.

    A tensor counts with its whole storage, even if it is a view of a part. Any other leaf with ``nbytes``, such as an offloaded
    one, counts as one storage, on disk or at its ``place``.

    >>> x = torch.zeros(1000)
    >>> list(holdings([x, x[:10], x.view(10, 100)]).values())  # one storage
    [('cpu', 4000)]
    """
    by_storage: dict[Hashable, tuple[str, int]] = {}
    for leaf in tree.leaves(held):
        if isinstance(leaf, Tensor):
            storage = leaf.untyped_storage()
            by_storage[StorageWeakRef(storage)] = (storage.device.type, storage.nbytes())
        elif hasattr(leaf, "nbytes"):
            by_storage["no tensor", id(leaf)] = (str(getattr(leaf, "place", "disk")), int(leaf.nbytes))
    return by_storage


def stored(held: Any) -> int:
    """The bytes of a tree.

    >>> import torch
    >>> whole = torch.zeros(4)
    >>> stored([whole, whole[1:], torch.zeros(2, dtype=torch.bfloat16)])
    20
    """
    return sum(size for _, size in holdings(held).values())


def places(held: Any) -> dict[str, int]:
    """The bytes of a tree by device type.

    >>> places({"w": torch.zeros(1000), "step": torch.tensor(0)})
    {'cpu': 4008}
    """
    sizes: dict[str, int] = {}
    for where, size in holdings(held).values():
        sizes[where] = sizes.get(where, 0) + size
    return sizes
