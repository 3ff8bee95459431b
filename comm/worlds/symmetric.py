"""A world in which only one rank runs and all others are assumed to behave like it."""

from collections.abc import Callable, Sequence
from typing import TypeVar, TypeVarTuple

import attrs
from torch import Tensor

from functional_ds.comm.record.group import Group, Ready, World
from functional_ds.comm.table.collective import Call, CallContext

from .current import enter, exclusive_simulation
from .rng_state import kept_rng

T = TypeVar("T")
Ts = TypeVarTuple("Ts")


@attrs.define(eq=False)
class SymmetricWorld(World):
    """The world of a rank whose peers pass the same inputs to every collective."""

    def start(self, call: Call, tensors: Sequence[Tensor], group: Group, *, beside: bool) -> Ready:
        return Ready([self._result(call, tensor.detach(), group) for tensor in tensors])

    def _result(self, call: Call, tensor: Tensor, group: Group) -> Tensor:
        if tensor.is_meta:
            return call.collective.on_shapes(tensor, CallContext(call.options, group.rank, group.size))
        options = call.merged([call.private()] * group.size)
        return call.collective.denotation([tensor.contiguous()] * group.size, options)[group.rank]


def is_symmetric(group: Group) -> bool:
    """Whether the group belongs to ``comm.symmetric``, where only this rank runs.

    Checks that ranks differ, such as in their data, must be skipped there.

    >>> from functional_ds import comm
    >>> symmetric(lambda: is_symmetric(comm.world()), world_size=2), is_symmetric(comm.world())
    (True, False)
    """
    return isinstance(group.world, SymmetricWorld)


def symmetric(program: Callable[[*Ts], T], *args: *Ts, world_size: int, rank: int = 0) -> T:
    """Runs ``program(*args)`` as one rank, assuming that all ranks pass the same inputs to every collective.

    Only this rank runs, so the cost does not grow with ``world_size``. Results of meta tensors have shapes only. Other results
    are computed as if all ranks had passed this rank's values: right for values that are equal on all ranks, such as the order
    of a model's layers, and wrong for others. Random generators are restored afterwards.

    Args:
        program: the program.
        args: its arguments.
        world_size: the number of ranks that the program sees.
        rank: the rank that it runs as.

    Raises:
        ValueError: ``rank`` is not in 0..world_size - 1.

    >>> import torch
    >>> from functional_ds import comm
    >>> def program():
    ...     whole = comm.all_gather(torch.empty(10**6, device="meta"))
    ...     return whole.shape[0], comm.all_reduce(torch.tensor(1)).item()
    >>> symmetric(program, world_size=1024)
    (1024000000, 1024)
    """
    if type(world_size) is not int or not 0 <= rank < world_size:
        raise ValueError(f"rank={rank!r}, world_size={world_size!r}: the ranks of a world are 0 to world_size - 1")
    with exclusive_simulation(), kept_rng(), enter(SymmetricWorld(rank), range(world_size)):
        return program(*args)
