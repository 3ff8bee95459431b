"""The alpha-beta model: law 39's formulas, the picture they give, and counts that add up.

That executed messages equal these counts is tested in test_algorithms.py.
"""

import math
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from functional_ds.comm.algorithms.cost import ALGORITHMS, Cost, Link, Load, Network, best, predict, sent

FLAT = Network(Link(latency=3e-6, bandwidth=2e9))
SUMMIT = Network(Link(20e-6, 12.5e9), Link(0.4e-6, 50e9), ranks_per_node=6)
ON_FLAT = [name for name in ALGORITHMS if name != "hierarchical"]


@pytest.mark.law(39)
@given(st.integers(2, 16), st.floats(0, 1e10))
def test_the_formulas(levels: int, nbytes: float) -> None:
    """Of N bytes on n = 2^levels ranks, as in the books."""
    n, alpha, beta = 2**levels, FLAT.across.latency, 1 / FLAT.across.bandwidth
    expected = {
        "ring": 2 * (n - 1) * alpha + 2 * (n - 1) / n * nbytes * beta,
        "tree": 2 * math.log2(n) * alpha + 4 * nbytes * beta,
        "double_tree": 2 * math.log2(n) * alpha + 2 * nbytes * beta,
        "recursive_doubling": math.log2(n) * (alpha + nbytes * beta),
        "halving_doubling": 2 * math.log2(n) * alpha + 2 * (n - 1) / n * nbytes * beta,
    }
    assert {name: predict(name, nbytes, n, FLAT).seconds for name in ON_FLAT} == pytest.approx(expected)


@given(st.integers(1, 40), st.integers(1, 40), st.floats(0, 1e10))
def test_two_levels_are_a_ring_inside_and_two_trees_across(nodes: int, m: int, nbytes: float) -> None:
    network = Network(SUMMIT.across, SUMMIT.inside, ranks_per_node=m)
    inside = predict("ring", nbytes, m, Network(SUMMIT.inside))
    across = predict("double_tree", nbytes / m, nodes, Network(SUMMIT.across))
    assert predict("hierarchical", nbytes, nodes * m, network).seconds == pytest.approx(inside.seconds + across.seconds)


@given(st.integers(1, 300), st.integers(1, 20), st.floats(0, 1e10), st.sampled_from(ON_FLAT))
def test_levels_of_one_kind_are_no_levels(n: int, m: int, nbytes: float, name: str) -> None:
    """Where all links are alike, or all ranks on one node, it does not matter what a node is."""
    flat = predict(name, nbytes, n, FLAT)
    alike = predict(name, nbytes, n, Network(FLAT.across, ranks_per_node=m))
    together = predict(name, nbytes, n, Network(SUMMIT.across, FLAT.across, ranks_per_node=n))
    for cost in (alike, together):
        assert (cost.messages, cost.bytes) == (flat.messages, pytest.approx(flat.bytes))
        assert cost.seconds == pytest.approx(flat.seconds)
    assert together.across == Load()


# -- which hops cross between nodes: counted one by one ------------------------------------------------------------------


