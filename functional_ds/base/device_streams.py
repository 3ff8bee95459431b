"""Streams of a device, and the one rule for tensors that pass between them.

A stream runs its work in the order of the launches, beside the host and beside other streams. The allocator gives a tensor's
memory to later work of the stream that it was allocated on, without a wait. So before another stream uses a tensor, it waits
for the work that makes it, and the allocator learns of the use (``record_stream``): ``_take``. The host never waits. On the
CPU all work is complete when a call returns, and none of this does anything.

Copies to and from the host run on a ``CopyStream``, chains of collectives on a ``SideStream``. A collective of NCCL's runs on
a stream of its communicator's: torch orders it after the stream that starts it, and the stream that waits after it. Of its
payload the allocator must learn here, where another stream waits than has started it: ``LentToTransport``.
"""

import threading
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import attrs
import torch
from torch import Tensor

from . import tree
from .device import overlaps

__all__ = ["Arrival", "CopyStream", "LentToTransport", "SideStream", "Streams", "current_stream"]


def current_stream(device: torch.device) -> Any:
    """The stream that gets the device's work on this thread."""
    return torch.get_device_module(device).current_stream(device)


def _on(stream: Any, device: torch.device) -> AbstractContextManager[Any]:
    """Within the block the stream is the device's current one."""
    block: AbstractContextManager[Any] = torch.get_device_module(device).stream(stream)
    return block


def _tell_allocator(tensors: Iterable[Tensor], stream: Any) -> None:
    for tensor in tensors:
        tensor.record_stream(stream)


def _take(tensors: Iterable[Tensor], made: Any) -> None:
    """The rule: their devices' current streams may use the tensors, which another stream has made at an event."""
    for tensor in tensors:
        current = current_stream(tensor.device)
        current.wait_event(made)
        _tell_allocator([tensor], current)


@attrs.define(eq=False)
class Streams:
    """Streams by device and purpose, the same at each call: the allocator pools memory by stream."""

    _made: dict[tuple[torch.device, Hashable], Any] = attrs.field(factory=dict)

    def of(self, device: torch.device, purpose: Hashable) -> Any:
        """The stream for a purpose; made when first asked for."""
        kind = torch.get_device_module(device).Stream
        if type(self._made.get((device, purpose))) is not kind:
            self._made[device, purpose] = kind(device)
        return self._made[device, purpose]


class _StreamsOfThread(threading.local):
    """For copies, which follow and hold up the thread's current streams."""

    def __init__(self) -> None:
        self.copies = Streams()


_THREAD = _StreamsOfThread()


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
            _take([self.tensor], self.copied)
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
        return _THREAD.copies.of(self.device, self.purpose)

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
        with _on(self._stream, self.device):
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
        _tell_allocator([tensor], self._stream)
        return host

    def to_device(self, host: Tensor) -> Arrival:
        """Starts to copy a tensor of the host's to the device; a CPU device gets the tensor itself."""
        if not self.overlaps:
            return Arrival(host.to(self.device))
        with _on(self._stream, self.device):
            return Arrival(host.to(self.device, non_blocking=True), self._stream.record_event())


@attrs.frozen(eq=False)
class SideStream:
    """Steps that were launched on a side stream: the computation goes on meanwhile, and waits for their result alone.

    Attributes:
        value: of the last step.
        done: the event after it.
    """

    value: Any
    done: Any

    @staticmethod
    def run(steps: Callable[[], Iterator[Any]], stream: Any) -> "SideStream":
        """Launches the steps; they follow what the current stream has queued, which goes on meanwhile."""
        value = None
        stream.wait_stream(current_stream(stream.device))
        with _on(stream, stream.device):
            for value in steps():
                _tell_allocator(_on_device(value), stream)  # the first one was allocated for the current stream
            return SideStream(value, stream.record_event())

    def wait(self) -> Any:
        """Lets the current stream wait for the last step; returns its value."""
        _take(_on_device(self.value), self.done)
        return self.value

    def poll(self, timeout: float) -> bool:
        """True: the host never waits."""
        return True


@attrs.frozen(eq=False)
class LentToTransport:
    """A tensor that a transport reads, allocated for the stream that was current at the start."""

    tensor: Tensor
    stream: Any

    @staticmethod
    def of(tensor: Tensor) -> "LentToTransport | None":
        """None for tensors of the host's."""
        return LentToTransport(tensor, current_stream(tensor.device)) if tensor.is_cuda else None

    def arrived(self) -> None:
        """Says that the current stream has waited for the transport: if it is another one, the allocator must know."""
        current = current_stream(self.tensor.device)
        if current != self.stream:
            _tell_allocator([self.tensor], current)


def _on_device(value: Any) -> list[Tensor]:
    return [leaf for leaf in tree.leaves(value) if isinstance(leaf, Tensor) and leaf.is_cuda]
