"""The buffers that an update's pieces go through, between a device, the host and the disk."""

from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import attrs
import torch
from torch import Tensor

from functional_ds.base.device_streams import CopyStream
from functional_ds.base.direct_io import padded

from .handles import typed
from .plan import OffloadedLeaf

__all__ = ["GRAD", "GRAD_BYTES", "PARAM", "Buffer", "regions_of"]

PARAM, GRAD = 0, -1  # the indices of a unit's param among its tensors, and of its gradient, which is none of them
GRAD_BYTES = 16  # an element's, of whatever dtype


@attrs.define(eq=False, repr=False)
class Buffer:
    """What an update needs of one piece, on its way in or out.

    Attributes:
        memory: bytes on the host.
        incoming: copies from the device.
        outgoing: copies to the device.
        writes: to the disk, which must end before the buffer is filled again.
    """

    memory: Tensor
    incoming: CopyStream
    outgoing: CopyStream
    writes: "tuple[Future[int], ...]" = ()
    _arrived: Any = None  # on CUDA the event after the copies from the device
    _left: Any = None  # on CUDA the event after the copies to the device

    def tensor(self, region: slice, dtype: torch.dtype, shape: Iterable[int]) -> Tensor:
        """A region as a tensor of this dtype and shape."""
        return typed(self.memory[region], dtype, shape)

    def copy_in(self, staged: Sequence[tuple[slice, Tensor]]) -> None:
        """Starts to copy tensors into regions."""
        if staged:
            pairs = [(self.tensor(region, source.dtype, source.shape), source) for region, source in staged]
            self._arrived = self.incoming.copy(pairs, after=self._left)

    def wait(self) -> None:
        """Waits until they are there."""
        if self._arrived is not None:
            self._arrived.synchronize()
            self._arrived = None

    def copy_out(self, region: slice, value: Tensor, target: Tensor) -> None:
        """Starts to copy a value, by way of the region if it lies elsewhere, to a target outside the buffer."""
        own = self.tensor(region, value.dtype, value.shape)
        if self.outgoing.overlaps and own.data_ptr() != value.data_ptr():
            value = own.copy_(value)
        self._left = self.outgoing.copy([(target.view(value.shape), value)])


def regions_of(units: Iterable[OffloadedLeaf], *, files: bool, cuda: bool) -> dict[int, dict[int, slice]]:
    """For each unit, by its leaf, the bytes of a buffer that each of its tensors takes.

    What is copied from memory lies in the front, and what is read from the disk behind it: so a copy may begin while the last
    piece is still being written.

    Args:
        units: those that go through buffers.
        files: whether there are files: params must then stay as they are until the update is complete.
        cuda: whether host and device are two.
    """
    units = list(units)
    staged = [_staged_bytes(unit, files=files, cuda=cuda) for unit in units]
    front = max((sum(map(padded, sizes.values())) for sizes in staged), default=0)
    return {
        unit.leaf: {
            **_consecutive(sizes, 0),
            **_consecutive({i: next(unit.pieces()).nbytes(tensor) for i, tensor in unit.on_disk()}, front),
        }
        for unit, sizes in zip(units, staged, strict=True)
    }


def _staged_bytes(unit: OffloadedLeaf, *, files: bool, cuda: bool) -> dict[int, int]:
    first, param, sizes = next(unit.pieces()), unit.tensors[PARAM], {}
    if param is not None and param.place != "disk" and (files or (cuda and param.place == "device")):
        sizes[PARAM] = first.nbytes(param)
    if cuda and unit.trained is not None:
        sizes[GRAD] = (first.stop - first.start) * GRAD_BYTES
    return sizes


def _consecutive(sizes: Mapping[int, int], start: int) -> dict[int, slice]:
    found = {}
    for i, size in sizes.items():
        found[i] = slice(start, start + padded(size))
        start += padded(size)
    return found
