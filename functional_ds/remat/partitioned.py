"""Values of which each rank of a group keeps a piece."""

import zlib

import attrs
import torch
from torch import Tensor

from functional_ds import comm

__all__ = ["Account", "Divided", "divide"]

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


@attrs.define(eq=False)
class Account:
    """What a rank has divided in a pass.

    Attributes:
        values: dtype and size of each, in order.
        sums: of their bytes, where they are looked at.
        looks: whether they are.
    """

    values: list[str] = attrs.field(factory=list)
    sums: list[Tensor] = attrs.field(factory=list)
    looks: bool = False

    def add(self, flat: Tensor) -> None:
        """A value was divided."""
        self.values.append(f"{flat.dtype}[{flat.numel()}]")
        if self.looks:
            self.sums.append(flat.view(torch.uint8).sum() if flat.numel() else flat.new_zeros((), dtype=torch.int64))

    def settle(self, group: comm.Group) -> None:
        """Refuses to go on where the ranks divided different values: their gathers would not meet, or give a mixture.

        Raises:
            RuntimeError: on all ranks, naming those that differ from rank 0.
        """
        channel = group.channel(f"{_CHANNEL}/control")
        counts = (len(self.values), len(self.sums))
        print_ = torch.tensor([zlib.crc32("\n".join(self.values).encode()), *counts])
        prints = comm.all_gather(print_, channel, tiled=False).tolist()
        odd = [rank for rank, other in enumerate(prints) if other[:2] != prints[0][:2]]
        if odd:
            raise _differ(
                group, odd, f"numbers of activations: {[other[1] for other in prints]}; here they begin {self.values[:1]}"
            )
        if all(looked == count and looked for _, count, looked in prints):
            sums = comm.all_gather(torch.stack(self.sums).cpu(), channel, tiled=False)
            odd = [rank for rank in range(group.size) if not torch.equal(sums[rank], sums[0])]
            if odd:
                raise _differ(group, odd, "as many, as large, but with other values")
        self.values.clear()
        self.sums.clear()


def _differ(group: comm.Group, odd: list[int], how: str) -> RuntimeError:
    return RuntimeError(
        f"remat: the ranks of group {group.name!r} divided other activations: ranks {odd} differ from rank 0 ({how}); "
        "partition takes a group along which activations are replicated, random draws included, and equal control flow on it"
    )
