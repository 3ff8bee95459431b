"""The single-device training step, to which transforms are applied and with which tests compare."""

import inspect
import math
from collections.abc import Callable, Collection
from functools import partial
from typing import Any

import attrs
import torch
from torch import Tensor

from functional_ds.base import tree
from functional_ds.base.marks import is_compiled, is_trainable, like_marked, trainable
from functional_ds.base.tree import rows_of
from functional_ds.base.weighted import Weighted, weigh
from functional_ds.comm.worlds.rng_state import RngState
from functional_ds.optim.bind import BoundOptimizer
from functional_ds.optim.optimizer import as_optimizer
from functional_ds.sharding.leaf_map import LeafMap
from functional_ds.sharding.leaf_selection import IndivisibleStateError
from functional_ds.sharding.sources import values_of

from .over_ranks.mesh_axes import axes_of
from .pass_scope import Pass, current_pass, detached, differentiated, evaluated, whole_if_needed, with_buffers
from .phase_signatures import Metrics, Passed, Phase
from .phases import Trait
from .state.buffer_scope import BufferScope
from .state.buffers import BUFFERS, POLICIES
from .state.state import State, UpdateError, unused_leaves
from .step import Step
from .views.plain_view import stored_view


def takes(function: Callable[..., Any], name: str) -> bool:
    """Whether a function has a parameter of this name."""
    try:
        return name in inspect.signature(function).parameters
    except (TypeError, ValueError):  # builtins have no signature
        return False


def train_step(
    loss_fn: Callable[..., Any], optimizer: Any, *, seed: int | Tensor = 0, buffers: str = "first", unused: str = "skip"
) -> Step:
    """The single-device training step, which minimises ``loss_fn(params, batch)``; apply transforms to it.

    Args:
        loss_fn: pure; returns a scalar mean, or ``Weighted(sum, weight)`` if batches differ in weight, or a pair of that and a
            dict of further such metrics. A parameter ``key`` receives a ``Key`` for random draws (None while evaluating).
        optimizer: ``fds.adamw(...)``, ``fds.sgd(...)`` or an optax-like ``(init, update)`` pair, which must be elementwise
            under ``zero`` 1 to 3.
        seed: of the key.
        buffers: which module buffers (running statistics, for example) data-parallel ranks keep: "first", those of the first
            rank, as in DistributedDataParallel; "mean", the mean of floating-point ones; "own", each rank its own.
        unused: what the optimizer does with trained leaves that the loss used on no rank and in no micro-batch: "skip" leaves
            them and their state unchanged, as ``torch.optim`` does if ``grad`` is None; "zeros" gives them zero gradients, so
            momentum and weight decay still apply.

    Raises:
        TypeError: ``loss_fn`` is not callable or is compiled by ``torch.compile``, or ``optimizer`` is not an optimizer.
        ValueError: an unknown word for ``buffers`` or ``unused``.

    >>> import functional_ds as fds
    >>> step = fds.train_step(lambda params, x: (params["w"] * x).sum(), fds.sgd(0.5))
    >>> state, metrics = step(step.init({"w": torch.ones(2)}), torch.tensor([1.0, 2.0]))
    >>> step.params(state)["w"].tolist(), metrics["loss"].item()
    ([0.5, 0.0], 3.0)
    """
    if not callable(loss_fn):
        raise TypeError(f"loss_fn={loss_fn!r} is not callable")
    if is_compiled(loss_fn):
        raise TypeError(
            "loss_fn is compiled by torch.compile: pass the plain function, and compile blocks by T.compiled or the step by "
            "fds.jit"
        )
    if buffers not in POLICIES:
        raise ValueError(f"buffers={buffers!r} is not one of {', '.join(POLICIES)}")
    if unused not in ("skip", "zeros"):
        raise ValueError(f"unused={unused!r} is neither 'skip' nor 'zeros'")
    rule = BoundOptimizer(as_optimizer(optimizer))
    with_key = takes(loss_fn, "key")

    def init(step: Step, params: Any) -> State:
        stored = tree.map(lambda x: like_marked(values_of(x), x), params)
        state = State.fresh(stored, (), seed)
        return tree.replace(state, optimizer=rule.at(lambda: step.leaf_map(state)).init(trainable(stored)))

    def loss(step: Step, state: State, params: Any, batch: Any) -> tuple[Weighted, dict[str, Weighted]]:
        further = {"key": state.key} if with_key else {}
        pass_ = current_pass()
        if pass_ is not None and pass_.loss is not None:
            returned = pass_.loss
        else:
            try:
                returned = step.forward(state, lambda given: loss_fn(params, given, **further), batch)
            except RuntimeError as error:
                _refuse_no_rows(error, batch)
                raise
        value, metrics = _with_metrics(returned)
        if "loss" in metrics:
            raise ValueError('the loss function returned a metric named "loss", which is the name of the loss: rename it')
        if pass_ is not None:
            pass_.slots["mean"] = not isinstance(value, Weighted)
        return weigh(value, "the loss", constant=True), {name: weigh(m, f"the metric {name!r}") for name, m in metrics.items()}

    base: dict[str, Phase] = {
        "prepare": lambda step, params: params,
        "init": init,
        "view": lambda step, state, trains, whole: stored_view(
            state.params, trains=trains, looks=trains and step.guarded and state.begins()
        ),
        "loss": loss,
        "forward": lambda step, state, function, batch: function(batch),
        "measure": _measure,
        "gradients": autograd,
        "reduce": lambda step, state, grads: (state, grads),
        "comm_dtype": lambda step, state, dtype: dtype,
        "scatter": lambda step, state: state,
        "update": updating(rule),
        "publish": lambda step, state: state,
        "rate": lambda step, state: 1.0,
        "params": _params,
        "leaf_map": _leaf_map,
        "select": _select,
    }
    name = f"train_step({getattr(loss_fn, '__name__', type(loss_fn).__name__)}, {rule})"
    draws = with_key and getattr(loss_fn, "draws", True)
    options = {"optimizer": rule.rule, "seed": seed}
    return Step(base, name, buffers=buffers, draws=draws, skips_unused=unused == "skip", options=options)


