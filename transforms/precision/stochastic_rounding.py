"""Stochastic rounding to bf16."""

import attrs
import torch
from torch import Tensor

from functional_ds.base.prng import Key
from functional_ds.sharding.leaf_map import LeafMap
from functional_ds.sharding.leaf_slice import runs

__all__ = ["Draws", "round_stochastically"]

_CHUNK = 1 << 20  # draws are made of a few int64 numbers each; so many at once


def round_stochastically(wide: Tensor, uniform: Tensor) -> Tensor:
    """fp32 to bf16: up or down, with the probabilities that keep the mean, where ``uniform`` is uniform in [0, 1).

    Laws: a value that bf16 has stays as it is; the result is one of the two neighbours; E(result) = wide.

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

    Law 29: an element's number depends on the seed, the step, the leaf and the place in the leaf, not on how leaves are cut;
    but for slices along other dims than the first, on the place in the slice.

    Attributes:
        parts: what lies where in the tensors that the optimizer gets.
        key: the key at this step.
    """

    parts: LeafMap
    key: Key

    @staticmethod
    def of(parts: LeafMap, key: Key, step: Tensor) -> "Draws":
        """The draws of a step, none of which waits for the device that ``step`` lies on."""
        seed = key.seed.to(step.device, non_blocking=True)
        return Draws(parts, Key(seed, step, torch.zeros_like(step)))

    def for_param(self, which: int, like: Tensor, name: str = "param") -> Tensor:
        """For the ``which``-th tensor that the optimizer gets; zero for padding."""
        found = torch.zeros(like.shape, device=like.device)
        for piece in self.parts.shards:
            if piece.tensor == which:
                own, leaf = found.view(-1)[piece.start : piece.start + piece.numel], self.parts.leaves[piece.leaf]
                rows = tuple(cut for cut in leaf.slices if not cut.dim)  # along other dims, ranks draw alike
                for here, there, numel in runs(leaf.shape, rows, piece.offset, piece.offset + piece.numel):
                    start = here - piece.offset
                    self._fill(own[start : start + numel], f"{name} of {leaf.path}", there)
        return found

    def for_state(self, path: str, like: Tensor) -> Tensor:
        """For a tensor of the optimizer's state: as for the param of its number, where its path is a name and a number.

        Optimizers that arrange their state otherwise get numbers by the place in this tensor, which depend on n.
        """
        name, _, last = path.partition(".")
        if last.isdecimal() and self._fits(int(last), like):
            return self.for_param(int(last), like, name)
        found = torch.zeros(like.shape, device=like.device)
        self._fill(found.view(-1), path, 0)
        return found

    def _fits(self, which: int, like: Tensor) -> bool:
        return all(piece.start + piece.numel <= like.numel() for piece in self.parts.shards if piece.tensor == which)

    def _fill(self, own: Tensor, name: str, offset: int) -> None:
        for done in range(0, own.numel(), _CHUNK):
            part = own[done : done + _CHUNK]
            row = torch.full((), offset + done, dtype=torch.int64, device=own.device)
            part.copy_(Key(self.key.seed, self.key.step, row).uniform(part, name))
