"""Programs that cannot be differentiated, or hyperparameters that a step would lose."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import functional_ds as fds
from functional_ds import transforms as T
from functional_ds.step.state.state import UpdateError
from tests.refusals.refusal import Refusal, made, rows, weights

RATES = torch.tensor([0.1, 0.2])


def trained(rule: Any, *strategy: fds.Transform, params: Any = None) -> Tensor:
    """The loss of two steps."""
    step = made(*strategy, rule=rule)
    state = step.init(weights() if params is None else params)
    for _ in range(2):
        state, metrics = step(state, rows())
    return metrics["loss"]


def learned(rate: float = 0.1) -> Tensor:
    return torch.tensor(rate, requires_grad=True)


def in_place(lr: Tensor) -> fds.Optimizer:
    def update(params: list[Tensor], grads: fds.Weighted, state: Any, rate: Any) -> tuple[list[Tensor], Any]:
        return [p.sub_(lr * rate * grad) for p, grad in zip(params, grads.sum, strict=True)], state

    return fds.Optimizer(lambda params: (), update, "in_place")


def by_frozen(leaf: Tensor) -> Tensor:
    params = fds.freeze({"w": leaf, "head": torch.ones(2)}, "w")
    step = fds.differentiable(made(loss=lambda p, x: (x @ p["w"] @ p["head"]).square().mean()))
    _, metrics = step(step.init(params), rows())
    return metrics["loss"]


def with_statistics() -> None:
    apply, params = fds.functional(nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2)))
    step = fds.differentiable(made(loss=lambda p, x: apply(p, x).square().mean()))
    step(step.init(params), torch.randn(4, 3))


def halves() -> None:
    step = fds.differentiable(made())
    step.open(step.init(weights()), rows())


def written_since() -> None:
    step, batch = fds.differentiable(made(T.zero(1), rule=fds.sgd(learned()))), rows()
    state, _ = step(step.init(weights()), batch)
    batch.add_(1)
    step.evaluate(state, rows()).backward()


def inside(transform: Callable[[Callable[[Tensor], Tensor]], Callable[..., Any]], program: Callable[[Tensor], Tensor]) -> None:
    """A program within one of torch.func's transforms."""
    transform(program)(RATES if transform is torch.func.vmap else RATES[0])


