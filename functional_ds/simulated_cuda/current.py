"""The simulated device of the current thread."""

import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .gpu import SimulatedGpu

__all__ = ["current_gpu", "enter_gpu", "require_gpu"]

_THREAD = threading.local()  # gpu: the thread's simulated device


def current_gpu() -> "SimulatedGpu | None":
    """The thread's simulated device, if it has one."""
    found: SimulatedGpu | None = getattr(_THREAD, "gpu", None)
    return found


def require_gpu() -> "SimulatedGpu":
    """The thread's simulated device.

    Raises:
        RuntimeError: the thread has none.
    """
    gpu = current_gpu()
    if gpu is None:
        raise RuntimeError(
            "a simulated stream or event is used on a thread without a simulated device: use it within simulated_cuda(), "
            "on the thread that entered it"
        )
    return gpu


def enter_gpu(gpu: "SimulatedGpu | None") -> "SimulatedGpu | None":
    """Makes it the thread's simulated device; returns the one before."""
    before = current_gpu()
    _THREAD.gpu = gpu
    return before
