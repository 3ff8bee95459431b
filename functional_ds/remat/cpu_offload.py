"""Saved tensors in the host's memory."""

import weakref

import attrs
from torch import Tensor

from functional_ds.base.device_streams import Arrival, CopyStream

__all__ = ["HostTensor"]


@attrs.define(eq=False)
class HostTensor:
    """A flat tensor in the host's memory.

    Attributes:
        host: the values.
        stream: copies them to and from the device. On a CPU they are copied all the same, so that reports count the same.
        previous: the tensor that was offloaded before this one. A backward pass needs it next, so its way back begins with
            this one's.
    """

    host: Tensor
    stream: CopyStream
    previous: "weakref.ref[HostTensor] | None" = None
    _arriving: Arrival | None = None

    @property
    def held(self) -> int:
        """Bytes on the host."""
        return self.host.nbytes

    def fetch(self) -> Tensor:
        """The flat tensor on its device."""
        arriving, self._arriving = self.start(), None
        previous = self.previous() if self.previous is not None else None
        if previous is not None and self.stream.overlaps:
            previous.start()
        return arriving.wait()

    def start(self) -> Arrival:
        """Starts the copy to the device, once."""
        if self._arriving is None:
            self._arriving = self.stream.to_device(self.host)
        return self._arriving
