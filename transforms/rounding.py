"""Stochastic rounding to bf16."""

import torch
from torch import Tensor

from functional_ds.key import Key
from functional_ds.parts import Parts

__all__ = ["round_stochastically", "uniforms"]

_CHUNK = 1 << 20  # draws are made of a few int64 numbers each; so many at once


def round_stochastically(wide: Tensor, uniform: Tensor) -> Tensor:
    """fp32 to bf16: up or down, with the probabilities that keep the mean, where ``uniform`` is uniform in [0, 1).

    Laws: a value that bf16 has stays as it is; the result is one of the two neighbours; E(result) = wide.

    >>> round_stochastically(torch.full((4,), 1 + 2.0**-9), torch.tensor([0.0, 0.7, 0.8, 0.9])).tolist()
    [1.0, 1.0, 1.0078125, 1.0078125]
    """
    low = (uniform * 65536).to(torch.int32)  # what is added to the 16 bits that bf16 lacks: at times it carries
    bits = (wide.contiguous().view(torch.int32) + low.view(wide.shape)) & ~0xFFFF
    return torch.where(wide.isfinite(), bits.view(torch.float32), wide).to(torch.bfloat16)


def uniforms(parts: Parts, key: Key, name: str, which: int, like: Tensor) -> Tensor:
    """Uniform numbers for the ``which``-th tensor that the optimizer gets, flat; those of padding are zero.

    Law 29: an element's number depends on the seed, the step, the name, the leaf and the place in the leaf, not on how
    leaves are cut.
    """
    found = torch.zeros(like.numel(), device=like.device)
    seed = key.seed.to(like.device, non_blocking=True)
    for piece in parts.pieces:
        if piece.tensor == which:
            own = found[piece.start : piece.start + piece.numel]
            for done in range(0, piece.numel, _CHUNK):
                part = own[done : done + _CHUNK]
                row = torch.full((), piece.offset + done, dtype=torch.int64, device=like.device)
                part.copy_(Key(seed, key.step, row).uniform(part, f"{name} of {parts.leaves[piece.leaf].path}"))
    return found
