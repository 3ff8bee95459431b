"""Differentiation through training steps: by hyperparameters, initial params and data."""

from collections.abc import Callable
from typing import Any

import attrs
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from functional_ds.base import tree
from functional_ds.base.marks import is_trainable, like_marked, trainable
from functional_ds.base.torch_private import below_level, grad_level, is_transformed, leaf_at_level
from functional_ds.base.weighted import Weighted
from functional_ds.optim.bind import BoundOptimizer
from functional_ds.optim.formula import out_of_place
from functional_ds.sharding.sources import is_deferred, values_of
from functional_ds.step.pass_scope import Pass, with_buffers
from functional_ds.step.phase_signatures import Passed, Phase
from functional_ds.step.phases import Trait
from functional_ds.step.state.buffer_scope import BufferScope
from functional_ds.step.state.buffers import BUFFERS, Buffers
from functional_ds.step.state.state import State, with_unused
from functional_ds.step.step import Step
from functional_ds.step.train_step import updating
from functional_ds.step.views.graph_checks import check_graph
from functional_ds.step.views.view import View, dense, wide_dtype

from .over_ranks import entering, of_first_rank, over_ranks, reduced

_COMPOSE = frozenset({"init", "loss", "gradients", "reduce", "update", "rate", "params"})  # gradients flow through these phases


def differentiable(step: Step) -> Step:
    """A step that can be differentiated through, by hyperparameters given as tensors, initial params and data.

    ```
    d loss(step ∘ ... ∘ step (init(params), batches)) / d (lr, betas, ..., params, batches)
    ```

    ``torch.autograd`` and ``torch.func`` treat it as any function of tensors: reverse mode, forward mode, and ``vmap`` over
    hyperparameters and seeds. No state is donated. Law: k steps equal k steps of ``step`` up to rounding, since the optimizer's
    formula replaces torch's fused kernel; derivatives equal finite differences.

    Gradients flow through ``clip``, ``accumulate``, ``schedule``, ``ema``, and custom transforms that wrap ``init``, ``loss``,
    ``gradients``, ``reduce``, ``update``, ``rate`` or ``params``.

    Cost: reverse mode keeps the graphs of all steps, forward mode one tangent of the state. Attention runs with
    ``SDPBackend.MATH``, which stores the scores.

    With ``zero``, ``torch.autograd`` works in reverse mode. Law: for values that are equal on all ranks, such as
    ``step.evaluate`` and functions of ``step.params``, each rank gets the single device's gradient on the concatenated batch:
    whole by hyperparameters and first params, and by its own rows. What the loss takes by closure has its rank's share of a
    gradient; ``comm.copy_to`` makes it whole. All ranks must differentiate alike.

    The steps compute whole states, and each is computed again in the backward pass. Until then each keeps, of S elements of the
    optimizer's state and Ψ params: Ψ + S; Ψ + S/n; Ψ + S/n; (Ψ + S)/n for stages 0 to 3. It sends 2Ψ(n-1)/n elements; in the
    backward pass 4Ψ(n-1)/n and (n-1)/n of what is kept in shards.

    Raises:
        ValueError: here, or in ``init`` for transforms that are composed later: a transform divides the model or the sequence,
            reduces gradients by a codec or a custom function, casts, recomputes, compiles or offloads; the optimizer needs
            whole leaves.
        RuntimeError: with ``zero``: ``torch.func`` or forward mode is active; in the backward pass: a batch was written to, or
            the loss is not a function of its arguments.

    >>> import functional_ds as fds
    >>> def trained(lr):
    ...     step = differentiable(fds.train_step(lambda params, x: (params["w"] - x).square().sum(), fds.sgd(lr)))
    ...     state, _ = step(step.init({"w": torch.zeros(())}), torch.tensor(1.0))
    ...     return step.evaluate(state, torch.tensor(1.0))  # (1 - 2 lr)²
    >>> torch.func.grad(trained)(torch.tensor(0.25)).item(), torch.func.vmap(trained)(torch.tensor([0.0, 0.25, 0.5])).tolist()
    (-2.0, [1.0, 0.25, 0.0])
    """
    step = over_ranks(step)
    _refuse(step)
    rule = BoundOptimizer(out_of_place(step.options["optimizer"]))

    def init(step: Step, params: Any) -> State:
        _refuse(step)
        _refuse_frozen(params)
        own = tree.map(lambda x: like_marked(values_of(x) if is_deferred(x) else x.clone(), x), params)
        own = of_first_rank(step, own)
        state = State.fresh(own, (), step.options["seed"])
        return tree.replace(state, optimizer=rule.at(lambda: step.leaf_map(state)).init(trainable(own)))

    base: dict[str, Phase] = {
        **step.base,
        "init": init,
        "view": lambda step, state, trains, whole: View(state.params, _no_pull),
        "forward": _forward,
        "measure": _measure,
        "gradients": _gradients,
        "reduce": reduced,
        "params": _params,
    }
    name = f"differentiable({step.name})"
    return attrs.evolve(step, base={**base, "update": updating(rule)}, name=name, keeps_graph=True)


