"""Leaves in pieces on many ranks, brought to rank 0."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from functional_ds import comm
from functional_ds.interchange.gather_stream import LeafInfo, LocalShard, plan_sends, stream
from functional_ds.sharding.leaf_region import LeafRegion


def streamed(edges: list[list[int]], chunk: int) -> list[list[int]]:
    """Each rank has a leaf's elements between its edges, overlapping with the others'."""
    here = comm.world()
    held = []
    for number, cuts in enumerate(edges):
        leaf, low = LeafInfo(f"{number}", (10,), torch.float32), cuts[here.rank]
        high = 10 if here.rank == here.size - 1 else min(10, cuts[here.rank + 1] + 2)
        held.append(LocalShard(leaf, LeafRegion(leaf.shape), low, torch.arange(float(low), float(high))))
    _, sends = plan_sends(held, here)
    found = [torch.full((10,), -1.0) for _ in edges]

    def take(hop: object, values: torch.Tensor) -> None:
        found[int(hop.leaf.path)][hop.offset : hop.offset + values.numel()] = values  # type: ignore[attr-defined]

    stream(sends, held, group=here, take=take, cast=lambda leaf: leaf.dtype, chunk=chunk)
    return [x.int().tolist() for x in found]


@pytest.mark.law(37)
@given(data=st.data(), size=st.integers(1, 4), chunk=st.integers(1, 50))
def test_any_chunks_make_the_whole(data: st.DataObject, size: int, chunk: int) -> None:
    """stream ∘ cut = id, for any pieces, overlaps and chunks."""
    cuts = st.lists(st.integers(0, 10), min_size=size - 1, max_size=size - 1).map(lambda inner: [0, *sorted(inner)])
    edges = data.draw(st.lists(cuts, min_size=1, max_size=3))
    assert comm.simulate(streamed, edges, chunk, world_size=size)[0] == [list(range(10))] * len(edges)
