"""Hypergradients: a learning rate for each step, learned by gradient descent through training.

Training is a function of its learning rates, so the validation loss has a gradient by them (Maclaurin et al. 2015,
arXiv:1502.03492). Adam takes eight steps on the text; the gradient through all eight moves the eight rates.

Law: the derivative along a direction equals central differences in fp64; reverse mode equals forward mode; a batch of runs
under ``vmap`` equals a loop.
"""

import torch
from shared import first, loss_fn, rows, table
from torch import Tensor

import functional_ds as fds
from functional_ds import transforms as T


def after(rates: Tensor, start: dict[str, Tensor]) -> Tensor:
    """The validation loss after a step at each of the rates."""
    step = fds.compose(T.clip(1.0), T.schedule(lambda count: rates[count]))(fds.train_step(loss_fn, fds.adam(1.0, eps=1e-4)))
    step = fds.differentiable(step)
    state = step.init(start)
    for index in range(len(rates)):
        state, _ = step(state, rows(index))
    return step.evaluate(state, rows(0, split="validation", count=128))


def law() -> None:
    """Derivatives are finite differences, in both modes; a batch is a loop."""
    rates = torch.tensor([1e-3, 3e-3, 1e-2], dtype=torch.float64)
    start = {path: leaf.double() for path, leaf in first(width=24).items()}
    along = torch.tensor([1.0, -0.5, 2.0], dtype=torch.float64)

    def run(rates: Tensor) -> Tensor:
        return after(rates, start)

    wanted = (run(rates + 1e-6 * along) - run(rates - 1e-6 * along)) / 2e-6
    torch.testing.assert_close(torch.func.grad(run)(rates) @ along, wanted, rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(torch.func.jvp(run, (rates,), (along,))[1], wanted, rtol=1e-5, atol=1e-7)
    batch = torch.stack([rates, 2 * rates])
    torch.testing.assert_close(torch.func.vmap(run)(batch), torch.stack([run(one) for one in batch]))


def main(steps: int = 8, updates: int = 12) -> str:
    """The schedule and the loss as the rates are learned."""
    logs, lines = torch.full((steps,), 1e-3).log(), []
    start = first(width=24)
    descent = torch.func.grad_and_value(lambda logs: after(logs.exp(), start))
    for update in range(updates + 1):
        slope, loss = descent(logs)
        if update % max(1, updates // 4) == 0:
            lines.append((update, loss.item(), *(f"{rate:.4f}" for rate in logs.exp().tolist())))
        logs = logs - 0.4 * slope / slope.abs().max()
    return table(["update", "loss", *(f"rate {i}" for i in range(steps))], lines)


TINY = {"steps": 3, "updates": 2}

if __name__ == "__main__":
    law()
    print(main())
