"""Cross entropy over a vocabulary without materialising the logits of all tokens."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from functional_ds.base.weighted import Weighted


def tiled_loss(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    tiles: int,
    bias: Tensor | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
) -> Weighted:
    """Cross entropy of ``hidden @ weight.T + bias``, tile by tile: the sum over tokens, and the number of tokens.

    Value and gradients equal ``F.cross_entropy(logits.float(), labels, reduction="sum")``. Logits exist for one of
    ``tiles`` parts of the tokens at a time: T/tiles x V elements, twice in fp32 at least, instead of T x V. Each tile's
    gradients are computed with its logits, so no product is computed twice, and the backward pass only scales them. Sums over
    tiles are in fp32.

    Cost: sends nothing. On ranks with other tokens, sum both results over the ranks, as ``T.zero`` does for such a loss.

    Args:
        hidden: [..., M], the states of T tokens, different on the ranks of a sequence.
        weight: [V, M], the output embedding, the same on those ranks.
        labels: integers [...], already shifted.
        tiles: into how many parts the tokens are split; fewer if there are fewer tokens.
        bias: [V].
        ignore_index: the label of tokens that do not count.
        label_smoothing: how much of the target is spread over the vocabulary, as in ``F.cross_entropy``.

    Raises:
        ValueError: shapes do not match, or a number is out of range.
        RuntimeError: in second derivatives.

    Source: fused logits and loss in Arctic Long Sequence Training (arXiv 2506.13996).

    >>> hidden, weight, labels = torch.ones(2, 6, 4), torch.zeros(8, 4), torch.zeros(2, 6, dtype=torch.int64)
    >>> labels[:, -1] = -100
    >>> loss = tiled_loss(hidden, weight, labels, tiles=3)
    >>> round(loss.mean().exp().item(), 4), loss.weight.item()
    (8.0, 10)
    """
    _check(hidden, weight, labels, tiles, bias, label_smoothing)
    # a lazy leaf gives the param behind it, as autograd knows it
    head = weight.view_as(weight)
    added = None if bias is None else bias.view_as(bias)
    args = tiles, ignore_index, float(label_smoothing), torch.is_grad_enabled()
    total = _TiledCrossEntropy.apply(hidden.flatten(0, -2), head, added, labels.flatten(), *args)
    return Weighted(total, (labels != ignore_index).sum())


def _check(hidden: Tensor, weight: Tensor, labels: Tensor, tiles: int, bias: Tensor | None, label_smoothing: float) -> None:
    if not isinstance(tiles, int) or tiles < 1:  # type: ignore[redundant-expr]
        raise ValueError(f"tiles={tiles!r}: the number of tiles must be a positive integer")
    if not 0 <= label_smoothing <= 1:
        raise ValueError(f"label_smoothing={label_smoothing}: it must be in [0, 1]")
    fits = weight.dim() == 2 and hidden.dim() > 1 and hidden.shape[-1] == weight.shape[1] and labels.shape == hidden.shape[:-1]
    if not fits or (bias is not None and bias.shape != weight.shape[:1]):
        shapes = {"hidden": hidden, "weight": weight, "labels": labels, **({} if bias is None else {"bias": bias})}
        listed = ", ".join(f"{name} {list(value.shape)}" for name, value in shapes.items())
        raise ValueError(f"tiled_loss: {listed}; they must be hidden [..., M], weight [V, M], labels [...] and bias [V]")


class _TiledCrossEntropy(torch.autograd.Function):
    """The sum over tokens; the gradients are computed in the forward pass."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        tiles: int,
        ignore_index: int,
        label_smoothing: float,
        records: bool,
    ) -> Tensor:
        needs = [records and need for need in ctx.needs_input_grad[:3]]
        # the loss scale, which keeps fp16 from underflow, comes in the backward pass only
        exact = torch.float32 if hidden.dtype == torch.float16 else hidden.dtype
        total = torch.zeros((), dtype=torch.promote_types(hidden.dtype, torch.float32), device=hidden.device)
        by_hidden = torch.empty_like(hidden, dtype=exact) if needs[0] else None
        by_weight = torch.zeros_like(weight, dtype=total.dtype) if needs[1] else None
        by_bias = torch.zeros_like(bias, dtype=total.dtype) if bias is not None and needs[2] else None
        rows = max(1, -(-len(hidden) // tiles))
        for start in range(0, len(hidden), rows):
            part = slice(start, start + rows)
            logits = F.linear(hidden[part], weight, bias).to(total.dtype)  # [rows, V]
            loss, grad = _with_gradient(logits, labels[part], ignore_index, label_smoothing, wants=any(needs))
            total += loss
            del logits
            if grad is None:
                continue
            if by_bias is not None:
                by_bias += grad.sum(0)
            narrow = grad.to(exact)
            if by_hidden is not None:
                by_hidden[part] = narrow @ weight.to(exact)
            if by_weight is not None:
                by_weight += narrow.T @ hidden[part].to(exact)
        ctx.dtypes = hidden.dtype, weight.dtype, None if bias is None else bias.dtype
        ctx.save_for_backward(by_hidden, by_weight, by_bias)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, seed: Tensor) -> tuple[Tensor | None, ...]:
        pairs = zip(ctx.saved_tensors, ctx.dtypes, strict=True)
        grads = [None if grad is None else (grad * seed.to(grad.dtype)).to(dtype) for grad, dtype in pairs]
        return (*grads, None, None, None, None, None)


def _with_gradient(
    logits: Tensor, labels: Tensor, ignore_index: int, label_smoothing: float, *, wants: bool
) -> tuple[Tensor, Tensor | None]:
    """The loss of a tile, summed, and its gradient by the logits: softmax(z) - (1 - s) onehot(y) - s / V."""
    logs = torch.log_softmax(logits, -1)
    counts = labels != ignore_index
    targets = labels.where(counts, 0)[:, None]
    chosen = -logs.gather(1, targets)[:, 0]
    size = logits.shape[1]
    if label_smoothing:
        chosen = (1 - label_smoothing) * chosen - (label_smoothing / size) * logs.sum(1)
    loss = chosen.where(counts, 0.0).sum()
    if not wants:
        return loss, None
    grad = logs.exp_()
    if label_smoothing:
        grad -= label_smoothing / size
    grad.scatter_add_(1, targets, torch.full_like(targets, label_smoothing - 1, dtype=grad.dtype))
    return loss, grad.masked_fill_(~counts[:, None], 0.0)
