"""The simulated device of the current thread."""

import threading
from typing import Any

_THREAD = threading.local()  # gpu: the thread's simulated device


def current_gpu() -> Any:
    """The thread's ``SimulatedGpu``; None if it has none."""
    return getattr(_THREAD, "gpu", None)


def require_gpu() -> Any:
    """The thread's ``SimulatedGpu``.

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


def enter_gpu(gpu: Any) -> Any:
    """Makes it the thread's simulated device; returns the one before."""
    before = current_gpu()
    _THREAD.gpu = gpu
    return before
