"""Values of which each rank of a group keeps a piece."""

import zlib

import attrs
import torch
from torch import Tensor

from . import comm

__all__ = ["Divided", "agree", "divide"]

_CHANNEL = "remat"  # gathers keep an order of their own, apart from what else the group does


@attrs.define(eq=False)
class Divided:
    """A flat tensor in n equal pieces, of which this rank has its own.

    Attributes:
        piece: ``ceil(numel / n)`` elements, the last ranks' padded with zeros.
        numel: elements of the whole.
    """

    piece: Tensor
    numel: int
    group: comm.Group

    @property
    def held(self) -> int:
        """Bytes on this rank."""
        return self.piece.nbytes

    def fetch(self) -> Tensor:
        """The whole, gathered: all ranks of the group must come here in one order."""
        with torch.no_grad():
            whole: Tensor = comm.all_gather(self.piece, self.group.channel(_CHANNEL))
        return whole[: self.numel]


def divide(flat: Tensor, group: comm.Group) -> Divided:
    """This rank's piece of a flat tensor that every rank of the group has. Law: ``divide(x, g).fetch() = x``, bitwise."""
    size = -(-flat.numel() // group.size)
    piece = flat.new_zeros(size)
    own = flat[group.rank * size : (group.rank + 1) * size]
    piece[: own.numel()].copy_(own)
    return Divided(piece, flat.numel(), group)


def agree(divided: list[str], group: comm.Group) -> None:
    """Refuses to go on where the ranks divided different values: their gathers would not meet.

    Raises:
        RuntimeError: on all ranks, with the first value of this rank and the ranks that differ from rank 0.
    """
    print_ = torch.tensor([zlib.crc32("\n".join(divided).encode()), len(divided)])
    prints = comm.all_gather(print_, group.channel(f"{_CHANNEL}/control"), tiled=False).tolist()
    odd = [rank for rank, other in enumerate(prints) if other != prints[0]]
    if odd:
        counts = ", ".join(str(count) for _, count in prints)
        raise RuntimeError(
            f"remat: the ranks of group {group.name!r} divided other activations: ranks {odd} differ from rank 0 (numbers of "
            f"activations: {counts}; here they begin with {divided[:1]}); partition takes a group along which the activations "
            "are replicated, and the same control flow on its ranks"
        )
