"""A small step and its data, for runs that are ended and go on."""

import torch
from torch import Tensor

import functional_ds as fds
from functional_ds import comm
from functional_ds import transforms as T

ROWS = 12  # of a step, over all ranks


def noisy(params: dict[str, Tensor], batch: Tensor, key: fds.Key | None) -> Tensor:
    """A loss that draws random numbers, so that a key that is not restored shows."""
    hidden = torch.tanh(batch @ params["a"])
    hidden = hidden if key is None else key.dropout(hidden, 0.25, "hidden")
    return (hidden @ params["b"] - batch.sum(1, keepdim=True)).square().mean()


def build(stage: int = 3) -> tuple[fds.Step, fds.State]:
    """The step and its first state."""
    generator = torch.Generator().manual_seed(0)
    params = {"a": torch.randn(4, 6, generator=generator), "b": torch.randn(6, 1, generator=generator)}
    step = fds.compose(T.ema(0.9), T.zero(stage), T.accumulate(2))(fds.train_step(noisy, fds.adamw(1e-2), seed=3))
    return step, step.init(params)


def batch(index: int) -> Tensor:
    """This rank's rows of a global batch."""
    here = comm.world()
    rows = torch.randn(ROWS, 4, generator=torch.Generator().manual_seed(100 + index))
    return rows.tensor_split(here.size)[here.rank]
