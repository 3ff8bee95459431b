"""Device streams, and the rule for tensors that pass between them.

A stream runs its work in order, asynchronously to the host and to other streams. The allocator reuses a tensor's memory for
later work of the stream that it was allocated on, without waiting for others. So before another stream uses a tensor, it must
wait for the work that computes it, and the use must be recorded (``record_stream``); ``_take`` does both. The host does not
wait. On a CPU all of this does nothing.

Copies to and from the host run on a ``CopyStream``, chains of collectives on a ``SideStream``. NCCL's collectives run on
streams of their communicators, which torch orders after the stream that starts them and before the stream that waits. If these
two differ, the use of the payload must be recorded: ``LentToTransport``.
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


def current_stream(device: torch.device) -> Any:
    """The device's current stream in this thread."""
    return torch.get_device_module(device).current_stream(device)


def _on(stream: Any, device: torch.device) -> AbstractContextManager[Any]:
    """Makes the stream the device's current one inside the block."""
    block: AbstractContextManager[Any] = torch.get_device_module(device).stream(stream)
    return block


def _tell_allocator(tensors: Iterable[Tensor], stream: Any) -> None:
    for tensor in tensors:
        tensor.record_stream(stream)


def _take(tensors: Iterable[Tensor], made: Any) -> None:
    """Lets the current streams use tensors that another stream has computed before the event ``made``."""
    for tensor in tensors:
        current = current_stream(tensor.device)
        current.wait_event(made)
        _tell_allocator([tensor], current)


@attrs.define(eq=False)
class Streams:
    """Streams by device and purpose, which are reused, since the allocator pools memory by stream."""

    _made: dict[tuple[torch.device, Hashable], Any] = attrs.field(factory=dict)

    def of(self, device: torch.device, purpose: Hashable) -> Any:
        """The stream for a purpose, created on first use."""
        cls = torch.get_device_module(device).Stream
        if type(self._made.get((device, purpose))) is not cls:
            self._made[device, purpose] = cls(device)
        return self._made[device, purpose]


class _StreamsOfThread(threading.local):
    """A thread's streams for copies, which are ordered relative to its current streams."""

    def __init__(self) -> None:
        self.copies = Streams()


_THREAD = _StreamsOfThread()


@attrs.frozen(eq=False)
class Arrival:
    """A tensor that is being copied to a device.

    Attributes:
        tensor: the copy, which must not be used before ``wait``.
        copied: the device's event after the copy; None if the copy is complete.
    """

    tensor: Tensor
    copied: Any = None

    def wait(self) -> Tensor:
        """Makes the device's current stream wait for the copy; returns the tensor."""
        if self.copied is not None:
            _take([self.tensor], self.copied)
        return self.tensor


@attrs.define(eq=False)
class CopyStream:
    """A stream for copies between the host and a device.

    Copies use pinned memory and run in the order of the calls. On a CPU copies are complete when the call returns, and the
    methods that order streams do nothing.

    Attributes:
        device: the device.
        purpose: in each thread, copies for the same purpose share a stream.

    >>> stream = CopyStream(torch.device("cpu"))
    >>> stream.to_device(stream.to_host(torch.arange(3))).wait()
    tensor([0, 1, 2])
    """

    device: torch.device
    purpose: str = "copies"

    @property
    def overlaps(self) -> bool:
        """Whether copies run asynchronously to the device's computation."""
        return overlaps(self.device)

    @property
    def _stream(self) -> Any:
        return _THREAD.copies.of(self.device, self.purpose)

    def wait_for_device(self) -> None:
        """Orders later copies after the work queued so far on the device's current stream."""
        if self.overlaps:
            self._stream.wait_stream(current_stream(self.device))

    def wait_for(self, other: "CopyStream") -> None:
        """Orders later copies after the other stream's copies so far."""
        if self.overlaps:
            self._stream.wait_stream(other._stream)

    def hold_device(self) -> None:
        """Orders later work of the device's current stream after the copies so far."""
        if self.overlaps:
            current_stream(self.device).wait_stream(self._stream)

    def copy(self, pairs: Iterable[tuple[Tensor, Tensor]], *, after: Any = None) -> Any:
        """Copies the second tensor of each pair into the first.

        Args:
            pairs: targets and sources.
            after: an event of the device that the copies wait for.

        Returns:
            The device's event after the copies; None if they are complete.
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
        """Copies a tensor to the host; with streams, the copy is complete when later copies on this stream start.

        With streams, the tensor must not be written to before ``hold_device`` is called.
        """
        if not self.overlaps:
            return tensor.to("cpu", copy=True)
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        self.wait_for_device()
        self.copy([(host, tensor)])
        _tell_allocator([tensor], self._stream)
        return host

    def to_device(self, host: Tensor) -> Arrival:
        """Starts copying a CPU tensor to the device; for a CPU device, the tensor itself."""
        if not self.overlaps:
            return Arrival(host.to(self.device))
        with _on(self._stream, self.device):
            return Arrival(host.to(self.device, non_blocking=True), self._stream.record_event())


@attrs.frozen(eq=False)
class SideStream:
    """Steps that run on a side stream, concurrently with the computation.

    Attributes:
        value: the last step's value.
        done: the event after the last step.
    """

    value: Any
    done: Any

    @staticmethod
    def run(steps: Callable[[], Iterator[Any]], stream: Any) -> "SideStream":
        """Launches the steps after the work queued so far on the current stream, which does not wait for them."""
        value = None
        stream.wait_stream(current_stream(stream.device))
        with _on(stream, stream.device):
            for value in steps():
                _tell_allocator(_on_device(value), stream)  # the first one was allocated for the current stream
            return SideStream(value, stream.record_event())

    def wait(self) -> Any:
        """Makes the current stream wait for the last step; returns its value."""
        _take(_on_device(self.value), self.done)
        return self.value

    def poll(self, timeout: float) -> bool:
        """Always True, since the host does not wait."""
        return True


@attrs.frozen(eq=False)
class LentToTransport:
    """A tensor that a back end reads, allocated on the stream that was current at the start."""

    tensor: Tensor
    stream: Any

    @staticmethod
    def of(tensor: Tensor) -> "LentToTransport | None":
        """The record of a CUDA tensor; None for others."""
        return LentToTransport(tensor, current_stream(tensor.device)) if tensor.is_cuda else None

    def arrived(self) -> None:
        """Records the use of the tensor if the stream that has waited is not the one that started."""
        current = current_stream(self.tensor.device)
        if current != self.stream:
            _tell_allocator([self.tensor], current)


def _on_device(value: Any) -> list[Tensor]:
    return [leaf for leaf in tree.leaves(value) if isinstance(leaf, Tensor) and leaf.is_cuda]
