"""Bytes of tensors, each storage counted once, on its device; of a step's gradients; and the peak of a process."""

from collections.abc import Hashable
from typing import Any

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from functional_ds.base import tree
from functional_ds.base.device import peak_bytes, resident_peak_bytes
from functional_ds.base.weighted import Weighted
from functional_ds.step.compose import wrap
from functional_ds.step.state.state import State
from functional_ds.step.step import Step, Transform


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


def noted(sizes: list[int]) -> Transform:
    """A transform that appends the bytes of each step's gradients, as the optimizer gets them, and changes nothing.

    >>> import functional_ds as fds
    >>> sizes = []
    >>> step = noted(sizes)(fds.train_step(lambda params, x: (params["w"] * x).sum(), fds.sgd(0.1)))
    >>> _ = step(step.init({"w": torch.ones(100)}), torch.ones(100))
    >>> sizes
    [400]
    """

    def reduce(inner: Any, step: Step, state: State, grads: Weighted) -> tuple[State, Weighted]:
        after, reduced = inner(step, state, grads)
        sizes.append(stored(reduced.sum))
        return after, reduced

    return wrap("noted", reduce=reduce)


def peak() -> int:
    """The peak bytes of this process: those of torch's allocator if a GPU is in use, else its resident memory.

    >>> peak() > 0
    True
    """
    allocated = peak_bytes()
    return resident_peak_bytes() if allocated is None else allocated
