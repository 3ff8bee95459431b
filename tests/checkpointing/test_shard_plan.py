"""Every element once, by somebody who has it, and nobody much more than the others."""

from itertools import chain, pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from functional_ds.checkpointing.shard_plan import (
    ShardMetadata,
    assign_writes,
    metadata_of,
    replicated,
    with_fingerprints,
)
from functional_ds.sharding.leaf_region import LeafRegion
from functional_ds.state_dict.describe import TensorShard
from functional_ds.state_dict.fingerprint import _row_sums, fingerprints
from functional_ds.state_dict.matching import per_rank_name


@st.composite
def holdings(draw: st.DrawFn) -> tuple[int, list[list[TensorShard]]]:
    """A flat tensor, and on each rank shards of it, overlapping or not, which together cover it."""
    total, ranks = draw(st.integers(0, 30)), draw(st.integers(1, 4))
    cuts = sorted({0, total, *draw(st.lists(st.integers(0, total), max_size=5))})
    pieces = [(low, high, draw(st.integers(0, ranks - 1))) for low, high in pairwise(cuts)]
    pieces += [(*sorted(draw(st.tuples(st.integers(0, total), st.integers(0, total)))), draw(st.integers(0, ranks - 1)))
               for _ in range(draw(st.integers(0, 4)))]  # fmt: skip
    values = torch.arange(float(total))
    found: list[list[TensorShard]] = [[] for _ in range(ranks)]
    for low, high, rank in pieces or [(0, 0, 0)]:
        found[rank].append(TensorShard("x", LeafRegion((total,)), low, values[low:high]))
    return total, found


def described(ranks: list[list[TensorShard]]) -> list[list[ShardMetadata]]:
    """All ranks' metadata, with fingerprints of copies."""
    found = [metadata_of(held) for held in ranks]
    indices = replicated(found)
    return [
        with_fingerprints(o, own, numbers=fingerprints([held[i].view for i in own]))
        for o, own, held in zip(found, indices, ranks, strict=True)
    ]


@given(holdings())
def test_every_element_is_written_once(case: tuple[int, list[list[TensorShard]]]) -> None:
    """The tasks are disjoint and cover the tensor, and each is for elements that its rank has."""
    total, ranks = case
    tasks = assign_writes(described(ranks))
    written = torch.full((total,), -1.0)
    for own, held in zip(tasks, ranks, strict=True):
        for task in own:
            start = task.offset - held[task.index].offset
            assert start >= 0
            part = held[task.index].view[start : start + task.numel]
            assert part.numel() == task.numel
            assert (written[task.offset : task.offset + task.numel] == -1).all()
            written[task.offset : task.offset + task.numel] = part
    assert torch.equal(written, torch.arange(float(total)))


@given(st.lists(st.integers(1, 1 << 22), min_size=8, max_size=30), st.integers(2, 4))
def test_copies_are_shared_out_evenly(sizes: list[int], ranks: int) -> None:
    """Where all ranks have everything, no rank writes more than its part and one of the pieces that are not cut up."""
    own = [ShardMetadata(f"t{i}", LeafRegion((n,)), "float32", 4, 0, n, False, 0) for i, n in enumerate(sizes)]
    load = [sum(4 * task.numel for task in tasks) for tasks in assign_writes([own] * ranks)]
    assert sum(load) == 4 * sum(sizes)
    assert max(load) <= 4 * sum(sizes) / ranks + (4 << 20) + 4 * ranks * len(sizes)


def test_copies_that_differ_are_all_written() -> None:
    def rank(value: float, *, per_rank: bool = False) -> list[TensorShard]:
        same = torch.arange(3.0)
        return [
            TensorShard.whole("same", same),
            TensorShard.whole("other", torch.full((10000,), value), per_rank=per_rank),
        ]

    def names(*ranks: Any) -> list[list[str]]:
        return [[task.name for task in own] for own in assign_writes(described(list(ranks)))]

    both = [[per_rank_name("other", 0)], ["same", per_rank_name("other", 1)]]
    assert [sorted(own) for own in names(rank(0.0), rank(1.0))] in (
        [sorted(own) for own in both],
        [["other@0", "same"], ["other@1"]],
    )
    assert sorted(chain(*names(rank(1.0), rank(1.0)))) == ["other", "same"]
    assert sorted(chain(*names(rank(1.0, per_rank=True), rank(1.0, per_rank=True)))) == ["other@0", "other@1", "same"]


def test_a_rank_without_anything() -> None:
    one: list[Tensor] = [torch.ones(2)]
    assert assign_writes([[], metadata_of([TensorShard.whole("a", one[0])])])[0] == []


KINDS = [torch.float32, torch.bfloat16, torch.float64, torch.complex128, torch.uint8]


@given(st.integers(4097, 40000), st.sampled_from(KINDS), st.data())
def test_copies_that_differ_in_one_element_differ(numel: int, dtype: torch.dtype, data: st.DataObject) -> None:
    """Wherever it is: each rank then keeps its own."""
    place = data.draw(st.integers(0, numel - 1))
    one = torch.arange(numel).to(dtype)
    other = one.clone()
    assert fingerprints([one]) == fingerprints([other])
    assert torch.equal(_row_sums(one), _row_sums(other))
    other[place] += 1 if dtype != torch.bfloat16 else other[place] + 1
    assert fingerprints([one]) != fingerprints([other])
    assert not torch.equal(_row_sums(one), _row_sums(other))
    both = assign_writes(described([[TensorShard.whole("x", one)], [TensorShard.whole("x", other)]]))
    assert [task.name for own in both for task in own] == [per_rank_name("x", 0), per_rank_name("x", 1)]


@pytest.mark.parametrize("change", [lambda x: -x, lambda x: 2 * x, lambda x: x.flip(0), lambda x: x.roll(512), lambda x: 0 * x])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64])
@pytest.mark.parametrize("random", [False, True])
def test_copies_that_differ_in_every_element_differ(change: Any, dtype: torch.dtype, random: bool) -> None:
    """Also where differences of bits cancel out in plain sums."""
    generator = torch.Generator().manual_seed(0)
    one = torch.randn(1 << 18, generator=generator).to(dtype) if random else torch.full((1 << 18,), 0.5, dtype=dtype)
    if torch.equal(change(one), one):
        return
    assert fingerprints([one]) != fingerprints([change(one)])
    assert not torch.equal(_row_sums(one), _row_sums(change(one)))
