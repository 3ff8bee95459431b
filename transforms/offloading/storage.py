"""Where an offloaded state lives: its plan, its disk, and the buffers that updates go through."""

from concurrent.futures import Future
from typing import Any

import attrs
import torch
from torch import Tensor

from functional_ds.base import tree
from functional_ds.base.direct_io import aligned, padded
from functional_ds.step.state import State

from .buffers import Copies, Lane, typed
from .disk import Disk, DiskTraffic
from .files import Extent, ScratchFolder
from .handles import OnDisk, OnHost
from .plan import Kind, Plan, Unit
from .prefetch import Ahead

__all__ = ["Home", "Offloaded", "Version", "make_disk", "traffic"]


@attrs.define(eq=False)
class Version:
    """A kind's next version, as it is written piece by piece."""

    kind: Kind
    chunk: int
    device: torch.device
    extent: Extent
    disk: Disk
    begun: "list[Future[int]]" = attrs.field(factory=list)

    def write(self, values: Tensor, room: Tensor) -> None:
        """Starts to write the next piece, which lies in ``room`` or is copied there."""
        nbytes = values.numel() * self.kind.dtype.itemsize
        own = typed(room, self.kind.dtype, values.shape)
        if own.data_ptr() != values.data_ptr():
            own.copy_(values)
        offset = len(self.begun) * padded(self.chunk * self.kind.dtype.itemsize)
        self.begun.append(self.disk.write(self.extent, offset, data=room[: padded(nbytes)], nbytes=nbytes))

    def done(self) -> OnDisk:
        """What stands for it, once all is written.

        Raises:
            OffloadError: it could not be written.
        """
        sums = tuple(begun.result() for begun in self.begun)
        shape = torch.Size(self.kind.shape)
        return OnDisk(shape, self.kind.dtype, self.device, self.chunk, sums, self.extent, self.disk)


@attrs.define(eq=False)
class Home:
    """What the states of one line share; it changes no value.

    Attributes:
        plan: which tensors go together, and where they are.
        device: where the loss is computed.
        disk: the files, if there are any.
        buffers: how many lanes there are.
        lanes: made at the first update.
        ahead: fetches params that are on the host.
    """

    plan: Plan
    device: torch.device
    disk: Disk | None
    buffers: int
    ahead: Ahead = attrs.field(factory=Ahead)
    copies: Copies = attrs.field(init=False)
    _lanes: tuple[Lane, ...] = ()
    _regions: dict[int, dict[int, tuple[int, int]]] = attrs.field(factory=dict)

    def __attrs_post_init__(self) -> None:
        self.copies = Copies(self.device)

    @property
    def cuda(self) -> bool:
        """Whether host and device are two."""
        return self.copies.cuda

    @property
    def on_paper(self) -> bool:
        """Whether params have no values: then the state has none, and no files."""
        return self.device.type == "meta"

    @property
    def lanes(self) -> tuple[Lane, ...]:
        """The buffers."""
        if not self._lanes:
            most = max((self.end(unit) for unit in self.plan.units if unit.away), default=0)
            self._lanes = tuple(Lane(aligned(most, pinned=self.cuda), self.copies) for _ in range(self.buffers))
        return self._lanes

    def stages_param(self, unit: Unit) -> bool:
        """Whether an update works on a copy of the param's piece: it is on another device, or must stay as it is so far."""
        param = unit.kinds[0]
        elsewhere = self.cuda and param is not None and param.place == "here"
        return param is not None and param.place != "disk" and (self.disk is not None or elsewhere)

    def regions(self, unit: Unit) -> dict[int, tuple[int, int]]:
        """Where in a buffer, from which byte to which, a unit's kinds have their room; -1 stands for its gradient.

        What is copied from memory has room of its own in the front: it may come while the last piece is still written.
        """
        if not self._regions:
            away = [other for other in self.plan.units if other.away]
            front = max((sum(map(padded, self._staged(other).values())) for other in away), default=0)
            for other in away:
                sizes = {i: _piece_bytes(other, kind, next(other.spans())) for i, kind in other.on_disk()}
                staged = _behind_each_other(self._staged(other), 0)
                self._regions[other.leaf] = {**staged, **_behind_each_other(sizes, front)}
        return self._regions.get(unit.leaf, {})

    def _staged(self, unit: Unit) -> dict[int, int]:
        first, param, sizes = next(unit.spans()), unit.kinds[0], {}
        if param is not None and self.stages_param(unit):
            sizes[0] = _piece_bytes(unit, param, first)
        if self.cuda and unit.trained is not None:
            sizes[-1] = (first[1] - first[0]) * 16  # of whatever dtype it is
        return sizes

    def end(self, unit: Unit) -> int:
        """How many bytes of a buffer a unit takes."""
        return max((end for _, end in self.regions(unit).values()), default=0)

    def version(self, unit: Unit, kind: Kind) -> "Version":
        """Room for the next version of a kind.

        Raises:
            OffloadError: there is none on the disk.
        """
        if self.disk is None:
            raise RuntimeError(f"{kind.path} of {unit.name}: this state has no files")
        chunk = max(kind.numel, 1) if unit.whole else unit.chunk * kind.each
        return Version(kind, chunk, self.device, self.disk.folder.files[unit.file(kind)].take(), self.disk)

    def on_host(self, unit: Unit, leaf: Tensor) -> OnHost:
        """What stands for a param in the host's memory."""
        return OnHost(leaf, f"{unit.leaf:05d}", self.device, self.ahead)

    def __eq__(self, other: object) -> bool:
        """Not what makes two states differ in structure."""
        return isinstance(other, Home)

    __hash__ = None  # type: ignore[assignment]


@tree.record
class Offloaded:
    """offload's slot in the state."""

    home: Home = tree.static()


def make_disk(root: Any, plan: Plan, *, threads: int, direct: bool) -> Disk:
    """The files of a plan, with room for two versions of each.

    Raises:
        OffloadError: the disk is too small.
    """
    sizes = {unit.file(kind): unit.file_bytes(kind) for unit in plan.units for _, kind in unit.on_disk()}
    return Disk.over(ScratchFolder.create(root, sizes), threads=threads, direct=direct)


def _behind_each_other(sizes: dict[int, int], start: int) -> dict[int, tuple[int, int]]:
    found = {}
    for i, size in sizes.items():
        found[i] = (start, start + padded(size))
        start += padded(size)
    return found


def _piece_bytes(unit: Unit, kind: Kind, span: tuple[int, int]) -> int:
    low, high = unit.span(kind, *span)
    return (high - low) * kind.dtype.itemsize


def traffic(state: State) -> DiskTraffic:
    """What went to the disk and back for this line of states, so far.

    Raises:
        ValueError: the state has no files.
    """
    slot = state.slots.get("offload")
    if not isinstance(slot, Offloaded) or slot.home.disk is None:
        raise ValueError('traffic: this state has no files; add T.offload(optimizer="disk", path=...)')
    return slot.home.disk.traffic
