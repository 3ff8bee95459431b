"""A causal transformer of pure functions for every axis, plain PyTorch's same model, and Hugging Face models."""

import functools
from collections.abc import Callable
from typing import Any

import attrs
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import functional_ds as fds
from functional_ds import comm, moe, seq
from functional_ds import pipelining as pp
from functional_ds.step.axes import axis

__all__ = ["EXPERTS", "LENGTH", "PATTERN", "Ways", "batch_of", "hugging_face", "pure_loss", "pure_params", "pure_plan"]
__all__ += ["hugging_face_plan", "inputs_of", "plain_loss", "pure_stages", "summed_loss"]

VOCABULARY, WIDTH, HEADS, SIZE, INNER, LAYERS = 16, 16, 4, 4, 8, 2
EXPERTS, CHOSEN = 4, 2
ROWS, LENGTH = 8, 8
PATTERN = "experts"


@functools.cache
def batch_of(index: int) -> dict[str, Tensor]:
    """Tokens, and the next one's labels, of which some count nothing: rows and positions weigh unequally."""
    generator = torch.Generator().manual_seed(100 + index)
    tokens = torch.randint(VOCABULARY, (ROWS, LENGTH), generator=generator)
    labels = torch.cat([tokens[:, 1:], torch.full((ROWS, 1), -100)], 1)
    hidden = torch.rand(ROWS, LENGTH, generator=generator) < torch.linspace(0, 0.8, ROWS)[:, None]
    return {"input_ids": tokens, "shift_labels": labels.masked_fill(hidden, -100)}


# -- pure functions -----------------------------------------------------------------------------------------------------


@attrs.frozen
class Ways:
    """How the model computes; none of it changes a value.

    Attributes:
        attention: a function of fds.seq.
        along: whether activations between the layers are cut along the sequence over tp (Megatron's sequence parallelism).
        mixture: whether the MLPs are mixtures of experts.
        biased: whether their routers have biases that balance them.
        key_heads: key-value heads.
        dropout: of the hidden layer and of what attention gives.
    """

    attention: str = "ring"
    along: bool = False
    mixture: bool = False
    biased: bool = False
    key_heads: int = 2
    dropout: float = 0.0

    @property
    def dim(self) -> int | None:
        return 1 if self.along else None


def pure_params(ways: Ways) -> dict[str, Any]:
    """Whole params, fresh and the same each time."""
    return fds.tree.map(torch.clone, _pure_params(ways))  # type: ignore[no-any-return]


@functools.cache
def _pure_params(ways: Ways) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)

    def weight(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64) * shape[-1] ** -0.5

    def scale() -> Tensor:
        return 0.5 + torch.rand(WIDTH, generator=generator, dtype=torch.float64)

    def layer() -> dict[str, Any]:
        kv = ways.key_heads * SIZE
        found: dict[str, Any] = {"norm": scale(), "q": weight(WIDTH, WIDTH), "k": weight(kv, WIDTH), "v": weight(kv, WIDTH)}
        found |= {"o": weight(WIDTH, WIDTH), "mlp_norm": scale()}
        if not ways.mixture:
            return {**found, "up": weight(INNER, WIDTH), "down": weight(WIDTH, INNER)}
        experts = {"up": weight(EXPERTS, INNER, WIDTH), "down": weight(EXPERTS, WIDTH, INNER)}
        return {**found, "router": 2 * weight(EXPERTS, WIDTH), "experts": experts}

    ends = {"embed": weight(VOCABULARY, WIDTH), "places": weight(LENGTH, WIDTH)}
    return {**ends, "layers": [layer() for _ in range(LAYERS)], "norm": scale(), "head": weight(VOCABULARY, WIDTH)}


def pure_plan(ways: Ways) -> dict[str, Any]:
    """How tensor parallelism cuts them. Along the sequence experts stay whole, as tp ranks then have different tokens."""
    plan: dict[str, Any] = {"embed": "vocab", "head": "vocab", "q": "colwise", "k": "colwise", "v": "colwise", "o": "rowwise"}
    if not ways.mixture:
        plan |= {"up": "colwise", "down": "rowwise"}
    elif not ways.along:
        plan |= {r"experts\.up": 1, r"experts\.down": 2}
    if ways.along:
        plan |= dict.fromkeys(("norm", "mlp_norm"), "replicated_with_grad_allreduce")
        if ways.mixture:
            plan |= dict.fromkeys(("router", "experts.up", "experts.down"), "replicated_with_grad_allreduce")
    return plan


