"""Modules with everything that a cut must preserve, each with the paths at which it may be cut."""

from collections.abc import Callable
from typing import Any

import attrs
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from examples.gpt import GPT, Config


@attrs.frozen
class Case:
    """A module, the paths at which it may be cut, in the order of calls, a batch of some rows, and the loss of its output."""

    make: Callable[[], nn.Module]
    at: tuple[str, ...]
    batch: Callable[[int], Any]
    loss: Callable[[Any, Any], Tensor]

    def built(self) -> nn.Module:
        """The same module every time."""
        torch.manual_seed(3)
        return self.make()


def rows(count: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(7)
    return torch.randn(count, 6, generator=generator), torch.randn(count, 6, generator=generator)


def tokens(count: int) -> tuple[Tensor, Tensor]:
    ids = torch.randint(0, 11, (count, 6), generator=torch.Generator().manual_seed(5))
    return ids[:, :-1], ids[:, 1:]


def mse(output: Tensor, batch: Any) -> Tensor:
    return F.mse_loss(output, batch[1])


def entropy(logits: Tensor, batch: Any) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), batch[1].flatten())


def _layers(count: int = 4) -> nn.ModuleList:
    return nn.ModuleList(nn.Linear(6, 6) for _ in range(count))


class Skips(nn.Module):
    """Each layer's output is used again by its mirror image, over the stages in between."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.up = _layers(3), _layers(3)

    def forward(self, x: Tensor) -> Tensor:
        kept = []
        for layer in self.down:
            x = torch.tanh(layer(x))
            kept.append(x)
        for layer in self.up:
            x = torch.tanh(layer(x + kept.pop()))
        return x


class Masked(nn.Module):
    """A mask and positions that follow from the inputs, integers that follow from activations, and a tied head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.layers = _layers()
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        mask = torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool, device=ids.device).tril_()
        mask = mask.expand(ids.shape[0], -1, -1) & (ids != 0)[:, None, :]
        with torch.no_grad():
            places = torch.arange(ids.shape[1], device=ids.device) / 7
        x = self.embed(ids)
        chosen = x.argmax(-1)
        for layer in self.layers:
            scores = (x @ x.transpose(1, 2)).masked_fill(~mask, -9.0) - places
            x = x + layer(scores.softmax(-1).to(x.dtype) @ x) + self.embed(chosen)
        return self.head(x)


class InPlace(nn.Module):
    """Activations that are written into, on both sides of cuts; and a fresh tensor that is filled step by step."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = _layers()

    def forward(self, x: Tensor) -> Tensor:
        seen = torch.zeros(len(self.layers), dtype=x.dtype, device=x.device)
        x = x * 1
        for index, layer in enumerate(self.layers):
            x += layer(x * 0.5)
            x[:, index].add_(x.mean())
            seen[index] = x[0, 0]
            x = F.relu(x + 0.1, inplace=True) * 2
        return x + seen.sum()


@attrs.frozen
class Pair:
    """A record that blocks pass on."""

    one: Tensor
    two: Tensor


class Records(nn.Module):
    """Blocks that return dicts, tuples and records."""

    class Block(nn.Module):
        def __init__(self, kind: str) -> None:
            super().__init__()
            self.kind, self.inner = kind, nn.Linear(6, 6)

        def forward(self, x: Tensor, *, extra: Any = None) -> Any:
            y = torch.tanh(self.inner(x))
            if extra is not None:
                y = y + extra.one * extra.two
            return {"dict": {"y": y, "n": 2}, "tuple": (y, y * 2), "record": Pair(y, y * 3), "plain": y}[self.kind]

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.d = (self.Block(kind) for kind in ("dict", "tuple", "record", "plain"))

    def forward(self, x: Tensor) -> Tensor:
        found = self.a(x)
        one, two = self.b(found["y"] * found["n"])
        pair = self.c(one)
        return self.d(two, extra=pair) + pair.one


class Twice(nn.Module):
    """Every layer is called in each of three passes."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.out = _layers(3), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(3):
            for layer in self.layers:
                x = torch.tanh(layer(x))
        return self.out(x)