def _refuse(step: Step) -> None:
    for layer in step.layers:
        divides = layer.axes and Trait.DATA_PARALLEL not in layer.traits
        if divides or layer.phases.keys() - _COMPOSE or layer.traits & {Trait.OFFLOADS, Trait.CASTS}:
            raise ValueError(
                f"differentiable: {layer.name} stores params or runs the loss in its own way, which has no derivative here "
                f"({step}): compose transforms of gradients, updates and rates alone, such as clip, accumulate, schedule and "
                "ema, and zero before fds.differentiable, with its own collectives; else use Hessian-vector products "
                "(docs/second-order.md)"
            )


def _refuse_frozen(params: Any) -> None:
    for path, leaf in tree.named(params):
        if isinstance(leaf, torch.nn.Parameter) and not leaf.requires_grad and is_transformed(leaf):
            raise ValueError(
                f"differentiable: the frozen leaf {path!r} is one that torch.func differentiates by, and frozen leaves have no "
                "derivative: let the loss take it from the batch or by a closure"
            )


def _no_pull(*args: Any, **options: Any) -> Any:
    raise RuntimeError("view: a differentiable step runs its backward passes itself; use step.gradients")


def _forward(step: Step, state: State, function: Callable[[Any], Any], batch: Any) -> Any:
    """Runs attention with ``SDPBackend.MATH``: torch's fused kernels have no second derivatives and no forward mode."""
    with sdpa_kernel(SDPBackend.MATH):
        return function(batch)


def _params(step: Step, state: State) -> Any:
    return tree.map(lambda x: like_marked(x.clone(), x), state.params)


def _measure(step: Step, state: State, batch: Any) -> dict[str, Weighted]:
    with Pass(buffers=BufferScope(state.slots.get(BUFFERS), keeps=False)) as pass_:
        params, linked = entering(step, step.view(state, trains=False).params)
        pass_.view = View(params, _no_pull)
        loss, metrics = step.loss(tree.replace(state, key=None), params, batch)
    return _all_linked(linked, loss, metrics)


def _all_linked(linked: Callable[[Tensor], Tensor], loss: Weighted, metrics: dict[str, Weighted]) -> dict[str, Weighted]:
    return {name: tree.replace(m, sum=linked(m.sum)) for name, m in {"loss": loss, **metrics}.items()}


def _gradients(step: Step, state: State, batch: Any, carry: Weighted | None, last: bool) -> Passed:
    """Autograd through the loss; the gradients have graphs where gradients are enabled."""
    _refuse(step)
    scope, again = BufferScope(state.slots.get(BUFFERS)), torch.is_grad_enabled()
    with grad_level() as level, Pass(buffers=scope) as pass_:

        def outside(found: Any) -> Any:
            return tree.map(lambda x: below_level(x, level) if isinstance(x, Tensor) else x, found)

        params, linked = entering(step, step.view(state).params)
        params = tree.map(lambda x: leaf_at_level(x, level) if is_trainable(x) else x, params)
        leaves = trainable(params)
        pass_.view = View(params, _no_pull, leaves)
        with pass_.forward():
            loss, metrics = step.loss(state, params, batch)
        check_graph(loss, leaves)
        pass_.end_forward()
        _refuse_writes(with_buffers(state, scope))
        grads: list[Tensor | None] = [None] * len(leaves)
        if leaves and loss.sum.requires_grad:
            grads = [*torch.autograd.grad(loss.sum, leaves, create_graph=again, allow_unused=True)]
        unused = [place for place, grad in enumerate(grads) if grad is None]
        new = [torch.zeros_like(leaf) if grad is None else dense(grad) for grad, leaf in zip(grads, leaves, strict=True)]
        own = outside(Weighted([linked(grad) for grad in new], loss.weight))
        metrics = outside(_all_linked(linked, loss, metrics))
    if not last:
        own = tree.replace(own, sum=[grad.to(wide_dtype(grad.dtype)) for grad in own.sum])
    return with_unused(step, state, unused), own if carry is None else tree.map(torch.add, carry, own), metrics


def _refuse_writes(state: State) -> None:
    held = state.slots.get(BUFFERS)
    known = [held.known.written, held.known.sets] if isinstance(held, Buffers) else []
    for name in sorted(name for by_module in known for names in by_module.values() for name in names):
        raise RuntimeError(
            f"differentiable: a module writes {name!r} in its forward pass, through which no gradient would flow: use "
            "apply.module.eval(), a norm without running statistics, or let the module return the value"
        )
