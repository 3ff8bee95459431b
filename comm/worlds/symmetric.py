"""One rank of a world whose other ranks do as it does: programs that need the others' answers, without the others."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import attrs
import torch
from torch import Tensor

from functional_ds.comm.record.collective import Call, Here
from functional_ds.comm.record.group import Group, Ready, each, place_in
from functional_ds.comm.record.ledger import Ledger

from .current import HERE, only_simulation
from .rng_state import Ambient
from .shapes import result_on_shapes

__all__ = ["alike", "are_alike"]


@attrs.define(eq=False)
class AlikeWorld:
    """The world as seen by a rank that takes the others to be like itself; ``observe`` sees each call and its results."""

    rank: int
    books: list[Ledger] = attrs.field(factory=list)
    observe: Callable[[Call, Sequence[Tensor]], None] = lambda call, results: None

    @property
    def device(self) -> torch.device:
        return torch.device("cpu")

    def together(self) -> AbstractContextManager[None]:
        return nullcontext()

    def repeat(self, times: int, body: Callable[[int], None]) -> None:
        each(times, body)

    def start(self, call: Call, tensors: Sequence[Tensor], group: Group, *, ahead: bool) -> Ready:
        results = [self._result(call, tensor.detach(), group) for tensor in tensors]
        self.observe(call, results)
        return Ready(results)

    def _result(self, call: Call, tensor: Tensor, group: Group) -> Tensor:
        if tensor.is_meta:
            return result_on_shapes(call.collective, tensor, Here(call.options, group.rank, group.size))
        everyone = call.merged([call.private()] * group.size)
        return call.collective.denotation([tensor.contiguous()] * group.size, everyone)[group.rank]

    def group(self, ranks: Sequence[int], name: str) -> Group:
        return Group(tuple(ranks), place_in(ranks, self.rank), name, self)

    def channel(self, group: Group, name: str) -> Group:
        return attrs.evolve(group, name=f"{group.name}/{name}")


def are_alike(group: Group) -> bool:
    """Whether the group's other ranks are only taken to be like this one, so that what they say of themselves is not so.

    >>> from functional_ds import comm
    >>> alike(lambda: are_alike(comm.world()), world_size=2), are_alike(comm.world())
    (True, False)
    """
    return isinstance(group.world, AlikeWorld)


def alike(program: Callable[..., Any], *args: Any, world_size: int, rank: int = 0) -> Any:
    """What ``program(*args)`` returns on one rank of ``world_size``, if all the others pass to collectives what it passes.

    Nobody else runs, so this costs the same for any number of ranks. Tensors on the meta device have no values: results have
    their shapes alone. Others have, so programs may ask each other and go by the answer; it is right where the ranks agree
    by nature, as on the order of a model's layers, and wrong where they differ. Generators are left as they were.

    Raises:
        ValueError: no such rank.

    >>> from functional_ds import comm
    >>> def program():
    ...     whole = comm.all_gather(torch.empty(10**6, device="meta"))
    ...     return whole.shape[0], comm.all_reduce(torch.tensor(1)).item()
    >>> alike(program, world_size=1024)
    (1024000000, 1024)
    """
    if type(world_size) is not int or not 0 <= rank < world_size:
        raise ValueError(f"rank={rank!r}, world_size={world_size!r}: the ranks of a world are 0 to world_size - 1")
    with only_simulation():
        outer, ambient = getattr(HERE, "group", None), Ambient.now()
        try:
            HERE.group = Group(tuple(range(world_size)), rank, "world", AlikeWorld(rank))
            return program(*args)
        finally:
            HERE.group = outer
            ambient.restore()