def _normed(x: Tensor, weight: Tensor) -> Tensor:
    return F.rms_norm(x, (WIDTH,), weight, 1e-6)


def _dropped(x: Tensor, key: fds.Key | None, name: str, *, ways: Ways, places: Any = None) -> Tensor:
    return key.dropout(x, ways.dropout, name, places=places) if key is not None and ways.dropout else x


def _embedded(p: Any, batch: Any, ways: Ways) -> Tensor:
    ids = batch["input_ids"]
    positions = batch.get("position_ids")
    places = p[1][torch.arange(ids.shape[1])[None] if positions is None else positions].expand(len(ids), -1, -1)
    places = comm.scatter_to(places, axis("tp"), dim=1) if ways.along else places
    return fds.tp.embed(ids, p[0], sequence_dim=ways.dim) + places


def _layer(p: Any, x: Tensor, key: fds.Key | None, *, ways: Ways, name: str) -> Tensor:
    qkv = fds.tp.column(_normed(x, p["norm"]), [p["q"], p["k"], p["v"]], sequence_dim=ways.dim)
    q, k, v = (each.unflatten(-1, (-1, SIZE)).transpose(1, 2) for each in qkv)
    made = {"ring": seq.ring, "gathered": seq.gathered, "ulysses": functools.partial(seq.ulysses, None)}
    attend: Callable[..., Tensor] = made[ways.attention]()
    o = fds.tp.row(attend(q, k, v, causal=True).transpose(1, 2).flatten(2), p["o"], sequence_dim=ways.dim)
    x = x + (_dropped(o, key, f"{name} o", ways=ways) if not ways.along else o)
    hidden = _normed(x, p["mlp_norm"])
    return x + (_mixed(p, hidden, ways, name) if ways.mixture else _mlp(p, hidden, key, ways=ways, name=name))


def _mlp(p: Any, x: Tensor, key: fds.Key | None, *, ways: Ways, name: str) -> Tensor:
    hidden = F.gelu(fds.tp.column(x, p["up"], sequence_dim=ways.dim))
    hidden = _dropped(hidden, key, f"{name} mlp", ways=ways, places=fds.tp.places(hidden, -1))
    return fds.tp.row(hidden, p["down"], sequence_dim=ways.dim)


def _mixed(p: Any, x: Tensor, ways: Ways, name: str) -> Tensor:
    bias = moe.router_bias(f"layer {name}") if ways.biased else None
    routing = moe.route(x @ p["router"].T, CHOSEN, gate="sigmoid", bias=bias)
    if ways.biased:
        moe.count_demand(f"layer {name}", routing.demand())
    tp = None if ways.along else axis("tp")
    return moe.exchange(moe.mlp(p["experts"]["up"], p["experts"]["down"], tp=tp), x, routing=routing)


def _summed(p: Any, x: Tensor, batch: Any, ways: Ways) -> fds.Weighted:
    logits = fds.tp.column(_normed(x, p[0]), p[1], sequence_dim=ways.dim)
    return fds.tp.cross_entropy(logits, batch["shift_labels"])


def pure_loss(ways: Ways) -> Callable[..., fds.Weighted]:
    """The loss of a rank's part of the params and of the batch."""

    def loss(params: Any, batch: Any, key: fds.Key | None) -> fds.Weighted:
        x = _embedded((params["embed"], params["places"]), batch, ways)
        for i, p in enumerate(params["layers"]):
            x = _layer(p, x, key, ways=ways, name=str(i))
        return _summed((params["norm"], params["head"]), x, batch, ways)

    return loss


def pure_stages(ways: Ways) -> pp.Stages:
    """The same as two stages."""

    def first(p: Any, x: Tensor, batch: Any, key: fds.Key | None) -> Tensor:
        return _layer(p[2], _embedded(p, batch, ways), key, ways=ways, name="0")

    def last(p: Any, x: Tensor, batch: Any, key: fds.Key | None) -> fds.Weighted:
        return _summed(p, _layer(p[2], x, key, ways=ways, name="1"), batch, ways)

    pieces = [pp.Piece(first, uses=("embed", "places", "layers.0")), pp.Piece(last, uses=("norm", "head", "layers.1"))]
    return pp.stages(pieces, pure_params(ways), inputs=lambda batch: batch["input_ids"])


