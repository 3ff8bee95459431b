"""Trains a byte-level GPT on real text; the whole parallel strategy is one line, in `strategy`.

    python examples/train_gpt.py                             two local ranks, ZeRO-3, bf16, on Python's own sources
    python examples/train_gpt.py --zero 1 --ranks 4          the same losses; other memory, other messages
    python examples/train_gpt.py --simulate 8 --check        eight ranks in one process, then one device beside them
    torchrun --nproc-per-node 8 examples/train_gpt.py        wherever torchrun runs
    python examples/train_gpt.py --save DIR --resume         run again, it goes on where it was ended
    python examples/train_gpt.py --profile                   also where time, operations and bytes went, and a trace

What comes of it lies in out/. Ctrl-C ends a run after the step it is in, with everything written.
"""

import signal

if __name__ == "__main__":  # while there is nothing to save, an interrupt just ends the process
    signal.signal(signal.SIGINT, signal.SIG_DFL)

import math
import sys
from collections.abc import Sequence
from contextlib import nullcontext

import corpus
import gpt
import memory
import torch
from flags import Flags, parse
from report import Measured, Report
from torch import Tensor
from tqdm import tqdm

import functional_ds as fds
from functional_ds import comm, fitting
from functional_ds import transforms as T

Batch = tuple[Tensor, Tensor]

PRECISION = {"bf16": T.mixed_precision("bf16"), "fp32": fds.compose()}  # nothing composed changes nothing
VALIDATION_BATCHES = 4
PROMPT_BYTES = 64
TEMPERATURE = 0.8


def strategy(flags: Flags) -> fds.Transform:
    """All that is parallel about the step. With another stage the losses stay the same."""
    precision = PRECISION[flags.dtype]
    return fds.compose(precision, T.zero(flags.zero), T.accumulate(flags.accumulate), T.clip(flags.clip), pace(flags))


def on_one_device(flags: Flags) -> fds.Transform:
    """The same with nothing parallel, for --check."""
    return fds.compose(PRECISION[flags.dtype], T.clip(flags.clip), pace(flags))


