"""Copies between a device and the host that run beside the device's computation."""

from collections.abc import Iterable
from typing import Any

import attrs
import torch
from torch import Tensor

from .device import current_stream, on_stream, overlaps, side_stream

__all__ = ["Arrival", "CopyStream"]


@attrs.frozen(eq=False)
class Arrival:
    """A tensor that is being copied to a device.

    Attributes:
        tensor: the copy, which must not be used before ``wait``.
        copied: the device's event after the copy; None where the copy is complete.
    """

    tensor: Tensor
    copied: Any = None

    def wait(self) -> Tensor:
        """Lets the device's current stream wait for the copy, and returns the tensor."""
        if self.copied is not None:
            current = current_stream(self.tensor.device)
            current.wait_event(self.copied)
            self.tensor.record_stream(current)  # the allocator knows the copy's stream only
        return self.tensor


@attrs.define(eq=False)
class CopyStream:
    """A stream of copies from and to one device.

    Where the device has streams, the copies run on one of their own, from and to pinned memory, in the order of the calls. On
    a CPU each copy is complete when the call returns, and the methods that order streams do nothing.

    Attributes:
        device: beside the host.
        purpose: copies for one purpose share one stream of a thread, whichever record they are made with.

    >>> stream = CopyStream(torch.device("cpu"))
    >>> stream.to_device(stream.to_host(torch.arange(3))).wait()
    tensor([0, 1, 2])
    """

    device: torch.device
    purpose: str = "copies"

    @property
    def overlaps(self) -> bool:
        """Whether copies run beside the device's computation."""
        return overlaps(self.device)

    @property
    def _stream(self) -> Any:
        return side_stream(self.device, self.purpose)

    def wait_for_device(self) -> None:
        """Orders the copies that follow after the work that the device's current stream has queued."""
        if self.overlaps:
            self._stream.wait_stream(current_stream(self.device))

    def wait_for(self, other: "CopyStream") -> None:
        """Orders the copies that follow after the other stream's copies so far."""
        if self.overlaps:
            self._stream.wait_stream(other._stream)

    def hold_device(self) -> None:
        """Orders the work that the device's current stream queues from now on after the copies so far."""
        if self.overlaps:
            current_stream(self.device).wait_stream(self._stream)

    def copy(self, pairs: Iterable[tuple[Tensor, Tensor]], *, after: Any = None) -> Any:
        """Copies the second tensor of each pair into the first.

        Args:
            pairs: targets and sources.
            after: an event of the device that the copies wait for.

        Returns:
            The device's event after the copies; None where they are complete.
        """
        if not self.overlaps:
            for target, source in pairs:
                target.copy_(source)
            return None
        with on_stream(self.device, self._stream):
            if after is not None:
                self._stream.wait_event(after)
            for target, source in pairs:
                target.copy_(source, non_blocking=True)
            return self._stream.record_event()

    def to_host(self, tensor: Tensor) -> Tensor:
        """A copy in the host's memory; with streams it is complete when the copies that follow on this stream begin.

        There the tensor must not be written into until ``hold_device`` was called.
        """
        if not self.overlaps:
            return tensor.to("cpu", copy=True)
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        self.wait_for_device()
        self.copy([(host, tensor)])
        tensor.record_stream(self._stream)  # its memory is not given to others before the copy is over
        return host

    def to_device(self, host: Tensor) -> Arrival:
        """Starts to copy a tensor of the host's to the device; a CPU device gets the tensor itself."""
        if not self.overlaps:
            return Arrival(host.to(self.device))
        with on_stream(self.device, self._stream):
            return Arrival(host.to(self.device, non_blocking=True), self._stream.record_event())
