"""Gossip over a topology: how fast workers agree that average with few others only.

Each worker trains on its own rows, and averages its params with few others after each update (Lian et al. 2017,
arXiv:1705.09056). The distance of the workers from their mean depends on who meets whom: neighbours on a ring, one peer at a
distance of 1, 2, 4, ... in turn (Assran et al. 2019, arXiv:1811.10792), or all.

Law: averaging leaves the mean of the workers as it is; meeting all of them is an all-reduce; a hypercube's log2 n meetings of
workers that do not train make them equal.
"""

from collections.abc import Callable

import torch
from shared import first, loss_fn, rows, table, validation
from torch import Tensor

import functional_ds as fds
from functional_ds import comm
from functional_ds import transforms as T

Mixing = Callable[[list[Tensor], int], list[Tensor]]


def ring(leaves: list[Tensor], count: int) -> list[Tensor]:
    """A third of each neighbour's, a third of the rank's."""
    n = comm.world().size
    left = comm.permute(leaves, [(a, (a + 1) % n) for a in range(n)])
    right = comm.permute(leaves, [(a, (a - 1) % n) for a in range(n)])
    return [(x + y + z) / 3 for x, y, z in zip(leaves, left, right, strict=True)]


def hypercube(leaves: list[Tensor], count: int) -> list[Tensor]:
    """Half of one peer's, whose number differs in one bit: another bit in each update."""
    n = comm.world().size
    bit = 1 << count % (n.bit_length() - 1)
    theirs = comm.permute(leaves, [(a, a ^ bit) for a in range(n)])
    return [(x + y) / 2 for x, y in zip(leaves, theirs, strict=True)]


def complete(leaves: list[Tensor], count: int) -> list[Tensor]:
    """The mean of all."""
    return comm.all_reduce(leaves, op="avg")


def alone(leaves: list[Tensor], count: int) -> list[Tensor]:
    """No averaging."""
    return leaves


def gossip(mixing: Mixing) -> fds.Transform:
    """Averages params after each update."""

    def average(step: fds.Step, state: fds.State) -> fds.State:
        leaves, spec = fds.tree.flatten(state.params)
        return fds.tree.replace(state, params=fds.tree.unflatten(spec, mixing(leaves, int(state.step))))

    return T.every(1, average)  # with T.apart workers skip a step together, so that they count the same updates


def distance(leaves: list[Tensor]) -> float:
    """The root mean square over workers of how far params are from their mean."""
    square = torch.stack([(x - m).square().sum() for x, m in zip(leaves, complete(leaves, 0), strict=True)]).sum()
    return comm.all_reduce(square, op="avg").sqrt().item()


def law() -> None:
    """On workers that do not train."""

    def program() -> None:
        leaves = [
            torch.full((3,), float(comm.world().rank)),
            torch.randn(2, generator=torch.Generator().manual_seed(comm.world().rank)),
        ]
        mean = complete(leaves, 0)
        for mixing in (ring, hypercube, complete, alone):
            torch.testing.assert_close(complete(mixing(leaves, 0), 0), mean)
        met = leaves
        for count in range(3):
            met = hypercube(met, count)
        torch.testing.assert_close(met, mean)

    comm.simulate(program, world_size=8)


def run(mixing: Mixing, steps: int) -> tuple[float, float, int]:
    """The validation loss of the mean, the distance from it, and the bytes that a worker sent."""
    step = gossip(mixing)(fds.train_step(loss_fn, fds.sgd(0.3, momentum=0.9)))
    state = step.init(first())
    with comm.ledger() as book:
        for index in range(steps):
            state, _ = step(state, rows(index))
    leaves = [*step.params(state).values()]
    mean = dict(zip(first(), complete(leaves, 0), strict=True))
    return validation(mean), distance(leaves), book.bytes


def main(steps: int = 80, workers: int = 8) -> str:
    """For each topology: the loss of the mean, the distance from it, and bytes."""
    lines = []
    for mixing in (alone, ring, hypercube, complete):
        loss, apart, sent = comm.simulate(run, mixing, steps, world_size=workers)[0]
        lines.append((mixing.__name__, loss, apart, f"{sent:,}"))
    return table([f"{workers} workers, {steps} steps", "loss of the mean", "distance", "bytes a worker"], lines)


TINY = {"steps": 2, "workers": 4}

if __name__ == "__main__":
    law()
    print(main())
