"""A mixture of experts in pure functions, whose exchange gathers all tokens: slow, and plain to read."""

from typing import Any

import torch
from torch import Tensor

import functional_ds as fds
from functional_ds import comm

EXPERTS, WIDTH = 4, 6
PATTERN = r"\.(up|down|bias)$"


def params(*, experts: int = EXPERTS, layers: int = 2, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """Dense leaves and stacked experts."""
    generator = torch.Generator().manual_seed(1)

    def leaf(*shape: int) -> Tensor:
        return (torch.randn(shape, generator=generator) / 2).to(dtype)

    found = {"embed": leaf(5, WIDTH)}
    for layer in range(layers):
        found |= {
            f"{layer}.router": leaf(WIDTH, experts),
            f"{layer}.up": leaf(experts, WIDTH, 8),
            f"{layer}.bias": leaf(experts, 8),
            f"{layer}.down": leaf(experts, 8, WIDTH),
        }
    return {**found, "head": leaf(WIDTH, 3)}


def batch(rows: int) -> tuple[Tensor, Tensor, Tensor]:
    """Inputs, targets, and the weight of each row: not equal, so that ranks weigh unequally."""
    generator = torch.Generator().manual_seed(2)
    weights = torch.arange(rows) % 3 != 1
    return torch.randn(rows, 5, generator=generator), torch.randn(rows, 3, generator=generator), weights


def layer(x: Tensor, p: Any, number: int, ep: comm.Group | None, tp: comm.Group | None = None, k: int = 2) -> Tensor:
    """What the k experts with the largest scores make of x; the experts' inner width may be cut over tp."""
    router, up, bias, down = (p[f"{number}.{name}"] for name in ("router", "up", "bias", "down"))
    scores = (x @ router).softmax(-1)
    chosen = torch.zeros_like(scores).scatter(-1, scores.topk(k, -1).indices, 1.0)
    gates = scores * chosen  # [rows, experts]
    if ep is not None:
        x, gates = comm.all_gather(x, ep), comm.all_gather(gates, ep)
        gates = gates.tensor_split(ep.size, 1)[ep.rank]
    if tp is not None:
        x, gates = comm.copy_to(x, tp), comm.copy_to(gates, tp)
    hidden = torch.tanh(torch.einsum("rw,ewh->erh", x, up) + bias[:, None])
    out = torch.einsum("erh,ehw,re->rw", hidden, down, gates)
    if tp is not None:
        out = comm.reduce_from(out, tp)
    return out if ep is None else comm.reduce_scatter(out, ep)


def loss(
    p: Any, given: tuple[Tensor, Tensor, Tensor], ep: comm.Group | None = None, tp: comm.Group | None = None
) -> fds.Weighted:
    """Squared errors, a sum over rows and their weight."""
    inputs, targets, weights = given
    x, number = inputs @ p["embed"], 0
    while f"{number}.router" in p:
        x = x + layer(x, p, number, ep, tp)
        number += 1
    errors = (x @ p["head"] - targets).square().sum(-1)
    return fds.Weighted((errors * weights).sum(), weights.sum())
