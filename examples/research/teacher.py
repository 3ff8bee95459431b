"""Mean teacher: distillation from a moving average of the model, which stays in shards.

The teacher is the average of the student's params (Tarvainen and Valpola 2017, arXiv:1703.01780). The student also learns the
teacher's logits. In ZeRO-3 the teacher is as sharded as the student: ``step.run`` gathers it unit by unit for its forward pass.

Law: alone and in stages 0 to 3 it is a plain loop of PyTorch; with weight 0 it is training without a teacher.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from shared import Batch, assert_everywhere, first, logits, loss_fn, rows, table, train, validation
from torch import Tensor

import functional_ds as fds
from functional_ds import comm
from functional_ds import transforms as T


@fds.tree.record
class Taught:
    """A batch, and what the teacher says of it."""

    batch: Any
    target: Tensor


def distilled(outputs: Callable[[Any, Any], Tensor], weight: float, decay: float) -> fds.Transform:
    """Adds the squared distance from the teacher's ``outputs(params, batch)`` to the loss."""

    def init(inner: Any, step: fds.Step, params: Any) -> fds.State:
        state = inner(step, params)
        return state.put(teacher=[leaf.clone() for leaf in step.trained(state)])

    def gradients(inner: Any, step: fds.Step, state: fds.State, batch: Any, carry: Any, last: bool) -> Any:
        target = step.run(step.with_trained(state, state.slots["teacher"]), outputs, batch)
        return inner(step, state, Taught(batch, target), carry, last)

    def loss(inner: Any, step: fds.Step, state: fds.State, params: Any, batch: Any) -> Any:
        if not isinstance(batch, Taught):  # an evaluation
            return inner(step, state, params, batch)
        found, metrics = inner(step, state, params, batch.batch)
        own = step.forward(state, partial(outputs, params), batch.batch)
        distance = (own - batch.target).square().mean()
        return fds.Weighted(found.sum + weight * distance * found.weight, found.weight), metrics

    def update(inner: Any, step: fds.Step, state: fds.State, grads: fds.Weighted) -> Any:
        state, metrics = inner(step, state, grads)
        pairs = zip(step.trained(state), state.slots["teacher"], strict=True)
        return state.put(teacher=[torch.lerp(new, old, decay) for new, old in pairs]), metrics

    return fds.wrap(f"distilled({weight})", slot="teacher", init=init, gradients=gradients, loss=loss, update=update)


def scores(params: Any, batch: Batch) -> Tensor:
    """The logits of a batch."""
    return logits(params, batch[0])


def oracle(steps: int, lr: float, weight: float, decay: float) -> dict[str, Tensor]:
    """The params after some updates."""
    params, mean = first(), first()
    for index in range(steps):
        batch = rows(index, rank=0, size=1)
        leaves = {path: leaf.detach().requires_grad_() for path, leaf in params.items()}
        loss = loss_fn(leaves, batch) + weight * (scores(leaves, batch) - scores(mean, batch)).square().mean()
        grads = torch.autograd.grad(loss, [*leaves.values()])
        params = {path: leaf.detach() - lr * grad for (path, leaf), grad in zip(leaves.items(), grads, strict=True)}
        mean = {path: torch.lerp(params[path], old, decay) for path, old in mean.items()}
    return params


def law() -> None:
    """It is its formula in any stage."""

    def program(*strategy: fds.Transform) -> Any:
        return train(*strategy, distilled(scores, 0.5, 0.8), optimizer=fds.sgd(0.5), steps=3)[0]

    assert_everywhere(program, oracle(3, 0.5, 0.5, 0.8), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(oracle(3, 0.5, 0.0, 0.8), train(optimizer=fds.sgd(0.5), steps=3)[0])


def run(weight: float, decay: float, steps: int) -> tuple[float, float]:
    """The validation losses of the student and of the teacher."""
    step = fds.compose(T.zero(3), distilled(scores, weight, decay))(fds.train_step(loss_fn, fds.adamw(3e-2)))
    state = step.init(first())
    for index in range(steps):
        state, _ = step(state, rows(index))
    teacher = step.params(step.with_trained(state, state.slots["teacher"]))
    return validation(step.params(state)), validation(teacher)


def main(steps: int = 100, weights: tuple[float, ...] = (0.0, 0.1, 0.5), decay: float = 0.9, ranks: int = 2) -> str:
    """Both losses by the weight of the teacher."""
    lines = [(weight, *comm.simulate(run, weight, decay, steps, world_size=ranks)[0]) for weight in weights]
    return table([f"weight; {ranks} ranks, {steps} steps", "loss of the student", "of the teacher"], lines)


TINY = {"steps": 2, "weights": (0.5,)}

if __name__ == "__main__":
    law()
    print(main())
