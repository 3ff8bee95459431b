"""Trains the byte-level GPT of train_gpt.py in pipeline stages, by any schedule, with ZeRO along the other axis.

    python examples/pipeline_gpt.py                                        two processes, 1F1B
    python examples/pipeline_gpt.py --stages 4 --schedule zbv --dp 2 --zero 1
    python examples/pipeline_gpt.py --stages 4 --schedule interleaved --simulate
    python examples/pipeline_gpt.py --schedule mine.csv                    a table of your own
    torchrun --nproc-per-node 4 examples/pipeline_gpt.py --dp 2            wherever torchrun runs

Each step's bubble stands beside the least that the schedule permits for actions that take so long.

Writes out/pipeline.svg: the timeline that is predicted from the times of the last step but one, beside that of the last step.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import corpus
import gpt
import torch

import functional_ds as fds
from functional_ds import comm
from functional_ds import pipelining as pp
from functional_ds import transforms as T

SCHEDULES = {  # generators, and how many stages each puts on a rank
    "gpipe": (pp.gpipe, 1),
    "1f1b": (pp.one_f_one_b, 1),
    "interleaved": (pp.interleaved_one_f_one_b, 2),
    "zb_h1": (pp.zb_h1, 1),
    "zbv": (pp.zbv, 2),
    "dualpipe_v": (pp.dualpipe_v, 2),
}


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stages", type=int, default=2, help="of the model, over all ranks of a pipeline; a file has its own")
    parser.add_argument(
        "--schedule", default="1f1b", help=f"{', '.join(SCHEDULES)}, or a CSV file as torch writes it, lowered or not"
    )
    parser.add_argument("--microbatches", type=int, default=4, help="of a step; a file has its own")
    parser.add_argument("--dp", type=int, default=1, help="pipelines side by side")
    parser.add_argument("--zero", type=int, default=0, choices=range(4), help="stage of ZeRO over them")
    parser.add_argument("--dtype", default="fp32", choices=["fp32", "bf16"])
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--context", type=int, default=64)
    parser.add_argument("--batch", type=int, default=32, help="rows of a step, over all ranks")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--data", type=Path, default=None, help="a file; by default Python's own sources")
    parser.add_argument("--out", type=Path, default=Path("out"))
    parser.add_argument("--simulate", action="store_true", help="all ranks in this process")
    return parser.parse_args(argv)


def chosen(flags: argparse.Namespace) -> pp.Schedule:
    """The schedule, proved."""
    if flags.schedule not in SCHEDULES:
        return pp.validate(pp.from_csv(flags.schedule))
    make, chunks = SCHEDULES[flags.schedule]
    if flags.stages % chunks:
        raise SystemExit(f"--stages {flags.stages}: {flags.schedule} puts {chunks} on each rank; use a multiple of {chunks}")
    return pp.validate(make(flags.stages // chunks, flags.microbatches))


def train(flags: argparse.Namespace) -> list[float]:
    """What each rank runs; the losses of the steps."""
    schedule = chosen(flags)
    mesh = comm.mesh(dp=flags.dp, pp=schedule.ranks)
    text, rows = corpus.load(flags.data, context=flags.context), flags.batch // flags.dp

    def batch(index: int) -> Any:
        first = mesh["dp"].rank * rows
        return text.batch("train", index, rows=rows, context=flags.context, first_row=first)

    model = gpt.GPT(gpt.Config(layers=flags.layers, width=flags.width, heads=4, context=flags.context))
    stages, params = pp.cut(model, schedule.stages, loss=lambda y, b: gpt.next_token_loss(y, b[1]), example=batch(0))
    recorder = pp.Recorder()
    strategy = fds.compose(
        *([T.mixed_precision("bf16")] if flags.dtype == "bf16" else []),
        T.zero(flags.zero, mesh["dp"]),
        T.pipeline(schedule, stages, mesh["pp"], recorder=recorder),
        T.clip(1.0),
    )
    step = strategy(fds.train_step(stages, fds.adamw(flags.lr)))
    state, losses, runs = step.init(params), [], []
    leads = comm.world().rank == 0
    if leads:
        print(f"{step}\n{stages}\n{schedule}", flush=True)
    computed = fds.tree.map(lambda p: p.to(torch.bfloat16 if flags.dtype == "bf16" else p.dtype), params)
    costs = pp.estimated(stages, computed, fds.tree.map(lambda x: x[: -(-rows // schedule.microbatches)], batch(0)))
    for index in range(flags.steps):
        state, metrics = step(state, batch(index))
        losses.append(metrics["loss"].item())
        runs.append(recorder.run(schedule, mesh["pp"], costs=costs))
        if leads:
            bubble = f"bubble {runs[-1].bubble:.0%}, at least {runs[-1].least_bubble:.0%}"
            print(f"step {index + 1:>3}: loss {losses[-1]:.4f}, {bubble}", flush=True)
    if leads:
        picture(flags, schedule, runs, recorder)
    return losses


def picture(flags: argparse.Namespace, schedule: pp.Schedule, runs: list[pp.Timeline], recorder: pp.Recorder) -> None:
    """The last step as it ran, beside what the step before it predicts."""
    predicted = pp.timeline(schedule, pp.measured(runs[max(0, len(runs) - 2)]))
    flags.out.mkdir(parents=True, exist_ok=True)
    pp.draw(predicted, flags.out / "pipeline.svg", beside=runs[-1], title=f"{flags.schedule}, seconds and bytes")
    print(f"activations on rank 0: {recorder.peak:,} bytes at most, predicted {predicted.peak[0]:,.0f}")
    print(f"the picture: {flags.out / 'pipeline.svg'}")


def main(argv: Sequence[str] | None = None) -> int:
    """Starts the ranks, or is one."""
    flags = parse(argv)
    schedule = chosen(flags)
    ranks = schedule.ranks * flags.dp
    if flags.batch % flags.dp or flags.batch // flags.dp < schedule.microbatches:
        raise SystemExit(
            f"--batch {flags.batch} has to divide by --dp {flags.dp} and give {schedule.microbatches} micro-batches rows"
        )
    if "TORCHELASTIC_RUN_ID" in os.environ:
        comm.init_distributed("gloo")
        train(flags)
        torch.distributed.destroy_process_group()
    elif flags.simulate:
        comm.simulate(train, flags, world_size=ranks)
    else:
        comm.spawn(train, flags, world_size=ranks, backend="gloo")
    return 0


if __name__ == "__main__":
    sys.exit(main())
