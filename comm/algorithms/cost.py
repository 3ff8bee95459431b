"""Costs of all-reduce algorithms: times by the alpha-beta model, and exact counts of what each rank sends.

A message of m bytes takes latency + m / bandwidth = α + mβ seconds. Each rank can send and receive one message at a time, and
links are not shared.

The formulas are those of Thakur, Rabenseifner & Gropp 2005 (recursive doubling, halving-doubling), Patarasuk & Yuan 2009
(ring) and Sanders, Speck & Träff 2009 (two trees).
"""

from collections.abc import Callable
from typing import Any

import attrs

from functional_ds import comm

__all__ = ["ALGORITHMS", "Cost", "Link", "Load", "Network", "Sent", "best", "counted", "predict", "sent"]


@attrs.frozen
class Link:
    """A link between two ranks.

    Attributes:
        latency: α, seconds for an empty message.
        bandwidth: 1/β, bytes per second in each direction.

    >>> Link(latency=1e-6, bandwidth=1e9).seconds(Load(messages=2, bytes=4000.0))
    6e-06
    """

    latency: float = attrs.field(validator=attrs.validators.ge(0))
    bandwidth: float = attrs.field(validator=attrs.validators.gt(0))

    def seconds(self, load: "Load") -> float:
        """The time of the load in seconds, one message after another."""
        return load.messages * self.latency + load.bytes / self.bandwidth


@attrs.frozen
class Network:
    """A network of nodes, with ranks numbered node by node; a flat network has one rank per node.

    Attributes:
        across: the link between ranks on different nodes.
        inside: the link between ranks of one node; by default the same.
        ranks_per_node: the number of ranks per node; the last node may have fewer.
    """

    across: Link
    inside: Link = attrs.field(default=attrs.Factory(lambda self: self.across, takes_self=True))
    ranks_per_node: int = attrs.field(default=1, validator=attrs.validators.ge(1))


@attrs.frozen
class Load:
    """Messages that are sent one after another.

    Attributes:
        messages: their number.
        bytes: their total size.
    """

    messages: int = 0
    bytes: float = 0.0

    def __add__(self, other: "Load") -> "Load":
        return Load(self.messages + other.messages, self.bytes + other.bytes)


@attrs.frozen
class Cost:
    """The critical path of an all-reduce.

    Attributes:
        inside: the messages on links inside nodes.
        across: the messages on links between nodes.
        seconds: the time of both.
    """

    inside: Load
    across: Load
    seconds: float

    @property
    def messages(self) -> int:
        """Messages on the critical path: the rounds, or a tree's longest branch, up and down."""
        return self.inside.messages + self.across.messages

    @property
    def bytes(self) -> float:
        """Bytes on the critical path; for trees, with many chunks."""
        return self.inside.bytes + self.across.bytes


@attrs.frozen
class Sent:
    """The messages that a rank sends.

    Attributes:
        messages: their number.
        elements: their total number of elements.
    """

    messages: int = 0
    elements: int = 0

    def __add__(self, other: "Sent") -> "Sent":
        return Sent(self.messages + other.messages, self.elements + other.elements)


# -- the critical path, (inside, across) nodes, of N bytes on n ranks, m to a node -------------------------------------
#
# Recursive doubling, halving-doubling and trees pair ranks at distances 1, 2, 4, ...; if m is not a power of two, even
# close pairs may be on different nodes, and a hop counts as one across nodes if it is for any rank.

Path = tuple[Load, Load]


def _place(load: Load, n: int, m: int) -> Path:
    """A load between nodes, or inside the node if there is only one."""
    return (load, Load()) if n <= m else (Load(), load)


def _join(*paths: Path) -> Path:
    inside, across = zip(*paths, strict=True)
    return sum(inside, Load()), sum(across, Load())


def _levels(n: int) -> int:
    """log2 of the largest power of two that is at most n."""
    return n.bit_length() - 1


def _aligned(m: int) -> int:
    """The number of levels of pairs (r, r xor 1), (r, r xor 2), ... within nodes: twice the distance divides m."""
    return _levels(m & -m)


