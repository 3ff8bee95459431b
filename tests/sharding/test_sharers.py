"""Leaves that are the same on some of the ranks alone: their segments are cut within each block."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from functional_ds import Layout, comm
from functional_ds.base.marks import mark_sharers
from functional_ds.sharding.layout import shard, unshard
from functional_ds.sharding.leaf_map import LeafMap


def blocks_of(d: int, e: int) -> tuple[tuple[int, ...], ...]:
    """e blocks of d ranks, as a mesh edp x ep has them."""
    return tuple(tuple(range(part, d * e, e)) for part in range(e))


def params(block: int, blocks: tuple[tuple[int, ...], ...]) -> dict[str, Tensor]:
    """One block's."""
    experts = torch.arange(11.0) + 100 * block
    return {"dense": torch.arange(7.0), "experts": mark_sharers(experts, blocks), "more": mark_sharers(experts[:3], blocks)}


@pytest.mark.law(1)
@given(d=st.integers(1, 4), e=st.integers(1, 4), owned=st.booleans())
def test_shards_of_a_block_are_its_leaves(d: int, e: int, owned: bool) -> None:
    """Each block's shards put together give the block's values; a leaf map has every element once a block."""
    blocks, n = blocks_of(d, e), d * e
    layouts = [Layout.of(params(block, blocks), n, owned=owned) for block in range(e)]
    assert all(layout == layouts[0] for layout in layouts)
    layout = layouts[0]
    mine = [shard(params(next(i for i, b in enumerate(blocks) if r in b), blocks), layout, r) for r in range(n)]
    for number, block in enumerate(blocks):
        others = [rank for rank in range(n) if rank not in block]
        first = [mine[rank] for rank in (*block, *others)] if not others else None
        for index, segment in enumerate(layout.segments):
            if segment.sharers is not None:
                flat = torch.cat([mine[rank][index] for rank in block])
                for slot, view in zip(segment.slots, segment.views(flat), strict=True):
                    assert torch.equal(view, params(number, blocks)[layout.paths[slot.leaf]])
        assert first is None or torch.equal(unshard(first, layout)["dense"], torch.arange(7.0))
    leaf_map = comm.symmetric(lambda: LeafMap.of_layout(layout, comm.world()), world_size=n)
    for place, leaf in enumerate(leaf_map.leaves):
        for block in blocks if leaf.path != "dense" and n > 1 else [tuple(range(n))]:
            held = sorted((s.offset, s.numel) for rank in block for s in leaf_map.shards_by_rank[rank] if s.leaf == place)
            ends = [offset + numel for offset, numel in held]
            assert [offset for offset, _ in held] == [0, *ends[:-1]]
            assert ends[-1] == leaf.numel


def test_sharers_must_be_the_ranks() -> None:
    for blocks in (((0, 1),), ((0, 1), (2,)), ((0, 1), (2, 4))):
        with pytest.raises(ValueError, match=r"the leaf 'w' is shared within the blocks .* over the ranks \[0, 1, 2, 3\]"):
            Layout.of({"w": mark_sharers(torch.ones(4), blocks)}, 4)
