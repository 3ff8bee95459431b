"""A transform and an optimizer of your own, trained with and without ZeRO: the losses are those of one device.

    python examples/new_optimizer.py

The optimizer is AdEMAMix (Pagliardini et al. 2024, arXiv:2409.03137): Adam with a second, slower mean of the gradients.
The transform scales every update's gradient to a norm of one. Neither knows of ranks.
"""

import torch
from torch import Tensor, nn

import functional_ds as fds
from functional_ds import comm
from functional_ds import transforms as T


def ademamix(lr: float, betas: tuple[float, float, float] = (0.9, 0.99, 0.999), alpha: float = 2.0) -> fds.Optimizer:
    """AdEMAMix without schedules of alpha and the third beta."""

    def init(params: list[Tensor]) -> dict[str, list[Tensor] | Tensor]:
        zeros = {name: [torch.zeros_like(p) for p in params] for name in ("fast", "slow", "square")}
        return {**zeros, "count": torch.zeros(())}

    def update(params, grads, state, rate):  # lists of tensors: whole leaves, or ZeRO's flat shards
        count = state["count"] + 1
        lists = params, grads.sum, state["fast"], state["slow"], state["square"]
        for p, total, fast, slow, square in zip(*lists, strict=True):
            g = total.to(p.dtype) / grads.weight  # the mean gradient
            fast.lerp_(g, 1 - betas[0])
            square.lerp_(g * g, 1 - betas[1])
            slow.lerp_(g, 1 - betas[2])
            mean = fast / (1 - betas[0] ** count) + alpha * slow
            p.sub_(lr * rate * mean / ((square / (1 - betas[1] ** count)).sqrt() + 1e-8))
        return params, {**state, "count": count}

    return fds.Optimizer(init, update, name=f"ademamix({lr})")


def unit_gradient() -> fds.Transform:
    """Scales the gradient to a norm of one, and reports its norm."""

    def update(inner, step, state, grads):
        norm = step.norm(state, grads.sum)  # global, over all ranks and shards
        state, metrics = inner(step, state, fds.Weighted(grads.sum, norm))  # the optimizer divides by the weight
        return state, {**metrics, "norm": norm / grads.weight}

    return fds.wrap("unit_gradient", update=update)


def train(stage: int) -> list[float]:
    """The losses of some steps, on one device or on each of the ranks."""
    torch.manual_seed(0)
    apply, params = fds.functional(nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1)))

    def loss_fn(params, batch):
        x, y = batch
        return (apply(params, x) - y).float().square().mean()

    step = fds.compose(unit_gradient(), T.zero(stage))(fds.train_step(loss_fn, ademamix(5e-2)))
    state, world, losses = step.init(params), comm.world(), []
    for _ in range(5):
        x = torch.randn(64, 8).chunk(world.size)[world.rank]  # this rank's rows
        state, metrics = step(state, (x, x.sum(1, keepdim=True)))
        losses.append(metrics["loss"].item())
    return losses


def show(name: str, losses: list[float]) -> None:
    """One line: what ran, and its losses."""
    print(f"{name:<22}", *(f"{loss:.4f}" for loss in losses))


if __name__ == "__main__":
    show("one device", train(0))
    for stage in range(4):
        show(f"4 ranks, ZeRO-{stage}", comm.simulate(train, stage, world_size=4)[0])
    show("2 processes, ZeRO-3", comm.spawn(train, 3, world_size=2)[0])
