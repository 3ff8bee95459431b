"""Attention of some queries to some keys, with its log-sum-exp and gradients, by torch's kernels.

If no kernel fits, for example for values of another size than keys, or masks on CUDA, the formula is computed.
"""

import torch
from torch import Tensor

from functional_ds.base.torch_private import CPU_ATTENTION, CPU_ATTENTION_BACKWARD, CUDA_ATTENTION, CUDA_ATTENTION_BACKWARD

_HALF = (torch.float16, torch.bfloat16)


def takes(q: Tensor, v: Tensor, masked: bool) -> str:
    """Which implementation computes a block: "cpu", "cuda" or "formula"."""
    if q.shape[-1] != v.shape[-1]:
        return "formula"
    if q.device.type in ("cpu", "meta"):
        return "cpu"
    fits = q.device.type == "cuda" and q.dtype in _HALF and q.shape[-1] % 8 == 0 and q.shape[-1] <= 256
    return "cuda" if fits and not masked else "formula"


def attend(
    q: Tensor, k: Tensor, v: Tensor, *, scale: float, causal: bool = False, mask: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The attention of q [rows, h, S, d] to k and v [rows, g, K, d], and the log-sum-exp of scores [rows, h, S].

    h / g consecutive query heads share a key-value head. Queries without keys get 0 and -inf.

    Args:
        q: queries.
        k: keys.
        v: values.
        scale: the factor of scores.
        causal: whether the i-th query sees the keys up to the i-th; then there are as many.
        mask: [rows or 1, 1, S, K], True where a query sees a key.
    """
    kernel = takes(q, v, mask is not None)
    q, k, v = _dense(q), _dense(k), _dense(v)
    if kernel == "cuda":
        o, lse, *_ = CUDA_ATTENTION(q, k, v, 0.0, causal, False, scale=scale)
        return o, lse
    if kernel == "cpu":
        o, lse = CPU_ATTENTION(q, k, v, 0.0, causal, attn_mask=_bias(mask, q), scale=scale)
        if mask is not None:
            none = ~mask.any(-1)
            o, lse = o.masked_fill(none.unsqueeze(-1), 0), lse.masked_fill(none, -torch.inf)
        return o, lse
    scores = _scores(q, k, scale, causal, mask)
    lse = scores.logsumexp(-1)
    weights = torch.exp(scores - lse.masked_fill(lse == -torch.inf, 0).unsqueeze(-1))
    o = weights @ v.to(weights.dtype).unsqueeze(2)
    return o.flatten(1, 2).to(q.dtype), lse.flatten(1, 2)


def attend_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    o: Tensor,
    lse: Tensor,
    scale: float,
    causal: bool = False,
    mask: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """This block's part of the gradients by q, k and v, given ``o`` and ``lse`` of the attention to all keys.

    Args:
        grad: of the loss by ``o``.
        q: queries.
        k: the block's keys.
        v: its values.
        o: the whole attention.
        lse: of all scores; +inf for queries without any key.
        scale: the factor of scores.
        causal: as in ``attend``.
        mask: as in ``attend``.
    """
    kernel = takes(q, v, mask is not None)
    grad, q, k, v, o = (_dense(x) for x in (grad, q, k, v, o))
    if kernel == "cuda":
        nothing = torch.empty(0, dtype=torch.uint64, device=q.device)
        s, t = q.shape[2], k.shape[2]
        grads = CUDA_ATTENTION_BACKWARD(
            grad, q, k, v, o, lse.contiguous(), None, None, s, t, 0.0, causal, nothing, nothing, scale=scale
        )
        return grads[0], grads[1], grads[2]
    if kernel == "cpu":
        grads = CPU_ATTENTION_BACKWARD(grad, q, k, v, o, lse, 0.0, causal, attn_mask=_bias(mask, q), scale=scale)
        return grads[0], grads[1], grads[2]
    weights = torch.exp(_scores(q, k, scale, causal, mask) - lse.unflatten(1, (k.shape[1], -1)).unsqueeze(-1))
    wide = weights.dtype
    heads = (k.shape[1], q.shape[1] // max(k.shape[1], 1))
    up, out, rows = (x.to(wide).unflatten(1, heads) for x in (grad, o, q))
    inner = up @ v.to(wide).mT.unsqueeze(2) - (up * out).sum(-1, keepdim=True)
    d_scores = weights * inner * scale
    d_q: Tensor = (d_scores @ k.to(wide).unsqueeze(2)).flatten(1, 2)
    return d_q, (d_scores.mT @ rows).sum(2), (weights.mT @ up).sum(2)


def _dense(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _bias(mask: Tensor | None, q: Tensor) -> Tensor | None:
    return None if mask is None else torch.zeros_like(mask, dtype=q.dtype).masked_fill_(~mask, -torch.inf)


def _scores(q: Tensor, k: Tensor, scale: float, causal: bool, mask: Tensor | None) -> Tensor:
    """[rows, g, h / g, S, K], in fp32 where the inputs are of half precision."""
    wide = torch.promote_types(q.dtype, torch.float32)
    heads = (k.shape[1], q.shape[1] // max(k.shape[1], 1))
    scores: Tensor = q.to(wide).unflatten(1, heads) @ k.to(wide).mT.unsqueeze(2) * scale
    if causal:
        mask = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).tril_()[None, None]
    return scores if mask is None else scores.masked_fill(~mask.unsqueeze(1), -torch.inf)
