"""A small causal transformer of pure functions, whose attention is an argument, and batches for it."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

import functional_ds as fds
from functional_ds.parallel.sequence.axis import documents_of
from functional_ds.pipelining.stages.from_functions import Piece, stages
from functional_ds.pipelining.stages.stages import Stages

__all__ = ["HEADS", "VOCABULARY", "batch_of", "model_loss", "model_params", "model_stages", "plain_attention", "shifted"]

VOCABULARY, WIDTH, HEADS, KEY_HEADS = 11, 8, 4, 2


def model_params(layers: int = 2) -> dict[str, Any]:
    """Fresh params, the same each time."""
    generator = torch.Generator().manual_seed(0)

    def weight(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64) * shape[0] ** -0.5

    size = WIDTH // HEADS
    blocks = [
        {
            "q": weight(WIDTH, WIDTH),
            "kv": weight(WIDTH, 2 * KEY_HEADS * size),
            "o": weight(WIDTH, WIDTH),
            "up": weight(WIDTH, 2 * WIDTH),
            "down": weight(2 * WIDTH, WIDTH),
        }
        for _ in range(layers)
    ]
    return {"embedding": weight(VOCABULARY, WIDTH), "positions": weight(32, WIDTH), "blocks": blocks}


def plain_attention(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, documents: Tensor | None = None) -> Tensor:
    """Torch's own attention with an explicit mask; positions in no document see themselves, which no loss counts."""
    size = q.shape[2]
    allowed = torch.ones(size, size, dtype=torch.bool)
    allowed = (allowed.tril() if causal else allowed)[None, None]
    if documents is not None:
        numbers = documents[:, None]
        allowed = allowed & (numbers[..., None] == numbers[..., None, :]) & (numbers >= 0)[..., None, :]
        allowed = allowed | torch.eye(size, dtype=torch.bool)
    return F.scaled_dot_product_attention(q, k, v, allowed, enable_gqa=True)


def _block(
    params: dict[str, Tensor], x: Tensor, key: fds.Key | None, *, name: str, attend: Callable[..., Tensor], dropout: float
) -> Tensor:
    rows, size = x.shape[:2]
    normed = F.layer_norm(x, (WIDTH,))
    q = (normed @ params["q"]).view(rows, size, HEADS, -1).transpose(1, 2)
    k, v = (normed @ params["kv"]).view(rows, size, 2 * KEY_HEADS, -1).transpose(1, 2).chunk(2, 1)
    mixed = attend(q, k, v).transpose(1, 2).reshape(rows, size, WIDTH) @ params["o"]
    x = x + (mixed if key is None else key.dropout(mixed, dropout, f"attention {name}"))
    hidden = F.gelu(F.layer_norm(x, (WIDTH,)) @ params["up"]) @ params["down"]
    return x + (hidden if key is None else key.dropout(hidden, dropout, f"mlp {name}"))


def _embedded(params: Any, batch: dict[str, Tensor]) -> Tensor:
    return params["embedding"][batch["input_ids"]] + params["positions"][batch["position_ids"]]  # type: ignore[no-any-return]


def _cross_entropy(params: Any, x: Tensor, batch: dict[str, Tensor]) -> Any:
    labels, logits = batch["shift_labels"], x @ params["embedding"].T
    each = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
    counts = labels.flatten() != -100
    hits = logits.argmax(-1) == labels
    return fds.Weighted(each.where(counts, 0.0).sum(), counts.sum()), {"hits": fds.Weighted(hits.sum().double(), counts.sum())}


def model_loss(
    attend: Callable[..., Tensor], *, causal: bool = True, dropout: float = 0.0, head: Callable[..., fds.Weighted] | None = None
) -> Callable[..., Any]:
    """The loss of a batch with ``input_ids``, ``shift_labels``, ``position_ids``; sums over tokens."""

    def loss(params: Any, batch: dict[str, Tensor], key: fds.Key | None) -> Any:
        x, own = _embedded(params, batch), functools.partial(attend, causal=causal)
        for i, layer in enumerate(params["blocks"]):
            x = _block(layer, x, key, name=str(i), attend=own, dropout=dropout)
        return _cross_entropy(params, x, batch) if head is None else head(x, params["embedding"], batch["shift_labels"])

    return loss


def model_stages(attend: Callable[..., Tensor], *, causal: bool, dropout: float) -> Stages:
    """The same in two stages, a block in each; the last one shares the embedding with the first."""
    own = functools.partial(attend, causal=causal)

    def first(params: Any, x: Tensor, batch: Any, key: fds.Key | None) -> Tensor:
        (embedding, positions), layer = params[:2], params[2]
        x = _embedded({"embedding": embedding, "positions": positions}, batch)
        return _block(layer, x, key, name="0", attend=own, dropout=dropout)

    def last(params: Any, x: Tensor, batch: Any, key: fds.Key | None) -> Any:
        x = _block(params[1], x, key, name="1", attend=own, dropout=dropout)
        return _cross_entropy({"embedding": params[0]}, x, batch)

    pieces = [Piece(first, uses=("embedding", "positions", "blocks.0")), Piece(last, uses=("embedding", "blocks.1"))]
    return stages(pieces, model_params(), inputs=lambda batch: batch["input_ids"])


def batch_of(rows: int, length: int, seed: int, padding: str | None) -> dict[str, Tensor]:
    """Tokens with labels, where ``padding`` says so padded on the right or the left by another length in each row.

    "packed": documents one after the other, as positions that begin anew.
    """
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, VOCABULARY, (rows, length), generator=generator)
    batch = {"input_ids": tokens, "labels": tokens.clone()}
    sizes = torch.randint(1, length + 1, (rows, 1), generator=generator)
    at = torch.arange(length)[None].expand(rows, -1)
    if padding == "packed":
        batch["position_ids"] = torch.where(at < sizes, at, at - sizes)
    elif padding is not None:
        mask = at < sizes if padding == "right" else at >= length - sizes
        batch["attention_mask"] = mask.long()
        batch["labels"][~mask] = -100
        batch["labels"][torch.arange(rows), mask.long().argmax(1)] = -100  # padding on the left does not predict it
    return batch


def shifted(batch: dict[str, Tensor]) -> tuple[dict[str, Tensor], Tensor | None]:
    """What one device computes with: labels shifted by hand, positions, and the documents."""
    labels = torch.cat([batch["labels"][:, 1:], torch.full_like(batch["labels"][:, :1], -100)], 1)
    mask, given = batch.get("attention_mask"), batch.get("position_ids")
    documents = documents_of(mask, position_ids=given)
    if given is None:
        given = torch.arange(labels.shape[1])[None].expand(len(labels), -1)
    return {"input_ids": batch["input_ids"], "shift_labels": labels, "position_ids": given}, documents
