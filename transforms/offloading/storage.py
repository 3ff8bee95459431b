"""The storage of an offloaded state: its plan, its disk, and the buffers of updates."""

from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import attrs
import torch
from torch import Tensor

from functional_ds.base import tree
from functional_ds.base.device_streams import CopyStream
from functional_ds.base.disk.direct_io import aligned, padded
from functional_ds.comm.worlds.current import recorder
from functional_ds.step.state.state import State

from .files import Disk, DiskTraffic, ScratchFolder
from .handles import OnHost, Version
from .plan import OffloadedLeaf, OffloadPlan, StateTensor
from .prefetch import Prefetcher
from .tensor_info import typed

PARAM, GRAD = 0, -1  # the indices of a unit's param among its tensors, and of its gradient, which is none of them
GRAD_BYTES = 16  # of an element of any dtype


@attrs.define(eq=False, repr=False)
class Buffer:
    """The memory for one piece of an update, on its way in or out.

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
    _copied_out: Any = None  # on CUDA the event after the copies to the device

    def tensor(self, region: slice, dtype: torch.dtype, shape: Iterable[int]) -> Tensor:
        """A region as a tensor of this dtype and shape."""
        return typed(self.memory[region], dtype, shape)

    def copy_in(self, staged: Sequence[tuple[slice, Tensor]]) -> None:
        """Starts to copy tensors into regions."""
        if staged:
            pairs = [(self.tensor(region, source.dtype, source.shape), source) for region, source in staged]
            self._arrived = self.incoming.copy(pairs, after=self._copied_out)

    def wait(self) -> None:
        """Waits for the copies."""
        if self._arrived is not None:
            self._arrived.synchronize()
            self._arrived = None

    def copy_out(self, region: slice, value: Tensor, target: Tensor) -> None:
        """Starts to copy a value, through the region if it is elsewhere, to a target outside the buffer."""
        staged = self.tensor(region, value.dtype, value.shape)
        if self.outgoing.overlaps and staged.data_ptr() != value.data_ptr():
            value = staged.copy_(value)
        self._copied_out = self.outgoing.copy([(target.view(value.shape), value)])


def regions_of(units: Iterable[OffloadedLeaf], *, files: bool, cuda: bool) -> dict[int, dict[int, slice]]:
    """For each unit, by its leaf, the bytes of a buffer that each of its tensors takes.

    Copies from memory are at the front, and reads from disk behind them, so a copy may begin while the last piece is still
    being written.

    Args:
        units: those that go through buffers.
        files: whether there are files: params must then stay unchanged until the update is complete.
        cuda: whether host and device differ.
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
    regions = {}
    for i, size in sizes.items():
        regions[i] = slice(start, start + padded(size))
        start += padded(size)
    return regions


@attrs.define(eq=False, repr=False)
class Storage(tree.Uncompared):
    """What all states of one run share. None of it is a value of a state.

    Attributes:
        plan: which tensors belong together, and where they are.
        device: where the loss is computed.
        disk: the files, if there are any.
        buffer_count: the number of buffers.
        prefetcher: fetches params to the device.
        incoming: copies from the device to buffers.
        outgoing: copies from buffers to the device.
        regions: for each unit, by its leaf, the bytes of a buffer that its tensors take.
    """

    plan: OffloadPlan
    device: torch.device
    disk: Disk | None
    buffer_count: int
    prefetcher: Prefetcher = attrs.field(init=False)
    incoming: CopyStream = attrs.field(init=False)
    outgoing: CopyStream = attrs.field(init=False)
    regions: dict[int, dict[int, slice]] = attrs.field(init=False)
    _pool: tuple[Buffer, ...] = ()

    def __attrs_post_init__(self) -> None:
        self.prefetcher = Prefetcher(CopyStream(self.device, "prefetch"))
        self.incoming, self.outgoing = CopyStream(self.device, "incoming"), CopyStream(self.device, "outgoing")
        offloaded = (unit for unit in self.plan.units if unit.offloaded)
        self.regions = regions_of(offloaded, files=self.disk is not None, cuda=self.cuda)

    @property
    def cuda(self) -> bool:
        """Whether host and device differ."""
        return self.incoming.overlaps

    @property
    def on_paper(self) -> bool:
        """Whether params have no values: then the state has neither values nor files."""
        return self.device.type == "meta"

    @property
    def buffers(self) -> tuple[Buffer, ...]:
        """The buffers, each as large as the largest unit's piece; made when they are first used, and by each graph."""
        traced = recorder().traces
        if traced or not self._pool:
            nbytes = max((region.stop for regions in self.regions.values() for region in regions.values()), default=0)
            makes = torch.ops.functional_ds.aligned if traced else partial(aligned, pinned=self.cuda)
            pool = tuple(Buffer(makes(nbytes), self.incoming, self.outgoing) for _ in range(self.buffer_count))
            if traced:
                return pool
            self._pool = pool
        return self._pool

    def version(self, unit: OffloadedLeaf, tensor: StateTensor) -> Version:
        """Space for the next version of a tensor.

        Raises:
            OffloadError: the disk is full.
        """
        if self.disk is None:
            raise RuntimeError(f"{tensor.path} of {unit.name}: this state has no files")
        chunk = max(tensor.numel, 1) if unit.whole else unit.chunk * tensor.per_element
        file = self.disk.folder.files[unit.file(tensor)]
        return Version(torch.Size(tensor.shape), tensor.dtype, chunk, file, self.disk, self.prefetcher)

    def on_host(self, unit: OffloadedLeaf, values: Tensor) -> OnHost:
        """The handle of a param in host memory."""
        return OnHost(values, f"{unit.leaf:05d}", self.prefetcher)

    def __repr__(self) -> str:
        return f"Storage({len(self.plan.units)} units, {self.device}, {self.disk and str(self.disk.folder.path)!r})"


@tree.record
class OffloadSlot:
    """offload's slot in the state."""

    storage: Storage = tree.static()


def make_disk(root: Path, plan: OffloadPlan, *, threads: int, direct: bool) -> Disk:
    """The files of a plan, with space for two versions of each, and so many threads that read and write.

    Raises:
        OffloadError: the disk is too small.
    """
    sizes = {unit.file(tensor): unit.file_bytes(tensor) for unit in plan.units for _, tensor in unit.on_disk()}
    pool, background = (ThreadPoolExecutor(count, thread_name_prefix="offload") for count in (threads, 1))
    return Disk(ScratchFolder.create(root, sizes), pool, background, direct)


def traffic(state: State) -> DiskTraffic:
    """The disk traffic so far of the run that the state belongs to.

    Raises:
        ValueError: the state has no files.
    """
    slot = state.slots.get("offload")
    if not isinstance(slot, OffloadSlot) or slot.storage.disk is None:
        raise ValueError('traffic: this state has no files; add T.offload(optimizer="disk", path=...)')
    return slot.storage.disk.traffic
