"""Data parallelism with replicated params: what its transforms share."""

from typing import Any

import attrs

from functional_ds import comm
from functional_ds.base import tree
from functional_ds.base.marks import like_marked, sharers_of
from functional_ds.step.guards import check_same_leaves
from functional_ds.step.over_ranks.mesh_axes import Axis, AxisRole
from functional_ds.step.step import Step


@attrs.frozen(eq=False)
class Replicas(Axis):
    """The mesh axis of ranks that each have all params and a part of the batch."""

    role: AxisRole = AxisRole.BATCH

    def alone(self, step: Step, what: str) -> None:
        """Raises an error for a step whose params another transform has sharded."""
        if step.wraps("view"):
            raise ValueError(
                f"{what}: this step has a transform that reduces gradients already ({step}); use either, since it would "
                "reduce them twice"
            )

    def same(self, params: Any) -> Any:
        """Rank 0's params, on every rank.

        Raises:
            ValueError: the ranks' params differ in structure, or a leaf is shared by a part of the ranks only, such as experts.
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
