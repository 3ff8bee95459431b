"""What the tests' jobs name: models, a transform, a text."""

import attrs
import torch
from torch import Tensor, nn

import functional_ds as fds
from functional_ds import transforms as T


@attrs.frozen
class Sizes:
    """Of the model below."""

    width: int = 8
    vocab: int = 256

    def __attrs_post_init__(self) -> None:
        if self.width % 2:
            raise ValueError(f"width {self.width} is odd")


class Tiny(nn.Module):
    """Tokens to logits."""

    def __init__(self, config: Sizes, *, wide: bool = False) -> None:
        super().__init__()
        width = config.width * (2 if wide else 1)
        self.embedding, self.output = nn.Embedding(config.vocab, width), nn.Linear(width, config.vocab)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.output(self.embedding(tokens))


def plain(width: int = 8, vocab: int = 256) -> nn.Module:
    """The same by its sizes."""
    return Tiny(Sizes(width, vocab))


class Deep(nn.Module):
    """Blocks, one after the other."""

    def __init__(self, blocks: int) -> None:
        super().__init__()
        self.embedding, self.output = nn.Embedding(256, 8), nn.Linear(8, 256)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(blocks))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = x + block(x)
        return self.output(x)


def clipped(limit: float) -> fds.Transform:
    """A transform of one's own."""
    return T.clip(limit)


def counting(length: int) -> fds.jobs.TokenText:
    """A text of one's own."""
    return fds.jobs.TokenText.cut(torch.arange(length) % 256, 0.2, source="numbers", context=4)


def no_model() -> str:
    """It makes no module."""
    return "none"
