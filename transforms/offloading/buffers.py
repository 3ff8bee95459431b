"""Buffers that pieces go through, between a device, the host and the disk."""

from collections.abc import Iterable
from concurrent.futures import Future
from typing import Any

import attrs
import torch
from torch import Tensor

__all__ = ["Copies", "Lane", "typed"]


@attrs.define(eq=False)
class Copies:
    """Copies between host and device: on CUDA on two streams of their own, else at once."""

    device: torch.device
    _streams: tuple[Any, ...] = ()

    @property
    def cuda(self) -> bool:
        """Whether host and device are two."""
        return self.device.type == "cuda"

    def begin(self) -> None:
        """What was queued on the device so far comes before the copies."""
        if self.cuda:
            self._streams = self._streams or (torch.cuda.Stream(self.device), torch.cuda.Stream(self.device))
            for stream in self._streams:
                stream.wait_stream(torch.cuda.current_stream(self.device))

    def end(self) -> None:
        """What is queued on the device from now on comes after the copies."""
        for stream in self._streams:
            torch.cuda.current_stream(self.device).wait_stream(stream)

    def copy(self, pairs: Iterable[tuple[Tensor, Tensor]], *, back: bool, after: Any = None) -> Any:
        """Copies the second of each pair to the first; on CUDA the event that says when it is done."""
        if not self.cuda:
            for target, source in pairs:
                target.copy_(source)
            return None
        stream = self._streams[back]
        with torch.cuda.stream(stream):
            if after is not None:
                stream.wait_event(after)
            for target, source in pairs:
                target.copy_(source, non_blocking=True)
            return stream.record_event()


@attrs.define(eq=False)
class Lane:
    """One buffer: what an update needs of one piece of a unit, on its way in or out.

    Attributes:
        room: its memory.
        writes: what must be written before the buffer can be filled again.
        arrived: on CUDA, when the copies from the device are there.
        left: on CUDA, when the copies to the device are through.
    """

    room: Tensor
    copies: Copies
    writes: "tuple[Future[int], ...]" = ()
    arrived: Any = None
    left: Any = None

    def copy_in(self, staged: list[tuple[int, Tensor]]) -> None:
        """Starts to copy tensors to bytes of the buffer."""
        if staged:
            pairs = [(typed(self.room[start:], source.dtype, source.shape), source) for start, source in staged]
            self.arrived = self.copies.copy(pairs, back=False, after=self.left)

    def wait_in(self) -> None:
        """Until they are there."""
        if self.arrived is not None:
            self.arrived.synchronize()
            self.arrived = None

    def copy_out(self, start: int, value: Tensor, target: Tensor) -> None:
        """Starts to copy a value, which lies at a byte of the buffer or is put there, to memory that is not the buffer's."""
        own = typed(self.room[start:], value.dtype, value.shape)
        if self.copies.cuda and own.data_ptr() != value.data_ptr():
            own.copy_(value)
            value = own
        self.left = self.copies.copy([(target.view(value.shape), value)], back=True)


def typed(room: Tensor, dtype: torch.dtype, shape: Iterable[int]) -> Tensor:
    """The first bytes as a tensor."""
    size = torch.Size(shape)
    return room[: size.numel() * dtype.itemsize].view(dtype).view(size)
