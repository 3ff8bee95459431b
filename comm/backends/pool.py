"""A pool of flat host buffers, which are reused by size to avoid fragmentation."""

from mmap import MAP_ANONYMOUS, MAP_PRIVATE, mmap
from threading import Lock
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from functional_ds.base.torch_private import dispatch_modes

_LEAST = 2**16  # bytes; smaller tensors are left to malloc


class Pool:
    """Memory for flat tensors, each in a separate mapping.

    A buffer is free as soon as no tensor uses its storage, so views, tensors saved by autograd and running collectives keep
    theirs. The pool holds, for each size, the peak number of buffers in use.
    """

    def __init__(self) -> None:
        self._held: dict[int, dict[mmap, StorageWeakRef]] = {}  # by size, with the tensors' storage
        self._lock = Lock()

    def __repr__(self) -> str:
        return f"Pool({self.bytes:,} bytes)"

    def __deepcopy__(self, memo: Any) -> "Pool":
        return Pool()

    def __reduce__(self) -> Any:
        return Pool, ()

    @property
    def bytes(self) -> int:
        """Total bytes of all buffers."""
        return sum(size * len(held) for size, held in self._held.items())

    def take(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor | None:
        """An uninitialized tensor ``[numel]``; None if torch must allocate it: small, not on CPU, or while traced.

        >>> pool = Pool()
        >>> shape = 2**20, torch.float32, torch.device("cpu")
        >>> first, second = pool.take(*shape), pool.take(*shape)
        >>> del first
        >>> third = pool.take(*shape)
        >>> pool
        Pool(8,388,608 bytes)
        """
        size = numel * dtype.itemsize
        if size < _LEAST or device.type != "cpu" or dispatch_modes():
            return None
        with self._lock:
            held = self._held.setdefault(size, {})
            free = next((buffer for buffer, storage in held.items() if storage.expired()), None)
            buffer = free or mmap(-1, size, flags=MAP_PRIVATE | MAP_ANONYMOUS)
            taken = torch.frombuffer(buffer, dtype=dtype, count=numel)
            held[buffer] = StorageWeakRef(taken.untyped_storage())
            return taken
