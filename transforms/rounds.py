"""Periodic transforms, and groups of ranks that train separate models in between (DiLoCo, local SGD)."""

import inspect
from collections.abc import Callable
from typing import Any

import attrs

from functional_ds import comm
from functional_ds.base.weighted import Weighted
from functional_ds.step.compose import wrap
from functional_ds.step.guards import check_same_leaves
from functional_ds.step.over_ranks.mesh_axes import Axis, AxisRole
from functional_ds.step.phase_signatures import Metrics
from functional_ds.step.phases import OF_A_STEP
from functional_ds.step.state.slots import Apart
from functional_ds.step.state.state import State
from functional_ds.step.step import Step, Transform

_FORM = frozenset({"init", "params", "measure"})  # phases that run in every step


def every(k: int, what: Transform | Callable[[Step, State], State]) -> Transform:
    """Applies a transform, or a function of the step and the state after the update, in updates k, 2k, 3k, ... only.

    In other steps the transform computes and sends nothing; its slot is kept. The host reads ``state.step`` before each step; a
    step that a loss scale skips does not count.

    Law: ``every(1, what)`` equals ``what``. ``fds.jit`` captures one graph for steps with it and one for those without.

    Cost: none in addition to ``what``, except that on a GPU the host waits for the previous step.

    Args:
        k: the period, in updates.
        what: a transform that wraps ``loss``, ``forward``, ``gradients``, ``reduce``, ``comm_dtype``, ``update`` or ``rate``,
            and ``init`` for its slot; or ``function(step, state) -> state``, which sees the params as they are stored at its
            place in ``compose``: before ``zero``, as the optimizer has them.

    Raises:
        ValueError: k is not a positive integer; when it is applied: the transform changes how params are stored, as ``zero``
            does.
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
            if wrong or layer.periodic:
                wraps = f"it wraps {', '.join(wrong)}, which give params their form in all steps"
                why = wraps if wrong else "it has a period already"
                raise ValueError(f"every({k}, {layer.name}): {why}; use it as it is")
        gated = (attrs.evolve(layer, name=f"every({k}, {layer.name})", due=due, periodic=True) for layer in new)
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
    """Declares that each rank of ``group`` trains its own model, so params may differ over the group.

    Checkpoints store each model under its rank's name, ``params/outer.0/w``. They can be loaded with any ZeRO stage, precision
    and number of ranks per model, but not with another number of models. Metrics, weights and norms are those of this rank's
    model.

    Law: a state saved between two rounds and loaded on a mesh with other inner ranks continues the same run.

    A step with a loss scale and ``every`` is skipped by all models where one overflows, so that they count the same updates.

    Cost: at ``init`` the ranks compare their steps and the shapes of their params; a step sends nothing, or with both a loss
    scale and ``every`` one number.

    Args:
        group: one rank of each model: ``mesh["outer"]`` of a mesh whose other axes ``zero`` and others use.
        slot: the name of the slot, and of the models in checkpoints.

    Raises:
        ValueError: the ranks' params differ in structure.
        TypeError: ``group`` is not a ``comm.Group``.

    >>> import torch
    >>> import functional_ds as fds
    >>> def program():
    ...     world = comm.world()
    ...     step = apart(world)(fds.train_step(lambda params, x: (params["w"] * x).sum(), fds.sgd(1.0)))
    ...     state, _ = step(step.init({"w": torch.zeros(1)}), torch.ones(1) * world.rank)
    ...     return step.params(state)["w"].item()
    >>> comm.simulate(program, world_size=2)
    [0.0, -1.0]
    """
    axis = Axis(group, AxisRole.APART)

    def init(inner: Any, step: Step, params: Any) -> State:
        check_same_leaves(params, group)
        return inner(step, params).put(**{slot: Apart(group.rank, group.size)})  # type: ignore[no-any-return]

    return wrap(f"apart({axis})", slot=slot, axes=[axis], init=init)
