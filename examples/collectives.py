"""A tour of the collectives. Each stop is a small function that every rank runs, and the same on one device beside it.

    python examples/collectives.py                                 four simulated ranks, in this one process
    python examples/collectives.py --world spawn --ranks 2         two processes
    torchrun --nproc-per-node 2 examples/collectives.py            wherever torchrun runs

A collective is a function from all ranks' values to all ranks' results. So a stop looks like this: ``sums(x)`` gets one rank's
value and returns that rank's result; ``sums_alone(xs)`` gets the list of all values and returns the list of all results. The
tour runs both and compares them. Every rank's value is a tensor of shape [4 n, 6], where n is the number of ranks.
"""

import argparse
import math
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

import attrs
import torch
from torch import Tensor

from functional_ds import comm, tree

WIDTH = 6
ROUNDING = 1e-5  # fp32, numbers about 1, few of them


# -- everyone gets everything ------------------------------------------------------------------------------------------


def sums(x: Tensor) -> Any:
    """all_reduce: everyone has the sum of all values."""
    return comm.all_reduce(x)


def sums_alone(xs: Sequence[Tensor]) -> list[Any]:
    return [sum(xs) for _ in xs]


def gathers(x: Tensor) -> Any:
    """reduce_scatter, then all_gather: each sums a part, all get all; a tree is one call."""
    piece = comm.reduce_scatter({"x": x, "squares": x * x})  # [4 n, 6] -> [4, 6], each
    return comm.all_gather(piece)  # -> [4 n, 6], each


def gathers_alone(xs: Sequence[Tensor]) -> list[Any]:
    return [{"x": sum(xs), "squares": sum(x * x for x in xs)} for _ in xs]


# -- some of the ranks -------------------------------------------------------------------------------------------------


def rows_of(n: int) -> int:
    """The largest divisor of n up to its root: 2 of 4, 2 of 6, 1 of 7."""
    return max(rows for rows in range(1, math.isqrt(n) + 1) if n % rows == 0)


