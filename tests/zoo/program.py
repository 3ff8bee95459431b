"""A program of the zoo: a module whose forward is its loss, and batches for it."""

from collections.abc import Callable
from typing import Any

import attrs
import torch
from torch import Tensor, nn

Batch = Any


@attrs.frozen
class Program:
    """What a user would train.

    Attributes:
        build: the module; ``module(batch)`` is the mean loss of the batch's rows.
        batch: from a number of rows and a seed to a batch.
        by_row: whether the loss is the mean of the rows' losses, so that ranks and micro-batches may share the rows.
        refused: what an error must say, where a strategy may refuse the module by name.
    """

    build: Callable[[], nn.Module]
    batch: Callable[[int, int], Batch]
    by_row: bool = True
    refused: str = ""


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(1000 + seed)


def rows_of(*shape: int) -> Callable[[int, int], Tensor]:
    """Normal numbers of this shape in each row."""
    return lambda rows, seed: torch.randn(rows, *shape, generator=generator(seed))


def labelled(*shape: int, classes: int = 3) -> Callable[[int, int], tuple[Tensor, Tensor]]:
    """Normal numbers and a class in each row."""

    def batch(rows: int, seed: int) -> tuple[Tensor, Tensor]:
        g = generator(seed)
        return torch.randn(rows, *shape, generator=g), torch.randint(0, classes, (rows,), generator=g)

    return batch


def regression(inputs: int, outputs: int) -> Callable[[int, int], tuple[Tensor, Tensor]]:
    """Normal numbers and targets in each row."""

    def batch(rows: int, seed: int) -> tuple[Tensor, Tensor]:
        g = generator(seed)
        return torch.randn(rows, inputs, generator=g), torch.randn(rows, outputs, generator=g)

    return batch


def tokens(length: int = 6, vocabulary: int = 13) -> Callable[[int, int], Tensor]:
    """Token numbers in each row."""
    return lambda rows, seed: torch.randint(1, vocabulary, (rows, length), generator=generator(seed))


class Classifier(nn.Module):
    """Cross entropy of a network's outputs."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, batch: Any) -> Tensor:
        x, y = batch
        return nn.functional.cross_entropy(self.net(x), y)


class Regressor(nn.Module):
    """Mean squared error of a network's outputs."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, batch: Any) -> Tensor:
        x, y = batch
        return nn.functional.mse_loss(self.net(x), y)