def crossings(pairs: list[tuple[int, int]], m: int) -> int:
    return sum(a // m != b // m for a, b in pairs)


@given(st.integers(2, 60), st.integers(1, 12))
def test_hops_around_a_ring(n: int, m: int) -> None:
    """A piece makes 2 (n - 1) hops from where it starts; some piece makes the most that cross."""
    around = [(rank, (rank + 1) % n) for rank in range(n)] * 3
    far = max(crossings(around[start : start + 2 * (n - 1)], m) for start in range(n))
    cost = predict("ring", 1.0, n, Network(SUMMIT.across, SUMMIT.inside, ranks_per_node=m))
    assert (cost.inside.messages, cost.across.messages) == (2 * (n - 1) - far, far)


@given(st.integers(1, 60), st.integers(1, 12))
def test_levels_of_pairs(n: int, m: int) -> None:
    """A level is inside if all its pairs are."""
    bits = [1 << level for level in range(n.bit_length() - 1)]
    p = 1 << len(bits)
    levels = [crossings([(rank, rank ^ bit) for rank in range(p)], m) > 0 for bit in bits]
    extra = 2 if n > p else 0
    network = Network(SUMMIT.across, SUMMIT.inside, ranks_per_node=m)
    cost = predict("recursive_doubling", 1.0, n, network)
    assert cost.across.messages == sum(levels) + (extra if n > m else 0)
    assert cost.messages == len(bits) + extra
    cost = predict("halving_doubling", 1.0, n, network)
    assert cost.across.messages == 2 * sum(levels) + (extra if n > m else 0)
    far = sum(2 * bit / p for bit, crosses in zip(bits, levels, strict=True) if crosses)
    assert cost.across.bytes == pytest.approx(far + (extra if n > m else 0))


def branches(n: int) -> list[list[tuple[int, int]]]:
    """Each rank's way to the root, in the tree in rank order: the lowest bit moves up, past ranks that are not there."""

    def parent(rank: int) -> int:
        bit = rank & -rank
        above = (rank ^ bit) | (bit << 1)
        return above if above < n else rank ^ bit

    def branch(rank: int) -> list[tuple[int, int]]:
        return [(rank, parent(rank)), *branch(parent(rank))] if rank else []

    return [branch(rank) for rank in range(n)]


@given(st.integers(1, 100), st.integers(1, 12))
def test_no_branch_crosses_more_often(n: int, m: int) -> None:
    """Between nodes of a power of two of ranks, of which a power of two is full, some branch crosses so often."""
    network = Network(SUMMIT.across, SUMMIT.inside, ranks_per_node=m)
    ways = branches(n)
    backwards = [[(n - 1 - a, n - 1 - b) for a, b in way] for way in ways] if n % 2 == 0 else []
    assert 2 * max(len(way) for way in ways) == predict("tree", 1.0, n, network).messages
    for name, trees in (("tree", ways), ("double_tree", ways + backwards)):
        far = 2 * max(crossings(way, m) for way in trees)
        bound = predict(name, 1.0, n, network).across.messages
        assert far <= bound
        if n & (n - 1) == m & (m - 1) == 0:
            assert far == bound


# -- counts --------------------------------------------------------------------------------------------------------------


@pytest.mark.law(39)
@given(st.integers(1, 200), st.integers(1, 5))
def test_trees_send_each_chunk_once_over_each_edge_each_way(n: int, chunks: int) -> None:
    """A tree has n - 1 edges; of two trees, every rank has at most 4 neighbours, and of one, some rank has 3."""
    for name, trees, most in (("tree", 1, 3), ("double_tree", 2, 4)):
        counts = [sent(name, 60 * chunks, n, rank, chunks=chunks) for rank in range(n)]
        assert sum(count.messages for count in counts) == 2 * (n - 1) * trees * chunks
        assert sum(count.elements for count in counts) == 2 * (n - 1) * 60 * chunks
        if n > 3:
            assert max(count.messages for count in counts) == most * chunks


@pytest.mark.law(39)
@given(st.integers(0, 8), st.integers(0, 5))
def test_the_busiest_rank_sends_the_formulas_bytes(levels: int, k: int) -> None:
    """Where every rank takes part in every round: what a rank sends is what passes one after another."""
    n = 2**levels
    for name in ("ring", "recursive_doubling", "halving_doubling"):
        cost = predict(name, n * k, n, FLAT)
        counts = [sent(name, n * k, n, rank) for rank in range(n)]
        assert {(count.messages, count.elements) for count in counts} == {(cost.messages, cost.bytes)}


@given(st.integers(0, 100), st.integers(1, 20), st.data())
def test_two_levels_send_what_their_parts_send(numel: int, nodes: int, data: st.DataObject) -> None:
    m = data.draw(st.integers(1, 8))
    rank = data.draw(st.integers(0, nodes * m - 1))
    piece = -(-numel // m)
    inside, across = sent("ring", numel, m, rank % m), sent("double_tree", piece, nodes, rank // m)
    assert sent("hierarchical", numel, nodes * m, rank, ranks_per_node=m) == inside + across


# -- the picture ---------------------------------------------------------------------------------------------------------


def test_a_ring_of_24756_ranks_takes_180_ms_and_trees_less_than_one() -> None:
    """4,126 nodes of 6 ranks."""
    seconds = {name: predict(name, 8, 24_756, SUMMIT).seconds for name in ALGORITHMS}
    assert 0.175 < seconds.pop("ring") < 0.185
    assert all(0.2e-3 < each < 1.2e-3 for each in seconds.values())


@pytest.mark.parametrize("name", ON_FLAT)
def test_latency_grows_linearly_around_a_ring_and_else_logarithmically(name: str) -> None:
    latencies = [predict(name, 0, 2**levels, FLAT).seconds for levels in range(10, 17)]
    for one, double in pairwise(latencies):
        if name == "ring":
            assert 1.99 < double / one < 2.01
        else:
            assert double - one == pytest.approx((1 if name == "recursive_doubling" else 2) * FLAT.across.latency)


def test_small_values_go_by_recursive_doubling_and_large_ones_by_what_sends_least() -> None:
    assert best(100, 1024, FLAT) == "recursive_doubling"
    assert best(1e10, 1024, FLAT) == "halving_doubling"
    assert best(1e9, 24_756, SUMMIT) == "hierarchical"
    assert best(1e9, 1, FLAT) == "ring"  # all cost nothing: the first


@given(st.integers(1, 100), st.floats(0, 1e9), st.integers(1, 8))
def test_the_best_is_the_least(n: int, nbytes: float, m: int) -> None:
    """Nothing beats it; hierarchical takes part where the nodes are full."""
    network = Network(SUMMIT.across, SUMMIT.inside, ranks_per_node=m)
    chosen = predict(best(nbytes, n, network), nbytes, n, network)
    for name in ALGORITHMS if n % m == 0 else ON_FLAT:
        assert chosen.seconds <= predict(name, nbytes, n, network).seconds


@pytest.mark.parametrize("name", ALGORITHMS)
def test_one_rank_costs_nothing(name: str) -> None:
    assert predict(name, 1e6, 1, FLAT) == Cost(Load(), Load(), 0.0)
    assert sent(name, 100, 1, 0).elements == sent(name, 100, 1, 0).messages == 0


# -- what is refused -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: Link(-1e-6, 1e9), r"latency.*-1e-06"),
        (lambda: Link(1e-6, 0), r"bandwidth.*0"),
        (lambda: Link(math.nan, 1e9), r"latency.*nan"),
        (lambda: Network(FLAT.across, ranks_per_node=0), r"ranks_per_node.*0"),
        (lambda: predict("star", 1, 2, FLAT), r"algorithm='star' is unknown; use one of ring, tree"),
        (lambda: predict("ring", 1, 0, FLAT), r"n=0: a group has at least one rank"),
        (lambda: predict("ring", -1, 2, FLAT), r"nbytes=-1: a value has 0 bytes or more"),
        (lambda: predict("ring", math.nan, 2, FLAT), r"nbytes=nan"),
        (lambda: predict("hierarchical", 1, 8, SUMMIT), r"n=8 is not a multiple of ranks_per_node=6"),
        (lambda: best(1, 0, FLAT), r"n=0"),
        (lambda: best(-1, 1, FLAT), r"nbytes=-1"),
        (lambda: sent("ring", 1, 2, 2), r"rank=2 is out of range for n=2; ranks are 0..1"),
        (lambda: sent("ring", -1, 2, 0), r"numel=-1"),
        (lambda: sent("ring", 1, 2, 0, chunks=2), r"chunks=2 for ring"),
        (lambda: sent("tree", 1, 2, 0, chunks=0), r"chunks=0 for tree"),
        (lambda: sent("hierarchical", 1, 2, 0, ranks_per_node=0), r"ranks_per_node=0: a node has"),
    ],
)
def test_bad_input_is_refused(call: Any, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        call()
