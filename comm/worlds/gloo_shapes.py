"""A rank on shapes only whose collectives allocate the memory that they would over Gloo."""

from collections.abc import Sequence

import attrs
from torch import Tensor
from torch.distributed import Work

from functional_ds.base.tree import setting
from functional_ds.comm.backends.primitives import Communicator, Options, Started
from functional_ds.comm.record.group import Group
from functional_ds.comm.table.collective import Call, Handle

from .process_handle import ProcessHandle
from .shapes import ShapesWorld


class _Silent(Communicator):
    """A communicator that sends nothing."""

    def send(self, tensor: Tensor, peer: int) -> list[Work]:
        """Nothing."""
        return []

    def recv(self, tensor: Tensor, peer: int) -> list[Work]:
        """Nothing."""
        return []


@attrs.define(eq=False)
class GlooShapesWorld(ShapesWorld):
    """The world of a rank on shapes only, which packs and reduces as over Gloo but sends nothing.

    Messages arrive at once; on a slow link the sent tensors would stay in memory until they arrive.

    Attributes:
        communicating: whether a collective is being computed.
    """

    communicating: bool = False

    def carried(self, call: Call, tensors: Sequence[Tensor], group: Group) -> Handle:
        def begin(payload: Tensor, options: Options) -> Started:
            silent = _Silent(None, group.ranks, group.rank, 0)  # type: ignore[arg-type]  # no process group
            result = call.collective.gloo(silent, payload, options).run()
            return Started((), lambda: result)

        with setting(self, communicating=True):
            return ProcessHandle.begin(call, tensors, group, begin)
