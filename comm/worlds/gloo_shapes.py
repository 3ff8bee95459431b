"""A rank without values whose collectives take the memory that they take over Gloo."""

from collections.abc import Sequence

import attrs
from torch import Tensor
from torch.distributed import Work

from functional_ds.comm.backends.primitives import Communicator, Options, Started
from functional_ds.comm.record.group import Group
from functional_ds.comm.table.collective import Call, Handle

from .process_handle import ProcessHandle
from .shapes import ShapesWorld

__all__ = ["GlooShapesWorld"]


class _Silent(Communicator):
    """No messages."""

    def send(self, tensor: Tensor, peer: int) -> list[Work]:
        """Nothing."""
        return []

    def recv(self, tensor: Tensor, peer: int) -> list[Work]:
        """Nothing."""
        return []


@attrs.define(eq=False)
class GlooShapesWorld(ShapesWorld):
    """The world of a rank without values, which packs and folds as a process does over Gloo; only that no bytes move.

    Links are fast: a call has arrived when it is started. On a slow one, what a rank sends is in memory until then.

    Attributes:
        communicating: whether what is computed now is a part of a collective.
    """

    communicating: bool = False

    def carried(self, call: Call, tensors: Sequence[Tensor], group: Group) -> Handle:
        def begin(payload: Tensor, options: Options) -> Started:
            silent = _Silent(None, group.ranks, group.rank, 0)  # type: ignore[arg-type]  # no process group
            result = call.collective.gloo(silent, payload, options).run()
            return Started((), lambda: result)

        self.communicating = True
        try:
            return ProcessHandle.begin(call, tensors, group, begin)
        finally:
            self.communicating = False