def groups(x: Tensor) -> Any:
    """mesh: ranks as a grid; sums along its rows, then along its columns, too."""
    n = comm.world().size
    mesh = comm.mesh(dp=rows_of(n), tp=n // rows_of(n))
    along_row = comm.all_reduce(x, mesh["tp"])
    return along_row, comm.all_reduce(along_row, mesh["dp"])


def groups_alone(xs: Sequence[Tensor]) -> list[Any]:
    columns = len(xs) // rows_of(len(xs))
    row_sums = [sum(xs[first : first + columns]) for first in range(0, len(xs), columns)]
    return [(row_sums[rank // columns], sum(row_sums)) for rank in range(len(xs))]


# -- from rank to rank -------------------------------------------------------------------------------------------------


def pipeline(x: Tensor) -> Any:
    """send, recv: rank r is layer r; activations go up, gradients come back down."""
    here, weight = comm.world(), x[:WIDTH].clone().requires_grad_()  # [6, 6]
    if here.rank > 0:
        x = comm.recv(torch.empty_like(x).requires_grad_(), src=here.rank - 1)
    y = torch.tanh(x @ weight)  # [4 n, 6]
    if here.rank < here.size - 1:
        y = comm.send(y, dst=here.rank + 1)  # zeros, through which the gradient comes back
    loss = y.square().sum() if here.rank == here.size - 1 else y.sum()
    loss.backward()
    return weight.grad


def pipeline_alone(xs: Sequence[Tensor]) -> list[Any]:
    weights, y = [x[:WIDTH].clone().requires_grad_() for x in xs], xs[0]
    for weight in weights:
        y = torch.tanh(y @ weight)
    return list(torch.autograd.grad(y.square().sum(), weights))


def overlap(x: Tensor) -> Any:
    """start: a neighbour's rows are under way while a rank computes with its own."""
    rank, n = comm.world().rank, comm.world().size
    onwards = comm.start(comm.send, x, dst=(rank + 1) % n)
    coming = comm.start(comm.recv, torch.empty_like(x), src=(rank - 1) % n)
    own = x @ x.mT  # [4 n, 4 n], meanwhile
    across = x @ coming.wait().mT
    onwards.wait()
    return own, across


def overlap_alone(xs: Sequence[Tensor]) -> list[Any]:
    return [(x @ x.mT, x @ xs[rank - 1].mT) for rank, x in enumerate(xs)]


# -- values that are cut over the ranks --------------------------------------------------------------------------------


def softmax(x: Tensor) -> Any:
    """Over columns that lie on all ranks: one max, one sum."""
    top = comm.all_reduce(x.amax(1, keepdim=True), op="max")  # [4 n, 1]
    weights = torch.exp(x - top)
    return weights / comm.all_reduce(weights.sum(1, keepdim=True))


def softmax_alone(xs: Sequence[Tensor]) -> list[Any]:
    return list(torch.cat(list(xs), dim=1).softmax(1).split(WIDTH, dim=1))  # [4 n, 6 n] -> n of [4 n, 6]


def normalise(x: Tensor) -> Any:
    """By the L2 norm of a vector that lies on all ranks: one number from each."""
    return x / comm.all_reduce(x.square().sum()).sqrt()


def normalise_alone(xs: Sequence[Tensor]) -> list[Any]:
    norm = torch.cat(list(xs)).norm()
    return [x / norm for x in xs]


def weigh(x: Tensor) -> Any:
    """The mean where ranks have different numbers of tokens: two sums in one call."""
    tokens = torch.tensor(comm.world().rank + 1.0)
    total, weight = comm.all_reduce((tokens * x, tokens))
    return total / weight


def weigh_alone(xs: Sequence[Tensor]) -> list[Any]:
    total = sum((rank + 1) * x for rank, x in enumerate(xs))
    return [total / sum(range(1, len(xs) + 1)) for _ in xs]


# -- from one rank, and between all ------------------------------------------------------------------------------------


def memory(x: Tensor) -> Any:
    """scatter against broadcast: a rank holds an n-th of the value, or all of it."""
    here = comm.world()
    piece = comm.scatter(x if here.rank == 0 else None, like=x[:4])  # [4 n, 6] on rank 0 -> [4, 6], each
    whole = comm.broadcast(x)  # [4 n, 6] -> [4 n, 6]
    return piece, whole, torch.tensor([value.untyped_storage().nbytes() for value in (piece, whole)])


def memory_alone(xs: Sequence[Tensor]) -> list[Any]:
    whole, nbytes = xs[0], 4 * xs[0].numel()
    return [(piece, whole, torch.tensor([nbytes // len(xs), nbytes])) for piece in whole.chunk(len(xs))]


def experts(x: Tensor) -> Any:
    """all_to_all: rows go to the rank of the expert that they chose, and come home."""
    here = comm.world()
    chosen = choices(x, here.size)  # [4 n], each row's expert
    order, sent = chosen.argsort(stable=True), chosen.bincount(minlength=here.size)
    expected = comm.all_to_all(sent)  # [n] -> [n]: how many rows come from each rank
    arrived = comm.all_to_all(x[order], input_splits=sent.tolist(), output_splits=expected.tolist())
    worked = arrived * (here.rank + 1)  # this rank's expert
    back = comm.all_to_all(worked, input_splits=expected.tolist(), output_splits=sent.tolist())
    return torch.empty_like(x).index_copy(0, order, back)


def experts_alone(xs: Sequence[Tensor]) -> list[Any]:
    return [x * (choices(x, len(xs)) + 1)[:, None] for x in xs]


def choices(x: Tensor, n: int) -> Tensor:
    return (1000 * x[:, 0].abs()).long() % n


# -- when it goes wrong ------------------------------------------------------------------------------------------------


def both_wait() -> None:
    """Each of two ranks waits for the other's message before it sends its own."""
    x, other = torch.ones(3), 1 - comm.world().rank
    comm.recv(x, src=other)
    comm.send(x, dst=other)


def deadlock() -> str:
    """What the simulator says of that. Processes would hang, unless they run under ``comm.debug.checked()``."""
    try:
        comm.simulate(both_wait, world_size=2)
    except comm.errors.DeadlockError as error:
        return str(error)
    return ""


# -- the tour ----------------------------------------------------------------------------------------------------------


@attrs.frozen
class Stop:
    """What every rank runs, and what comes of it on one device."""

    ranks: Callable[[Tensor], Any]
    alone: Callable[[Sequence[Tensor]], list[Any]]


TOUR = (
    Stop(sums, sums_alone),
    Stop(gathers, gathers_alone),
    Stop(groups, groups_alone),
    Stop(pipeline, pipeline_alone),
    Stop(overlap, overlap_alone),
    Stop(softmax, softmax_alone),
    Stop(normalise, normalise_alone),
    Stop(weigh, weigh_alone),
    Stop(memory, memory_alone),
    Stop(experts, experts_alone),
)


def distance(found: Any, expected: Any) -> float:
    """The largest difference of two trees of tensors; infinite where shapes differ."""
    pairs = list(zip(tree.leaves(found), tree.leaves(expected), strict=True))
    if any(a.shape != b.shape for a, b in pairs):
        return math.inf
    return torch.stack([(a - b).abs().max().double() for a, b in pairs]).max().item()  # a NaN stays one


def tour(seed: int) -> bool:
    """Runs all stops on each rank; whether all ranks found the values of a single device at each."""
    here, good = comm.world(), True
    xs = torch.randn(here.size, 4 * here.size, WIDTH, generator=torch.Generator().manual_seed(seed)).unbind()
    say(f"{here.size} ranks, each with a tensor of {list(xs[0].shape)}\n\n{'':<11}{'one device':>10}{'bytes sent':>12}")
    for stop in TOUR:
        with comm.ledger() as book:
            found = stop.ranks(xs[here.rank])
        gap = distance(found, stop.alone(xs)[here.rank])
        gaps, sent = zip(*comm.all_gather_object((gap, book.bytes)), strict=True)
        agrees = all(gap <= ROUNDING for gap in gaps)  # a NaN does not
        verdict = ("equal" if not any(gaps) else f"± {max(gaps):.0e}") if agrees else "WRONG"
        say(f"{stop.ranks.__name__:<11}{verdict:>10}{sum(sent):>12,}   {stop.ranks.__doc__}")
        good = good and agrees
    if here.rank == 0:
        say(f"\nTwo ranks that both wait for a message, simulated:\n{deadlock()}")
    return good


def say(text: str) -> None:
    """Only rank 0 speaks."""
    if comm.world().rank == 0:
        print(text, flush=True)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, metavar="N", help="how many (default: 4; under torchrun, its)")
    parser.add_argument("--world", choices=("simulate", "spawn"), help="threads or processes (default: simulate)")
    parser.add_argument("--seed", type=int, default=0, help="of the ranks' values (default: %(default)s)")
    args = parser.parse_args(argv)
    if "RANK" not in os.environ:
        args.world, args.ranks = args.world or "simulate", 4 if args.ranks is None else args.ranks
        if args.ranks < 2:
            parser.error(f"--ranks {args.ranks}: it takes two to communicate")
    elif args.world or args.ranks:
        parser.error("torchrun has started the ranks: leave --ranks and --world out")
    if not 0 <= args.seed < 2**63:
        parser.error(f"--seed {args.seed} must be at least 0 and below 2**63")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Starts the ranks, or is one; 1 where a stop went wrong."""
    args = parse(argv)
    if args.world == "simulate":
        good = all(comm.simulate(tour, args.seed, world_size=args.ranks))
    elif args.world == "spawn":
        good = all(comm.spawn(tour, args.seed, world_size=args.ranks, backend="gloo"))
    else:
        comm.init_distributed("gloo")
        good = tour(args.seed)
        comm.destroy_process_group()
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