class Noisy(nn.Module):
    """Dropout inside of blocks and between them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.4)) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = F.dropout(torch.tanh(layer(x)), 0.3, self.training) + x
        return x


class Contexts(nn.Module):
    """Parts of the forward under no_grad, autocast and recomputation."""

    def __init__(self, *, recompute: bool) -> None:
        super().__init__()
        self.layers, self.recompute = _layers(), recompute

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            with torch.no_grad():
                scale = x.abs().amax(1, keepdim=True) + 1
            with torch.autocast(x.device.type, torch.bfloat16):
                wide = x @ x.T
            y = checkpoint(layer, x, use_reentrant=False) if self.recompute and x.requires_grad else layer(x)
            x = torch.tanh(y) / scale + wide.float() @ x / 20
        return x


class Recurrent(nn.Module):
    """Recurrent layers, whose state goes from one to the next."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.first, self.second = (nn.LSTM(6, 6, num_layers=2, batch_first=True) for _ in range(2))
        self.head = nn.Linear(6, 11)

    def forward(self, ids: Tensor) -> Tensor:
        x, state = self.first(self.embed(ids))
        x, _ = self.second(x, state)
        return self.head(x)


class Normed(nn.Module):
    """Running statistics, a buffer that is read, parameters of the outer module, a branch on constants."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6)) for _ in range(3))
        self.shift = nn.Parameter(torch.ones(6))
        self.register_buffer("scale", torch.linspace(0.5, 1.5, 6))

    def forward(self, x: Tensor) -> Tensor:
        early = torch.arange(6, device=x.device) < 3
        for layer in self.layers:
            x = torch.tanh(layer(x)) * self.scale + self.shift
            if early.any():  # known without any input
                x = x * early + x.flip(1)
        return x


class Nested(nn.Module):
    """Blocks in blocks, cut at both levels."""

    def __init__(self) -> None:
        super().__init__()
        self.outer = nn.Sequential(*(nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6)) for _ in range(3)))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.outer(x)


CASES: dict[str, Case] = {
    "sequential": Case(
        lambda: nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Dropout(0.2), nn.Linear(8, 6)),
        ("1", "2", "3", "4"),
        rows,
        mse,
    ),
    "gpt": Case(
        lambda: GPT(Config(layers=3, width=8, heads=2, context=8, vocab=11)),
        ("wpe", "blocks.0", "blocks.1", "blocks.2", "ln_f", "head"),
        tokens,
        entropy,
    ),
    "skips": Case(Skips, ("down.1", "down.2", "up.0", "up.1", "up.2"), rows, mse),
    "masked": Case(Masked, ("layers.0", "layers.1", "layers.2", "layers.3", "head"), tokens, entropy),
    "in place": Case(InPlace, ("layers.1", "layers.2", "layers.3"), rows, mse),
    "records": Case(Records, ("b", "c", "d"), rows, mse),
    "twice": Case(Twice, ("layers.1", "layers.2", "out"), rows, mse),
    "noisy": Case(Noisy, ("layers.1", "layers.2", "layers.3"), rows, mse),
    "contexts": Case(lambda: Contexts(recompute=False), ("layers.1", "layers.2", "layers.3"), rows, mse),
    "recomputed": Case(lambda: Contexts(recompute=True), ("layers.1", "layers.2", "layers.3"), rows, mse),
    "recurrent": Case(Recurrent, ("first", "second", "head"), tokens, entropy),
    "normed": Case(Normed, ("layers.1", "layers.2"), rows, mse),
    "nested": Case(Nested, ("outer.0.1", "outer.1", "outer.1.2", "outer.2", "outer.2.1"), rows, mse),
}