REFUSALS = [
    Refusal(
        what="`fds.differentiable` of a step with `replicated`, `T.Combine`, a codec, or parallelism within a model",
        error=ValueError,
        says=r"differentiable: zero\(0, world, .* stores params or runs the loss in its own way",
        advises=r"use Hessian-vector products \(docs/second-order\.md\)",
        why="Their reductions have no transpose, or round.",
        instead="Use `zero` with its own collectives, or Hessian-vector products ([second-order.md](second-order.md)).",
        program=lambda: fds.differentiable(made(T.zero(0, aggregate=T.Combine(lambda grads, memory, group: (grads, memory))))),
    ),
    Refusal(
        what="`zero` composed after `fds.differentiable`",
        error=ValueError,
        says=r"differentiable: zero\(3, world\) stores params or runs the loss in its own way",
        advises=r"zero before fds\.differentiable",
        why="The step would have to gather shards that keep no graph.",
        instead="Compose `zero` first: `fds.differentiable(T.zero(3)(step))`.",
        program=lambda: trained(None, fds.differentiable, T.zero(3)),
    ),
    Refusal(
        what="`torch.func`, or forward mode, through a differentiable step with `zero`",
        error=RuntimeError,
        says=r"differentiable: torch\.func or forward mode runs over ranks",
        advises=r"use torch\.autograd\.grad",
        why="Collectives are nodes of autograd, which `torch.func` does not enter.",
        instead="Use `torch.autograd.grad`.",
        program=lambda: inside(torch.func.grad, lambda rate: trained(fds.sgd(rate), T.zero(3), fds.differentiable)),
    ),
    Refusal(
        what="a batch that is written to between a differentiable step with `zero` and the backward pass",
        error=RuntimeError,
        says=r"differentiable: a tensor of shape \[4, 3\] of a batch or a state was written to in place since its step",
        advises="pass a copy",
        why="The step is computed again in the backward pass.",
        instead="Pass a copy.",
        program=written_since,
    ),
    Refusal(
        what="`mixed_precision`, `remat`, `compiled`, `offload` in a differentiable step, composed before or after",
        error=ValueError,
        says="differentiable: mixed_precision.* stores params or runs the loss in its own way",
        advises="compose transforms of gradients, updates and rates alone",
        why="They detach params, or write into memory.",
        instead="Leave them out; `clip`, `accumulate`, `schedule` and `ema` may stay.",
        program=lambda: trained(None, fds.differentiable, T.mixed_precision("bf16")),
    ),
    Refusal(
        what="`fds.differentiable` with `lamb`, `muon`, `per_matrix`, `per_leaf` or 1-bit Adam, also in `param_groups`",
        error=ValueError,
        says="differentiable: lamb.* has no derivative here",
        advises=r"use fds\.sgd, adam, adamw",
        why="Their updates write into params, and have no second form.",
        instead="Use `sgd`, `adam`, `adamw`, `adagrad`, `lion`, or an optimizer of your own.",
        program=lambda: trained(fds.param_groups({"w": fds.lamb(0.1)}, fds.sgd(0.1)), fds.differentiable),
    ),
    Refusal(
        what="a differentiable step of a module that writes buffers: BatchNorm in training",
        error=RuntimeError,
        says="differentiable: a module writes '1.num_batches_tracked'",
        advises=r"use apply\.module\.eval\(\)",
        why="No gradient flows through running statistics.",
        instead="Use `apply.module.eval()`, or a norm without them.",
        program=with_statistics,
    ),
    Refusal(
        what="`torch.func.grad` by a frozen leaf of a differentiable step",
        error=ValueError,
        says="the frozen leaf 'w' is one that torch.func differentiates by",
        advises="by a closure",
        why="The gradient would be zero.",
        instead="Let the loss take it by a closure, or from the batch.",
        program=lambda: inside(torch.func.grad, lambda rate: by_frozen(torch.ones(3, 2) * rate)),
    ),
    Refusal(
        what="`step.open` of a differentiable step",
        error=ValueError,
        says="open: a differentiable step cannot be run as separate passes",
        advises=r"call step\(state, batch\)",
        why="Its backward pass would keep no graph.",
        instead="Call `step(state, batch)`.",
        program=halves,
    ),
    Refusal(
        what="`torch.func.vmap` over steps of your own optimizer that writes into what it gets",
        error=RuntimeError,
        says=r"differentiable: in_place writes into tensors that are the same for all of torch\.func\.vmap",
        advises="let its update return new tensors",
        why="One tensor would have to hold the values of all runs.",
        instead="Return new tensors, or pass `fds.Optimizer(..., formula=)`.",
        program=lambda: inside(torch.func.vmap, lambda rate: trained(in_place(rate), fds.differentiable)),
    ),
    Refusal(
        what="an ordinary step within `torch.func.grad`, `jvp` or `vmap`",
        error=RuntimeError,
        says=r"step: a transform of torch\.func runs",
        advises=r"use fds\.differentiable\(step\)",
        why="It keeps no graph, so gradients would be zero.",
        instead="Use `fds.differentiable(step)`.",
        program=lambda: inside(torch.func.grad, lambda rate: trained(None, params={"w": torch.ones(3, 2) * rate})),
    ),
    Refusal(
        what="a hyperparameter that is a tensor, or a learning rate that requires grad, in an ordinary step",
        error=ValueError,
        says=r"optimizer: momentum of sgd\(.* given as tensors",
        advises=r"use fds\.differentiable\(step\), or pass numbers",
        why="Torch's fused kernels would lose its gradient.",
        instead="Use `fds.differentiable(step)`, or pass a number.",
        program=lambda: trained(fds.sgd(0.1, momentum=RATES[0])),
    ),
    Refusal(
        what="a schedule or a limit of `clip` that requires grad, in an ordinary step",
        error=UpdateError,
        says="update: its learning rate or its gradients require grad",
        advises=r"use fds\.differentiable\(step\)",
        why="The gradient would be lost.",
        instead="Use `fds.differentiable(step)`, or detach it.",
        program=lambda: trained(None, T.clip(learned())),
    ),
    Refusal(
        what="a hyperparameter with a shape",
        error=ValueError,
        says=r"lr has shape \[2\], and is one number",
        advises=r"use torch\.func\.vmap over a function that makes the step",
        why="It would be broadcast over the elements of leaves.",
        instead="Use `torch.func.vmap`, or `fds.param_groups`.",
        program=lambda: fds.sgd(RATES),
    ),
]
