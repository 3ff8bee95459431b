"""Values in the host's memory while the device does not need them."""

import weakref
from collections.abc import Callable
from typing import Any

import attrs
import torch
from torch import Tensor

__all__ = ["Hosted", "Lane"]


@attrs.define(eq=False)
class Lane:
    """Copies between a device and the host, beside the computation.

    On CUDA they run on a stream of their own, from and to pinned memory, in order with each other; events say when one is
    over. A CPU's memory is the host's already: a copy is made there all the same, so that the books are the same.
    """

    device: torch.device
    _stream: Any = attrs.field(init=False)

    @_stream.default
    def _new_stream(self) -> Any:
        return torch.cuda.Stream(self.device) if self.device.type == "cuda" else None

    def away(self, flat: Tensor) -> Tensor:
        """The values in the host's memory, once the copy is over; ``back`` comes after it."""
        if self._stream is None:
            return flat.to("cpu", copy=True)
        host = torch.empty(flat.shape, dtype=flat.dtype, pin_memory=True)
        self._stream.wait_stream(torch.cuda.current_stream(self.device))  # what computes the values comes first
        with torch.cuda.stream(self._stream):
            host.copy_(flat, non_blocking=True)
        flat.record_stream(self._stream)  # nobody gets this memory before the copy is over
        return host

    def back(self, host: Tensor) -> tuple[Tensor, Callable[[], None]]:
        """The values on the device, and what to call before they are used."""
        if self._stream is None:
            return host.to(self.device), _nothing_to_wait_for
        with torch.cuda.stream(self._stream):  # after the copy that brought them here, which went along this stream
            flat = host.to(self.device, non_blocking=True)
            event = self._stream.record_event()

        def arrive() -> None:
            current = torch.cuda.current_stream(self.device)
            current.wait_event(event)
            flat.record_stream(current)  # it was allocated for the other stream

        return flat, arrive


def _nothing_to_wait_for() -> None:
    """A copy that is over when it returns."""


@attrs.define(eq=False)
class Hosted:
    """A flat tensor that is on the host.

    Attributes:
        before: what was sent away just before this: a backward pass needs it next, so its way back begins with this one's.
    """

    host: Tensor
    lane: Lane
    before: "weakref.ref[Hosted] | None" = None
    _coming: tuple[Tensor, Callable[[], None]] | None = None

    @property
    def held(self) -> int:
        """Bytes on the host."""
        return self.host.nbytes

    def fetch(self) -> Tensor:
        """The flat tensor on its device."""
        flat, arrive = self.start()
        self._coming = None
        before = self.before() if self.before is not None else None
        if before is not None and self.lane.device.type == "cuda":
            before.start()
        arrive()
        return flat

    def start(self) -> tuple[Tensor, Callable[[], None]]:
        """Begins the way back, if it has not begun."""
        if self._coming is None:
            self._coming = self.lane.back(self.host)
        return self._coming
