"""Gossip over a topology: how fast workers agree that average with few others only.

Each worker trains on its own rows, and averages its params with few others after each update (Lian et al. 2017,
arXiv:1705.09056). The distance of the workers from their mean depends on who meets whom: neighbours on a ring, one peer at a
distance of 1, 2, 4, ... in turn (Assran et al. 2019, arXiv:1811.10792), a random one (Boyd et al. 2006), or all. In
local SGD all meet in every k-th update (Stich 2019, arXiv:1805.09767), in post-local SGD also in each of the first ones (Lin
et al. 2020, arXiv:1808.07217).

Law: averaging leaves the mean of the workers as it is; meeting all of them is an all-reduce; a hypercube's log2 n meetings of
workers that do not train make them equal; workers of two ranks with ZeRO in stages 0 and 3 are workers of one rank.
"""

from collections.abc import Callable

import torch
from diloco import in_workers
from shared import first, loss_fn, rows, table, validation
from torch import Tensor

import functional_ds as fds
from functional_ds import comm
from functional_ds import transforms as T

Mixing = Callable[[list[Tensor], int, comm.Group], list[Tensor]]


def ring(leaves: list[Tensor], count: int, workers: comm.Group) -> list[Tensor]:
    """A third of each neighbour's, a third of the rank's."""
    n = workers.size
    left = comm.permute(leaves, [(a, (a + 1) % n) for a in range(n)], workers)
    right = comm.permute(leaves, [(a, (a - 1) % n) for a in range(n)], workers)
    return [(x + y + z) / 3 for x, y, z in zip(leaves, left, right, strict=True)]


def hypercube(leaves: list[Tensor], count: int, workers: comm.Group) -> list[Tensor]:
    """Half of one peer's, whose number differs in one bit: another bit in each update."""
    n = workers.size
    bit = 1 << count % (n.bit_length() - 1)
    theirs = comm.permute(leaves, [(a, a ^ bit) for a in range(n)], workers)
    return [(x + y) / 2 for x, y in zip(leaves, theirs, strict=True)]


def matching(leaves: list[Tensor], count: int, workers: comm.Group) -> list[Tensor]:
    """Half of a random peer's; of an odd number of workers one is left out."""
    order = torch.randperm(workers.size, generator=torch.Generator().manual_seed(count)).tolist()
    peers = {a: b for one, two in zip(order[::2], order[1::2], strict=False) for a, b in ((one, two), (two, one))}
    theirs = comm.permute(leaves, sorted(peers.items()), workers)
    return [(x + y) / 2 if workers.rank in peers else x for x, y in zip(leaves, theirs, strict=True)]


def complete(leaves: list[Tensor], count: int, workers: comm.Group) -> list[Tensor]:
    """The mean of all."""
    return comm.all_reduce(leaves, workers, op="avg")


def alone(leaves: list[Tensor], count: int, workers: comm.Group) -> list[Tensor]:
    """No averaging."""
    return leaves


def gossip(mixing: Mixing, group: comm.Group | None = None, *, every: int = 1, until: int = 0) -> fds.Transform:
    """Averages params in each of the first ``until`` updates, and then in every so many; ``group`` as in ``diloco``."""

    def average(step: fds.Step, state: fds.State) -> fds.State:
        count = int(state.step)
        if count > until and count % every:
            return state
        leaves, spec = fds.tree.flatten(state.params)
        return fds.tree.replace(state, params=fds.tree.unflatten(spec, mixing(leaves, count, group or comm.world())))

    return T.every(1, average)  # with T.apart workers skip a step together, so that they count the same updates


def distance(leaves: list[Tensor]) -> float:
    """The root mean square over workers of how far params are from their mean."""
    means = complete(leaves, 0, comm.world())
    square = torch.stack([(x - mean).square().sum() for x, mean in zip(leaves, means, strict=True)]).sum()
    return comm.all_reduce(square, op="avg").sqrt().item()


def law() -> None:
    """On workers that do not train, and on workers of several ranks."""

    def program() -> None:
        here = comm.world()
        drawn = torch.randn(2, generator=torch.Generator().manual_seed(here.rank))
        leaves = [torch.full((3,), float(here.rank)), drawn]
        mean = complete(leaves, 0, here)
        for mixing in (ring, hypercube, matching, complete, alone):
            torch.testing.assert_close(complete(mixing(leaves, 0, here), 0, here), mean)
        met = leaves
        for count in range(3):
            met = hypercube(met, count, here)
        torch.testing.assert_close(met, mean)

    comm.simulate(program, world_size=8)
    for mixing in (ring, matching, complete):
        in_workers(lambda group, mixing=mixing: gossip(mixing, group, every=2, until=1))


def run(method: fds.Transform, steps: int) -> tuple[float, float, int]:
    """The validation loss of the mean, the distance from it, and the bytes that a worker sent."""
    step = method(fds.train_step(loss_fn, fds.sgd(0.3, momentum=0.9)))
    state = step.init(first())
    with comm.ledger() as book:
        for index in range(steps):
            state, _ = step(state, rows(index))
    leaves = [*step.params(state).values()]
    mean = dict(zip(first(), complete(leaves, 0, comm.world()), strict=True))
    return validation(mean), distance(leaves), book.bytes


def main(steps: int = 80, workers: int = 8) -> str:
    """For each topology: the loss of the mean, the distance from it, and bytes."""
    methods = {mixing.__name__: gossip(mixing) for mixing in (alone, ring, hypercube, matching, complete)}
    methods["complete, every 8th"] = gossip(complete, every=8)
    methods["the first 16, too"] = gossip(complete, every=8, until=16)
    lines = []
    for name, method in methods.items():
        loss, apart, sent = comm.simulate(run, method, steps, world_size=workers)[0]
        lines.append((name, loss, apart, f"{sent:,}"))
    return table([f"{workers} workers, {steps} steps", "loss of the mean", "distance", "bytes a worker"], lines)


TINY = {"steps": 2, "workers": 4}

if __name__ == "__main__":
    law()
    print(main())
