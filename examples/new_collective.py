"""A collective of your own: specified in one line, run on simulated ranks and on processes, tested, and used for training.

    python examples/new_collective.py

``neighbour_mean`` mixes each rank's value with those of its two neighbours on a ring, (2 x_r + x_(r-1) + x_(r+1)) / 4.
Decentralized SGD (Lian et al. 2017, arXiv:1705.09056) mixes parameters with it after each update, instead of summing gradients
over all ranks.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import functional_ds as fds
from functional_ds import comm
from functional_ds.comm.table import Call, Collective, Communicator, Prepared, Started, Traffic, collective, request


def ring(rank: int, n: int) -> list[int]:
    """The neighbours of a rank: two, or on two ranks the other one."""
    return sorted({(rank - 1) % n, (rank + 1) % n} - {rank})


def mixed(rank: int, values: Sequence[Tensor]) -> Tensor:
    """What the rank gets of all ranks' values."""
    n = len(values)
    return (2 * values[rank] + values[(rank - 1) % n] + values[(rank + 1) % n]) / 4


def over_gloo(group: Communicator, payload: Tensor, options: Any) -> Prepared:
    """Messages to both neighbours and back; the result is computed when they are there."""
    values = {r: torch.empty_like(payload) for r in ring(group.rank, group.size)} | {group.rank: payload}

    def post() -> list[Any]:
        works = [work for r in ring(group.rank, group.size) for work in group.recv(values[r], r)]
        return works + [work for r in ring(group.rank, group.size) for work in group.send(payload, r)]

    none = torch.empty(0)  # in the place of values that do not reach this rank
    return Prepared(post, lambda: mixed(group.rank, [values.get(r, none) for r in range(group.size)]))


def over_nccl(group: dist.ProcessGroup, payload: Tensor, options: Any) -> Started:
    """Gathers all values, more than is needed: untested, for want of GPUs."""
    rows = payload.new_empty(group.size(), payload.numel())
    work = dist.all_gather(list(rows.unbind(0)), payload, group=group, async_op=True)
    return Started([work], lambda: mixed(group.rank(), rows))


NEIGHBOUR_MEAN = Collective(
    name="neighbour_mean",
    denotation=lambda xs, options: [mixed(r, xs) for r in range(len(xs))],  # what it means: the simulator runs this
    adjoint=lambda options: Call(NEIGHBOUR_MEAN, options),  # its matrix is symmetric, so it is its own transpose
    volume=lambda leaf, here: leaf.numel() * len(ring(here.rank, here.n)),  # elements that a rank sends
    result=lambda shape, here: shape,
    traffic=Traffic("exchange"),
    gloo=over_gloo,
    nccl=over_nccl,
)


@collective
def neighbour_mean(x: Any, group: Any = None) -> Any:
    """Each rank's value, mixed with those of its neighbours on the ring of the group's ranks."""
    return request(Call(NEIGHBOUR_MEAN, {}), x, group)


def decentralized() -> fds.Transform:
    """Each rank takes its own update, then mixes its parameters with its neighbours'."""

    def update(inner, step, state, grads):
        state, metrics = inner(step, state, grads)
        return fds.tree.replace(state, params=neighbour_mean(state.params)), metrics

    return fds.wrap("decentralized", update=update)


def train(steps: int) -> list[float]:
    """Fits w to each rank's own data. Returns how far w is from the truth, and how far the ranks are apart."""
    world, truth = comm.world(), torch.linspace(-1, 1, 8)

    def loss_fn(params, batch):
        x, y = batch
        return (x @ params["w"] - y).square().mean()

    step = decentralized()(fds.train_step(loss_fn, fds.sgd(0.1)))
    state, generator = step.init({"w": torch.zeros(8)}), torch.Generator().manual_seed(world.rank)
    for _ in range(steps):
        x = torch.randn(16, 8, generator=generator)
        state, _ = step(state, (x, x @ truth))
    w = step.params(state)["w"]
    mean = comm.all_reduce(w, op="avg")
    return [(mean - truth).norm().item(), (w - mean).norm().item()]


if __name__ == "__main__":
    print(fds.testing.collective_holds(neighbour_mean))
    for steps in (1, 5, 20):
        wrong, apart = comm.simulate(train, steps, world_size=8)[0]
        print(f"{steps:>2} steps on 8 ranks: {wrong:.3f} from the truth, rank 0 is {apart:.3f} from the mean of all ranks")
