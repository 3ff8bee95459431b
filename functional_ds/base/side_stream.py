"""Steps on a CUDA stream of their own: the computation goes on meanwhile, and waits for their result alone."""

from collections.abc import Callable, Iterator
from typing import Any

import attrs
import torch
from torch import Tensor

from . import tree

__all__ = ["Sent", "SideStream"]


@attrs.frozen(eq=False)
class Sent:
    """A tensor that a transport reads, allocated for the stream that was current at the start."""

    tensor: Tensor
    stream: Any

    @staticmethod
    def of(tensor: Tensor) -> "Sent | None":
        """None for tensors of the host's."""
        return Sent(tensor, torch.cuda.current_stream(tensor.device)) if tensor.is_cuda else None

    def arrived(self) -> None:
        """Says that the current stream has waited for the transport: if it is another one, the allocator must know."""
        current = torch.cuda.current_stream(self.tensor.device)
        if current != self.stream:
            self.tensor.record_stream(current)


@attrs.frozen(eq=False)
class SideStream:
    """Steps that were launched on a side stream.

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
        stream.wait_stream(torch.cuda.current_stream(stream.device))
        with torch.cuda.stream(stream):
            for value in steps():
                _use(value, stream)  # the first one was allocated for the current stream
            return SideStream(value, stream.record_event())

    def wait(self) -> Any:
        """Lets the current stream wait for the last step; returns its value."""
        for device in {tensor.device for tensor in _tensors(self.value)}:
            current = torch.cuda.current_stream(device)
            current.wait_event(self.done)
            _use(self.value, current)
        return self.value

    def poll(self, timeout: float) -> bool:
        """True: the host never waits."""
        return True


def _tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in tree.leaves(value) if isinstance(leaf, Tensor) and leaf.is_cuda]


def _use(value: Any, stream: Any) -> None:
    """Tells the allocator that the stream uses the tensors."""
    for tensor in _tensors(value):
        tensor.record_stream(stream)
