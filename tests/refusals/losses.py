"""Losses, batches and states that are refused: a gradient would be lost, or a value would be another one."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.utils.checkpoint import checkpoint

import functional_ds as fds
from functional_ds import comm
from functional_ds import transforms as T
from tests.refusals.refusal import Refusal, made, rows, square, weights


class Doubled(Function):
    @staticmethod
    def forward(ctx: Any, w: Tensor) -> Tensor:
        return w * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 2


def once(loss: Any, *strategy: fds.Transform, params: Any = None, batch: Any = None) -> None:
    """One step."""
    step = made(*strategy, loss=loss)
    step(step.init(weights() if params is None else params), rows() if batch is None else batch)


def on_two(loss: Any, *strategy: fds.Transform, params: Any = None) -> None:
    comm.simulate(lambda: once(loss, *strategy, params=params), world_size=2)


def other_metrics() -> None:
    """A metric for each task, which depends on the batch."""

    def program() -> None:
        step = made(T.zero(0), loss=lambda params, x: (square(params, x), {f"task {int(x[0, 0])}": x.mean()}))
        state = step.init(weights())
        for task in range(2):
            state, _ = step(state, torch.full((4, 3), float(task)))

    comm.simulate(program, world_size=2)


def a_module_itself() -> None:
    module = nn.Linear(3, 2)
    _, params = fds.functional(module)
    once(lambda params, x: module(x).square().mean(), params=params)


@torch.no_grad()
def without_grad(params: Any, x: Tensor) -> Tensor:
    return square(params, x)


def through_func(params: Any, x: Tensor) -> Tensor:
    inner = torch.func.grad(lambda params: square(params, x))(params)
    return square({"w": params["w"] - inner["w"]}, x)


def reentrant(params: Any, x: Tensor) -> Any:
    return checkpoint(lambda x: square(params, x), x.clone().requires_grad_(), use_reentrant=True)


def in_place(params: Any, x: Tensor) -> Tensor:
    y = (x @ params["w"]).exp()
    y.add_(1)
    return y.sum()


def halving(params: Any, x: Tensor) -> Tensor:
    params["w"].data.mul_(0.5)
    return square(params, x)


def embedded(params: Any, x: Tensor) -> Tensor:
    return nn.functional.embedding(torch.arange(2), params["w"], sparse=True).sum()


class Recomputing(Function):
    """Runs a backward pass of its own within its backward pass."""

    @staticmethod
    def forward(ctx: Any, body: Any, x: Tensor) -> Any:
        ctx.body = body
        ctx.save_for_backward(x)
        with torch.no_grad():
            return body(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor | None]:
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            ctx.body(x).backward(grad)
        return None, x.grad


def nested_later() -> None:
    def loss(params: Any, x: Tensor) -> Tensor:
        body = lambda x: torch.tanh(x @ params["w"])  # noqa: E731
        x = x + params["b"]
        return (Recomputing.apply(body, x) if len(x) > 4 else body(x)).square().mean()

    step = made(T.zero(3, unit_of=lambda path: path), loss=loss)
    state, _ = step(step.init({"w": torch.eye(3), "b": torch.ones(3)}), rows(4))
    step(state, rows(8))


def other_activations() -> None:
    def program() -> None:
        apply, params = fds.functional(nn.Sequential(nn.Linear(3, 3), nn.Tanh()))
        step = made(T.remat(policy="partition", group=comm.world()), loss=lambda params, x: apply(params, x).sum())
        step(step.init(params), rows() * (1 + comm.world().rank))

    comm.simulate(program, world_size=2)


class Batch:
    def __init__(self) -> None:
        self.x = rows()


def inference() -> None:
    step = made(T.zero(1))
    state = step.init(weights())
    with torch.inference_mode():
        step(state, rows())


def donated() -> None:
    step = made()
    state = step.init(weights())
    step(state, rows())
    step(state, rows())


def another_structure() -> None:
    step = made(loss=lambda params, batch: square(params, batch["x"]))
    state, _ = step(step.init(weights()), {"x": rows()})
    step(state, {"x": rows(), "y": rows()})


REFUSALS = [
    Refusal(
        what="a loss that calls the module itself",
        error=RuntimeError,
        says=r"a parameter of shape \[2.*\] that is not one of the step's params",
        advises=r"call apply\(params, ...\) in the loss",
        why="The step's params would not be trained.",
        instead="Call `apply(params, x)`.",
        program=a_module_itself,
    ),
    Refusal(
        what="a loss compiled by `torch.compile`",
        error=TypeError,
        says="loss_fn is compiled by torch.compile",
        advises="blocks by T.compiled or the step by fds.jit",
        why="It would trace the step's own bookkeeping.",
        instead="Compile blocks by `T.compiled`, or the step by `fds.jit`.",
        program=lambda: once(torch.compile(square, backend="eager")),
    ),
    Refusal(
        what="metrics whose names change in a later step, on several ranks",
        error=ValueError,
        says=r"returned the metrics \['task 1'\], and \['task 0'\] before",
        advises="return the same metrics in every step",
        why="Ranks add metrics up by position, so those of other names would be mixed.",
        instead="Return the same metrics in every step, `fds.Weighted(torch.zeros(()), 0)` if there is nothing to add.",
        program=other_metrics,
    ),
    Refusal(
        what="a loss without a graph (`no_grad`, `detach()`, `.item()`)",
        error=RuntimeError,
        says="the loss .* has no graph, so it would train nothing",
        advises="Return the tensor itself",
        why="It would train nothing.",
        instead="Return the tensor itself; a batch without targets returns `fds.Weighted(torch.zeros(()), 0)`.",
        program=lambda: once(without_grad),
    ),
    Refusal(
        what="a loss with a shape",
        error=ValueError,
        says="the loss must be a scalar",
        advises=r"Weighted\(sum, weight\)",
        why="It does not say how its elements weigh.",
        instead="Return a mean, or `fds.Weighted(sum, weight)`.",
        program=lambda: once(lambda params, x: x @ params["w"]),
    ),
    Refusal(
        what="a loss `Weighted(sum, weight)` whose weight requires grad: learned weights of rows",
        error=ValueError,
        says="with a weight that requires grad, and weights are constants",
        advises="Return the mean itself, sum / weight",
        why="The quotient of the whole batch is known only after the backward pass of its parts.",
        instead="Return `sum / weight`, to differentiate both, or `Weighted(sum, weight.detach())`.",
        program=lambda: once(lambda params, x: fds.Weighted((x @ params["w"]).sum(), params["w"].exp().sum())),
    ),
    Refusal(
        what="a parameter straight into a custom `autograd.Function`, under ZeRO",
        error=RuntimeError,
        says="the parameter 'w' went straight into a custom autograd.Function",
        advises=r"pass p.view_as\(p\)",
        why="The Function would get a placeholder, and its gradient would be lost.",
        instead="Hand over a view: `w.view_as(w)`.",
        program=lambda: on_two(lambda params, x: (x @ Doubled.apply(params["w"])).sum(), T.zero(1)),
    ),
    Refusal(
        what="`torch.func` by the params themselves, under ZeRO",
        error=RuntimeError,
        says="a transform of torch.func, where its gradient would be lost",
        advises=r"pass p.view_as\(p\)",
        why="Its gradient would be lost.",
        instead="Differentiate by views of the params: `p.view_as(p)`.",
        program=lambda: on_two(through_func, T.zero(1)),
    ),
    Refusal(
        what="`torch.utils.checkpoint` with `use_reentrant=True`",
        error=RuntimeError,
        says="use_reentrant=True gives no gradients to what it recomputes",
        advises="pass use_reentrant=False",
        why="What it recomputes gets no gradients.",
        instead="Pass `use_reentrant=False`, or use `T.remat`.",
        program=lambda: once(reentrant),
    ),
    Refusal(
        what="params that the loss writes in place (`no_grad`, `.data`, `out=`), in every stage",
        error=RuntimeError,
        says="the loss wrote into the parameter 'w' in place",
        advises=r"compute the weight from the parameter instead.*fds.wrap\(..., update=",
        why="The state before the step would change with them, and where ZeRO gathers params the write would be lost.",
        instead="Compute the weight from the parameter, or change params after the update, in a transform around `update`.",
        program=lambda: once(halving),
    ),
    Refusal(
        what="a change in place of a tensor that the backward pass needs",
        error=RuntimeError,
        says="modified by an inplace operation",
        advises="use the out-of-place one",
        why="Gradients would be computed from the changed values, also in stage 3.",
        instead="Use the operation that returns a new tensor.",
        program=lambda: on_two(in_place, T.zero(3)),
    ),
    Refusal(
        what="backward passes within backward passes that begin after the first step, under ZeRO",
        error=RuntimeError,
        says=r"ran another backward pass, which gave the params \['w'\] gradients",
        advises="use the Function in the first step, too",
        why="The ranks agree in the first step on what they sum.",
        instead="Use that Function in the first step as well.",
        program=nested_later,
    ),
    Refusal(
        what="sparse gradients (`nn.Embedding(sparse=True)`)",
        error=ValueError,
        says=r"the gradient of a leaf of shape \[3, 2\] is sparse",
        advises="sparse=False",
        why="Updates are dense.",
        instead="Build the embedding with `sparse=False`.",
        program=lambda: once(embedded),
    ),
    Refusal(
        what="activations partitioned over ranks that compute different ones",
        error=RuntimeError,
        says=r"partitioned other activations: ranks \[1\] differ from rank 0",
        advises="partition takes a group along which activations are replicated",
        why="The backward pass would put parts of different tensors together.",
        instead="Partition over ranks with the same batch, those of tensor parallelism.",
        program=other_activations,
    ),
    Refusal(
        what="a module instead of params",
        error=TypeError,
        says="this is the module Linear",
        advises=r"apply, params = fds.functional\(module\)",
        why="A step trains a tree of tensors.",
        instead="Write `apply, params = fds.functional(module)`, and pass `params`.",
        program=lambda: made().init(nn.Linear(3, 2)),
    ),
    Refusal(
        what="params without values (on `meta`)",
        error=ValueError,
        says="on the device 'meta', without values",
        advises=r"fds.deferred\(build\).*fds.from_source",
        why="Nothing could be computed.",
        instead="Use `fds.deferred(build)`, or `fds.from_source(params, source)`.",
        program=lambda: once(square, params={"w": torch.ones(3, 2, device="meta")}),
    ),
    Refusal(
        what="a batch in a class in which no tensors are found",
        error=TypeError,
        says="it is a Batch, in which no tensors are found",
        advises="pass a dict",
        why="It could not be divided into micro-batches.",
        instead="Pass a dict, a dataclass or another tree.",
        program=lambda: once(lambda params, batch: square(params, batch.x), batch=Batch()),
    ),
    Refusal(
        what="a batch of another structure than the batches before",
        error=ValueError,
        says="batch: its structure is .*, but the batches so far had",
        advises="give all batches one structure",
        why="Ranks might disagree on what a step holds.",
        instead="Give all batches the same keys and numbers of tensors.",
        program=another_structure,
    ),
    Refusal(
        what="a step within `torch.inference_mode()`",
        error=RuntimeError,
        says=r"step: torch.inference_mode\(\) is on",
        advises="leave the block for it",
        why="Nothing trains on inference tensors, in this step or a later one.",
        instead="Leave the block; `step.evaluate` may stay in it.",
        program=inference,
    ),
    Refusal(
        what="a state that a step has used up",
        error=fds.DonatedStateError,
        says="this state was donated to a step",
        advises="donate=False",
        why="The step has written into its memory.",
        instead="Use the state that the step returned, or pass `donate=False`.",
        program=donated,
    ),
]
