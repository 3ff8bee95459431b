"""Compares pipelines with torch.distributed.pipelining: the same stages, micro-batches and schedule, in turns, in one run.

    python benchmarks/pipeline.py                       2 Gloo processes
    python benchmarks/pipeline.py --ranks 4 --rounds 9

A contest is a forward and backward pass of the GPT of the examples, cut into stages of equally many blocks, without the
optimizer. Both contenders hold equal weights and get equal batches; their gradients are compared before anything is timed.
A round times each contender once, by its slowest rank. The ratio is our median over the rounds divided by torch's.
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import attrs
import torch
import torch.nn.functional as F
from interleaved import compared, difference, run, seconds, shown, verdict
from torch import Tensor, nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleZBVZeroBubble,
)

import functional_ds as fds
from functional_ds import comm
from functional_ds import pipelining as pp
from functional_ds import transforms as T

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))
import gpt

RESULTS = Path(__file__).parent / "results"
TARGET = 0.95
TOLERANCE = 1e-5  # of gradients, relative to the largest of a leaf; micro-batches are summed in another order


@attrs.frozen
class Contest:
    """Our schedule and torch's, and how many stages they put on a rank."""

    ours: Callable[[int, int], pp.Schedule]
    theirs: Any
    chunks: int


CONTESTS = {
    "gpipe": Contest(pp.gpipe, ScheduleGPipe, 1),
    "1f1b": Contest(pp.one_f_one_b, Schedule1F1B, 1),
    "interleaved": Contest(pp.interleaved_one_f_one_b, ScheduleInterleaved1F1B, 2),
    "zbv": Contest(pp.zbv, ScheduleZBVZeroBubble, 2),
}


class Part(nn.Module):
    """Some blocks of the GPT; the first part embeds, the last one has the head."""

    def __init__(self, config: gpt.Config, *, blocks: int, first: bool, last: bool) -> None:
        super().__init__()
        self.wte = nn.Embedding(config.vocab, config.width) if first else None
        self.blocks = nn.ModuleList(gpt.Block(config) for _ in range(blocks))
        self.head = nn.Linear(config.width, config.vocab, bias=False) if last else None

    def forward(self, x: Tensor) -> Tensor:
        if self.wte is not None:
            x = self.wte(x)
        for block in self.blocks:
            x = block(x)
        return x if self.head is None else self.head(x)


def parts(flags: argparse.Namespace, count: int) -> list[Part]:
    """The stages, equal on all ranks."""
    torch.manual_seed(0)
    config = gpt.Config(layers=flags.layers, width=flags.width, heads=4, context=flags.context)
    ends = [round(i * flags.layers / count) for i in range(count + 1)]
    return [Part(config, blocks=ends[i + 1] - ends[i], first=i == 0, last=i == count - 1) for i in range(count)]


def next_token_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Both contenders' loss."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def theirs(flags: argparse.Namespace, contest: Contest, schedule: pp.Schedule, batch: Any) -> Callable[[], dict[str, Tensor]]:
    """A pass through torch's schedule; the gradients by path."""
    here = comm.world().rank
    modules = parts(flags, schedule.stages)
    own = schedule.stages_of(here)
    stages = [PipelineStage(modules[s], s, schedule.stages, torch.device("cpu")) for s in own]
    given = stages if contest.chunks > 1 else stages[0]
    run = contest.theirs(given, flags.microbatches, loss_fn=next_token_loss)
    first, last = 0 in own, schedule.stages - 1 in own

    def once() -> dict[str, Tensor]:
        for s in own:
            modules[s].zero_grad(set_to_none=True)
        losses: list[Tensor] = []
        args = (batch[0],) if first else ()
        run.step(*args, **({"target": batch[1], "losses": losses} if last else {}))
        return {f"{s}.{name}": p.grad for s in own for name, p in modules[s].named_parameters() if p.grad is not None}

    return once


def ours(flags: argparse.Namespace, schedule: pp.Schedule, batch: Any) -> Callable[[], dict[str, Tensor]]:
    """A pass through our executor; the gradients by path."""
    pairs = [fds.functional(part) for part in parts(flags, schedule.stages)]
    params = [each for _, each in pairs]
    stages = pp.stages([apply for apply, _ in pairs], params, loss=lambda y, given: next_token_loss(y, given[1]))
    step = T.pipeline(schedule, stages)(fds.train_step(stages, fds.sgd(0.0)))
    state = step.init(params)
    paths = [path for path, _ in fds.tree.named(state.params)]

    def once() -> dict[str, Tensor]:
        _, grads, _ = step.gradients(state, batch, None, True)
        return dict(zip(paths, grads.sum, strict=True))

    return once


def measure(flags: argparse.Namespace) -> list[dict[str, Any]]:
    """What each rank runs; the rows of the table."""
    torch.set_num_threads(1)
    world, rows = comm.world(), []
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, 256, (2, flags.microbatches * flags.rows, flags.context), generator=generator)
    for name in flags.schedules:
        contest = CONTESTS[name]
        schedule = contest.ours(world.size, flags.microbatches)
        passes = {"ours": ours(flags, schedule, (tokens[0], tokens[1])), "torch": theirs(flags, contest, schedule, tokens)}
        sums = passes["ours"]()  # of means over micro-batches, which torch's contender averages
        gap = difference({path: grad / flags.microbatches for path, grad in sums.items()}, passes["torch"]())
        times = seconds(passes, flags.rounds)
        rows.append({"schedule": name, "difference": gap, **compared(times, "torch")})
        if world.rank == 0:
            print(shown(name, rows[-1], TARGET), flush=True)
    return rows


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the contests and writes the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--schedules", nargs="+", default=list(CONTESTS), choices=list(CONTESTS))
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--rows", type=int, default=2, help="of a micro-batch")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--context", type=int, default=64)
    parser.add_argument("--out", type=Path, default=RESULTS)
    flags = parser.parse_args(argv)
    rows = run(measure, flags, "pipeline")
    return verdict([row["schedule"] for row in rows if row["difference"] > TOLERANCE], TOLERANCE)


if __name__ == "__main__":
    sys.exit(main())
