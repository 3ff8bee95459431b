"""Online softmax: merges attention over parts of the keys."""

import torch
from torch import Tensor


def merge(o: Tensor, lse: Tensor, other: Tensor, *, other_lse: Tensor) -> tuple[Tensor, Tensor]:
    """Attention over two disjoint sets of keys from attention over each.

    Law: it is associative and commutative, and (0, -inf), the attention to no key, is its identity:
    o - σ(l' - l) (o - o') and l - log σ(l - l').

    Args:
        o: [..., d], softmax-weighted values of the first keys.
        lse: [...], the logarithm of the sum of exponentials of their scores; -inf where there are none.
        other: the same of the other keys.
        other_lse: the same of the other keys.

    Source: online normalizer calculation for softmax (arXiv 1805.02867); Blockwise Parallel Transformer (arXiv 2305.19370).

    >>> merge(torch.zeros(1), torch.tensor(-torch.inf), torch.ones(1), other_lse=torch.tensor(2.0))
    (tensor([1.]), tensor(2.))
    """
    o, lse = o.clone(), lse.clone()
    merge_into(o, lse, other, other_lse)
    return o, lse


def merge_into(o: Tensor, lse: Tensor, other: Tensor, other_lse: Tensor) -> None:
    """``merge``, which writes its results into the first two."""
    total = torch.logaddexp(lse, other_lse)
    weight = torch.exp(other_lse - total).masked_fill_(total == -torch.inf, 0)  # where there is no key at all: -inf + inf
    o.lerp_(other.to(o.dtype), weight.unsqueeze(-1))
    lse.copy_(total)
