"""The command line of train_gpt.py: flags that replace entries of train_gpt.toml, checked before any rank starts."""

import argparse
import math
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import attrs
import torch

from functional_ds import jobs

JOB = Path(__file__).with_name("train_gpt.toml")
CONFIG = "model.gpt:GPT.config"
PATHS = {  # by flag, the entries that it changes
    "zero": ["strategy.zero.stage"],
    "accumulate": ["strategy.accumulate.k"],
    "clip": ["strategy.clip.limit"],
    "lr": ["optimizer.adamw.lr"],
    "layers": [f"{CONFIG}.layers"],
    "width": [f"{CONFIG}.width"],
    "heads": [f"{CONFIG}.heads"],
    "context": ["data.context", f"{CONFIG}.context"],
    "batch": ["data.rows"],
    "steps": ["steps", "schedule.warmup_cosine.total"],
    "seed": ["seed"],
    "every": ["evaluation.every"],
}


@attrs.frozen
class Flags:
    """What to train, and what to do beside training."""

    job: jobs.Job
    out: Path
    check: bool
    sample: int
    profile: bool
    start: str  # who starts the ranks: spawn, simulate or torchrun
    ranks: int

    def __attrs_post_init__(self) -> None:
        rows, parts = self.job.data.rows, self.ranks * self.accumulate
        if rows % parts:
            raise ValueError(
                f"--batch {rows} does not divide among {self.ranks} ranks x {self.accumulate} micro-batches; "
                f"use a multiple of {parts}"
            )
        if self.sample < 0:
            raise ValueError(f"--sample {self.sample} must be at least 0 bytes")

    def __str__(self) -> str:
        ranks = f"{self.ranks} {'simulated ' * (self.start == 'simulate')}rank{'s' * (self.ranks > 1)}"
        sizes = self.job.model.arguments["config"]
        return f"GPT {sizes['layers']} x {sizes['width']}, {self.dtype}, ZeRO-{self.zero} on {ranks}"

    @property
    def zero(self) -> int:
        """ZeRO's stage."""
        return int(self._argument("zero", "stage", 0))

    @property
    def accumulate(self) -> int:
        """Micro-batches of a step."""
        return int(self._argument("accumulate", "k", 1))

    @property
    def dtype(self) -> str:
        """What the model computes in."""
        return "bf16" if any(each.name == "mixed_precision" for each in self.job.strategy) else "fp32"

    @property
    def every(self) -> int:
        """Steps between validations, and checkpoints."""
        return (self.job.evaluation and self.job.evaluation.every) or self.job.steps

    def _argument(self, name: str, argument: str, default: int) -> Any:
        return next((each.arguments[argument] for each in self.job.strategy if each.name == name), default)


