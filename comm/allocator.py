"""Keeping freed host memory for the next step."""

import ctypes
import sys
from contextlib import suppress

__all__ = ["keep_freed_memory"]

# Parameters of glibc's mallopt(3), and values that leave it to the next allocation to reuse what was freed.
_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD = -1, -2, -3
_NEVER, _CHUNK = 2**31 - 1, 64 * 2**20


def keep_freed_memory() -> None:
    """Tells glibc not to give freed memory back to the system.

    A step allocates the same large buffers as the last. Left alone, glibc returns many of them, and the kernel zeroes every
    page of the next ones again: tens of milliseconds a step for a model of 14 M parameters. Does nothing elsewhere.
    """
    if not sys.platform.startswith("linux"):
        return
    with suppress(OSError, AttributeError):  # musl has no mallopt
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_MMAP_THRESHOLD, 2**30)
        mallopt(_TRIM_THRESHOLD, _NEVER)
        mallopt(_TOP_PAD, _CHUNK)
