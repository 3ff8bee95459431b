"""Streams and events as vector clocks: which work is known to be finished when other work begins."""

import itertools
import threading
from contextlib import AbstractContextManager, nullcontext
from time import perf_counter
from typing import Any

import torch

from functional_ds.base.tree import setting

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


_IDS = itertools.count(1)


class Clock(dict[int, int]):
    """For each stream, by its number, the latest of its work that is finished."""

    def join(self, other: "Clock") -> None:
        """Adds what the other clock knows."""
        for stream, time in other.items():
            if time > self.get(stream, 0):
                self[stream] = time


class SimulatedStream:
    """Replaces ``torch.cuda.Stream``: work on it begins after what it has waited for, and ends at no known time."""

    def __init__(self, device: Any = None, priority: int = 0, *, name: str | None = None, **_: Any) -> None:
        self.id = self.cuda_stream = self.stream_id = next(_IDS)
        self.name, self.priority, self.clock = name or f"stream {self.id}", priority, Clock()
        self.device = torch.device("cuda", 0)

    def wait_stream(self, stream: "SimulatedStream") -> None:
        """Later work of this stream begins after the other stream's work so far."""
        self.clock.join(stream.clock)

    def wait_event(self, event: "SimulatedEvent") -> None:
        """Later work of this stream begins after the event."""
        self.clock.join(event.clock)

    def record_event(self, event: "SimulatedEvent | None" = None) -> "SimulatedEvent":
        """An event after the work so far."""
        event = event or SimulatedEvent()
        event.record(self)
        return event

    def synchronize(self) -> None:
        """The host waits for the work so far."""
        require_gpu().wait_for(self.clock, f"synchronize of {self.name!r}")

    def query(self) -> bool:
        """True: the work so far is over."""
        require_gpu().host.clock.join(self.clock)
        return True

    def is_capturing(self) -> bool:
        """False: no graph is captured."""
        return False

    def __enter__(self) -> "SimulatedStream":
        self._entered = on_stream(self)
        self._entered.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self._entered.__exit__(None, None, None)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SimulatedStream) and self.id == other.id

    def __hash__(self) -> int:
        return hash(self.id)

    def __repr__(self) -> str:
        return f"SimulatedStream({self.name!r})"


class SimulatedEvent:
    """Replaces ``torch.cuda.Event``."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.clock, self.device = Clock(), torch.device("cuda", 0)
        self._time = perf_counter()

    def record(self, stream: SimulatedStream | None = None) -> None:
        """Marks the stream's work so far."""
        self.clock = Clock((stream or require_gpu().stream).clock)
        self._time = perf_counter()

    def wait(self, stream: SimulatedStream | None = None) -> None:
        """Later work of the stream begins after the event."""
        (stream or require_gpu().stream).wait_event(self)

    def synchronize(self) -> None:
        """The host waits for the event."""
        require_gpu().wait_for(self.clock, "synchronize of an event")

    def query(self) -> bool:
        """True: the event is over."""
        require_gpu().host.clock.join(self.clock)
        return True

    def elapsed_time(self, end: "SimulatedEvent") -> float:
        """Milliseconds on the host between the two calls of ``record``."""
        return (end._time - self._time) * 1000


def on_stream(stream: SimulatedStream | None) -> AbstractContextManager[None]:
    """Replaces ``torch.cuda.stream``."""
    gpu = current_gpu()
    return nullcontext() if gpu is None or stream is None else setting(gpu, stream=stream)