def plain_loss(ways: Ways) -> Callable[..., Any]:
    """Plain PyTorch on whole params and the whole batch: sum over tokens, and how often each expert was chosen."""

    def loss(params: Any, batch: Any, key: fds.Key | None, biases: Any = None) -> tuple[fds.Weighted, list[Tensor]]:
        ids, labels, counts = batch["input_ids"], batch["shift_labels"], []
        x = F.embedding(ids, params["embed"]) + params["places"][: ids.shape[1]]
        for i, p in enumerate(params["layers"]):
            h = F.rms_norm(x, (WIDTH,), p["norm"], 1e-6)
            q, k, v = (F.linear(h, p[name]).unflatten(-1, (-1, SIZE)).transpose(1, 2) for name in "qkv")
            a = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
            x = x + _dropped(F.linear(a.transpose(1, 2).flatten(2), p["o"]), key, f"{i} o", ways=ways)
            h = F.rms_norm(x, (WIDTH,), p["mlp_norm"], 1e-6)
            if not ways.mixture:
                x = x + F.linear(_dropped(F.gelu(F.linear(h, p["up"])), key, f"{i} mlp", ways=ways), p["down"])
                continue
            scores = F.linear(h, p["router"]).sigmoid()
            chosen = (scores if biases is None else scores + biases[i]).topk(CHOSEN, -1).indices
            counts.append(torch.bincount(chosen.flatten(), minlength=EXPERTS))
            gates = torch.zeros_like(scores).scatter(-1, chosen, scores.gather(-1, chosen))
            each = F.gelu(torch.einsum("btw,eiw->btei", h, p["experts"]["up"]))
            x = x + torch.einsum("btei,ewi,bte->btw", each, p["experts"]["down"], gates)
        logits = F.linear(F.rms_norm(x, (WIDTH,), params["norm"], 1e-6), params["head"])
        total = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
        return fds.Weighted(total, (labels != -100).sum()), counts

    return loss


# -- Hugging Face -------------------------------------------------------------------------------------------------------

SIZES: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 32,  # a grouped product needs rows of 16 bytes, also of slices
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 16,
    "use_cache": False,
}


def hugging_face(kind: str, attention: str = "sdpa", experts: str | None = None) -> nn.Module:
    """An unmodified tiny model, the same on every rank; "llama kv1" has one key-value head."""
    import transformers

    torch.manual_seed(0)
    name, _, heads = kind.partition(" kv")
    more: dict[str, Any] = {"num_key_value_heads": int(heads or 2), "attn_implementation": attention}
    config: Any
    if name == "mixtral":
        more |= {} if experts is None else {"experts_implementation": experts}
        config = transformers.MixtralConfig(**SIZES, **more, num_local_experts=EXPERTS)
        model: nn.Module = transformers.MixtralForCausalLM(config)
    elif name == "qwen3":
        model = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**SIZES, **more, head_dim=8))
    else:
        config = transformers.LlamaConfig(**SIZES, **more, tie_word_embeddings=name == "tied llama")
        model = transformers.LlamaForCausalLM(config)
    for parameter in model.parameters():
        if parameter.dim() == 1:  # else norms are ones, and slices of them all alike
            nn.init.uniform_(parameter, 0.5, 1.5)
        elif kind == "mixtral":  # else routers are near a tie
            parameter.data.mul_(4)
    return (model if name == "mixtral" else model.double()).train()  # grouped products are not known in fp64


def hugging_face_plan(kind: str, *, along: bool = False, vocab: bool = True) -> dict[str, Any]:
    """The model's own plan, with a head whose logits stay cut, and a cut sequence between the layers."""
    plan: dict[str, Any] = dict(fds.tp.plan_of(hugging_face(kind)))
    plan |= {"lm_head": "vocab"} if vocab else {}
    if along:
        plan |= {"model.layers": "sequence_parallel"} | ({"mlp.gate": "replicated"} if kind == "mixtral" else {})
    return plan


def summed_loss(output: Any, batch: Any, *, vocab: bool = False) -> fds.Weighted:
    """The loss of an unmodified causal model's logits, whose vocabulary may be cut."""
    logits, labels = output.logits, batch["shift_labels"]
    if vocab:
        return fds.tp.cross_entropy(logits, labels)
    total = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
    return fds.Weighted(total, (labels != -100).sum())


def inputs_of(batch: Any) -> dict[str, Tensor]:
    """What the model gets of a batch."""
    return {name: leaf for name, leaf in batch.items() if name != "shift_labels"}
