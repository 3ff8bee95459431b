"""Mixtures of experts in plain PyTorch on one device, token by token: what the library is compared with."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from functional_ds import comm
from functional_ds.parallel.experts.routing import Routing

E, M, INNER = 4, 8, 12  # experts, width, inner width


def numbers(*shape: int, seed: int = 0) -> Tensor:
    """Standard normal numbers."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def weights_of(experts: int = E, *, seed: int = 1) -> dict[str, Tensor]:
    """Of gated MLPs."""
    return {"gate_up": numbers(experts, 2 * INNER, M, seed=seed) / 3, "down": numbers(experts, M, INNER, seed=seed + 1) / 3}


def gated(x: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """One expert on some rows."""
    gate, up = (x @ gate_up.T).chunk(2, -1)
    return (F.silu(gate) * up) @ down.T


def mixture(params: dict[str, Tensor], x: Tensor, routing: Routing) -> Tensor:
    """Every token's experts, one after the other."""
    kept = torch.ones_like(routing.experts, dtype=torch.bool) if routing.kept is None else routing.kept
    rows = []
    for t in range(len(x)):
        total = x.new_zeros(M)
        for j in range(routing.experts.shape[1]):
            e = int(routing.experts[t, j])
            if kept[t, j]:
                total = total + routing.weights[t, j] * gated(x[t : t + 1], params["gate_up"][e], params["down"][e])[0]
        rows.append(total)
    return torch.stack(rows) if rows else x.new_zeros(0, M) + 0 * sum(p.sum() for p in params.values())


def gradients(loss: Tensor, leaves: dict[str, Tensor]) -> dict[str, Tensor]:
    """By all leaves; zeros where the loss does not use one."""
    found = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
    return {n: torch.zeros_like(x) if g is None else g for (n, x), g in zip(leaves.items(), found, strict=True)}


def on(leaves: dict[str, Tensor]) -> dict[str, Tensor]:
    """New leaves that require gradients."""
    return {name: leaf.detach().clone().requires_grad_() for name, leaf in leaves.items()}


def own(params: dict[str, Tensor], group: comm.Group) -> dict[str, Tensor]:
    """This rank's experts."""
    return {name: leaf.chunk(group.size)[group.rank].clone() for name, leaf in params.items()}


def close(found: Any, expected: Any, tolerance: float = 1e-9) -> None:
    """Equal within rounding."""
    assert found.shape == expected.shape, (found.shape, expected.shape)
    assert torch.allclose(found, expected, rtol=tolerance, atol=tolerance), (found - expected).abs().max()
