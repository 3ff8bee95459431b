"""Our collectives against torch.distributed's of the same name, over Gloo on loopback: time, bandwidth, overhead.

    python benchmarks/comm.py                                      2 and 4 ranks, 1 kB to 64 MB; a few minutes
    python benchmarks/comm.py --ranks 4 --only broadcast reduce --sizes 4MB 64MB --rounds 9
    python benchmarks/comm.py --quick                              seconds; its figures mean little

Both run in the same processes and take turns, a batch of calls each, in changing order; a barrier comes before each batch, and
a batch takes as long as its slowest rank does. Ratios are taken within a round, where noise is shared. torch writes into
tensors that were made beforehand, as its users would; ours returns new ones. Sizes are powers of 1024, and mean what the
ledger calls the payload: what comes out of a gather, what goes into anything else. So do the bandwidths.

Then what small messages cost, what ``comm.debug.checked()`` adds to a call, and how long simulations take.
"""

import argparse
import json
import os
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

import attrs
import torch
import torch.distributed as dist
from peers import facts, positive, progress
from torch import Tensor

from functional_ds import comm
from functional_ds.comm.record.ledger import Row

RESULTS = Path(__file__).parent / "results"
QUICK_SIZES = ("1kB", "256kB")
SIZES = ("1kB", "16kB", "256kB", "1MB", "4MB", "16MB", "64MB")
UNITS = {"kB": 2**10, "MB": 2**20}
BATCH_BYTES = 2**22  # a batch is this much, but not more than the plan's calls
OBJECT_BYTES = 2**20  # larger objects say nothing new
COLOURS = ("#c44e52", "#4c72b0", "#55a868", "#8172b2", "#ccb974", "#64b5cd", "#8c8c8c")

# torch 2.13 renamed these two, and warns of the old names.
ALL_GATHER = dist.all_gather_single if hasattr(dist, "all_gather_single") else dist.all_gather_into_tensor
REDUCE_SCATTER = dist.reduce_scatter_single if hasattr(dist, "reduce_scatter_single") else dist.reduce_scatter_tensor

Once = Callable[[], Any]  # one call; returns what is to be the same for both


# -- the contenders ----------------------------------------------------------------------------------------------------
# Each takes this rank, the number of ranks and a filled tensor of the size, and returns our call and torch's.


def all_reduce(rank: int, n: int, x: Tensor) -> tuple[Once, Once]:
    return lambda: comm.all_reduce(x), lambda: _then(x, dist.all_reduce(x))


