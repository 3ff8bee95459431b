"""Ranks that have a model each, by design: local SGD, DiLoCo, gossip."""

from typing import Any

from functional_ds import comm
from functional_ds.step.compose import wrap
from functional_ds.step.guards import check_same_leaves
from functional_ds.step.mesh_axes import Axis, AxisRole
from functional_ds.step.state.slots import Apart
from functional_ds.step.state.state import State
from functional_ds.step.step import Step, Transform

__all__ = ["apart"]


def apart(group: comm.Group, *, slot: str = "outer") -> Transform:
    """Says that the ranks of ``group`` have a model each, whose params differ.

    Nothing is computed or sent in a step. Checkpoints keep each model under the name of its place, ``params/outer.0/w``, so
    that a state is loaded into any stage, precision and number of ranks of each model, and not into another number of models.
    The step's metrics, weights and norms are those of this rank's model.

    Law: a state that is saved between two rounds and loaded on a mesh with other inner ranks goes on as one run.

    Cost: at ``init`` the ranks compare their steps and the shapes of their params.

    Args:
        group: one rank of each model: ``mesh["outer"]`` of a mesh whose other axes ``zero`` and others use.
        slot: the name of the slot, and of the models in checkpoints.

    Raises:
        ValueError: the ranks' params differ in structure.
        TypeError: ``group`` is no group.
    """
    axis = Axis(group, AxisRole.APART)

    def init(inner: Any, step: Step, params: Any) -> State:
        check_same_leaves(params, group)
        return inner(step, params).put(**{slot: Apart(group.rank, group.size)})  # type: ignore[no-any-return]

    return wrap(f"apart({axis})", slot=slot, axes=[axis], init=init)
