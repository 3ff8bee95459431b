"""Stochastic rounding to bf16."""

import math

import attrs
import torch
from torch import Tensor

from functional_ds.base.prng import Key
from functional_ds.sharding.leaf_map import LeafMap
from functional_ds.sharding.leaf_region import LeafRegion, grouped

_CHUNK = 1 << 20  # elements per batch of draws, which take a few int64 numbers each


def round_stochastically(wide: Tensor, uniform: Tensor) -> Tensor:
    """Rounds fp32 to bf16, up or down with probabilities that preserve the mean; ``uniform`` is uniform in [0, 1).

    Laws: a value that bf16 represents is unchanged; the result is one of the two neighbours; E(result) = wide.

    >>> round_stochastically(torch.full((4,), 1 + 2.0**-9), torch.tensor([0.0, 0.7, 0.8, 0.9])).tolist()
    [1.0, 1.0, 1.0078125, 1.0078125]
    """
    low = (uniform * 65536).to(torch.int32)  # what is added to the 16 bits that bf16 lacks: at times it carries
    bits = (wide.contiguous().view(torch.int32) + low.view(wide.shape)) & ~0xFFFF
    rounded = torch.where(wide.isfinite(), bits.view(torch.float32), wide)  # a carry makes numbers of some NaNs
    return rounded.to(torch.bfloat16)


@attrs.frozen
class Draws:
    """The uniform numbers for one update.

    An element's number depends on the seed, the step, the leaf and the place in the whole leaf, however leaves are
    split.

    Attributes:
        parts: which leaves the optimizer's tensors contain.
        key: the key at this step.
    """

    parts: LeafMap
    key: Key

    @staticmethod
    def of(parts: LeafMap, key: Key, step: Tensor) -> "Draws":
        """The draws of a step; does not wait for ``step``'s device."""
        seed = key.seed.to(step.device, non_blocking=True)
        return Draws(parts, Key(seed, step, torch.zeros_like(step)))

    def for_param(self, which: int, like: Tensor, name: str = "param") -> Tensor:
        """The numbers for the optimizer's ``which``-th tensor; zero for padding."""
        numbers = torch.zeros(like.shape, device=like.device)
        for piece in self.parts.shards:
            if piece.tensor == which:
                part = numbers.view(-1)[piece.start : piece.start + piece.numel]
                leaf = self.parts.leaves[piece.leaf]
                if leaf.region.ranges:
                    self._fill_slice(part, f"{name} of {leaf.path}", piece.offset, leaf.region)
                else:
                    self._fill(part, f"{name} of {leaf.path}", piece.offset)
        return numbers

    def for_state(self, path: str, like: Tensor) -> Tensor:
        """The numbers for a tensor of the optimizer's state: as for its param, if its path is a name and the param's number.

        Other state layouts get numbers by the place in the tensor, which depend on the number of ranks.
        """
        name, _, last = path.partition(".")
        if last.isdecimal() and self._fits(int(last), like):
            return self.for_param(int(last), like, name)
        numbers = torch.zeros(like.shape, device=like.device)
        self._fill(numbers.view(-1), path, 0)
        return numbers

    def _fits(self, which: int, like: Tensor) -> bool:
        return all(piece.start + piece.numel <= like.numel() for piece in self.parts.shards if piece.tensor == which)

    def _fill_slice(self, out: Tensor, name: str, offset: int, region: LeafRegion) -> None:
        shape, key = grouped(region.shape, region.dims), Key(self.key.seed, self.key.step, torch.zeros_like(self.key.step))
        for start in range(offset, offset + out.numel(), _CHUNK):
            for box in region.boxes(start, min(start + _CHUNK, offset + out.numel()), region.dims):
                there = box.in_whole(shape)
                at = torch.full((), there.place, dtype=torch.int64, device=out.device)
                for size, stride in zip(there.shape, there.strides, strict=True):
                    at = at[..., None] + torch.arange(size, device=out.device) * stride
                room = torch.empty(at.numel(), device=out.device)
                drawn = key.uniform(room, name, places={0: (at.reshape(-1), math.prod(shape))})
                box.view(out, offset).copy_(drawn.view(box.shape))

    def _fill(self, out: Tensor, name: str, offset: int) -> None:
        for done in range(0, out.numel(), _CHUNK):
            part = out[done : done + _CHUNK]
            row = torch.full((), offset + done, dtype=torch.int64, device=out.device)
            part.copy_(Key(self.key.seed, self.key.step, row).uniform(part, name))
