"""Rounds of training: transforms that act in every k-th update, and ranks whose models differ by design in between."""

import inspect
from collections.abc import Callable
from typing import Any

import attrs

from functional_ds import comm
from functional_ds.base.weighted import Weighted
from functional_ds.step.compose import wrap
from functional_ds.step.guards import check_same_leaves
from functional_ds.step.mesh_axes import Axis, AxisRole
from functional_ds.step.phase_signatures import Metrics
from functional_ds.step.phases import OF_A_STEP
from functional_ds.step.state.slots import Apart
from functional_ds.step.state.state import State
from functional_ds.step.step import Step, Transform

__all__ = ["apart", "every"]

_FORM = frozenset({"init", "params", "measure"})  # what runs in any case


def every(k: int, what: Transform | Callable[[Step, State], State]) -> Transform:
    """What acts in updates k, 2k, 3k, ... alone: a transform, or a function of the step and the state after the update.

    In other steps it is as if the transform were not there, except that its slot is kept: nothing of it is computed or sent.
    Which update it is the host reads from ``state.step``, before the step; a step that a loss scale skips does not count.

    Law: with k = 1 it is ``what`` itself. ``fds.jit`` has a graph for steps with it and one for those without.

    Cost: nothing in addition to ``what``. On a GPU the host waits for the step before.

    Args:
        k: how many updates make a round.
        what: a transform that wraps ``loss``, ``forward``, ``gradients``, ``reduce``, ``comm_dtype``, ``update`` or ``rate``,
            and ``init`` for its slot; or ``function(step, state) -> state``. The function sees the params in the form that
            they have at its place in ``compose``: before ``zero`` that of the optimizer.

    Raises:
        ValueError: k is no positive integer; when it is applied: the transform gives params another form, as ``zero`` does.
        TypeError: ``what`` takes neither one argument nor two.

    >>> import torch
    >>> import functional_ds as fds
    >>> def to_zero(step, state):
    ...     return fds.tree.replace(state, params=fds.tree.map(torch.zeros_like, state.params))
    >>> step = every(3, to_zero)(fds.train_step(lambda params, x: (params["w"] * x).sum(), fds.sgd(1.0)))
    >>> state = step.init({"w": torch.zeros(1)})
    >>> for _ in range(4):
    ...     state, _ = step(state, torch.ones(1))
    ...     print(step.params(state)["w"].item())
    -1.0
    -2.0
    0.0
    -1.0
    """
    if type(k) is not int or k < 1:
        raise ValueError(f"every: k={k!r} must be a positive integer")
    transform = _after(what) if _takes(what, 2) else what
    if not _takes(transform, 1):
        raise TypeError(f"every: {what!r} is neither a transform nor a function of (step, state)")

    def due(state: State) -> bool:
        return state.step.is_meta or (int(state.step) + 1) % k == 0

    def applied(step: Step) -> Step:
        whole: Step = transform(step)  # type: ignore[call-arg, assignment]
        new = whole.layers[len(step.layers) :]
        for layer in new:
            wrong = sorted(layer.phases.keys() - OF_A_STEP - _FORM)
            if wrong or layer.due is not None:
                why = (
                    f"it wraps {', '.join(wrong)}, which give params their form in all steps"
                    if wrong
                    else "it has a period already"
                )
                raise ValueError(f"every({k}, {layer.name}): {why}; use it as it is")
        gated = (attrs.evolve(layer, name=f"every({k}, {layer.name})", due=due) for layer in new)
        return attrs.evolve(whole, layers=(*step.layers, *gated))

    return applied


def _after(function: Any) -> Transform:
    def update(inner: Any, step: Step, state: State, grads: Weighted) -> tuple[State, Metrics]:
        state, metrics = inner(step, state, grads)
        return function(step, state), metrics

    return wrap(getattr(function, "__name__", type(function).__name__), update=update)


def _takes(function: Any, count: int) -> bool:
    if not callable(function):
        return False
    try:
        inspect.signature(function).bind(*range(count))
    except TypeError:
        return False
    return True


def apart(group: comm.Group, *, slot: str = "outer") -> Transform:
    """Says that the ranks of ``group`` have a model each, whose params differ.

    Nothing is computed or sent in a step. Checkpoints keep each model under the name of its place, ``params/outer.0/w``, so
    that a state is loaded into any stage, precision and number of ranks of each model, and not into another number of models.
    The step's metrics, weights and norms are those of this rank's model.

    Law: a state that is saved between two rounds and loaded on a mesh with other inner ranks continues as one run.

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
