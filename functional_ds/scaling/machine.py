"""Machines as a few numbers: the speed of computation, memory and links, and memory capacity."""

from collections.abc import Iterable, Mapping
from math import isfinite
from typing import Any

import attrs

from functional_ds.comm.algorithms.cost import Link, Network, predict
from functional_ds.comm.record.ledger import Row
from functional_ds.dry_run.operations import WORK_KINDS, SizedOperation

FACTORS = (*WORK_KINDS, "starts", "communicate")

_AGAIN = 2.5  # starts that a recomputed operation takes: its hooks on saved tensors are Python, in both passes


def _all_factors(given: Any) -> dict[str, float]:
    """Those given, and 1 for the rest."""
    if not isinstance(given, Mapping) or given.keys() - set(FACTORS):
        raise ValueError(f"factors={given!r} should have numbers by {', '.join(FACTORS)}")
    wrong = [name for name, value in given.items() if not _is_number(value) or value < 0]
    if wrong:
        raise ValueError(f"factors: {wrong[0]}={given[wrong[0]]!r} must be a number, 0 or above")
    return {name: float(given.get(name, 1.0)) for name in FACTORS}


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and isfinite(value)


def _above_0(_: object, field: Any, value: Any) -> None:
    if not _is_number(value) or value <= 0:
        raise ValueError(f"{field.name}={value!r} must be a number above 0")


def _not_negative(_: object, field: Any, value: Any) -> None:
    if not _is_number(value) or value < 0:
        raise ValueError(f"{field.name}={value!r} must be a number, 0 or above")


