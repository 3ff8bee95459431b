"""How much a precision policy adds to the host's time for a step, on a GPT so narrow that little else is left.

    python benchmarks/precision.py
    python benchmarks/precision.py --stage 0 --layers 4 --rounds 50

One process, one thread; all contenders take turns, and ratios are taken within a round. "step" is a whole step of AdamW.
"kernels" is what torch takes for the loss and its gradients of the same model in the policy's dtype, without this library: on a
CPU half precision's operations are slower than fp32's even on small tensors, which a GPU's host would not see. "added" is
what the policy added to the step, and "own" what is left of that without the kernels' part, both over the fp32 step's time.
"skipped" is a step of the same policy whose gradients overflowed, over one that was made.
"""

import argparse
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import torch
from torch import Tensor

import functional_ds as fds
from functional_ds import transforms as T

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))
import gpt

RESULTS = Path(__file__).parent / "results"
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
WARM = 10  # rounds before the first that counts


@attrs.frozen
class Batch:
    """Rows, and what their loss is multiplied by: infinity overflows every gradient."""

    inputs: Tensor
    targets: Tensor
    factor: Tensor


def batches(args: argparse.Namespace) -> tuple[Batch, Batch]:
    rows = torch.zeros(args.batch, args.context, dtype=torch.int64)
    return Batch(rows, rows, torch.tensor(1.0)), Batch(rows, rows, torch.tensor(float("inf")))


def config(args: argparse.Namespace) -> gpt.Config:
    return gpt.Config(layers=args.layers, width=args.width, heads=args.heads, context=args.context)


def loss_of(logits: Tensor, batch: Batch) -> Tensor:
    return gpt.next_token_loss(logits.float(), batch.targets) * batch.factor


def step_of(name: str, args: argparse.Namespace) -> Callable[[Batch], None]:
    """A step that keeps its own state."""
    torch.manual_seed(0)
    apply, params = fds.functional(gpt.GPT(config(args)))
    policy = [] if name == "fp32" else [T.mixed_precision(name)]
    sharding = [] if args.stage is None else [T.zero(args.stage)]
    step = fds.compose(*policy, *sharding)(
        fds.train_step(lambda params, batch: loss_of(apply(params, batch.inputs), batch), fds.adamw(1e-3))
    )
    state = step.init(params)

    def once(batch: Batch) -> None:
        nonlocal state
        state, _ = step(state, batch)

    return once


def kernels_of(name: str, args: argparse.Namespace) -> Callable[[Batch], None]:
    """The loss and its gradients, by torch alone."""
    torch.manual_seed(0)
    model = gpt.GPT(config(args)).to(DTYPES[name])
    params = list(model.parameters())
    return lambda batch: torch.autograd.grad(loss_of(model(batch.inputs), batch), params) and None


def measure(args: argparse.Namespace) -> dict[str, list[float]]:
    """Seconds of each contender in each round."""
    good, bad = batches(args)
    contenders: dict[str, Callable[[], None]] = {}
    for name in DTYPES:
        for what, made in (("step", step_of), ("kernels", kernels_of)):
            run = made(name, args)
            contenders[f"{name} {what}"] = lambda run=run: run(good)
        if name == "fp16":
            skipping = step_of(name, args)
            contenders[f"{name} skipped"] = lambda run=skipping: run(bad)
    found: dict[str, list[float]] = {name: [] for name in contenders}
    for count in range(WARM + args.rounds):
        for name, run in contenders.items():
            start = time.perf_counter()
            run()
            if count >= WARM:
                found[name].append(time.perf_counter() - start)
    return found


def figures(found: dict[str, list[float]]) -> dict[str, float]:
    """Medians over the rounds of what the docstring says."""

    def median(rule: Callable[..., float], *names: str) -> float:
        return statistics.median(rule(*row) for row in zip(*(found[name] for name in names), strict=True))

    out = {f"{name}, ms": 1e3 * statistics.median(seconds) for name, seconds in found.items()}
    for name in ("bf16", "fp16"):
        names = (f"{name} step", "fp32 step", f"{name} kernels", "fp32 kernels")
        out[f"{name} added"] = median(lambda step, base: step / base - 1, *names[:2])
        out[f"{name} own"] = median(lambda step, base, ours, theirs: (step - base - (ours - theirs)) / base, *names)
    out["fp16 skipped / step"] = median(lambda skipped, step: skipped / step, "fp16 skipped", "fp16 step")
    return out


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in {"layers": 8, "width": 16, "heads": 2, "batch": 1, "context": 8, "rounds": 200}.items():
        parser.add_argument(f"--{name}", type=int, default=default, help=f"default {default}")
    parser.add_argument("--stage", type=int, choices=(0, 1, 2, 3), help="of ZeRO, on one rank; default: without")
    parser.add_argument("--out", type=Path, default=RESULTS / "precision.json", help="where the numbers go")
    return parser.parse_args()


def main() -> int:
    args = parse()
    torch.set_num_threads(1)
    shown: dict[str, Any] = figures(measure(args))
    print(f"GPT {args.layers} x {args.width}, ZeRO {args.stage}, torch {torch.__version__}")
    for name, value in shown.items():
        print(f"{name:<22}{value:>9.3f}" if "ms" in name or "/" in name else f"{name:<22}{100 * value:>8.1f}%")
    setup = {name: getattr(args, name) for name in ("layers", "width", "heads", "batch", "context", "rounds", "stage")}
    where = {"python": platform.python_version(), "torch": torch.__version__, "machine": platform.machine()}
    args.out.parent.mkdir(exist_ok=True)
    args.out.write_text(json.dumps({"setup": setup, "where": where, "figures": shown}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
