"""Trains a byte-level GPT on real text: the job is train_gpt.toml, and its whole parallel strategy one entry of it.

    python examples/train_gpt.py                             two local ranks, ZeRO-3, bf16, on Python's own sources
    python examples/train_gpt.py --zero 1 --ranks 4          the same losses; other memory, other messages
    python examples/train_gpt.py --simulate 8 --check        eight ranks in one process, then one device beside them
    torchrun --nproc-per-node 8 examples/train_gpt.py        wherever torchrun runs
    python examples/train_gpt.py --save DIR --resume         run again, it goes on where it was ended
    python examples/train_gpt.py --profile                   also where time, operations and bytes went, and a trace

Flags take the place of the file's entries. What comes of it lies in out/. Ctrl-C ends a run after the step it is in, with
everything written.
"""

import signal

if __name__ == "__main__":  # while there is nothing to save, an interrupt just ends the process
    signal.signal(signal.SIGINT, signal.SIG_DFL)

import math
import sys
from collections.abc import Sequence
from contextlib import nullcontext

import gpt
import memory
import torch
from flags import Flags, parse
from report import Measured, Report
from torch import Tensor
from tqdm import tqdm

import functional_ds as fds
from functional_ds import comm, fitting, jobs

PROMPT_BYTES = 64
TEMPERATURE = 0.8


def on_one_device(job: jobs.Job) -> jobs.Job:
    """The same with nothing parallel, for --check."""
    return job.changed({"strategy.zero": None, "strategy.accumulate": None, "ranks": 1, "simulate": False})


def train(job: jobs.Job, flags: Flags, stop: fitting.Flag) -> tuple[list[float], bool]:
    """What each rank runs, wherever it is one; on rank 0, the losses of the steps, and whether it was interrupted."""
    world = comm.world()
    sizes = [0]  # of the gradients, in bytes
    with comm.ledger() as whole:
        prepared = jobs.prepare(job, after=fds.memory.noted(sizes))
        state = prepared.init()
        psi = sum(p.numel() for p in prepared.apply.module.parameters())
        expected = memory.Expected(flags.zero, flags.dtype, flags.accumulate, psi, world.size)
        tokens, leads = job.data.rows * job.data.context, world.rank == 0
        measured = Measured(prepared.step, profiled(flags, prepared) if flags.profile else None)
        resumes = job.checkpoints is not None and job.checkpoints.resume
        with Report(flags.out, str(flags), expected, job.steps, tokens, measured, leads, resumes) as report:
            state = fit(flags, prepared, measured, state, report, stop)
            memories = fds.memory.measured(state, gradients=sizes[-1]).plus(peak=fds.memory.peak()).of_all_ranks()
            params = prepared.step.params(state)
            report.finish(whole, memories)
            if measured.profiled is not None and (found := measured.profiled.result()) and leads:
                found.save(flags.out)
            if leads:
                if flags.sample and math.isfinite(report.validation[len(report.train)]):
                    report.sampled(*sample(flags, prepared, params))
                report.say(report.summary())
            return [row.loss for row in report.train], stop.is_set()


def profiled(flags: Flags, prepared: jobs.PreparedJob) -> fds.profiling.Profiled:
    """The step with a profile; its peak is that of products in the dtype that it computes in."""
    dtype = torch.bfloat16 if flags.dtype == "bf16" else torch.float32
    peak = fds.profiling.peak_flops(dtype, prepared.device)
    return fds.profile(prepared.step, tokens=lambda batch: batch["input_ids"].numel(), peak=peak)


def fit(
    flags: Flags, prepared: jobs.PreparedJob, step: Measured, state: fds.State, report: Report, stop: fitting.Flag
) -> fds.State:
    """Takes the steps, fewer if interrupted, and measures the validation loss before, every so many steps, and after."""

    def validation(state: fds.State) -> dict[str, Tensor]:
        with nullcontext() if step.profiled is None else step.profiled.apart():
            return prepared.validation(state)

    try:
        return fds.fit(
            step,
            state,
            lambda index: prepared.batch("train", index),
            steps=prepared.job.steps,
            checkpoints=prepared.checkpoints,
            evaluation=fds.Evaluation(validation, every=flags.every),
            logging=fds.Logging([report], every=1),
            on_non_finite=None,
            stop=stop,
        )
    except fitting.Interrupted as end:
        report.say(f"interrupted after step {end.done}")
        if end.done % flags.every:
            report.validated(end.done, validation(end.state)["validation"].item())
        return end.state


def sample(flags: Flags, prepared: jobs.PreparedJob, params: dict[str, Tensor]) -> tuple[bytes, bytes]:
    """The beginning of the validation text, and how the model goes on."""
    prompt = bytes(prepared.text.validation[:PROMPT_BYTES].tolist())
    return prompt, gpt.sample(
        lambda tokens_BT: prepared.apply(params, tokens_BT.to(prepared.device)),
        prompt,
        length=flags.sample,
        context=prepared.job.data.context,
        temperature=TEMPERATURE,
        generator=torch.Generator().manual_seed(prepared.job.seed),
    )


def check(flags: Flags, losses: Sequence[float], stop: fitting.Flag) -> None:
    """Trains on the same global batches with the single-device step, and prints how far its losses are from ours."""
    alone = jobs.prepare(on_one_device(flags.job))
    state, gaps = alone.init(), []
    for index, ours in enumerate(tqdm(losses, "one device")):
        if stop.is_set():
            break
        state, metrics = alone.step(state, alone.batch("train", index))
        gaps.append(abs(ours - metrics["loss"].item()))
    print("\nlargest difference of the losses from the single-device step's, per step:")
    for first in range(0, len(gaps), flags.every):
        part = gaps[first : first + flags.every]
        print(f"  steps {first + 1:>5} to {first + len(part):>5}: {max(part):.2e}")
    if gaps:
        worst = gaps.index(max(gaps))
        print(f"  the largest: {gaps[worst]:.2e}, in step {worst + 1}, of {losses[worst]:.4f}")


def main(argv: Sequence[str] | None = None) -> int:
    """Starts the ranks, or is one; 130 where it was interrupted, 2 where a checkpoint is another run's, or cannot be made."""
    flags = parse(argv, doc=__doc__)
    saved = flags.job.checkpoints
    try:
        losses, stopped = jobs.run_ranks(flags.job, train, flags)
    except fitting.Interrupted:
        return 130  # interrupted again, while it was stopping
    except fds.checkpointing.StructureError as error:
        folder = saved and saved.folder
        print(f"{error}\n--save {folder} holds another run: take its flags, or another folder", file=sys.stderr)
        return 2
    except fds.checkpointing.CheckpointError as error:
        print(error, file=sys.stderr)
        return 2
    if flags.check and losses and not stopped:
        with fitting.stop_on_signals() as stop:
            check(flags, losses, stop)
            stopped = stop.is_set()
    return 130 if stopped else 0


if __name__ == "__main__":
    sys.exit(main())
