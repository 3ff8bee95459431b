"""The command line of train_gpt.py, checked as a whole before any rank starts."""

import argparse
import math
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import attrs
import corpus
import gpt
import torch


@attrs.frozen
class Flags:
    """What to train and how. `batch` is a step's rows over all ranks, so that losses do not depend on their number."""

    data: Path | None
    zero: int
    dtype: str
    accumulate: int
    clip: float
    lr: float
    layers: int
    width: int
    heads: int
    context: int
    batch: int
    steps: int
    seed: int
    out: Path
    save: Path | None
    resume: bool
    every: int
    check: bool
    sample: int
    profile: bool
    start: str  # who starts the ranks: spawn, simulate or torchrun
    ranks: int
    device: str

    def __attrs_post_init__(self) -> None:
        parts = self.ranks * self.accumulate
        if self.batch % parts:
            raise ValueError(
                f"--batch {self.batch} does not divide among {self.ranks} ranks x {self.accumulate} micro-batches; "
                f"use a multiple of {parts}"
            )
        if not 0 <= self.seed < 2**63:
            raise ValueError(f"--seed {self.seed} must be at least 0 and below 2**63")
        if self.sample < 0:
            raise ValueError(f"--sample {self.sample} must be at least 0 bytes")
        if self.resume and self.save is None:
            raise ValueError("--resume: say with --save where the checkpoints are")
        if math.isinf(self.lr):
            raise ValueError("--lr inf: the learning rate must be finite")

    def __str__(self) -> str:
        ranks = f"{self.ranks} {'simulated ' * (self.start == 'simulate')}rank{'s' * (self.ranks > 1)}"
        return f"GPT {self.layers} x {self.width}, {self.dtype}, ZeRO-{self.zero} on {ranks}"

    @property
    def model(self) -> gpt.Config:
        """The model's sizes."""
        return gpt.Config(layers=self.layers, width=self.width, heads=self.heads, context=self.context)


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
    parser = _parser(doc)
    found = vars(parser.parse_args(argv))
    try:
        ranks = _ranks(found.pop("ranks"), found.pop("simulate"))
        wanted = found.pop("dtype")
        found["every"] = found["every"] or max(1, found["steps"] // 10)
        flags = Flags(**found, **ranks, dtype=wanted or _dtype(ranks["device"]))
        corpus.load(flags.data, context=flags.context)
        _ = flags.model
        flags.out.mkdir(parents=True, exist_ok=True)
    except (OSError, ValueError) as error:
        parser.error(str(error))
    if wanted is None and flags.dtype == "fp32" and os.environ.get("RANK", "0") == "0":
        note = "this CPU has no bf16 arithmetic: training in fp32, which is faster here (--dtype bf16 insists)"
        print(note, file=sys.stderr)
    return flags


def _parser(doc: str | None) -> argparse.ArgumentParser:
    parser = _Parser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    flag = parser.add_argument
    flag("--data", type=Path, metavar="FILE", help="the text (default: Python's standard library)")
    flag("--zero", type=int, choices=range(4), default=3, help="the stage (default: %(default)s)")
    flag("--dtype", choices=("bf16", "fp32"), help="bf16 keeps fp32 masters (default: bf16; fp32 on a CPU without it)")
    flag("--accumulate", type=_positive, default=1, metavar="K", help="micro-batches of a step (default: %(default)s)")
    flag("--clip", type=_above_zero, default=1.0, metavar="NORM", help="inf for never (default: %(default)s)")
    flag("--lr", type=_above_zero, default=1e-3, help="the highest learning rate (default: %(default)s)")
    for name, default in {"layers": 4, "width": 192, "heads": 3, "context": 128}.items():
        flag(f"--{name}", type=_positive, default=default, metavar="N", help="(default: %(default)s)")
    flag("--batch", type=_positive, default=32, metavar="N", help="rows of a step, over all ranks (default: %(default)s)")
    flag("--steps", type=_positive, default=300, metavar="N", help="(default: %(default)s)")
    flag("--seed", type=int, default=0, help="of the weights and batches (default: %(default)s)")
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--ranks", type=_positive, metavar="N", help="local processes (default: 2; under torchrun, its)")
    where.add_argument("--simulate", type=_positive, metavar="N", help="simulated ranks, in this one process")
    flag("--out", type=Path, default=Path("out"), metavar="DIR", help="what is written (default: %(default)s)")
    flag("--save", type=Path, metavar="DIR", help="checkpoints, every so many steps and at the end (default: none)")
    flag("--resume", action="store_true", help="go on from the newest of them, if there is one")
    flag("--every", type=_positive, metavar="N", help="steps between validations, and checkpoints (default: a tenth of all)")
    flag("--check", action="store_true", help="train on one device too, and print how far the losses differ")
    flag("--profile", action="store_true", help="measure steps: where time, operations and bytes go")
    flag("--sample", type=int, default=500, metavar="BYTES", help="text at the end; 0 for none (default: %(default)s)")
    return parser


def _ranks(ranks: int | None, simulate: int | None) -> dict[str, Any]:
    """Who starts the ranks, how many, and on what: GPUs where there is one for each, else the CPU."""
    if {"RANK", "WORLD_SIZE"} <= os.environ.keys():
        if ranks or simulate:
            raise ValueError("torchrun has started the ranks: leave --ranks and --simulate out")
        start, ranks, here = "torchrun", int(os.environ["WORLD_SIZE"]), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    elif simulate:
        start, ranks, here = "simulate", simulate, 1
    else:
        start, ranks, here = "spawn", ranks or 2, ranks or 2
    return {"start": start, "ranks": ranks, "device": "cuda" if torch.cuda.device_count() >= here else "cpu"}


def _dtype(device: str) -> str:
    """bf16, but for a CPU that lacks it: there torch took 20 times as long a step."""
    return "bf16" if device == "cuda" or _cpu_has_bf16() else "fp32"


def _cpu_has_bf16() -> bool:
    return torch.backends.mkldnn.is_available() and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