@attrs.frozen
class Machine:
    """A rank's device and its links; all ranks are the same.

    Attributes:
        name: for tables.
        flops: bf16 matmul operations per second.
        flops_fp32: the same in fp32.
        memory_bandwidth: bytes per second of the device's memory, reads and writes together.
        link_bandwidth: bytes per second that a rank sends, in one direction, to another rank of its node.
        link_latency: seconds of an empty message.
        operation_latency: seconds that the host takes to start an operation of an eager step: Python, autograd and modules.
        node_latency: the same for a node of a graph; None if not measured, for ``start_seconds``.
        overlaps: the fraction of a collective's time in which the rank can compute; 1 if links move bytes by themselves, 0 if
            the computing cores do. Graph timelines use it; a planner only for what crosses nodes.
        memory: bytes; 0 if unknown.
        device: the type, "cuda" or "cpu".
        page_bandwidth: bytes per second of new pages from the operating system; 0 if an allocator keeps its memory.
        factors: by category of operation, ``"starts"`` and ``"communicate"``: measured time relative to these rates, from
            microbenchmarks and fits; 1 by default. The factor of products is one over their efficiency.
        ranks_per_node: how many consecutive ranks share a node.
        node_bandwidth: bytes per second that a rank sends to other nodes while all of its node do; 0 if all links are equal.
    """

    name: str
    flops: float = attrs.field(validator=_above_0)
    flops_fp32: float = attrs.field(validator=_above_0)
    memory_bandwidth: float = attrs.field(validator=_above_0)
    link_bandwidth: float = attrs.field(validator=_above_0)
    link_latency: float = attrs.field(default=5e-6, validator=_not_negative)
    operation_latency: float = attrs.field(default=5e-6, validator=_not_negative)
    memory: int = attrs.field(default=0, validator=_not_negative)
    device: str = "cuda"
    page_bandwidth: float = attrs.field(default=0.0, validator=_not_negative)
    node_latency: float | None = attrs.field(default=None, validator=attrs.validators.optional(_not_negative))
    overlaps: float = 1.0
    factors: Mapping[str, float] = attrs.field(factory=dict, converter=_all_factors, hash=False)
    ranks_per_node: int = 1
    node_bandwidth: float = attrs.field(default=0.0, validator=_not_negative)

    def __attrs_post_init__(self) -> None:
        if not _is_number(self.overlaps) or not 0 <= self.overlaps <= 1:
            raise ValueError(f"overlaps={self.overlaps!r} must be a number from 0 to 1")
        if type(self.ranks_per_node) is not int or self.ranks_per_node < 1:
            raise ValueError(f"ranks_per_node={self.ranks_per_node!r} must be a whole number, at least 1")
        if self.device not in ("cpu", "cuda"):
            raise ValueError(f"device={self.device!r} is neither cuda nor cpu")

    def perfect_seconds(self, work: Mapping[SizedOperation, int], sent: Iterable[Row]) -> dict[str, float]:
        """Seconds of a step by the names of ``FACTORS``, with all factors 1.

        An operation takes the longer of computing and of moving its bytes (the roofline of Williams, Waterman & Patterson
        2009). On the CPU a large result also takes pages from the operating system, which clears them first.

        Args:
            work: how often each operation runs.
            sent: the ledger's rows.

        >>> machine = Machine("m", flops=1e3, flops_fp32=1e2, memory_bandwidth=100.0, link_bandwidth=1.0)
        >>> work = {SizedOperation("products", flops=100, bytes=10): 2, SizedOperation("copies", bytes=10): 1}
        >>> found = machine.perfect_seconds(work, ())
        >>> found["products"], found["copies"]
        (2.0, 0.1)
        """
        seconds = dict.fromkeys(WORK_KINDS, 0.0)
        for operation, count in work.items():
            rate = self.flops if operation.half else self.flops_fp32
            seconds[operation.kind] += count * max(operation.flops / rate, operation.bytes / self.memory_bandwidth)
            seconds["pages"] += count * operation.pages / self.page_bandwidth if self.page_bandwidth else 0.0
        starts = sum(count * (_AGAIN if operation.again else 1) for operation, count in work.items())
        return seconds | {
            "starts": starts * self.operation_latency,
            "communicate": sum(self.sends(row) for row in sent if row.size > 1),
        }

    def scaled(self, perfect: Mapping[str, float]) -> dict[str, float]:
        """These seconds times their factors; their sum is the step's time.

        If a device computes concurrently with the host, ``"starts"`` is how much longer the host takes than the device.
        """
        seconds = {name: self.factors[name] * perfect[name] for name in FACTORS}
        if self.device != "cpu":
            seconds["starts"] = max(0.0, seconds["starts"] - sum(seconds[kind] for kind in WORK_KINDS))
        return seconds

    def operation_seconds(self, operation: SizedOperation) -> float:
        """Of an operation on the device, without its start."""
        seconds = self.perfect_seconds({operation: 1}, ())
        return sum(self.factors[kind] * seconds[kind] for kind in WORK_KINDS)

    @property
    def start_seconds(self) -> float:
        """Of the host, to start an operation."""
        return self.factors["starts"] * self.operation_latency

    @property
    def node_seconds(self) -> float:
        """Of the host, to start a node of a graph."""
        return self.start_seconds if self.node_latency is None else self.node_latency

    @property
    def host_computes(self) -> bool:
        """Whether the host waits for each operation, because it is the device."""
        return self.device == "cpu"

    @property
    def network(self) -> Network:
        """Its links, inside nodes and between them."""
        inside = Link(latency=self.link_latency, bandwidth=self.link_bandwidth)
        across = Link(latency=self.link_latency, bandwidth=self.node_bandwidth or self.link_bandwidth)
        return Network(across, inside, self.ranks_per_node)

    def crosses(self, row: Row) -> bool:
        """Whether a row's ranks are on several nodes, with another link between them."""
        return self.node_bandwidth > 0 and len({rank // self.ranks_per_node for rank in row.ranks}) > 1

    def collective_seconds(self, row: Row, link: Link | None = None) -> float:
        """Of a ledger's row on a link; None for the machine's own."""
        return self.factors["communicate"] * self.sends(row, link)

    def held_seconds(self, row: Row, link: Link | None = None) -> float:
        """Of these, those in which the rank cannot compute: on a CPU its cores move all bytes, and links between nodes wait."""
        if link is None and self.host_computes and self.crosses(row):
            link = self.network.inside
        return (1 - self.overlaps) * self.collective_seconds(row, link)

    def sends(self, row: Row, link: Link | None = None) -> float:
        """Seconds of a ledger's row: rings, one call after another; other collectives send their bytes once.

        Between the nodes of CPUs, whose collectives are messages over Gloo: all bytes at the speed inside nodes, or those that
        leave the node over the link between them, whichever takes longer.

        >>> cpu = Machine("m", flops=1.0, flops_fp32=1.0, memory_bandwidth=1.0, link_bandwidth=1e9, device="cpu")
        >>> hosts = attrs.evolve(cpu, link_latency=0.0, ranks_per_node=2, node_bandwidth=1e6)
        >>> hosts.sends(Row("all_gather", "world", 4, calls=1, bytes=3 * 10**6, ranks=(0, 1, 2, 3)))
        2.0
        """
        if link is None and self.host_computes and self.crosses(row):
            leaving = row.leaving(self.ranks_per_node) / self.node_bandwidth
            return max(leaving, self.sends(row, self.network.inside))
        beside = sum(rank // self.ranks_per_node == row.ranks[0] // self.ranks_per_node for rank in row.ranks) or None
        if row.traffic.passes == 2 and row.calls:
            values = row.bytes * row.size / max(1, 2 * (row.size - 1))
            return self.reduces(values, row.size, beside=beside, calls=row.calls, link=link)
        link = link or (self.network.inside if beside in (None, row.size) else self.network.across)
        return row.calls * max(1, row.size - 1) * link.latency + row.bytes / link.bandwidth

    def reduces(
        self, nbytes: float, ranks: int, *, beside: int | None = None, calls: int = 1, link: Link | None = None
    ) -> float:
        """Seconds of ring all-reduces, one for each participating device of a node, each on a separate link.

        Args:
            nbytes: of all values together.
            ranks: that take part.
            beside: how many of them share a node; by default all of a node.
            calls: how many all-reduces, one after another.
            link: between all ranks; None for the machine's own.

        >>> MACHINES["a100-80gb"].reduces(1e9, 8) < MACHINES["a100-80gb"].reduces(1e9, 8, beside=1)
        True
        """
        network = self.network if link is None else Network(link)
        network = attrs.evolve(network, ranks_per_node=min(beside or network.ranks_per_node, network.ranks_per_node))
        volume, beside = predict("ring", nbytes, ranks, network).bytes, network.ranks_per_node
        latency = calls * predict("ring", 0.0, ranks, network).seconds
        if ranks <= beside:
            return latency + volume / network.inside.bandwidth
        return latency + max(volume / beside / network.across.bandwidth, (beside > 1) * volume / network.inside.bandwidth)


# Data sheets' dense rates; links in one direction, for each device: NVLink within DGX nodes, InfiniBand between them.
# Latencies are assumed.
MACHINES = {
    name: Machine(shown, half, single, memory, link, memory=size * 10**9, ranks_per_node=node, node_bandwidth=across)
    for name, shown, half, single, memory, link, size, node, across in (
        ("a100-40gb", "A100 40 GB", 312e12, 156e12, 1.555e12, 300e9, 40, 8, 25e9),
        ("a100-80gb", "A100 80 GB", 312e12, 156e12, 2.039e12, 300e9, 80, 8, 25e9),
        ("h100", "H100 SXM 80 GB", 989e12, 494e12, 3.35e12, 450e9, 80, 8, 50e9),
        ("h200", "H200 SXM 141 GB", 989e12, 494e12, 4.8e12, 450e9, 141, 8, 50e9),
        ("v100", "V100 32 GB", 125e12, 15.7e12, 0.9e12, 150e9, 32, 16, 6.25e9),
    )
}
