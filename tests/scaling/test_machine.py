"""Machines with nodes: which links a collective takes."""

import attrs
import pytest

from functional_ds.comm.algorithms.cost import Link, Network, predict
from functional_ds.comm.record.ledger import Row
from functional_ds.comm.table.rows import ALL_GATHER, ALL_REDUCE
from functional_ds.scaling import MACHINES, Machine

H100 = MACHINES["h100"]
FLAT = attrs.evolve(H100, ranks_per_node=1, node_bandwidth=0.0)


def row(name: str, ranks: tuple[int, ...], calls: int = 2, payload: int = 8 * 10**6) -> Row:
    n = len(ranks)
    sent = (2 if name == "all_reduce" else 1) * (n - 1) * payload // n
    traffic = (ALL_REDUCE if name == "all_reduce" else ALL_GATHER).traffic
    return Row(name, "dp", n, calls=calls, bytes=calls * sent, ranks=ranks, traffic=traffic)


@pytest.mark.parametrize("name", ["all_reduce", "all_gather"])
def test_within_a_node_the_links_are_those_of_the_node(name: str) -> None:
    inside = row(name, tuple(range(8)))
    assert H100.sends(inside) == pytest.approx(FLAT.sends(inside))


@pytest.mark.parametrize("name", ["all_reduce", "all_gather"])
def test_between_nodes_they_are_slower(name: str) -> None:
    """Neighbours of other nodes send all over the links between; a given link is taken instead."""
    far = row(name, (0, 8))
    link = Link(latency=H100.link_latency, bandwidth=H100.node_bandwidth)
    assert H100.sends(far) == pytest.approx(FLAT.sends(far, link))
    assert H100.sends(far, Link(latency=0.0, bandwidth=1e30)) < 1e-9


def test_rings_share_a_nodes_links() -> None:
    """Eight devices of each of two nodes have a ring each, on an eighth of the values."""
    link = Link(latency=H100.link_latency, bandwidth=H100.node_bandwidth)
    values = row("all_reduce", tuple(range(16)), calls=1)
    sent = predict("ring", 8e6, 16, Network(link)).bytes
    hops = predict("ring", 0.0, 16, Network(link)).seconds
    assert H100.sends(values) == pytest.approx(hops + max(sent / 8 / H100.node_bandwidth, sent / H100.link_bandwidth), rel=1e-3)


def test_nodes_have_a_rank() -> None:
    with pytest.raises(ValueError, match="ranks_per_node=0 must be a whole number, at least 1"):
        Machine("m", 1.0, 1.0, 1.0, 1.0, ranks_per_node=0)