def all_gather(rank: int, n: int, x: Tensor) -> tuple[Once, Once]:
    piece, out = x[: len(x) // n].clone(), torch.empty_like(x)
    return lambda: comm.all_gather(piece), lambda: _then(out, ALL_GATHER(out, piece))


def reduce_scatter(rank: int, n: int, x: Tensor) -> tuple[Once, Once]:
    out = torch.empty_like(x[: len(x) // n])
    return lambda: comm.reduce_scatter(x), lambda: _then(out, REDUCE_SCATTER(out, x))


def broadcast(rank: int, n: int, x: Tensor) -> tuple[Once, Once]:
    buffer = x.clone()
    return lambda: comm.broadcast(x), lambda: _then(buffer, dist.broadcast(buffer, 0))


def reduce(rank: int, n: int, x: Tensor) -> tuple[Once, Once]:
    def theirs() -> Tensor | None:
        dist.reduce(x, 0)
        return x if rank == 0 else None  # elsewhere it leaves what it likes

    return lambda: _root(rank, comm.reduce(x)), theirs


def gather(rank: int, n: int, x: Tensor) -> tuple[Once, Once]:
    piece, out = x[: len(x) // n].clone(), torch.empty_like(x)
    pieces = list(out.chunk(n)) if rank == 0 else None
    return lambda: _root(rank, comm.gather(piece)), lambda: _then(out if rank == 0 else None, dist.gather(piece, pieces))


def scatter(rank: int, n: int, x: Tensor) -> tuple[Once, Once]:
    out, whole = torch.empty_like(x[: len(x) // n]), x if rank == 0 else None
    pieces = list(x.chunk(n)) if rank == 0 else None
    return lambda: comm.scatter(whole, like=out), lambda: _then(out, dist.scatter(out, pieces))


def all_to_all(rank: int, n: int, x: Tensor) -> tuple[Once, Once]:
    out = torch.empty_like(x)
    return lambda: comm.all_to_all(x), lambda: _then(out, dist.all_to_all_single(out, x))


def all_to_all_rows(rank: int, n: int, x: Tensor) -> tuple[Once, Once]:
    """Rank r sends (r + p) mod n + 1 parts of n (n + 1) / 2 to rank p."""
    part = len(x) // (n * (n + 1) // 2)
    x = x[: part * (n * (n + 1) // 2)]
    splits = [part * ((rank + peer) % n + 1) for peer in range(n)]  # the same both ways
    out = torch.empty_like(x)
    return (
        lambda: comm.all_to_all(x, input_splits=splits, output_splits=splits),
        lambda: _then(out, dist.all_to_all_single(out, x, splits, splits)),
    )


def send_recv(rank: int, n: int, x: Tensor) -> tuple[Once, Once]:
    """There and back between ranks 0 and 1; the others look on."""
    buffer = x.clone()

    def ours() -> Tensor | None:
        if rank == 0:
            comm.send(x, 1)
            return comm.recv(x, 1)
        return _then(None, comm.send(comm.recv(x, 0), 0)) if rank == 1 else None

    def theirs() -> Tensor | None:
        if rank == 0:
            dist.send(x, 1)
            dist.recv(buffer, 1)
            return buffer
        if rank == 1:
            dist.recv(buffer, 0)
            dist.send(buffer, 0)
        return None

    return ours, theirs


def ring_shift(rank: int, n: int, x: Tensor) -> tuple[Once, Once]:
    ring, out = comm.Permutation.shift(n), torch.empty_like(x)

    def theirs() -> Tensor:
        ops = [dist.P2POp(dist.isend, x, (rank + 1) % n), dist.P2POp(dist.irecv, out, (rank - 1) % n)]
        for work in dist.batch_isend_irecv(ops):
            work.wait()
        return out

    return lambda: comm.permute(x, ring), theirs


def barrier(rank: int, n: int, x: Tensor) -> tuple[Once, Once]:
    return comm.barrier, dist.barrier


def all_gather_object(rank: int, n: int, x: Tensor) -> tuple[Once, Once]:
    value, out = bytes(4 * len(x) // n), [None] * n
    return lambda: comm.all_gather_object(value), lambda: _then(out, dist.all_gather_object(out, value))


def broadcast_object(rank: int, n: int, x: Tensor) -> tuple[Once, Once]:
    value = bytes(4 * len(x)) if rank == 0 else None

    def theirs() -> Any:
        box = [value]
        dist.broadcast_object_list(box, 0)
        return box[0]

    return lambda: comm.broadcast_object(value), theirs


def _then(result: Any, done: Any) -> Any:
    return result


def _root(rank: int, result: Tensor) -> Tensor | None:
    return result if rank == 0 else None


@attrs.frozen
class Contest:
    """Both contenders; the ledger's name for the collective, for bandwidths; messages of the size in a call."""

    build: Callable[[int, int, Tensor], tuple[Once, Once]]
    collective: str
    messages: int = 1
    largest: float = float("inf")


CONTESTS = {
    "all_reduce": Contest(all_reduce, "all_reduce"),
    "all_gather": Contest(all_gather, "all_gather"),
    "reduce_scatter": Contest(reduce_scatter, "reduce_scatter"),
    "broadcast": Contest(broadcast, "broadcast"),
    "reduce": Contest(reduce, "reduce"),
    "gather": Contest(gather, "gather"),
    "scatter": Contest(scatter, "scatter"),
    "all_to_all": Contest(all_to_all, "all_to_all"),
    "all_to_all_rows": Contest(all_to_all_rows, "all_to_all"),
    "send_recv": Contest(send_recv, "send", messages=2),
    "ring_shift": Contest(ring_shift, "permute"),
    "barrier": Contest(barrier, "barrier", messages=0, largest=0),
    "all_gather_object": Contest(all_gather_object, "all_gather", largest=OBJECT_BYTES),
    "broadcast_object": Contest(broadcast_object, "broadcast", largest=OBJECT_BYTES),
}


# -- on the ranks ------------------------------------------------------------------------------------------------------


@attrs.frozen
class Plan:
    """What to measure; sizes in bytes, and calls in a batch of small messages."""

    only: tuple[str, ...]
    sizes: tuple[int, ...]
    rounds: int
    calls: int

    def turns(self) -> list[tuple[str, int]]:
        """Each contest with its sizes; one that sends no data once."""
        found = []
        for name in self.only:
            largest = CONTESTS[name].largest
            sizes = [size for size in self.sizes if size <= largest] if largest else [0]
            found += [(name, size) for size in sizes or self.sizes[:1]]
        return found


@attrs.frozen
class Timed:
    """Seconds of a call, by round: ours and torch's."""

    name: str
    size: int
    ours: list[float]
    theirs: list[float]


def measure(plan: Plan) -> tuple[list[Timed], Timed]:
    """What each rank runs: its seconds of every contest, and of a small all_reduce in a checked block and outside."""
    rank, n, found = comm.get_rank(), comm.get_world_size(), []
    for name, size in plan.turns():
        if rank == 0:
            progress(f"{n} ranks: {name} {shown_size(size)}")
        elements = max(size // 4, 1)
        x = (torch.arange(elements + -elements % n) % 251 + rank).float()
        ours, theirs = CONTESTS[name].build(rank, n, x)
        check(name, ours(), theirs())
        x.zero_()  # or sums in place would grow without end
        calls = max(1, min(plan.calls, BATCH_BYTES // max(size, 1)))
        found.append(Timed(name, size, *compete(ours, theirs, calls, plan.rounds)))
    small = torch.zeros(256)

    def with_checks() -> None:
        with comm.debug.checked():
            for _ in range(plan.calls):
                comm.all_reduce(small)

    def without() -> None:
        for _ in range(plan.calls):
            comm.all_reduce(small)

    checked = compete(with_checks, without, 1, plan.rounds)
    return found, Timed("checked", 1024, *([seconds / plan.calls for seconds in side] for side in checked))


def check(name: str, ours: Any, theirs: Any) -> None:
    """What is timed must be the same thing."""
    same = torch.equal(ours, theirs) if isinstance(ours, Tensor) and isinstance(theirs, Tensor) else ours == theirs
    if not same:
        raise ValueError(f"{name}: ours gives {ours}, torch's {theirs}")


def compete(ours: Once, theirs: Once, calls: int, rounds: int) -> tuple[list[float], list[float]]:
    """Both one after the other, in changing order; a first round warms up."""
    seconds: dict[Once, list[float]] = {ours: [], theirs: []}
    for number in range(rounds + 1):
        for once in (ours, theirs) if number % 2 else (theirs, ours):
            dist.barrier()
            began = perf_counter()
            for _ in range(calls):
                once()
            if number:
                seconds[once].append((perf_counter() - began) / calls)
    return seconds[ours], seconds[theirs]


def slowest(ranks: Sequence[Timed]) -> Timed:
    """Round by round the slowest rank's time."""
    ours, theirs = ([max(r) for r in zip(*(getattr(t, side) for t in ranks), strict=True)] for side in ("ours", "theirs"))
    return Timed(ranks[0].name, ranks[0].size, ours, theirs)


# -- simulations -------------------------------------------------------------------------------------------------------


def ten_collectives() -> None:
    x = torch.ones(256)  # 1 kB
    for _ in range(10):
        x = comm.all_reduce(x, op="avg")


def ring_on_shapes() -> None:
    comm.algorithms.ring(torch.empty(1024, device="meta"))


SIMULATIONS: dict[str, Once] = {
    "8 ranks, 10 all_reduces of 1 kB": lambda: comm.simulate(ten_collectives, world_size=8),
    "64 ranks, 10 all_reduces of 1 kB": lambda: comm.simulate(ten_collectives, world_size=64),
    "1,024 ranks, a ring on shapes only": lambda: comm.simulate(ring_on_shapes, world_size=1024, shapes_only=True),
}


def simulations(rounds: int) -> dict[str, list[float]]:
    """Seconds of each, by round."""
    found: dict[str, list[float]] = {}
    for name, once in SIMULATIONS.items():
        progress(name)
        for _ in range(rounds):
            began = perf_counter()
            once()
            found.setdefault(name, []).append(perf_counter() - began)
    return found


# -- what is said of it ------------------------------------------------------------------------------------------------


def ratios(timed: Timed) -> list[float]:
    """torch's time over ours in each round: above 1 ours is faster."""
    return [theirs / ours for ours, theirs in zip(timed.ours, timed.theirs, strict=True)]


def bandwidths(timed: Timed, seconds: float, ranks: int) -> tuple[float, float]:
    """Algorithmic and bus bandwidth, bytes per second, as the ledger has them."""
    contest = CONTESTS[timed.name]
    row = Row(contest.collective, "world", ranks, timed=1, seconds=seconds, payload=timed.size * contest.messages)
    row.traffic = {known.name: known.traffic for known in comm.table.TABLE}.get(contest.collective, row.traffic)
    return row.algorithmic_bandwidth or 0.0, row.bus_bandwidth or 0.0


def shown_size(size: int) -> str:
    unit, scale = next((pair for pair in reversed(UNITS.items()) if size >= pair[1]), ("B", 1))
    return f"{size / scale:g} {unit}" if size else "-"


def spread(values: Sequence[float], scale: float, digits: int) -> str:
    middle, low, high = (f"{f(values) * scale:,.{digits}f}" for f in (statistics.median, min, max))
    return f"{middle} ({low}..{high})"


def table(found: Sequence[Timed], ranks: int) -> str:
    """A line a contest: medians with least and greatest round; ratios of medians per round, and of the least times."""
    head = f"{'collective':<18}{'size':>8}{'ours µs':>30}{'torch µs':>30}"
    head += f"{'torch / ours':>20}{'of minima':>10}{'alg GB/s':>10}{'bus GB/s':>10}"
    lines = [head, "-" * len(head)]
    for t in found:
        alg, bus = bandwidths(t, statistics.median(t.ours), ranks)
        times = f"{spread(t.ours, 1e6, 0):>30}{spread(t.theirs, 1e6, 0):>30}{spread(ratios(t), 1, 2):>20}"
        rates = f"{alg / 1e9:>10.3f}{bus / 1e9:>10.3f}" if t.size else ""
        lines.append(f"{t.name:<18}{shown_size(t.size):>8}{times}{min(t.theirs) / min(t.ours):>10.2f}{rates}".rstrip())
    return "\n".join(lines)


def overheads(found: Sequence[Timed]) -> dict[str, float]:
    """What ours takes longer than torch's at the smallest size, seconds of a call, by the least times: noise only adds."""
    smallest = min((t.size for t in found if t.size), default=0)
    return {t.name: min(t.ours) - min(t.theirs) for t in found if t.size in (0, smallest)}


def summary(timed: Timed, ranks: int) -> dict[str, Any]:
    sides = {}
    for side in ("ours", "theirs"):
        seconds = getattr(timed, side)
        alg, bus = bandwidths(timed, statistics.median(seconds), ranks)
        sides[side] = {"seconds": seconds, "algorithmic_bandwidth": alg, "bus_bandwidth": bus}
    return {
        "collective": timed.name,
        "bytes": timed.size,
        **sides,
        "ratio": statistics.median(ratios(timed)),
        "ratio_of_minima": min(timed.theirs) / min(timed.ours),
    }


def save_png(path: Path, found: Sequence[Timed], ranks: int, title: str) -> None:
    """Left: torch's time over ours, by size; right: our bus bandwidth (torch's dotted)."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    names = list(dict.fromkeys(t.name for t in found if t.size))
    figure, (left, right) = plt.subplots(1, 2, figsize=(14, 5.5), layout="constrained")
    for i, name in enumerate(names):
        mine = sorted((t for t in found if t.name == name), key=lambda t: t.size)
        sizes = [t.size for t in mine]
        look: dict[str, Any] = {"color": COLOURS[i % len(COLOURS)], "marker": "os"[i // len(COLOURS) % 2], "markersize": 4}
        left.plot(sizes, [statistics.median(ratios(t)) for t in mine], label=name, **look)
        for side, style in (("ours", "-"), ("theirs", ":")):
            rates = [bandwidths(t, statistics.median(getattr(t, side)), ranks)[1] / 1e9 for t in mine]
            right.plot(sizes, rates, linestyle=style, **look)
    left.axhline(1.0, color="black", linewidth=0.8, linestyle="--")
    left.set(ylabel="torch's time / ours (above 1: ours is faster)", title="ratio")
    right.set(ylabel="bus bandwidth, GB/s", yscale="log", title="ours (torch's dotted)")
    for axes in (left, right):
        axes.set(xscale="log", xlabel="bytes")
        axes.grid(alpha=0.3)
    if names:
        figure.legend(*left.get_legend_handles_labels(), loc="outside right center")
    figure.suptitle(title)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def run(plan: Plan, ranks: int, folder: Path, simulated: dict[str, list[float]]) -> None:
    """Measures one number of ranks, prints the table and writes the files."""
    load = os.getloadavg()[0]
    results = comm.spawn(measure, plan, world_size=ranks, backend="gloo")
    progress("")
    found = [slowest(timed) for timed in zip(*(timeds for timeds, _ in results), strict=True)]
    checked = slowest([check for _, check in results])
    machine = {**facts(), "load": round(load, 2), "load_after": round(os.getloadavg()[0], 2)}
    title = f"{ranks} ranks over Gloo, {machine['cores']} cores, {plan.rounds} rounds, load {load:.1f}"
    extra = overheads(found)
    adds = min(checked.ours) - min(checked.theirs)
    print(f"{title}\n\n{table(found, ranks)}\n\nours takes longer at the smallest size, µs a call:")
    print("  " + ", ".join(f"{name} {seconds * 1e6:+.0f}" for name, seconds in extra.items()))
    print(f"comm.debug.checked() adds to an all_reduce of 1 kB: {adds * 1e6:,.0f} µs")
    content = {
        "machine": machine,
        "setup": {"ranks": ranks, **attrs.asdict(plan)},
        "contests": [summary(timed, ranks) for timed in found],
        "overhead_seconds": extra,
        "checked_seconds": adds,
        "simulation_seconds": simulated,
    }
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"comm-{ranks}-ranks.json"
    path.write_text(json.dumps(content, indent=1) + "\n")
    save_png(path.with_suffix(".png"), found, ranks, title)
    print(f"written: {path}, {path.with_suffix('.png')}\n")


# -- the command line --------------------------------------------------------------------------------------------------


def nbytes(text: str) -> int:
    """ "16kB" and the like."""
    unit = next((unit for unit in UNITS if text.endswith(unit)), "")
    number = float(text.removesuffix(unit).removesuffix("B"))
    if (size := int(number * UNITS.get(unit, 1))) < 1:
        raise argparse.ArgumentTypeError(f"{text} is less than a byte")
    return size


def at_least_two(text: str) -> int:
    if (value := int(text)) < 2:
        raise argparse.ArgumentTypeError(f"{value}: it takes two to communicate")
    return value


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    flag = parser.add_argument
    flag("--ranks", type=at_least_two, nargs="+", metavar="N", help="numbers of ranks (default: 2 4; quick: 2)")
    flag("--rounds", type=positive, help="batches of each contender (default: 7; quick: 2)")
    flag("--sizes", type=nbytes, nargs="+", metavar="SIZE", help=f"default: {' '.join(SIZES)} (quick: 1kB 256kB)")
    flag("--only", nargs="+", choices=CONTESTS, default=list(CONTESTS), metavar="NAME", help=", ".join(CONTESTS))
    flag("--quick", action="store_true", help="few rounds of small sizes")
    flag("--out", type=Path, default=RESULTS, metavar="DIR", help="where JSON and PNG go (default: benchmarks/results)")
    args = parser.parse_args(argv)
    sizes, ranks, rounds, args.calls = (QUICK_SIZES, (2,), 2, 3) if args.quick else (SIZES, (2, 4), 7, 20)
    args.sizes = args.sizes or [nbytes(size) for size in sizes]
    args.ranks, args.rounds = args.ranks or ranks, args.rounds or rounds
    return args


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    plan = Plan(tuple(args.only), tuple(sorted(set(args.sizes))), args.rounds, args.calls)
    simulated = simulations(min(args.rounds, 3))
    progress("")
    for name, seconds in simulated.items():
        print(f"{name:<36}{spread(seconds, 1e3, 1)} ms")
    print()
    for ranks in args.ranks:
        run(plan, ranks, args.out, simulated)
    return 0


if __name__ == "__main__":
    sys.exit(main())
