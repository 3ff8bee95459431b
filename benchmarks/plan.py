"""How near `functional-ds plan` is to the time of a step.

    python benchmarks/plan.py
    python benchmarks/plan.py --ranks 2 --stages 0,1,2,3 --micro 2,8 --write
    python benchmarks/plan.py --tiny --ranks 1 --stages 0,3 --micro 2,64

Run it on a machine that does nothing else. Every model trains in each stage with each size of micro-batch, in processes of
its own. Columns are seconds of a step and ratios predicted / measured: "microbenchmarks" predicts with `--machine here`,
"fitted" with factors that were fitted to all other runs, as `tune --save-machine` fits them to its own. The last
lines are the median and the worst ratio of each.
"""

import argparse
import json
import math
import os
import platform
import statistics
import sys
from pathlib import Path
from typing import Any

import attrs
import torch
from torch import Tensor, nn

from functional_ds.cli.planning.candidate import Candidate
from functional_ds.cli.planning.forecast import Forecast, forecast
from functional_ds.cli.planning.microbenchmarks import measured_here
from functional_ds.cli.planning.subject import subject_of
from functional_ds.cli.tuning.calibration import fitted
from functional_ds.cli.tuning.halving import Measurement
from functional_ds.cli.tuning.trial import TrialSpec, measure
from functional_ds.scaling.machine import Machine

RESULTS = Path(__file__).parent / "results"


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.heads = max(1, width // 64)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(self.norms[0](x)).chunk(3, -1))
        x = x + self.out(nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
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
    return _perceptron(512, 6, 128)


def many_layers() -> dict[str, Any]:
    return _perceptron(64, 48, 32)


def gpt() -> dict[str, Any]:
    return _gpt(384, 6, 256)


def long_gpt() -> dict[str, Any]:
    return _gpt(128, 4, 1024)


def tiny_perceptron() -> dict[str, Any]:
    return _perceptron(32, 2, 8)


def tiny_gpt() -> dict[str, Any]:
    return _gpt(64, 1, 16, vocab=64)


MODELS, TINY = ("perceptron", "many_layers", "gpt", "long_gpt"), ("tiny_perceptron", "tiny_gpt")
Run = tuple[str, Forecast, Measurement]


def trials(args: argparse.Namespace, machine: Machine, device: str) -> list[Run]:
    found = []
    for name in TINY if args.tiny else MODELS:
        model = f"{__file__}:{name}"
        for stage in args.stages:
            for rows in args.micro:
                candidate = Candidate.of({}, args.ranks, stage=stage, precision=args.precision, micro_batch=rows)
                predicted = forecast(subject_of(model), candidate, machine=machine, limit=0)
                spec = TrialSpec(model, dict(candidate.config), args.ranks, device=device, steps=args.steps)
                sys.stderr.write(f"{name}, {candidate.name}\n")
                found.append((name, predicted, measure(spec, timeout=args.timeout)))
    return found


def compared(machine: Machine, runs: list[Run]) -> list[dict[str, Any]]:
    """The runs that ended well, with both predictions."""
    well = [run for run in runs if run[2].seconds is not None]
    rows = []
    for index, (name, predicted, found) in enumerate(well):
        others = [
            (each.perfect_seconds, m.seconds)
            for other, (_, each, m) in enumerate(well)
            if other != index and each.perfect_seconds is not None and m.seconds is not None
        ]
        by_fit = attrs.evolve(predicted, machine=fitted(machine, others))
        seconds, peak = found.seconds or math.nan, found.peak or math.nan
        rows.append(
            {
                "model": name,
                "candidate": predicted.candidate.name,
                "seconds": seconds,
                "microbenchmarks": (predicted.step_seconds or math.nan) / seconds,
                "fitted": (by_fit.step_seconds or math.nan) / seconds,
                "peak": predicted.peak / peak,
                "state": predicted.shape.memory.state == found.state,
                "spent": predicted.seconds,
            }
        )
    return rows


def numbers(text: str) -> list[int]:
    return [int(each) for each in text.split(",")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=min(2, os.cpu_count() or 1))
    parser.add_argument("--stages", type=numbers, default=[0, 1, 2, 3])
    parser.add_argument("--micro", type=numbers, default=[1, 4, 16], help="rows of a micro-batch on a rank")
    parser.add_argument("--precision", default="fp32")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--timeout", type=float, default=300.0)
    parser.add_argument("--tiny", action="store_true", help="small models, to try the script")
    parser.add_argument("--write", action="store_true", help="put the figures into benchmarks/results/plan.json")
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    machine = measured_here(args.ranks)
    runs = trials(args, machine, device)
    rows = compared(machine, runs)
    for name, predicted, found in runs:
        if found.why:
            sys.stdout.write(f"{name}, {predicted.candidate.name}: {found.why}\n")
    for row in rows:
        sys.stdout.write(
            f"{row['model']:>16} {row['candidate']:28} {row['seconds']:9.4f} s  microbenchmarks {row['microbenchmarks']:5.2f}  "
            f"fitted {row['fitted']:5.2f}  peak {row['peak']:5.2f}  state {'equal' if row['state'] else 'DIFFERENT'}\n"
        )
    for column in ("microbenchmarks", "fitted"):
        ratios = [row[column] for row in rows]
        if ratios:
            worst = max(ratios, key=lambda ratio: abs(math.log(ratio)))
            sys.stdout.write(f"{column}: median {statistics.median(ratios):.2f}, worst {worst:.2f}\n")
    if args.write:
        found_all = {
            "machine": attrs.asdict(machine),
            "runs": rows,
            "torch": torch.__version__,
            "platform": platform.platform(),
        }
        (RESULTS / "plan.json").write_text(json.dumps(found_all, indent=1) + "\n")


if __name__ == "__main__":
    main()
