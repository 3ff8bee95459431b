"""The memory of this process on its host: what malloc does with freed memory, unless the user has chosen, and flat buffers."""

import ctypes
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import attrs

__all__ = ["SETTING", "HostMemory", "keep_freed_memory"]

SETTING = "FUNCTIONAL_DS_MALLOC"  # the environment variable that leaves malloc as it is, where it is "default"

# Parameters of mallopt(3), and values with which freed memory is reused by later allocations.
_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD = -1, -2, -3
_NEVER, _CHUNK, _ALL, _LARGE = 2**31 - 1, 64 * 2**20, 2**30, 2**17

_LIMIT = 32 * 2**20  # the size up to which a freed mapping raises the threshold for mappings, as long as no program has set one
_MAPPED = 2  # the bit of a block's header that says that it is a mapping of its own


@attrs.frozen
class HostMemory:
    """What the library may do with malloc, where the choice is not the user's.

    Attributes:
        libc: glibc, whose options are the library's to set.
    """

    libc: Any = attrs.field(repr=False)

    @contextmanager
    def mapped(self) -> Iterator[None]:
        """Large tensors that are made within the block, to stay, lie in mappings of their own, which leave no holes."""
        self.libc.mallopt(_MMAP_THRESHOLD, _LARGE)
        try:
            yield
        finally:
            self.libc.mallopt(_MMAP_THRESHOLD, _ALL)

    def release(self) -> None:
        """Gives the pages back to the kernel that are free now: those of a model, say, whose values are in a state."""
        self.libc.malloc_trim(0)


@cache
def keep_freed_memory() -> HostMemory | None:
    """Makes glibc keep freed memory for later allocations.

    Every step allocates the same large buffers. By default glibc returns many of them to the kernel, which zeroes every page
    of the next ones: tens of milliseconds a step for a model of 14 M parameters.

    A user's choice stays: ``MALLOC_...`` or ``GLIBC_TUNABLES`` in the environment, an earlier ``mallopt``, another allocator
    that is preloaded, or ``FUNCTIONAL_DS_MALLOC=default``. Other C libraries are left alone. The result is then None.

    Raises:
        ValueError: ``FUNCTIONAL_DS_MALLOC`` is neither "keep" nor "default".
    """
    wanted = os.environ.get(SETTING, "keep")
    if wanted not in ("keep", "default"):
        raise ValueError(f'{SETTING}={wanted!r} in the environment is unknown: use "keep" or "default"')
    libc = _glibc() if wanted == "keep" else None
    if libc is None or _is_tuned(libc):
        return None
    for parameter, value in {_MMAP_THRESHOLD: _ALL, _TRIM_THRESHOLD: _NEVER, _TOP_PAD: _CHUNK}.items():
        libc.mallopt(parameter, value)
    return HostMemory(libc)


def _glibc() -> ctypes.CDLL | None:
    """The C library, if it is glibc and this process allocates by its malloc."""
    if not sys.platform.startswith("linux"):
        return None
    try:
        used, glibc = ctypes.CDLL(None), ctypes.CDLL("libc.so.6")
    except OSError:  # musl
        return None
    used.malloc.restype, used.malloc.argtypes, used.free.argtypes = ctypes.c_void_p, [ctypes.c_size_t], [ctypes.c_void_p]
    addresses = {ctypes.cast(library.malloc, ctypes.c_void_p).value for library in (used, glibc)}
    return used if len(addresses) == 1 else None


def _is_tuned(libc: ctypes.CDLL) -> bool:
    """Whether a parameter was set: from then on the threshold for mappings no longer follows what is freed."""

    def is_mapped(size: int) -> bool:
        block = libc.malloc(size)
        header = ctypes.c_size_t.from_address(block - ctypes.sizeof(ctypes.c_size_t)).value
        libc.free(block)
        return bool(header & _MAPPED)

    below = _LIMIT - 2**16
    return not is_mapped(_LIMIT + 2**20) or (is_mapped(below) and is_mapped(below))
