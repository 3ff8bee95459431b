"""Models that the tests of the command line name: ``tests/cli/models_by_name.py:mlp``."""

import os
from typing import Any

import torch
from torch import Tensor, nn

from functional_ds import Weighted

HERE = __file__


def _loss(model: Any, x: Tensor) -> Tensor:
    found: Tensor = (model(x) - x).square().mean()
    return found


def mlp(width: int = 32) -> dict[str, Any]:
    layers = [nn.Linear(width, 4 * width), nn.Tanh(), nn.Linear(4 * width, width)]
    return {"module": nn.Sequential(*layers), "loss": _loss, "batch": lambda rows: torch.ones(rows, width)}


def blocks() -> dict[str, Any]:
    """Wide activations, so that these are most of the peak."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = x + layer(x)
            return x

    return {"module": Model(), "loss": _loss, "batch": lambda rows: torch.ones(rows, 64)}


def attention() -> dict[str, Any]:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv = nn.Linear(32, 96)

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = (part.unflatten(-1, (4, 8)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
            return nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)

    return {"module": Model(), "loss": _loss, "batch": lambda rows: torch.ones(rows, 128, 32)}


def attending() -> dict[str, Any]:
    """Blocks that call attention in their own forward."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv, self.out = nn.Linear(32, 96), nn.Linear(32, 32)

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = (part.unflatten(-1, (4, 8)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
            attended = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            return x + self.out(attended.transpose(1, 2).flatten(2))

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(Block() for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = block(x)
            return x

    return {"module": Model(), "loss": _loss, "batch": lambda rows: torch.ones(rows, 128, 32)}


def plain() -> nn.Module:
    return nn.Linear(3, 2)


def dies() -> dict[str, Any]:
    """A model whose process ends as soon as it has values."""

    def batch(rows: int) -> Tensor:
        if torch.empty(()).device.type != "meta" and os.environ.get("PLANNED") is None:
            os.kill(os.getpid(), 9)
        return torch.ones(rows, 32)

    return {**mlp(), "batch": batch}


def reads() -> dict[str, Any]:
    return {**mlp(), "loss": lambda model, x: model(x).sum() if x.sum().item() > 0 else model(x).mean()}


def wrong() -> int:
    return 3


def raises() -> nn.Module:
    raise ZeroDivisionError("no model today")


def cut() -> dict[str, Any]:
    """A model that says how its layers are cut over tensor-parallel ranks."""
    return {**mlp(), "tp_plan": {"0": "colwise", "2": "rowwise"}}


def cut_wrongly() -> dict[str, Any]:
    return {**mlp(), "tp_plan": {"0": "colwize"}}


def tokens() -> dict[str, Any]:
    """A model whose layers, blocks and sequences can be cut."""

    def loss(model: Any, batch: dict[str, Tensor]) -> Weighted:
        return Weighted((model(batch["x"]) - 0.5).square().sum(), torch.tensor(float(batch["x"].numel())))

    rules = {"dims": {"x": 1}, "tokenwise": True}
    return {**cut(), "loss": loss, "batch": lambda rows: {"x": torch.ones(rows, 8, 32)}, "sequence": rules}
