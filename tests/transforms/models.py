"""Models with every trait that a sharding of params must survive, each with a loss and a batch."""

from collections.abc import Callable
from typing import Any

import attrs
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import functional_ds as fds
from functional_ds import comm

Loss = Callable[[Any, Any], Any]


@attrs.frozen
class Case:
    """A way to make params and a loss; ``batch(rows)`` gives the whole global batch."""

    make: Callable[[], tuple[Any, Loss]]
    batch: Callable[[int], Any]


def _xy(rows: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(7)
    return torch.randn(rows, 6, generator=generator), torch.randn(rows, 3, generator=generator)


def _mse(apply: Any) -> Loss:
    return lambda params, batch: F.mse_loss(apply(params, batch[0]), batch[1])


def _module(build: Callable[[], nn.Module]) -> Callable[[], tuple[Any, Loss]]:
    def make() -> tuple[Any, Loss]:
        torch.manual_seed(3)
        apply, params = fds.functional(build())
        return params, _mse(apply)

    return make


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))


class Blocks(nn.Module):
    """Blocks between an input and an output layer, recomputed where asked."""

    def __init__(self, *, recompute: bool = False, passes: int = 1) -> None:
        super().__init__()
        self.inp = nn.Linear(6, 8)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.LayerNorm(8)) for _ in range(3))
        self.out = nn.Linear(8, 3)
        self.recompute, self.passes = recompute, passes

    def forward(self, x: Tensor) -> Tensor:
        x = self.inp(x)
        for _ in range(self.passes):
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=False) if self.recompute and x.requires_grad else block(x)
        return self.out(x)