def updating(rule: BoundOptimizer) -> Phase:
    """The base of ``update``: the optimizer's update of the trained leaves."""

    def update(step: Step, state: State, grads: Weighted) -> tuple[State, Metrics]:
        trained = trainable(state.params)
        weight = torch.as_tensor(grads.weight)
        weight = torch.where(weight == 0, math.inf, weight)  # no weight: gradient zero, not 0 / 0
        grads = tree.replace(grads, weight=weight, skip=state.skip, unused=unused_leaves(step, state))
        rate = step.rate(state)
        if not step.keeps_graph and [x for x in (rate, weight, *grads.sum) if isinstance(x, Tensor) and x.requires_grad]:
            raise UpdateError(
                "update: its learning rate or its gradients require grad, as those of a schedule or a limit do that is such a "
                f"tensor, and this step keeps no graph ({step}): use fds.differentiable(step)"
            )
        try:
            leaf_map = partial(step.leaf_map, state)
            moved, optimizer_state = rule.update([*trained], grads, state.optimizer, rate=rate, leaf_map=leaf_map)
        except IndivisibleStateError as error:
            raise UpdateError(str(error)) from None
        params, pairs = state.params, [*zip(moved, trained, strict=True)]
        if [value for value, leaf in pairs if value is not leaf]:
            new = iter([value if value is leaf else like_marked(value, leaf) for value, leaf in pairs])
            params = tree.map(lambda leaf: next(new) if is_trainable(leaf) else leaf, params)
        count = 1 if state.skip is None else state.skip.logical_not()
        return tree.replace(state, params=params, optimizer=optimizer_state, step=state.step + count), {}

    return update


def _refuse_no_rows(error: RuntimeError, batch: Any) -> None:
    """Explains torch's error about an empty batch.

    Raises:
        ValueError: it is such an error.
    """
    has_rows = [x for x in tree.leaves(batch) if isinstance(x, Tensor) and x.dim()]
    if type(error) is RuntimeError and has_rows and not rows_of(batch):
        raise ValueError(
            f"batch: this rank has no rows, and the loss fails on none ({str(error).splitlines()[0]}): give the rank a row "
            "that weighs nothing, for example with labels of -100; or return fds.Weighted(torch.zeros(()), 0), if no function "
            "of the loss waits for other ranks"
        ) from error


def _with_metrics(returned: Any) -> tuple[Any, dict[str, Any]]:
    """The loss and further metrics, from what a loss function returned."""
    if not isinstance(returned, tuple):
        return returned, {}
    if len(returned) != 2 or not isinstance(returned[1], dict):
        kinds = ", ".join(type(part).__name__ for part in returned)
        raise TypeError(
            f'the loss function returned a tuple of ({kinds}); return the loss alone, or (loss, {{"name": metric, ...}})'
        )
    return returned


def _params(step: Step, state: State) -> Any:
    """The base of ``params``: a copy of the stored params."""
    return tree.map(lambda x: like_marked(x.detach().clone(), x), state.params)


def _measure(step: Step, state: State, batch: Any) -> dict[str, Weighted]:
    key = state.key if state.key is not None and state.key.constant else None
    loss, metrics = evaluated(step, state, lambda params: step.loss(tree.replace(state, key=key), params, batch))
    return {"loss": loss, **metrics}


def _leaf_map(step: Step, state: State) -> LeafMap:
    partial = next((axis for axis in axes_of(step) if axis.summed_in == "update"), None)
    return attrs.evolve(LeafMap.of(state.params), reduce_group=None if partial is None else partial.ranks())


def _select(step: Step, state: State, paths: Collection[str]) -> tuple[State, tuple[int, ...]]:
    trained = [path for path, leaf in tree.named(state.params) if is_trainable(leaf)]
    chosen = {path: leaf for path, leaf in tree.named(state.params) if path in paths}
    return tree.replace(state, params=chosen), tuple(i for i, path in enumerate(trained) if path in paths)


def autograd(step: Step, state: State, batch: Any, carry: Weighted | None, last: bool) -> Passed:
    """Autograd through loss ∘ view. The graph of a state's first batch is inspected for lost gradients."""

    def run(whole: bool) -> Passed:
        scope = BufferScope(state.slots.get(BUFFERS))
        with Pass(buffers=scope, graphs=state.graphs if step.guarded else None) as pass_:
            pass_.view = step.view(state, whole=whole)
            with pass_.forward():
                loss, metrics = step.loss(state, pass_.view.params, batch)
            after, grads = differentiated(step, state, pass_, loss, carry, last)
        return with_buffers(after, scope), grads, detached(loss, metrics)

    before = RngState.now() if state.batch is None or step.has(Trait.SHARDS_PARAMS) else None  # what else raises ``NeedsWhole``
    return whole_if_needed(run, before)
