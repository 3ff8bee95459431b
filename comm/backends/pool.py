"""Flat buffers on the host that are used again by size, so that those of one size never take the place of others."""

from mmap import MAP_ANONYMOUS, MAP_PRIVATE, mmap
from threading import Lock
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from functional_ds.base.torch_private import dispatch_modes

__all__ = ["Pool"]

_LEAST = 2**16  # bytes; smaller tensors are malloc's


class Pool:
    """Memory for flat tensors, each in a mapping of its own.

    A buffer is free as soon as no tensor lies in it, however that was made. So a view that a program keeps, what autograd has
    saved and a collective under way keep theirs. What a pool holds is the most that was in use at one time, size by size.
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
        """The bytes of all buffers."""
        return sum(size * len(held) for size, held in self._held.items())

    def take(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor | None:
        """A tensor ``[numel]`` without values; None where torch's allocator is to give it: on a GPU, say, or while traced.

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
