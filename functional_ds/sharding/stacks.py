"""Stacks of matrices, such as the experts of a mixture: leaves [E, a, b], treated as E matrices."""

import math
from collections.abc import Collection

import attrs

from .leaf_map import LeafMap, LeafShard, LeafSpec


def unstacked(leaf_map: LeafMap, stacks: Collection[int]) -> LeafMap:
    """The leaf map in which each matrix of a stack is a leaf ``path[number]``; the tensors are the same.

    Numbers count the experts of all ranks, so a matrix has the same name on any rank.

    Args:
        leaf_map: the leaves.
        stacks: the indices of the leaves that are stacks.

    >>> import torch
    >>> found = unstacked(LeafMap.of({"w": torch.ones(2, 3, 4)}), [0])
    >>> [leaf.path for leaf in found.leaves], [shard.start for shard in found.shards]
    (['w[0]', 'w[1]'], [0, 12])
    """
    leaves: list[LeafSpec] = []
    first: dict[tuple[int, int], int] = {}  # leaf and slice -> the new index of the slice's first matrix
    for index, leaf in enumerate(leaf_map.leaves):
        if index not in stacks:
            first[index, 0] = len(leaves)
            leaves.append(leaf)
            continue
        count = leaf.shape[0]
        for which in [_own(leaf)] if leaf.sharers is None else range(len(leaf.sharers)):
            first[index, which] = len(leaves)
            leaves += [_matrix(leaf, which * count + place) for place in range(count)]
    shards = tuple(
        tuple(part for shard in held for part in _parts(leaf_map, shard, rank, first, shard.leaf in stacks))
        for rank, held in enumerate(leaf_map.shards_by_rank)
    )
    return attrs.evolve(leaf_map, leaves=tuple(leaves), shards_by_rank=shards)


def _own(leaf: LeafSpec) -> int:
    """The index of this rank's slice along dim 0."""
    return next((cut.rank for cut in leaf.slices if cut.dim == 0), 0)


def _matrix(leaf: LeafSpec, number: int) -> LeafSpec:
    shape = leaf.shape[1:]
    return attrs.evolve(leaf, path=f"{leaf.path}[{number}]", shape=shape, numel=math.prod(shape), slices=(), stack=leaf.path)


def _parts(
    leaf_map: LeafMap, shard: LeafShard, rank: int, first: dict[tuple[int, int], int], is_stack: bool
) -> list[LeafShard]:
    """A shard, split at the boundaries of matrices."""
    leaf = leaf_map.leaves[shard.leaf]
    if not is_stack:
        return [attrs.evolve(shard, leaf=first[shard.leaf, 0])]
    blocks = leaf.sharers
    which = _own(leaf) if blocks is None else next(number for number, block in enumerate(blocks) if rank in block)
    size, stop, parts = math.prod(leaf.shape[1:]), shard.offset + shard.numel, []
    for number in range(shard.offset // size, -(-stop // size)) if size else ():
        low, high = max(shard.offset, number * size), min(stop, (number + 1) * size)
        place = first[shard.leaf, which] + number
        parts.append(LeafShard(place, low - number * size, shard.tensor, shard.start + low - shard.offset, high - low))
    return parts
