"""Data parallelism with whole params on every rank: what its transforms share."""

from typing import Any

import attrs

from functional_ds import comm
from functional_ds.base import tree
from functional_ds.base.marks import like_marked, sharers_of
from functional_ds.step.guards import check_same_leaves
from functional_ds.step.state.buffer_sync import synced
from functional_ds.step.state.state import State
from functional_ds.step.step import Step

__all__ = ["Replicas"]


@attrs.frozen(eq=False)
class Replicas:
    """Ranks that each have all params and a part of the batch.

    Raises:
        TypeError: ``group`` is no group.
    """

    group: comm.Group | None

    def __attrs_post_init__(self) -> None:
        if self.group is not None and not isinstance(self.group, comm.Group):
            raise TypeError(f"group={self.group!r} is no group: pass mesh['dp'], comm.world() or None")

    def ranks(self) -> comm.Group:
        """The group; the default is wherever the program runs."""
        return self.group or comm.world()

    def __str__(self) -> str:
        return "world" if self.group is None else f"{self.group.name!r} of {self.group.size}"

    def alone(self, step: Step, what: str) -> None:
        """Refuses a step whose params another transform has spread over ranks already."""
        if step.wraps("view"):
            raise ValueError(
                f"{what}: this step has a transform that reduces gradients already ({step}); use either, since it would "
                "reduce them twice"
            )

    def same(self, params: Any) -> Any:
        """Rank 0's params, on every rank.

        Raises:
            ValueError: the ranks' params differ in structure, or some leaf is not the same on all ranks.
        """
        group = self.ranks()
        for path, leaf in tree.named(params):
            if sharers_of(leaf) is not None:
                raise ValueError(
                    f"params: the leaf {path!r} holds other experts on other ranks of {group.name!r}, and this transform keeps "
                    "all params the same on all ranks; use T.zero(0, ...) in its place"
                )
        check_same_leaves(params, group)
        return tree.map(lambda x: like_marked(comm.broadcast(x.detach(), 0, group), x), params)

    def sum_over_ranks(self, inner: Any, step: Step, state: State, scalars: Any) -> Any:
        """Sums over the group."""
        return comm.all_reduce(inner(step, state, scalars), self.ranks())

    def sync_buffers(self, inner: Any, step: Step, state: State) -> State:
        """The buffers that the ranks agree on."""
        return synced(inner(step, state), self.ranks())

    def batch_shard(self, inner: Any, step: Step, state: State) -> tuple[int, int]:
        """The group's ranks share what the rank would have had."""
        index, count = inner(step, state)
        group = self.ranks()
        return index * group.size + group.rank, count * group.size
