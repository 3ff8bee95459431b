"""Partitioned activations: each rank of a group keeps 1/n of a saved tensor (ZeRO-R's P_a, Rajbhandari et al. 2020)."""

import zlib

import attrs
import torch
from torch import Tensor

from functional_ds import comm

_CHANNEL = "remat"  # gathers are ordered apart from the group's other collectives


@attrs.define(eq=False)
class PartitionedTensor:
    """A flat tensor of which this rank keeps one of n equal pieces.

    Attributes:
        piece: ``ceil(numel / n)`` elements; the last ranks' pieces are padded with zeros.
        numel: elements of the whole tensor.
        group: the n ranks.
    """

    piece: Tensor
    numel: int
    group: comm.Group

    @property
    def held(self) -> int:
        """Bytes on this rank."""
        return self.piece.nbytes

    def fetch(self) -> Tensor:
        """All-gathers the whole tensor; all ranks of the group must fetch in one order."""
        with torch.no_grad():
            whole: Tensor = comm.all_gather(self.piece, self.group.channel(_CHANNEL))
        return whole[: self.numel]


def partition(flat: Tensor, group: comm.Group) -> PartitionedTensor:
    """This rank's piece of a flat tensor that every rank of the group has. Law: ``partition(x, g).fetch() = x``, bitwise."""
    size = -(-flat.numel() // group.size)
    piece = flat.new_zeros(size)
    shard = flat[group.rank * size : (group.rank + 1) * size]
    piece[: shard.numel()].copy_(shard)
    return PartitionedTensor(piece, flat.numel(), group)


@attrs.define(eq=False)
class PartitionLog:
    """Records what a rank partitions in a forward pass, so that ranks can compare it before the backward pass.

    Attributes:
        values: dtype and size of each tensor, in order.
        sums: the sum of each tensor's bytes, if values are compared.
        compares_values: whether values are compared in addition to dtypes and sizes.
    """

    values: list[str] = attrs.field(factory=list)
    sums: list[Tensor] = attrs.field(factory=list)
    compares_values: bool = False

    def add(self, flat: Tensor) -> None:
        """Records a tensor."""
        self.values.append(f"{flat.dtype}[{flat.numel()}]")
        if self.compares_values:
            self.sums.append(flat.view(torch.uint8).sum() if flat.numel() else flat.new_zeros((), dtype=torch.int64))

    def compare(self, group: comm.Group) -> None:
        """Compares the ranks' logs and clears them. Otherwise ranks that differ would deadlock, or gather a mixture.

        Raises:
            RuntimeError: on all ranks; names those that differ from rank 0.
        """
        channel = group.channel(f"{_CHANNEL}/control")
        counts = (len(self.values), len(self.sums))
        print_ = torch.tensor([zlib.crc32("\n".join(self.values).encode()), *counts])
        prints = comm.all_gather(print_, channel, tiled=False).tolist()
        odd = [rank for rank, other in enumerate(prints) if other[:2] != prints[0][:2]]
        if odd:
            numbers = [other[1] for other in prints]
            raise _differ(group, odd, f"numbers of activations: {numbers}; here they begin {self.values[:1]}")
        if all(summed == count and summed for _, count, summed in prints):
            sums = comm.all_gather(torch.stack(self.sums).cpu(), channel, tiled=False)
            odd = [rank for rank in range(group.size) if not torch.equal(sums[rank], sums[0])]
            if odd:
                raise _differ(group, odd, "as many, as large, but with other values")
        self.clear()

    def clear(self) -> None:
        """Clears the log."""
        self.values.clear()
        self.sums.clear()


def _differ(group: comm.Group, odd: list[int], how: str) -> RuntimeError:
    return RuntimeError(
        f"remat: the ranks of group {group.name!r} partitioned other activations: ranks {odd} differ from rank 0 ({how}); "
        "partition takes a group along which activations are replicated, random draws included, and equal control flow on it"
    )
