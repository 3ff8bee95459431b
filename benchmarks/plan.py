"""How near `functional-ds plan` is to a step's time and memory on the machine that it was fitted to.

    python benchmarks/plan.py --ranks 1
    python benchmarks/plan.py --ranks 2 --write

Run it on a machine that does nothing else. Each configuration trains on every rank; their steps run in rounds, a step of each
configuration after the other, so that a slow minute is slow for all, and a time is the median of its rounds. Then
each is predicted by a machine that was fitted to the others, as `tune --save-machine` fits one: to all but the configuration
itself, and to all but the configurations of its model. Columns are ratios predicted / measured; the last lines count
those within 10 %. "tensors" is the peak that `plan` predicts by the most bytes of tensors that were alive; "process" is the
same by how much the process grew, and "given back" by how much it grew where the C library gives freed memory back at once,
in processes of their own. On two ranks each model is a pipeline, too, whose predicted time has its bubble.
"""

import argparse
import ctypes
import json
import math
import platform
import statistics
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

import attrs
import torch
from torch import Tensor, nn

from functional_ds import comm
from functional_ds.cli.planning.candidate import candidate, name_of
from functional_ds.cli.planning.forecast import Forecast, forecast
from functional_ds.cli.planning.known_machines import measured_here
from functional_ds.cli.planning.subject import job_of, planned
from functional_ds.cli.tuning.calibration import fitted
from functional_ds.cli.tuning.trial import ProcessMemory
from functional_ds.dry_run.events import EventRecorder
from functional_ds.jobs.job import Job
from functional_ds.jobs.job_subject import subject_of
from functional_ds.jobs.strategy import rows_of_rank
from functional_ds.memory.account import measured
from functional_ds.scaling.machine import Machine

RESULTS = Path(__file__).parent / "results"
_TRIM, _MMAP = -1, -3  # glibc's names for mallopt


class Attention(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.heads, self.qkv, self.out = max(1, width // 64), nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        found: Tensor = self.out(nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return found


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.attention = Attention(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norms[0](x))
        found: Tensor = x + self.mlp(self.norms[1](x))
        return found


class Transformer(nn.Module):
    def __init__(self, width: int, depth: int, vocab: int) -> None:
        super().__init__()
        self.embed, self.blocks = nn.Embedding(vocab, width), nn.ModuleList(Block(width) for _ in range(depth))
        self.head = nn.Linear(width, vocab)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        found: Tensor = self.head(x)
        return found


def _perceptron(width: int, depth: int, tokens: int) -> dict[str, Any]:
    layers = (nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)) for _ in range(depth))
    return {
        "module": nn.Sequential(*layers),
        "loss": lambda model, x: (model(x) - x).square().mean(),
        "batch": lambda rows: torch.randn(rows, tokens, width),
    }


def _gpt(width: int, depth: int, tokens: int, vocab: int = 1024) -> dict[str, Any]:
    return {
        "module": Transformer(width, depth, vocab),
        "loss": lambda model, x: nn.functional.cross_entropy(model(x).flatten(0, 1), x.flatten()),
        "batch": lambda rows: torch.randint(0, vocab, (rows, tokens)),
    }


def perceptron() -> dict[str, Any]:
    return _perceptron(256, 4, 64)


def wide_perceptron() -> dict[str, Any]:
    return _perceptron(512, 3, 32)


def many_layers() -> dict[str, Any]:
    return _perceptron(64, 16, 32)


def gpt() -> dict[str, Any]:
    return _gpt(256, 3, 64)


def small_gpt() -> dict[str, Any]:
    return _gpt(128, 4, 64)


def long_gpt() -> dict[str, Any]:
    return _gpt(128, 2, 512)


MODELS = ("perceptron", "wide_perceptron", "many_layers", "gpt", "small_gpt", "long_gpt")