def _near(n: int, m: int) -> int:
    """The number of levels within nodes among the first p ranks, the largest power of two that is at most n."""
    return _levels(n) if 1 << _levels(n) <= m else _aligned(m)


def _ring(nbytes: float, n: int, m: int) -> Path:
    """Twice around the ring except two hops. All links carry the same bytes at the same time, so the slowest one counts."""
    nodes, hops = -(-n // m), 2 * (n - 1)
    volume = hops * nbytes / n
    if nodes == 1:
        return Load(hops, volume), Load()
    far = 2 * nodes - max(0, 3 - m)  # the two omitted hops are adjacent: within a node, if it has three ranks
    return Load(hops - far), Load(far, volume)


def _extras(nbytes: float, n: int, m: int) -> Path:
    """Ranks beyond a power of two first send their values, and receive the result at the end."""
    return _place(Load(2, 2 * nbytes) if n > 1 << _levels(n) else Load(), n, m)


def _recursive_doubling(nbytes: float, n: int, m: int) -> Path:
    """The whole value at each level."""
    near = _near(n, m)
    far = _levels(n) - near
    return _join((Load(near, near * nbytes), Load(far, far * nbytes)), _extras(nbytes, n, m))


def _halving_doubling(nbytes: float, n: int, m: int) -> Path:
    """A half, a quarter, ... and back; the largest pieces travel the longest distances."""
    near, levels = _near(n, m), _levels(n)
    inside = Load(2 * near, 2 * ((1 << near) - 1) * nbytes / (1 << levels))
    across = Load(2 * (levels - near), 2 * ((1 << levels) - (1 << near)) * nbytes / (1 << levels))
    return _join((inside, across), _extras(nbytes, n, m))


def _up_and_down(volume: float, n: int, m: int) -> Path:
    """To the root of a tree in rank order and back: an edge at distance d is within an aligned block of 4 d ranks."""
    hops = 2 * (n - 1).bit_length()
    near = hops if n <= m else 2 * max(0, _aligned(m) - 1)
    return _join((Load(near), Load(hops - near)), _place(Load(0, volume), n, m))


def _tree(nbytes: float, n: int, m: int) -> Path:
    """A rank with two children receives the value twice and later sends it twice; with two or three ranks there is none."""
    return _up_and_down(nbytes * (0, 2, 2, 4)[min(n, 4) - 1], n, m)


def _double_tree(nbytes: float, n: int, m: int) -> Path:
    """Half the value in each tree; a rank with two children in one has none in the other.

    The second tree numbers ranks backwards, or shifted for odd n, so its pairs fit nodes only if all nodes are full.
    """
    return _up_and_down(nbytes * (0, 1, 2)[min(n, 3) - 1], n, 1 if n > m and n % m else m)


def _hierarchical(nbytes: float, n: int, m: int) -> Path:
    """Rings within nodes, and two trees across them for each 1/m of the value."""
    return _join(_ring(nbytes, m, m), _double_tree(nbytes / m, n // m, 1) if n > m else (Load(), Load()))


# -- what a rank sends, of a value of numel elements, cut into k chunks; m ranks to a node ------------------------------


def _piece(numel: int, n: int) -> int:
    """Elements in each of n equal pieces, with padding."""
    return -(-numel // n)


def _ring_sends(numel: int, n: int, rank: int, m: int, k: int) -> Sent:
    return Sent(2 * (n - 1), 2 * (n - 1) * _piece(numel, n))


def _extras_sends(numel: int, n: int, rank: int) -> Sent:
    """A rank beyond the power of two sends its value, and the rank that received it sends back the result."""
    p = 1 << _levels(n)
    return Sent(1, numel) if rank >= p or rank < n - p else Sent()


def _recursive_doubling_sends(numel: int, n: int, rank: int, m: int, k: int) -> Sent:
    levels = _levels(n)
    core = Sent(levels, levels * numel) if rank < 1 << levels else Sent()
    return core + _extras_sends(numel, n, rank)


def _halving_doubling_sends(numel: int, n: int, rank: int, m: int, k: int) -> Sent:
    levels = _levels(n)
    p = 1 << levels
    core = Sent(2 * levels, 2 * (p - 1) * _piece(numel, p)) if rank < p else Sent()
    return core + _extras_sends(numel, n, rank)


def _neighbours(n: int, rank: int) -> int:
    """The number of a rank's neighbours in the tree in rank order: odd ranks are leaves, the root 0 has one child."""
    if rank == 0 or rank % 2:
        return min(1, n - 1)
    return 3 if rank + 1 < n else 2


def _tree_sends(numel: int, n: int, rank: int, m: int, k: int) -> Sent:
    messages = k * _neighbours(n, rank)  # to the parent on the way up, to the children on the way down
    return Sent(messages, messages * _piece(numel, k))


def _double_tree_sends(numel: int, n: int, rank: int, m: int, k: int) -> Sent:
    mirrored = (rank - 1) % n if n % 2 else n - 1 - rank  # its position in the second tree
    messages = k * (_neighbours(n, rank) + _neighbours(n, mirrored))
    return Sent(messages, messages * _piece(numel, 2 * k))


def _hierarchical_sends(numel: int, n: int, rank: int, m: int, k: int) -> Sent:
    return _ring_sends(numel, m, rank % m, m, k) + _double_tree_sends(_piece(numel, m), n // m, rank // m, m, k)


# -- the table ----------------------------------------------------------------------------------------------------------


@attrs.frozen
class _Formulas:
    path: Callable[[float, int, int], Path]
    sends: Callable[[int, int, int, int, int], Sent]


_FORMULAS = {
    "ring": _Formulas(_ring, _ring_sends),
    "tree": _Formulas(_tree, _tree_sends),
    "double_tree": _Formulas(_double_tree, _double_tree_sends),
    "recursive_doubling": _Formulas(_recursive_doubling, _recursive_doubling_sends),
    "halving_doubling": _Formulas(_halving_doubling, _halving_doubling_sends),
    "hierarchical": _Formulas(_hierarchical, _hierarchical_sends),
}

ALGORITHMS: tuple[str, ...] = tuple(_FORMULAS)


def _check(algorithm: str, n: int, ranks_per_node: int) -> None:
    if algorithm not in _FORMULAS:
        raise ValueError(f"algorithm={algorithm!r} is unknown; use one of {', '.join(ALGORITHMS)}")
    if n < 1:
        raise ValueError(f"n={n}: a group has at least one rank")
    if ranks_per_node < 1:
        raise ValueError(f"ranks_per_node={ranks_per_node}: a node has at least one rank")
    if algorithm == "hierarchical" and n % ranks_per_node:
        raise ValueError(f"n={n} is not a multiple of ranks_per_node={ranks_per_node}: hierarchical needs a grid of full nodes")


def predict(algorithm: str, nbytes: float, n: int, network: Network) -> Cost:
    """Predicts the time of an all-reduce of ``nbytes`` bytes on n ranks with the alpha-beta model.

    On a flat network, with latency α seconds, bandwidth 1/β bytes per second and n a power of two::

        ring                2 (n - 1) α + 2 (n - 1) / n N β
        tree                2 log2 n α + 4 N β
        double_tree         2 log2 n α + 2 N β
        recursive_doubling  log2 n (α + N β)
        halving_doubling    2 log2 n α + 2 (n - 1) / n N β

    For other n the trees have ⌈log2 n⌉ levels; the last two have ⌊log2 n⌋, plus 2 (α + N β). The second term of trees is the
    limit of many chunks, and is smaller for fewer than four ranks. ``hierarchical`` is a ring in each node and a double tree
    across nodes on 1/m of the value.

    Args:
        algorithm: one of ``ALGORITHMS``.
        nbytes: bytes of the value on each rank.
        n: the number of ranks.
        network: latencies in seconds and bandwidths in bytes per second, inside nodes and across them.

    Raises:
        ValueError: the algorithm is unknown; n < 1; ``nbytes`` is negative; n ranks do not fill the nodes of ``hierarchical``.

    >>> flat = Network(Link(latency=1e-6, bandwidth=1e9))
    >>> predict("ring", 16e6, 4, flat)
    Cost(inside=Load(messages=0, bytes=0.0), across=Load(messages=6, bytes=24000000.0), seconds=0.024006)
    >>> [predict(name, 0, 1024, flat).messages for name in ("ring", "tree", "recursive_doubling", "halving_doubling")]
    [2046, 20, 10, 20]
    """
    _check(algorithm, n, network.ranks_per_node)
    if not nbytes >= 0:
        raise ValueError(f"nbytes={nbytes}: a value has 0 bytes or more")
    inside, across = _FORMULAS[algorithm].path(nbytes, n, network.ranks_per_node)
    return Cost(inside, across, network.inside.seconds(inside) + network.across.seconds(across))


def best(nbytes: float, n: int, network: Network) -> str:
    """The algorithm with the lowest predicted time; of equals, the first in ``ALGORITHMS``.

    ``hierarchical`` is considered only if n ranks fill the nodes.

    Args:
        nbytes: bytes of the value on each rank.
        n: the number of ranks.
        network: as for ``predict``.

    Raises:
        ValueError: n < 1, or ``nbytes`` is negative.

    >>> flat = Network(Link(latency=1e-6, bandwidth=1e9))
    >>> best(1e3, 1024, flat), best(1e9, 8, flat)
    ('recursive_doubling', 'halving_doubling')
    """
    able = [name for name in ALGORITHMS if name != "hierarchical" or n % network.ranks_per_node == 0]
    return min(able, key=lambda name: predict(name, nbytes, n, network).seconds)


def sent(algorithm: str, numel: int, n: int, rank: int, *, ranks_per_node: int = 1, chunks: int = 1) -> Sent:
    """The messages and elements that a rank sends in an algorithm of ``comm.algorithms``, exactly as its ledger counts them.

    Args:
        algorithm: one of ``ALGORITHMS``.
        numel: elements of the value, all leaves of one dtype together; pieces are padded to equal sizes.
        n: the number of ranks.
        rank: the rank; for ``hierarchical`` its position in its node is ``rank % ranks_per_node``.
        ranks_per_node: for ``hierarchical``, the size of the inner group.
        chunks: for the trees, as in the algorithm.

    Raises:
        ValueError: as ``predict``; or ``rank``, ``numel`` or ``chunks`` is out of range.

    >>> [sent("ring", 12, 4, rank) for rank in (0, 3)]
    [Sent(messages=6, elements=18), Sent(messages=6, elements=18)]
    >>> [sent("double_tree", 100, 8, rank).elements for rank in range(8)]
    [100, 200, 200, 200, 200, 200, 200, 100]
    """
    _check(algorithm, n, ranks_per_node)
    if not 0 <= rank < n:
        raise ValueError(f"rank={rank} is out of range for n={n}; ranks are 0..{n - 1}")
    if numel < 0:
        raise ValueError(f"numel={numel}: a value has 0 elements or more")
    if chunks < 1 or (chunks > 1 and algorithm not in ("tree", "double_tree")):
        raise ValueError(f"chunks={chunks} for {algorithm}: tree and double_tree split into 1 or more, the others into 1")
    return _FORMULAS[algorithm].sends(numel, n, rank, ranks_per_node, chunks)


def counted(function: Callable[..., Any], n: int, *values: Any) -> list[Load]:
    """Counts the calls and bytes of each of n ranks in ``function(*values)``, by a simulation on shapes only.

    Use it for custom algorithms, which ``predict`` and ``sent`` do not know. ``messages`` includes calls in which a rank only
    receives, so ``link.seconds(load)`` is the time of the calls one after another.

    Law: for the algorithms of ``comm.algorithms``, the bytes equal those of ``sent``.

    Args:
        function: calls collectives; may call ``comm.world()``.
        n: the number of ranks.
        values: its arguments; tensors must be on the meta device.

    Raises:
        ValueError: n < 1.

    >>> import torch
    >>> counted(comm.algorithms.ring, 4, torch.empty(12, device="meta"))[0]
    Load(messages=6, bytes=72.0)
    """
    if n < 1:
        raise ValueError(f"n={n}: a group has at least one rank")

    def program() -> Load:
        with comm.ledger() as book:
            function(*values)
        return Load(book.calls, float(book.bytes))

    return comm.simulate(program, world_size=n, shapes_only=True)
