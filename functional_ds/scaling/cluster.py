"""``Cluster``: devices, their memory, and the links between them, as numbers."""

from typing import Any

import attrs

from functional_ds.comm.algorithms.cost import Link, Network, predict

__all__ = ["CLUSTERS", "Cluster"]

_positive: Any = attrs.validators.gt(0)


@attrs.frozen(kw_only=True)
class Cluster:
    """Equal devices on equal nodes.

    Attributes:
        name: for tables.
        flops: operations a second of a device's 16-bit products, from its data sheet.
        efficiency: the part of these that large products reach; measured, or fitted to one run.
        memory: bytes of a device.
        memory_bandwidth: bytes a second.
        network: links of one device inside its node and between nodes.
    """

    name: str
    flops: float = attrs.field(validator=_positive)
    efficiency: float = attrs.field(default=1.0, validator=[_positive, attrs.validators.le(1)])
    memory: int = attrs.field(validator=_positive)
    memory_bandwidth: float = attrs.field(validator=_positive)
    network: Network

    @property
    def rate(self) -> float:
        """Operations a second that products reach."""
        return self.flops * self.efficiency

    def reduces(self, nbytes: float, ranks: int, *, apart: int = 1, calls: int = 1) -> float:
        """Seconds of all-reduces by rings: one for each device of a node that takes part, each on a link of its own.

        Args:
            nbytes: of all values together.
            ranks: that take part.
            apart: the distance between two of them; 1 for neighbours.
            calls: how many all-reduces, one after another.

        >>> CLUSTERS["a100"].reduces(1e9, 8) < CLUSTERS["a100"].reduces(1e9, 8, apart=8)
        True
        """
        beside = max(1, self.network.ranks_per_node // apart)
        network = attrs.evolve(self.network, ranks_per_node=beside)
        latency = calls * predict("ring", 0.0, ranks, network).seconds
        if ranks <= beside:
            return latency + predict("ring", nbytes, ranks, network).bytes / network.inside.bandwidth
        volume = predict("ring", nbytes, ranks, network).bytes
        return latency + max(
            volume / beside / network.across.bandwidth, volume / network.inside.bandwidth if beside > 1 else 0.0
        )


def _cluster(name: str, flops: float, memory: int, bandwidth: float, inside: float, across: float, *, node: int = 8) -> Cluster:
    network = Network(Link(latency=5e-6, bandwidth=across), Link(latency=5e-6, bandwidth=inside), node)
    return Cluster(name=name, flops=flops, memory=memory * 10**9, memory_bandwidth=bandwidth, network=network)


# Data sheets' dense rates; links in one direction, for each device. Latencies are assumed.
CLUSTERS = {
    "v100": _cluster("V100 32 GB, DGX-2", 125e12, 32, 0.9e12, 150e9, 6.25e9, node=16),
    "a100": _cluster("A100 80 GB, DGX A100", 312e12, 80, 2.039e12, 300e9, 25e9),
    "h100": _cluster("H100 80 GB, DGX H100", 989e12, 80, 3.35e12, 450e9, 50e9),
}