def pace(flags: Flags) -> fds.Transform:
    """A tenth of the steps to warm up, but not under 30; then a cosine down to a tenth of the learning rate."""
    warmup = min(max(flags.steps // 10, 30), flags.steps)
    return T.schedule(T.warmup_cosine(warmup, flags.steps, floor=0.1))


def build(flags: Flags, transform: fds.Transform) -> tuple[fds.Apply, fds.Step, fds.State]:
    """The model as a function, the step that trains it, and the state to begin with."""
    apply, params = fds.functional(gpt.GPT(flags.model, seed=flags.seed).to(flags.device))

    def loss_fn(params: dict[str, Tensor], batch: Batch) -> Tensor:
        tokens_BT, targets_BT = batch
        return gpt.next_token_loss(apply(params, tokens_BT), targets_BT)

    optimizer = fds.adamw(flags.lr, betas=(0.9, 0.95), weight_decay=0.1)
    step = transform(fds.train_step(loss_fn, optimizer, seed=flags.seed))
    return apply, step, step.init(params)


def batch_of(flags: Flags, split: str, index: int) -> Batch:
    """This rank's rows of a global batch, which is the same on any number of ranks."""
    here = comm.world()
    text, rows = corpus.load(flags.data, context=flags.context), flags.batch // here.size
    x, y = text.batch(split, index, rows=rows, context=flags.context, seed=flags.seed, first_row=here.rank * rows)
    return x.to(flags.device), y.to(flags.device)


def train(flags: Flags, stop: fitting.Flag) -> list[float]:
    """What each rank runs, wherever it is one; on rank 0, the losses of the steps."""
    world = comm.world()
    sizes = [0]  # of the gradients, in bytes
    with comm.ledger() as whole:
        apply, step, state = build(flags, fds.compose(strategy(flags), fds.memory.noted(sizes)))
        psi = sum(p.numel() for p in apply.module.parameters())
        expected = memory.Expected(flags.zero, flags.dtype, flags.accumulate, psi, world.size)
        tokens, leads = flags.batch * flags.context, world.rank == 0
        measured = Measured(step, profiled(flags, step) if flags.profile else None)
        with Report(flags.out, str(flags), expected, flags.steps, tokens, measured, leads, flags.resume) as report:
            state = fit(flags, measured, state, report, stop)
            memories = fds.memory.measured(state, gradients=sizes[-1]).plus(peak=fds.memory.peak()).of_all_ranks()
            params = step.params(state)
            report.finish(whole, memories)
            if measured.profiled is not None and (found := measured.profiled.result()) and leads:
                found.save(flags.out)
            if leads:
                if flags.sample and math.isfinite(report.validation[len(report.train)]):
                    report.sampled(*sample(flags, apply, params))
                report.say(report.summary())
            return [row.loss for row in report.train]


def profiled(flags: Flags, step: fds.Step) -> fds.profiling.Profiled:
    """The step with a profile; its peak is that of products in the dtype that it computes in."""
    dtype = torch.bfloat16 if flags.dtype == "bf16" else torch.float32
    peak = fds.profiling.peak_flops(dtype, flags.device)
    return fds.profile(step, tokens=lambda batch: batch[0].numel(), peak=peak)


def fit(flags: Flags, step: Measured, state: fds.State, report: Report, stop: fitting.Flag) -> fds.State:
    """Takes the steps, fewer if interrupted, and measures the validation loss before, every so many steps, and after."""
    held_out = [batch_of(flags, "validation", index) for index in range(VALIDATION_BATCHES)]

    def validation(state: fds.State) -> dict[str, Tensor]:
        with nullcontext() if step.profiled is None else step.profiled.apart():
            return numbers(state)

    def numbers(state: fds.State) -> dict[str, Tensor]:
        return {"validation": torch.stack([step.step.evaluate(state, batch) for batch in held_out]).mean()}

    try:
        return fds.fit(
            step,
            state,
            lambda index: batch_of(flags, "train", index),
            steps=flags.steps,
            checkpoints=fds.Checkpoints(flags.save, every=flags.every, resume=flags.resume) if flags.save else None,
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


def sample(flags: Flags, apply: fds.Apply, params: dict[str, Tensor]) -> tuple[bytes, bytes]:
    """The beginning of the validation text, and how the model goes on."""
    prompt = bytes(corpus.load(flags.data).validation[:PROMPT_BYTES].tolist())
    return prompt, gpt.sample(
        lambda tokens_BT: apply(params, tokens_BT.to(flags.device)),
        prompt,
        length=flags.sample,
        context=flags.context,
        temperature=TEMPERATURE,
        generator=torch.Generator().manual_seed(flags.seed),
    )


def check(flags: Flags, losses: Sequence[float], stop: fitting.Flag) -> None:
    """Trains on the same global batches with the single-device step, and prints how far its losses are from ours."""
    _, step, state = build(flags, on_one_device(flags))
    gaps = []
    for index, ours in enumerate(tqdm(losses, "one device")):
        if stop.is_set():
            break
        state, metrics = step(state, batch_of(flags, "train", index))
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
    backend = None if flags.device == "cuda" else "gloo"
    with fitting.stop_ranks_on_signals() if flags.start == "spawn" else fitting.stop_on_signals() as stop:
        try:
            if flags.start == "torchrun":
                comm.init_distributed(backend)
                losses = train(flags, stop)
                torch.distributed.destroy_process_group()
            elif flags.start == "simulate":
                losses = comm.simulate(train, flags, stop, world_size=flags.ranks)[0]
            else:
                losses = comm.spawn(train, flags, stop, world_size=flags.ranks, backend=backend)[0]
        except comm.RankFailedError:
            if not stop.is_set():
                raise
            return 130  # interrupted again, while it was stopping
        except fds.checkpointing.StructureError as error:
            print(f"{error}\n--save {flags.save} holds another run: take its flags, or another folder", file=sys.stderr)
            return 2
        except fds.checkpointing.CheckpointError as error:
            print(error, file=sys.stderr)
            return 2
        if flags.check and losses:
            check(flags, losses, stop)
        return 130 if stop.is_set() else 0


if __name__ == "__main__":
    sys.exit(main())
