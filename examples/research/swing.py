"""Swing all-reduce: messages, bytes and the busiest link, compared with the ring, halving-doubling and a torus.

In round i of swing each rank exchanges with a peer 1, 1, 3, 5, 11, ... ranks away, alternately to the left and to the right
(De Sensi et al. 2024, arXiv:2401.09356). It needs log2 n rounds as halving-doubling does, whose peers are 1, 2, 4, 8, ... away:
on a network that is a ring or a torus its messages cross fewer links. The all-reduce of a 2D torus (Mikami et al. 2018,
arXiv:1811.05233) goes along rows, columns and rows.

Law: both are all-reduces with equal bits on all ranks; in swing each rank sends 2 log2 n messages and 2 (n - 1) / n of the
value.
"""

from collections.abc import Callable

import torch
from shared import table
from torch import Tensor

from functional_ds import comm


def distance(i: int) -> int:
    """How far away, and on which side, an even rank's peer is in round i."""
    return (1 - (-2) ** (i + 1)) // 3


def peer(rank: int, i: int, n: int) -> int:
    """The peer of a rank in round i: odd ranks go to the other side."""
    return (rank + (distance(i) if rank % 2 == 0 else -distance(i))) % n


def blocks(rank: int, i: int, n: int) -> set[int]:
    """The blocks of the value that pass through a rank from round i on."""
    return {rank} if 2**i >= n else blocks(rank, i + 1, n) | blocks(peer(rank, i, n), i + 1, n)


def swing(x: Tensor) -> Tensor:
    """The sum over all ranks, whose number is a power of two: half as much in each round, then twice as much."""
    here = comm.world()
    n, rank, rounds = here.size, here.rank, here.size.bit_length() - 1
    flat = torch.nn.functional.pad(x.flatten(), (0, -x.numel() % n)).view(n, -1).clone()

    def swap(sent: Tensor, i: int) -> Tensor:
        return comm.permute(sent, [(a, peer(a, i, n)) for a in range(n)])

    for i in range(rounds):
        give, keep = (sorted(blocks(a, i + 1, n)) for a in (peer(rank, i, n), rank))
        flat[keep] += swap(flat[give], i)
    for i in reversed(range(rounds)):
        get, have = (sorted(blocks(a, i + 1, n)) for a in (peer(rank, i, n), rank))
        flat[get] = swap(flat[have], i)
    return flat.flatten()[: x.numel()].view(x.shape)


def torus(x: Tensor, rows: comm.Group, columns: comm.Group) -> Tensor:
    """The sum over a mesh of two axes: each rank of a row sums its part of the row's values along its column."""
    flat = torch.nn.functional.pad(x.flatten(), (0, -x.numel() % rows.size))
    total = comm.all_gather(comm.all_reduce(comm.reduce_scatter(flat, rows), columns), rows)
    return total[: x.numel()].view(x.shape)


def counted(n: int, numel: int) -> tuple[int, int]:
    """Messages and bytes of one rank, counted on shapes."""

    def program() -> tuple[int, int]:
        with comm.ledger() as book:
            swing(torch.empty(numel, device="meta"))
        return book.calls, book.bytes

    return comm.simulate(program, world_size=n, shapes_only=True)[0]


def law() -> None:
    """The sum, its bits, and what it sends."""

    def program() -> tuple[Tensor, Tensor, Tensor]:
        x = torch.randn(11, generator=torch.Generator().manual_seed(comm.world().rank))
        mesh = comm.mesh(rows=2, columns=comm.world().size // 2)
        return swing(x), torus(x, mesh["rows"], mesh["columns"]), comm.all_reduce(x)

    for n in (2, 4, 8):
        found = comm.simulate(program, world_size=n)
        for *ours, sums in found:
            for x, other in zip(ours, found[0], strict=False):
                torch.testing.assert_close(x, sums)
                assert torch.equal(x, other)
        rounds = n.bit_length() - 1
        assert counted(n, 64) == (2 * rounds, 2 * (n - 1) * 64 * 4 // n)


def busiest(partner: Callable[[int, int, int], int], n: int) -> float:
    """What the busiest link of a ring carries one way, in units of the value: messages take the shorter way around."""
    carried = [[0.0, 0.0] for _ in range(n)]  # by link, to the right and to the left
    for i in range(n.bit_length() - 1):
        for rank in range(n):
            right = (partner(rank, i, n) - rank) % n
            way = range(right) if right <= n - right else range(-1, right - n - 1, -1)
            for hop in way:
                carried[(rank + hop) % n][0 if right <= n - right else 1] += 2 * 2.0 ** -(i + 1)  # there, and back
    return max(max(link) for link in carried)


def main(sizes: tuple[int, ...] = (8, 64, 256), nbytes: float = 1e6) -> str:
    """Predicted times on a flat network, and loads of links on a ring of ranks, beside the library's algorithms."""
    link = comm.algorithms.cost.Link(latency=20e-6, bandwidth=25e9)
    network = comm.algorithms.cost.Network(across=link)
    lines = []
    for n in sizes:
        rounds = n.bit_length() - 1
        calls, sent = counted(n, int(nbytes) // 4)
        ring, halving = (comm.algorithms.cost.predict(name, nbytes, n, network) for name in ("ring", "halving_doubling"))
        ours = link.seconds(comm.algorithms.cost.Load(messages=calls, bytes=float(sent)))
        lines.append((n, "ring", 2 * (n - 1), ring.seconds * 1e6, 2 * (n - 1) / n))
        lines.append((n, "halving-doubling", 2 * rounds, halving.seconds * 1e6, busiest(lambda rank, i, n: rank ^ 2**i, n)))
        lines.append((n, "swing", calls, ours * 1e6, busiest(peer, n)))
    return table(
        ["ranks", f"all-reduce of {nbytes / 1e6:g} MB", "messages", "μs, flat network", "busiest link of a ring"], lines
    )


TINY = {"sizes": (4,)}

if __name__ == "__main__":
    law()
    print(main())
