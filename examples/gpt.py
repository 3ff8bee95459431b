"""A byte-level GPT in plain PyTorch: pre-norm blocks, learned positions, GPT-2's initialisation.

The model of the examples and benchmarks. It knows nothing of ranks, precision or sharding: those are transforms of the
step that trains it. Shape suffixes: B batch, T time, C channels (the width), H heads, D channels a head, V vocabulary.
"""

from collections.abc import Callable

import attrs
import torch
import torch.nn.functional as F
from torch import Tensor, nn

INIT_STD = 0.02  # GPT-2's, for every matrix and embedding


@attrs.frozen
class Config:
    """The sizes of a GPT; `tied` shares the embedding matrix with the output head."""

    layers: int = 8
    width: int = 384
    heads: int = 6
    context: int = 128
    vocab: int = 256
    tied: bool = True

    def __attrs_post_init__(self) -> None:
        for name in ("layers", "width", "heads", "context", "vocab"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if self.width % self.heads:
            raise ValueError(f"width {self.width} is not divisible by heads {self.heads}; choose a multiple of it")


class Attention(nn.Module):
    """Causal self-attention with one fused projection for queries, keys and values."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.heads = config.heads
        self.qkv = nn.Linear(config.width, 3 * config.width)
        self.proj = nn.Linear(config.width, config.width)

    def forward(self, x_BTC: Tensor) -> Tensor:
        qkv_BTHD = (part.unflatten(-1, (self.heads, -1)) for part in self.qkv(x_BTC).chunk(3, dim=-1))
        q_BHTD, k_BHTD, v_BHTD = (part.transpose(1, 2) for part in qkv_BTHD)
        y_BHTD = F.scaled_dot_product_attention(q_BHTD, k_BHTD, v_BHTD, is_causal=True)
        return self.proj(y_BHTD.transpose(1, 2).flatten(2))


class Block(nn.Module):
    """Attention, then a GELU MLP four times as wide, each added to the residual stream."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(config.width)
        self.attn = Attention(config)
        self.ln_2 = nn.LayerNorm(config.width)
        self.fc = nn.Linear(config.width, 4 * config.width)
        self.proj = nn.Linear(4 * config.width, config.width)

    def forward(self, x_BTC: Tensor) -> Tensor:
        x_BTC = x_BTC + self.attn(self.ln_1(x_BTC))
        return x_BTC + self.proj(F.gelu(self.fc(self.ln_2(x_BTC)), approximate="tanh"))


class GPT(nn.Module):
    """`GPT(config, seed=0)(tokens_BT) -> logits_BTV`; equal seeds give equal weights on every rank."""

    def __init__(self, config: Config, *, seed: int = 0) -> None:
        super().__init__()
        self.config = config
        self.wte = nn.Embedding(config.vocab, config.width)
        self.wpe = nn.Embedding(config.context, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.ln_f = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, config.vocab, bias=False)
        if config.tied:
            self.head.weight = self.wte.weight
        self._initialise(torch.Generator().manual_seed(seed))

    @torch.no_grad()
    def _initialise(self, generator: torch.Generator) -> None:
        """Normal matrices, zero biases; layers that add to the residual stream shrink with their number (GPT-2)."""
        for name, param in self.named_parameters():  # names a tied matrix once; LayerNorms keep torch's ones and zeros
            residual = name.endswith("proj.weight")
            if param.dim() > 1:
                std = INIT_STD / (2 * self.config.layers) ** 0.5 if residual else INIT_STD
                param.normal_(std=std, generator=generator)
            elif name.endswith("bias"):
                param.zero_()

    def forward(self, tokens_BT: Tensor) -> Tensor:
        time = tokens_BT.shape[1]
        if time > self.config.context:
            raise ValueError(f"{time} tokens do not fit a context of {self.config.context}; crop them")
        x_BTC = self.wte(tokens_BT) + self.wpe(torch.arange(time, device=tokens_BT.device))
        for block in self.blocks:
            x_BTC = block(x_BTC)
        return self.head(self.ln_f(x_BTC))


def next_token_loss(logits_BTV: Tensor, targets_BT: Tensor) -> Tensor:
    """The mean cross-entropy in nats per token, a scalar."""
    return F.cross_entropy(logits_BTV.flatten(0, 1).float(), targets_BT.flatten())


@torch.no_grad()
def sample(
    logits_fn: Callable[[Tensor], Tensor],
    prompt: bytes,
    *,
    length: int,
    context: int,
    temperature: float = 1.0,
    generator: torch.Generator | None = None,
) -> bytes:
    """Continue `prompt` by `length` bytes, each drawn from softmax(logits / temperature); 0 takes the likeliest.

    Where `logits_fn` communicates (ZeRO-3), every rank must call this with equal arguments and an equally seeded
    generator.
    """
    if not prompt:
        raise ValueError("prompt is empty; give at least one byte to continue")
    if temperature < 0:
        raise ValueError(f"temperature is {temperature}; it must be 0 (the likeliest byte) or more")
    drawn = list(prompt)
    for _ in range(length):
        logits_BTV = logits_fn(torch.tensor([drawn[-context:]]))
        logits_V = logits_BTV[0, -1].float().cpu()
        if temperature == 0:
            drawn.append(int(logits_V.argmax()))
        else:
            drawn.append(int(torch.multinomial(torch.softmax(logits_V / temperature, dim=-1), 1, generator=generator)))
    return bytes(drawn[len(prompt) :])