@attrs.frozen
class Case:
    """A configuration: a model's name, rows of a micro-batch, and a strategy."""

    model: str
    rows: int
    stage: int = 0
    precision: str = "fp32"
    accumulate: int = 1
    recompute: bool = False
    pp: int = 1

    def job(self, ranks: int) -> Job:
        return candidate(
            job_of(f"{__file__}:{self.model}"),
            {"dp": ranks // self.pp, "pp": self.pp},
            stage=self.stage,
            precision=self.precision,
            micro_batch=self.rows,
            accumulate=self.accumulate,
            recompute=self.recompute,
        )


def cases(ranks: int) -> Iterator[Case]:
    """Small and large batches of each model, stages in turn; some accumulate, some recompute."""
    stages = (0,) if ranks == 1 else (0, 1, 2, 3)
    for number, model in enumerate(MODELS):
        few, more = (1, 2) if model == "long_gpt" else (2, 8)
        yield Case(model, few, stages[number % len(stages)])
        yield Case(model, more, stages[(number + 1) % len(stages)])
        if ranks > 1:
            yield Case(model, few, stages[(number + 2) % len(stages)])
            yield Case(model, few, accumulate=4, pp=2)
        if number % 2 == 0:
            yield Case(model, few, stages[(number + 3) % len(stages)], accumulate=2)
        if model in ("many_layers", "gpt", "small_gpt"):
            yield Case(model, more, stages[(number + 2) % len(stages)], recompute=True)


def trained(chosen: Sequence[Case], rounds: int, at_once: bool = False) -> "list[Timed]":
    """On this rank, for each configuration: seconds of its steps, how much the process grew, its tensors' peak, its state."""
    if at_once:
        libc = ctypes.CDLL(None)
        libc.mallopt(_MMAP, 1 << 16)
        libc.mallopt(_TRIM, 1 << 16)
    process, runs, found = ProcessMemory(torch.device("cpu")), [], []
    for case in (chosen[0], *chosen):  # the first once more, for what libraries take once
        before = process.now()
        torch.manual_seed(0)
        job = case.job(comm.world().size)
        subject = subject_of(job, device="cpu")
        batch = subject.batch(rows_of_rank(job))
        subject = subject.piped_for(job)
        step = subject.step(job)
        state = step.init(subject.params)
        del subject
        held = measured(state).state
        state, _ = step(state, batch)
        process.forget_peak()
        for _ in range(2):
            state, _ = step(state, batch)
        grown = max(0, process.peak() - before)
        with EventRecorder() as recorder:
            recorder.note((state, batch))
            state, _ = step(state, batch)
        found.append(([], grown, recorder.events.peak(), held))
        runs.append([step, state, batch])
    for _ in range(rounds):
        for run, (times, *_) in zip(runs[1:], found[1:], strict=True):
            step, state, batch = run
            comm.barrier()
            start = perf_counter()
            run[1], _ = step(state, batch)
            times.append(perf_counter() - start)
    return found[1:]


Timed = tuple[list[float], int, int, int]


def compared(ranks: int, rounds: int) -> dict[str, Any]:
    """All configurations of so many ranks, measured and predicted."""
    chosen, machine = list(cases(ranks)), measured_here(ranks, seconds=0.03)
    every, live = (
        comm.spawn(trained, chosen, times, at_once, world_size=ranks, backend="gloo")
        for times, at_once in ((rounds, False), (0, True))
    )
    return beside(chosen, every, [max(rank[place][1] for rank in live) for place in range(len(chosen))], machine)


@attrs.frozen
class Compared:
    """A configuration as predicted, its seconds, and of its ranks: growth, the largest ratio of tensors, equal states."""

    case: Case
    predicted: Forecast
    spent: float
    grown: int
    tensors: float
    state: bool


def beside(chosen: Sequence[Case], every: Sequence[Sequence[Timed]], live: Sequence[int], machine: Machine) -> dict[str, Any]:
    """What each rank has measured, and the predictions of fitted machines beside it."""
    ranks, found = len(every), list[Compared]()
    for place, case in enumerate(chosen):
        job = case.job(ranks)
        predicted = forecast(planned(job), job, machine=machine, limit=0)
        times, grown, peaks, held = zip(*(rank[place] for rank in every), strict=True)
        slowest = [max(each) for each in zip(*times, strict=True)]
        shapes = predicted.stages or (predicted.shape,) * ranks
        ratios = [shape.peak / peak for shape, peak in zip(shapes, peaks, strict=True)]
        state = [shape.memory.state for shape in shapes] == list(held)
        farthest = max(ratios, key=lambda ratio: abs(ratio - 1))
        found.append(Compared(case, predicted, statistics.median(slowest), max(grown), farthest, state))

    def seconds(predicted: Forecast, others: Sequence[Compared]) -> float:
        runs = [(other.predicted.perfect_seconds or {}, other.spent) for other in others if other.case.pp == 1]
        return attrs.evolve(predicted, machine=fitted(machine, runs)).step_seconds or math.nan

    rows = []
    for run, given_back in zip(found, live, strict=True):
        case, predicted, spent = run.case, run.predicted, run.spent
        apart = [other for other in found if other is not run]
        rows.append(
            {
                **attrs.asdict(case),
                "name": f"{case.model}, {name_of(predicted.job)}",
                "seconds": spent,
                "bubble": predicted.bubble_seconds,
                "microbenchmarks": (predicted.step_seconds or math.nan) / spent,
                "held out": seconds(predicted, apart) / spent,
                "model held out": seconds(predicted, [other for other in apart if other.case.model != case.model]) / spent,
                "state": run.state,
                "grown": run.grown,
                "tensors": run.tensors,
                "given back": predicted.peak / given_back,
                "process": predicted.peak / run.grown,
            }
        )
    all_runs = [(run.predicted.perfect_seconds or {}, run.spent) for run in found if run.case.pp == 1]
    return {
        "ranks": ranks,
        "rounds": len(every[0][0][0]),
        "torch": torch.__version__,
        "platform": platform.platform(),
        "machine": attrs.asdict(fitted(machine, all_runs)),
        "rows": rows,
    }


RATIOS = ("microbenchmarks", "held out", "model held out", "tensors", "given back", "process")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--write", action="store_true", help="put the figures into benchmarks/results/plan-N-ranks.json")
    args = parser.parse_args()
    start = perf_counter()
    found = compared(args.ranks, args.rounds)
    sys.stdout.write(f"{'':48} {'ms':>8} {'  '.join(RATIOS)}  state\n")
    for row in found["rows"]:
        ratios = "  ".join(f"{row[name]:{len(name)}.2f}" for name in RATIOS)
        sys.stdout.write(f"{row['name']:48} {row['seconds'] * 1e3:8.1f} {ratios}  {'equal' if row['state'] else 'DIFFERENT'}\n")
    for name in RATIOS:
        ratios = [row[name] for row in found["rows"]]
        near = sum(abs(ratio - 1) <= 0.1 for ratio in ratios)
        sys.stdout.write(
            f"{name}: {near} of {len(ratios)} within 10 %, median {statistics.median(ratios):.2f}, "
            f"from {min(ratios):.2f} to {max(ratios):.2f}\n"
        )
    sys.stdout.write(f"{perf_counter() - start:.0f} s\n")
    if args.write:
        (RESULTS / f"plan-{args.ranks}-ranks.json").write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
