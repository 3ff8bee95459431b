"""What the files of the gallery share: real text, a small model of the next byte, Hessian-vector products, and a table.

The text is Python's own standard library. The model is a multilayer perceptron on the last eight bytes (Bengio et al. 2003).
"""

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

import functional_ds as fds
from functional_ds import comm
from functional_ds import transforms as T
from functional_ds.jobs import TokenText
from functional_ds.jobs.job_data import read_standard_library

CONTEXT, WIDTH, ROWS = 8, 48, 64
Batch = tuple[Tensor, Tensor]


@cache
def text() -> TokenText:
    """The first bytes of the standard library's sources."""
    data = torch.frombuffer(bytearray(read_standard_library(400_000)), dtype=torch.uint8)
    return TokenText.cut(data, 0.1, source="Python's standard library", context=CONTEXT)


def rows(index: int, *, split: str = "train", count: int = ROWS, rank: int | None = None, size: int | None = None) -> Batch:
    """This rank's rows of a global batch: bytes [rows, context], and the byte that follows each."""
    here = comm.world()
    rank, size = here.rank if rank is None else rank, here.size if size is None else size
    own = count // size
    tokens, targets = text().batch(split, index, rows=own, context=CONTEXT, first_row=rank * own)
    return tokens, targets[:, -1]


def first(seed: int = 0, width: int = WIDTH) -> dict[str, Tensor]:
    """Params before training."""
    generator = torch.Generator().manual_seed(seed)
    shapes = {"embed": (256, 16), "hidden": (16 * CONTEXT, width), "bias": (width,), "head": (width, 256)}
    return {name: torch.randn(shape, generator=generator) * shape[0] ** -0.5 for name, shape in shapes.items()}


def logits(params: Any, tokens: Tensor) -> Tensor:
    """Scores of the next byte."""
    return torch.tanh(params["embed"][tokens].flatten(1) @ params["hidden"] + params["bias"]) @ params["head"]


def loss_fn(params: Any, batch: Batch) -> Tensor:
    """The mean cross entropy in nats."""
    return torch.nn.functional.cross_entropy(logits(params, batch[0]), batch[1])


def validation(params: Any, count: int = 512) -> float:
    """The loss on text that is not trained on."""
    with torch.no_grad():
        return loss_fn(params, rows(0, split="validation", count=count, rank=0, size=1)).item()


def train(*strategy: fds.Transform, optimizer: Any, steps: int, batch: Callable[[int], Batch] = rows) -> tuple[Any, int]:
    """The params after some steps, and the bytes that this rank has sent in them."""
    step = fds.compose(*strategy)(fds.train_step(loss_fn, optimizer))
    state = step.init(first())
    with comm.ledger() as book:
        for index in range(steps):
            state, _ = step(state, batch(index))
    return step.params(state), book.bytes


def hessian_times(step: fds.Step, state: fds.State, batch: Batch, vector: dict[str, Tensor]) -> dict[str, Tensor]:
    """H v of the mean loss, as whole tensors, in any stage of ZeRO."""
    product = fds.hvp(step, state, batch, step.placed(state, vector))
    return step.params(step.with_trained(state, product))  # type: ignore[no-any-return]


def assert_everywhere(program: Callable[..., Any], wanted: Any, *, ranks: int = 2, **tolerance: float) -> None:
    """On one device and in all stages of ZeRO, each rank's result is the wanted one."""
    torch.testing.assert_close(program(), wanted, **tolerance)
    for stage in range(4):
        for found in comm.simulate(program, T.zero(stage), world_size=ranks):
            torch.testing.assert_close(found, wanted, **tolerance)


def table(head: Sequence[str], lines: Sequence[Sequence[Any]]) -> str:
    """Rows in columns that are as wide as they must be."""
    cells = [[f"{cell:.4g}" if isinstance(cell, float) else str(cell) for cell in line] for line in (head, *lines)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in cells)
