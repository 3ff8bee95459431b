"""Where an offloaded state lives: its plan, its disk, and the buffers that updates go through."""

from concurrent.futures import Future
from typing import Any

import attrs
import torch
from torch import Tensor

from functional_ds import tree

from .ahead import Ahead
from .disk import Disk, aligned
from .folder import Extent, Folder, padded
from .handles import OnDisk
from .plan import Kind, Plan, Unit

__all__ = ["Home", "Lane", "Offloaded"]


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
    writes: "tuple[Future[int], ...]" = ()
    arrived: Any = None
    left: Any = None


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
    _lanes: tuple[Lane, ...] = ()

    @property
    def cuda(self) -> bool:
        """Whether host and device are two."""
        return self.device.type == "cuda"

    @property
    def lanes(self) -> tuple[Lane, ...]:
        """The buffers."""
        if not self._lanes:
            most = max((self.end(unit) for unit in self.plan.units if not unit.here), default=0)
            self._lanes = tuple(Lane(aligned(most, pinned=self.cuda)) for _ in range(self.buffers))
        return self._lanes

    def stages_param(self, unit: Unit) -> bool:
        """Whether an update works on a copy of the param's piece: it is on another device, or must stay as it is so far."""
        param = unit.kinds[0]
        return param is not None and param.place != "disk" and (bool(unit.on_disk()) or (self.cuda and param.place == "here"))

    def regions(self, unit: Unit) -> dict[int, tuple[int, int]]:
        """Where in a buffer, from which byte to which, a unit's kinds have their room; -1 stands for its gradient."""
        first = next(unit.spans())
        sizes = {i: _piece_bytes(unit, kind, first) for i, kind in unit.on_disk()}
        param = unit.kinds[0]
        if param is not None and self.stages_param(unit):
            sizes[0] = _piece_bytes(unit, param, first)
        if self.cuda:
            sizes[-1] = padded((first[1] - first[0]) * 16)  # of whatever dtype it is
        found, end = {}, 0
        for i, size in sizes.items():
            found[i] = (end, end + padded(size))
            end += padded(size)
        return found

    def end(self, unit: Unit) -> int:
        """How many bytes of a buffer a unit takes."""
        return max((end for _, end in self.regions(unit).values()), default=0)

    def handle(self, unit: Unit, kind: Kind, extent: Extent, sums: tuple[int, ...]) -> OnDisk:
        """What stands for a kind of which a new version was written."""
        if self.disk is None:
            raise RuntimeError("this state has no files")
        shape = torch.Size(kind.shape)
        chunk = max(kind.numel, 1) if unit.whole else unit.chunk * kind.each
        return OnDisk(shape, kind.dtype, self.device, chunk, sums, extent, self.disk)

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
    return Disk.over(Folder.create(root, sizes), threads=threads, direct=direct)


def _piece_bytes(unit: Unit, kind: Kind, span: tuple[int, int]) -> int:
    low, high = unit.span(kind, *span)
    return (high - low) * kind.dtype.itemsize