class _Parser(argparse.ArgumentParser):
    """Errors in one line, from one rank."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message}\n" if os.environ.get("RANK", "0") == "0" else None)


def _positive(text: str) -> int:
    if (value := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"{value} is less than 1")
    return value


def _above_zero(text: str) -> float:
    if not (value := float(text)) > 0:
        raise argparse.ArgumentTypeError(f"{value} is not above 0")
    return value


def parse(argv: Sequence[str] | None, *, doc: str | None) -> Flags:
    """The flags; what makes no sense ends the program with one line and status 2."""
    job = jobs.load_job(JOB)
    parser = _parser(doc, job)
    given = parser.parse_args(argv)
    try:
        start, ranks, here = _ranks(given.ranks, given.simulate, job)
        device = "cuda" if torch.cuda.device_count() >= here else "cpu"
        mixed = any(each.name == "mixed_precision" for each in job.strategy)
        if given.dtype == "bf16" and not mixed:
            raise ValueError(f"--dtype bf16: the strategy of {JOB} has no mixed_precision")
        wanted = given.dtype or _dtype(device)
        job = job.changed(
            _changes(given, mixed and wanted == "fp32", job)
            | {"ranks": ranks, "simulate": start == "simulate", "device": device}
        )
        flags = Flags(job, given.out, given.check, given.sample, given.profile, start, ranks)
        jobs.check_job(job)
        flags.out.mkdir(parents=True, exist_ok=True)
    except (OSError, ValueError) as error:
        parser.error(str(error))
    if given.dtype is None and mixed and wanted == "fp32" and os.environ.get("RANK", "0") == "0":
        note = "this CPU has no bf16 arithmetic: training in fp32, which is faster here (--dtype bf16 insists)"
        print(note, file=sys.stderr)
    return flags


def _changes(given: argparse.Namespace, plain: bool, job: jobs.Job) -> dict[str, Any]:
    """The entries that flags change, by path; ``plain`` takes mixed precision out."""
    if given.seed is not None and not 0 <= given.seed < 2**63:
        raise ValueError(f"--seed {given.seed} must be at least 0 and below 2**63")
    if given.resume and given.save is None:
        raise ValueError("--resume: say with --save where the checkpoints are")
    if given.lr is not None and math.isinf(given.lr):
        raise ValueError("--lr inf: the learning rate must be finite")
    if given.steps is not None:
        given.every = given.every or max(1, given.steps // 10)
    wanted = {flag: getattr(given, flag) for flag in PATHS if getattr(given, flag) is not None}
    found: dict[str, Any] = {path: value for flag, value in wanted.items() for path in PATHS[flag]}
    if given.steps is not None:  # a tenth of the steps to warm up, but not under 30
        found["schedule.warmup_cosine.steps"] = min(max(given.steps // 10, 30), given.steps)
    if plain:
        found["strategy.mixed_precision"] = None
    if given.data is not None:
        found["data.files"] = [str(given.data.absolute())]
    if given.save is not None:
        every = given.every or (job.evaluation and job.evaluation.every)
        found["checkpoints"] = {"folder": str(given.save), "every": every, "resume": given.resume}
    return found


def _parser(doc: str | None, job: jobs.Job) -> argparse.ArgumentParser:
    """What is left out stays as the file has it."""
    parser = _Parser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)

    def entry(name: str, help: str, **options: Any) -> None:
        parser.add_argument(f"--{name}", help=f"{help} (default: {_value(job, PATHS[name][0])})".lstrip(), **options)

    flag = parser.add_argument
    flag("--data", type=Path, metavar="PATH", help="the text: a file, or a folder of such (default: Python's standard library)")
    entry("zero", "the stage", type=int, choices=range(4))
    flag("--dtype", choices=("bf16", "fp32"), help="bf16 keeps fp32 masters (default: bf16; fp32 on a CPU without it)")
    entry("accumulate", "micro-batches of a step", type=_positive, metavar="K")
    entry("clip", "inf for never", type=_above_zero, metavar="NORM")
    entry("lr", "the highest learning rate", type=_above_zero)
    for name in ("layers", "width", "heads", "context"):
        entry(name, "", type=_positive, metavar="N")
    entry("batch", "rows of a step, over all ranks", type=_positive, metavar="N")
    entry("steps", "with a warm-up of a tenth, but not under 30", type=_positive, metavar="N")
    entry("seed", "of the weights and batches", type=int)
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--ranks", type=_positive, metavar="N", help=f"processes (default: {job.ranks}; under torchrun, its)")
    where.add_argument("--simulate", type=_positive, metavar="N", help="simulated ranks, in this one process")
    flag("--out", type=Path, default=Path("out"), metavar="DIR", help="what is written (default: %(default)s)")
    flag("--save", type=Path, metavar="DIR", help="checkpoints, every so many steps and at the end (default: none)")
    flag("--resume", action="store_true", help="resume from the newest of them, if there is one")
    flag("--every", type=_positive, metavar="N", help="steps between validations, and checkpoints (default: a tenth of all)")
    flag("--check", action="store_true", help="train on one device too, and print how far the losses differ")
    flag("--profile", action="store_true", help="measure steps: where time, operations and bytes go")
    flag("--sample", type=int, default=500, metavar="BYTES", help="text at the end; 0 for none (default: %(default)s)")
    return parser


def _value(job: jobs.Job, path: str) -> Any:
    """What the file has at a path."""
    table = job.to_dict(defaults=True)
    table["strategy"] = {name: arguments for call in table["strategy"] for name, arguments in call.items()}
    for name in path.split("."):
        table = table.get(name, {}) if isinstance(table, dict) else {}
    return "none" if table == {} else table


def _ranks(ranks: int | None, simulate: int | None, job: jobs.Job) -> tuple[str, int, int]:
    """Who starts the ranks, how many, and how many of them need a device of their own here."""
    if {"RANK", "WORLD_SIZE"} <= os.environ.keys():
        if ranks or simulate:
            raise ValueError("torchrun has started the ranks: leave --ranks and --simulate out")
        return "torchrun", int(os.environ["WORLD_SIZE"]), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if simulate:
        return "simulate", simulate, 1
    count = ranks or job.world_size
    return "spawn", count, count


def _dtype(device: str) -> str:
    """bf16, but for a CPU that lacks it: there torch took 20 times as long a step."""
    return "bf16" if device == "cuda" or _cpu_has_bf16() else "fp32"


def _cpu_has_bf16() -> bool:
    return torch.backends.mkldnn.is_available() and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
