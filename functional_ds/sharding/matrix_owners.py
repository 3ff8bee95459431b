"""Gathers each leaf on a rank that owns it, and scatters the owner's result to the leaf's shards."""

from collections.abc import Callable, Mapping, Sequence

import attrs
import torch
from torch import Tensor

from functional_ds import comm

from .leaf_map import LeafMap, LeafShard


@attrs.frozen
class MatrixOwners:
    """The owner of each leaf.

    Law: ``scatter ∘ gather = id``.

    Cost: ``gather`` and ``scatter`` are one all-to-all each, which sends Σ over leaves of (numel - the owner's shard) elements
    over all ranks. If each leaf is whole on one rank, nothing is sent.

    Attributes:
        leaf_map: the leaves and shards.
        owner: each leaf's owner: the rank with most of its elements; of several, the one that owns least so far.
    """

    leaf_map: LeafMap
    owner: tuple[int, ...]

    @staticmethod
    def choose(leaf_map: LeafMap) -> "MatrixOwners":
        """Chooses the owners, the same on all ranks.

        >>> from functional_ds import Layout
        >>> layout = Layout.of({"a": torch.ones(8), "b": torch.ones(8)}, 2)
        >>> comm.simulate(lambda: MatrixOwners.choose(LeafMap.of_layout(layout, comm.world())).owner, world_size=2)
        [(0, 1), (0, 1)]
        """
        held: list[dict[int, int]] = [{} for _ in leaf_map.leaves]
        for rank, shards in enumerate(leaf_map.shards_by_rank):
            for shard in shards:
                held[shard.leaf][rank] = shard.numel
        load = [0] * len(leaf_map.shards_by_rank)
        owners = []
        for leaf, sizes in zip(leaf_map.leaves, held, strict=True):
            owner = min(sizes, key=lambda rank: (-sizes[rank], load[rank], rank), default=0)
            load[owner] += leaf.numel
            owners.append(owner)
        return MatrixOwners(leaf_map, tuple(owners))

    def select(self, leaf_map: LeafMap) -> "MatrixOwners":
        """The owners of some of the leaves; ``leaf_map`` is their leaf map."""
        owners = {leaf.path: owner for leaf, owner in zip(self.leaf_map.leaves, self.owner, strict=True)}
        return MatrixOwners(leaf_map, tuple(owners[leaf.path] for leaf in leaf_map.leaves))

    @property
    def owned(self) -> list[int]:
        """The leaves that this rank owns."""
        return [leaf for leaf, owner in enumerate(self.owner) if owner == self.leaf_map.rank]

    def gather(self, shards: Sequence[Tensor], dtype: torch.dtype) -> dict[int, Tensor]:
        """Gathers the leaves that this rank owns, as new tensors by leaf, from all ranks' shards; all of ``dtype``."""
        order, arriving = self._by_owner(), self._arriving()
        blocks = [shards[i] for i in order]
        flat = self._exchange(blocks, self._outward(), [_total(block) for block in arriving], dtype)
        leaves = self.leaf_map.leaves
        gathered = {i: flat.new_empty(leaves[i].numel) for i in self.owned}
        there = [shard for block in arriving for shard in block]
        for shard, part in zip(there, flat.split([shard.numel for shard in there]), strict=True):
            gathered[shard.leaf][shard.offset : shard.offset + shard.numel] = part
        return {i: flat.view(leaves[i].shape) for i, flat in gathered.items()}

    def scatter(self, leaves: Mapping[int, Tensor], dtype: torch.dtype) -> list[Tensor]:
        """Scatters the leaves that the ranks own; returns this rank's flat shards; all of ``dtype``."""
        order, leaving = self._by_owner(), self._arriving()
        flats = {leaf: value.reshape(-1) for leaf, value in leaves.items()}
        blocks = [flats[s.leaf][s.offset : s.offset + s.numel] for block in leaving for s in block]
        flat = self._exchange(blocks, [_total(block) for block in leaving], self._outward(), dtype)
        parts = zip(order, flat.split([self.leaf_map.shards[i].numel for i in order]), strict=True)
        return [part for _, part in sorted(parts, key=lambda pair: pair[0])]

    def apply(self, function: Callable[..., Tensor], *rows: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
        """Computes ``function(leaf, *matrices)`` on each leaf's owner; returns this rank's shards of the results.

        Args:
            function: gets the leaf's index, and the whole leaf of each row; returns a tensor of the leaf's shape. It is not
                called for empty leaves.
            rows: this rank's shards of the same leaves, as flat tensors; each row costs a ``gather``.
            dtype: the dtype in which they are sent.
        """
        wholes = [self.gather([shard.to(dtype) for shard in row], dtype) for row in rows]
        matrices = {i: [whole[i] for whole in wholes] for i in self.owned}
        return self.scatter({i: function(i, *row) if row[0].numel() else row[0] for i, row in matrices.items()}, dtype)

    def _by_owner(self) -> list[int]:
        """This rank's shards in the order of their owners."""
        return sorted(range(len(self.leaf_map.shards)), key=lambda i: self.owner[self.leaf_map.shards[i].leaf])

    def _outward(self) -> list[int]:
        """How many elements of this rank's shards each rank owns."""
        shards = self.leaf_map.shards
        return [_total([s for s in shards if self.owner[s.leaf] == rank]) for rank in range(len(self.leaf_map.shards_by_rank))]

    def _arriving(self) -> list[list[LeafShard]]:
        """Each rank's shards of the leaves that this rank owns."""
        rank = self.leaf_map.rank
        return [[s for s in shards if self.owner[s.leaf] == rank] for shards in self.leaf_map.shards_by_rank]

    def _exchange(self, blocks: list[Tensor], sends: list[int], receives: list[int], dtype: torch.dtype) -> Tensor:
        group = self.leaf_map.group
        device = group.world.device if group is not None else None
        flat = torch.cat(blocks) if blocks else torch.empty(0, dtype=dtype, device=device)
        held = ((rank, s.leaf) for rank, shards in enumerate(self.leaf_map.shards_by_rank) for s in shards)
        if group is None or all(self.owner[leaf] == rank for rank, leaf in held):
            return flat
        received: Tensor = comm.all_to_all(flat, group, input_splits=sends, output_splits=receives)
        return received


def _total(shards: Sequence[LeafShard]) -> int:
    return sum(shard.numel for shard in shards)
