"""Tunes glibc's malloc to reuse freed memory, unless the user has set its options."""

import ctypes
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import attrs

SETTING = "FUNCTIONAL_DS_MALLOC"  # the environment variable; "default" leaves malloc unchanged

# Parameters of mallopt(3), and values with which freed memory is reused by later allocations.
_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD = -1, -2, -3
_NEVER, _CHUNK, _ALL, _LARGE = 2**31 - 1, 64 * 2**20, 2**30, 2**17

_LIMIT = 32 * 2**20  # freeing a mapping up to this size raises the threshold for mappings, unless a program has set one
_MAPPED = 2  # the bit of a block's header that marks a separate mapping


@attrs.frozen
class HostMemory:
    """Control over malloc, if the user has not set its options.

    Attributes:
        libc: glibc.
    """

    libc: Any = attrs.field(repr=False)

    @contextmanager
    def mapped(self) -> Iterator[None]:
        """Allocates large tensors inside the block, which are to be kept, in separate mappings to avoid fragmentation."""
        self.libc.mallopt(_MMAP_THRESHOLD, _LARGE)
        try:
            yield
        finally:
            self.libc.mallopt(_MMAP_THRESHOLD, _ALL)

    def release(self) -> None:
        """Returns free pages to the kernel, such as those of a model whose values were moved to a state."""
        self.libc.malloc_trim(0)


@cache
def keep_freed_memory() -> HostMemory | None:
    """Makes glibc keep freed memory for later allocations.

    Every step allocates the same large buffers. By default glibc returns many of them to the kernel, which zeroes the pages of
    new ones: tens of milliseconds per step for a model of 14 M parameters.

    Does nothing, and returns None, if the user has chosen (``MALLOC_...`` or ``GLIBC_TUNABLES`` in the environment, an earlier
    ``mallopt``, a preloaded allocator, or ``FUNCTIONAL_DS_MALLOC=default``), or with another C library.

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


class _MallInfo(ctypes.Structure):
    """What ``mallinfo(3)`` returns."""

    _fields_ = tuple(
        (name, ctypes.c_int)
        for name in ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")
    )


def _glibc() -> ctypes.CDLL | None:
    """The C library, if it is glibc and this process uses its malloc."""
    if not sys.platform.startswith("linux"):
        return None
    try:
        used, glibc = ctypes.CDLL(None), ctypes.CDLL("libc.so.6")
    except OSError:  # musl
        return None
    used.malloc.restype, used.malloc.argtypes, used.free.argtypes = ctypes.c_void_p, [ctypes.c_size_t], [ctypes.c_void_p]
    return used if _counts(glibc, used) else None


def _counts(glibc: ctypes.CDLL, used: ctypes.CDLL) -> bool:
    """Whether glibc's count of bytes in use includes a block of this process's malloc.

    The functions' addresses do not tell: an executable at a fixed address has its own for ``malloc``.
    """
    glibc.mallinfo.restype = _MallInfo

    def in_use() -> int:
        now = glibc.mallinfo()
        return int(now.uordblks + now.hblkhd)

    size, before = 2**16, in_use()
    block = used.malloc(size)
    grown = (in_use() - before) % 2**32  # its counters are 32 bits wide
    used.free(block)
    return size <= grown < 2 * size


def _is_tuned(libc: ctypes.CDLL) -> bool:
    """Whether a parameter was set, after which the threshold for mappings is no longer raised by freeing."""

    def is_mapped(size: int) -> bool:
        block = libc.malloc(size)
        header = ctypes.c_size_t.from_address(block - ctypes.sizeof(ctypes.c_size_t)).value
        libc.free(block)
        return bool(header & _MAPPED)

    below = _LIMIT - 2**16
    return not is_mapped(_LIMIT + 2**20) or (is_mapped(below) and is_mapped(below))