class Tied(nn.Module):
    """An embedding whose weight is also the head's, around blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        return self.head(x)


class LoRA(nn.Module):
    """Frozen layers with trained low-rank additions, in the same blocks."""

    def __init__(self, recompute: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
        self.down = nn.ModuleList(nn.Linear(6, 2, bias=False) for _ in range(3))
        self.up = nn.ModuleList(nn.Linear(2, 6, bias=False) for _ in range(3))
        self.out = nn.Linear(6, 3)
        self.blocks.requires_grad_(False)
        self.recompute = recompute

    def forward(self, x: Tensor) -> Tensor:
        for base, down, up in zip(self.blocks, self.down, self.up, strict=True):

            def layer(x: Tensor, base: nn.Module = base, down: nn.Module = down, up: nn.Module = up) -> Tensor:
                return torch.tanh(base(x) + up(down(x)))

            x = checkpoint(layer, x, use_reentrant=False) if self.recompute else layer(x)
        return self.out(x)


def _sequence(x: Tensor) -> Tensor:
    return torch.stack([x, x.roll(1, 1), x.roll(2, 1)], dim=1)  # [rows, 6] -> [rows, 3, 6]


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.MultiheadAttention(6, 2, batch_first=True) for _ in range(2))
        self.out = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = _sequence(x)
        for layer in self.layers:
            x = x + layer(x, x, x, need_weights=False)[0]
        return self.out(x).mean(1)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.LSTM(6, 5, num_layers=2, batch_first=True)
        self.out = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.rnn(_sequence(x))[0]).mean(1)


def _tied() -> tuple[Any, Loss]:
    torch.manual_seed(3)
    apply, params = fds.functional(Tied())
    return params, lambda p, tokens: F.cross_entropy(apply(p, tokens).flatten(0, 1), tokens.roll(-1, 1).flatten())


def _tokens(rows: int) -> Tensor:
    return torch.randint(0, 11, (rows, 5), generator=torch.Generator().manual_seed(5))


def _odd_leaves() -> tuple[Any, Loss]:
    """A plain tree: scalars, empty tensors, integers, complex numbers, an unused leaf, lists and tuples."""
    g = torch.Generator().manual_seed(2)
    params = {
        "w": [torch.randn(6, 4, generator=g), torch.randn(4, 3, generator=g)],
        "scale": torch.tensor(1.5),
        "empty": torch.zeros(0, 3),
        "wave": (torch.randn(3, generator=g, dtype=torch.complex64),),
        "which": torch.tensor([2, 0, 1]),
        "unused": {"a": torch.ones(5)},
        "double": torch.ones(2, dtype=torch.float64),
    }

    def loss(p: Any, batch: Any) -> Tensor:
        y = torch.tanh(batch[0] @ p["w"][0]) @ p["w"][1] * p["scale"] + p["empty"].sum()
        y = y[:, p["which"]] + (p["wave"][0] * (1 + 2j)).abs() + p["double"].sum().float()
        return F.mse_loss(y, batch[1])

    return params, loss


def _weighted() -> tuple[Any, Loss]:
    """Rows weigh differently."""
    torch.manual_seed(3)
    apply, params = fds.functional(Blocks())

    def loss(p: Any, batch: Any) -> fds.Weighted:
        weight = batch[0][:, 0].abs().round()
        return fds.Weighted((((apply(p, batch[0]) - batch[1]) ** 2).sum(1) * weight).sum(), weight.sum())

    return params, loss


def _two_trees() -> tuple[Any, Loss]:
    """One module applied to two parameter trees with recomputation, in one loss."""
    torch.manual_seed(3)
    apply, first = fds.functional(Blocks(recompute=True))
    second = {name: p.detach() * 0.5 for name, p in first.items()}

    def loss(p: Any, batch: Any) -> Tensor:
        return F.mse_loss(apply(p["student"], batch[0]), apply(p["teacher"], batch[0]) + batch[1])

    return {"student": first, "teacher": second}, loss


def _branching() -> tuple[Any, Loss]:
    """Every rank uses other blocks, in another order, depending on its data: rows of the batch choose."""
    params = {"blocks": [torch.eye(6) * (i + 1) / 3 + 0.1 for i in range(4)], "never": torch.ones(7), "out": torch.ones(6, 3)}

    def loss(p: Any, batch: Any) -> fds.Weighted:
        total = torch.zeros(())
        for x, y in zip(*batch, strict=True):  # row by row, so that the whole batch is the sum of the ranks' parts
            order = [0, 1, 2] if x[0] > 0 else ([3] if x[1] > 0 else [2, 0, 2])
            hidden = x
            for block in order:
                hidden = torch.tanh(hidden @ p["blocks"][block])
            used = hidden[2] > 0  # the output layer is not used by every rank either
            total = total + (((hidden @ p["out"] - y) ** 2).sum() if used else (hidden**2).sum())
        return fds.Weighted(total, float(len(batch[0])))

    return params, loss


CASES: dict[str, Case] = {
    "mlp": Case(_module(mlp), _xy),
    "blocks": Case(_module(Blocks), _xy),
    "checkpoint": Case(_module(lambda: Blocks(recompute=True)), _xy),
    "several passes": Case(_module(lambda: Blocks(passes=3)), _xy),
    "several passes, checkpoint": Case(_module(lambda: Blocks(recompute=True, passes=2)), _xy),
    "tied": Case(_tied, _tokens),
    "lora": Case(_module(LoRA), _xy),
    "lora, checkpoint": Case(_module(lambda: LoRA(recompute=True)), _xy),
    "attention": Case(_module(Attention), _xy),
    "recurrent": Case(_module(Recurrent), _xy),
    "odd leaves": Case(_odd_leaves, _xy),
    "weighted": Case(_weighted, _xy),
    "two trees": Case(_two_trees, _xy),
    "branching": Case(_branching, _xy),
}


def own_rows(batch: Any, group: comm.Group) -> Any:
    """This rank's part of the global batch."""
    return fds.tree.map(lambda x: x.tensor_split(group.size)[group.rank], batch)


def run(
    case: Case, transforms: tuple[fds.Transform, ...], *, rows: int = 8, steps: int = 3, seed: int = 0, lr: float = 1e-2
) -> tuple[list[float], list[float], Any]:
    """Losses of some steps, then the evaluated loss, and the params at the end, on this rank of the current world."""
    params, loss = case.make()
    step = fds.compose(*transforms)(fds.train_step(loss, fds.adamw(lr, eps=1e-4), seed=seed))
    state = step.init(params)
    batch = own_rows(case.batch(rows), comm.world())
    losses = []
    for _ in range(steps):
        state, metrics = step(state, batch)
        losses.append(metrics["loss"].item())
    return losses, [step.evaluate(state, batch).item()], step.params(state)
