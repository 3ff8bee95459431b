"""What an engine's loop takes beside the step that it runs.

    python benchmarks/engine.py
    python benchmarks/engine.py --width 256 --layers 12 --rounds 50 --stage 2

"engine" is ``loss = engine(x); engine.backward(loss); engine.step()``, "halves" the same by ``step.open``, ``backward`` and
``finish``, "step" is ``step(state, batch)``. They take turns on one rank, each on a state of its own; what is given is the
processor's time of an update in milliseconds, the median and the least over rounds. The overhead is the median of the
ratios engine / step of neighbouring turns, less one.
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

import torch
from torch import Tensor, nn

import functional_ds as fds

RESULTS = Path(__file__).parent / "results"
WARM = 5  # rounds before the first that counts


def model(width: int, layers: int) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)) for _ in range(layers))
    )


def config(stage: int, rows: int, micro: int, *, half: bool) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": rows,
        "gradient_accumulation_steps": micro,
        "bf16": {"enabled": half},
        "zero_optimization": {"stage": stage},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
    }


def loops(args: argparse.Namespace, device: torch.device) -> dict[str, Callable[[], None]]:
    """The three loops, each a function that makes one update."""
    ds = config(args.stage, args.rows, args.micro, half=args.bf16)
    batch = torch.randn(args.rows * args.micro, args.width, device=device)
    micros = batch.chunk(args.micro)
    plan = fds.from_ds_config(ds, 1)
    engine, *_ = fds.deepspeed.initialize(model=model(args.width, args.layers).to(device), config=ds)

    def loss_of(y: Tensor) -> Tensor:
        return y.float().square().mean()

    def by_engine() -> None:
        for micro in micros:
            engine.backward(loss_of(engine(micro)))
            engine.step()

    apply, params = fds.functional(model(args.width, args.layers).to(device))
    step = plan.transform(fds.train_step(lambda params, x: loss_of(apply(params, x)), plan.optimizer))
    states = {"halves": step.init(params), "step": step.init(params)}

    def by_halves() -> None:
        grads = None
        for index, micro in enumerate(micros):
            run = step.open(states["halves"], None, grads)
            grads = run.backward(loss_of(run(apply, micro)), last=index == args.micro - 1)
        if grads is not None:
            states["halves"], _ = step.finish(states["halves"], grads)

    def by_step() -> None:
        states["step"], _ = step(states["step"], batch)

    return {"engine": by_engine, "halves": by_halves, "step": by_step}


def measured(args: argparse.Namespace) -> dict[str, Any]:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    programs = loops(args, device)
    clock = time.perf_counter if device.type == "cuda" else time.process_time
    times: dict[str, list[float]] = {name: [] for name in programs}
    for turn in range(WARM + args.rounds):
        for name in (*programs,) if turn % 2 else (*reversed(programs),):
            began = clock()
            programs[name]()
            if device.type == "cuda":
                torch.cuda.synchronize()
            if turn >= WARM:
                times[name].append((clock() - began) * 1000)
    ratios = {name: [a / b for a, b in zip(times[name], times["step"], strict=True)] for name in ("engine", "halves")}
    return {
        "ms": {name: {"median": statistics.median(each), "least": min(each)} for name, each in times.items()},
        "overhead": {name: statistics.median(each) - 1 for name, each in ratios.items()},
        "overhead of the least": {name: min(times[name]) / min(times["step"]) - 1 for name in ratios},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--micro", type=int, default=2, help="micro-batches of an update")
    parser.add_argument("--stage", type=int, default=1)
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--write", action="store_true", help="put the figures into benchmarks/results/engine.json")
    args = parser.parse_args()
    torch.set_num_threads(1)
    found = {**measured(args), "options": vars(args), "torch": torch.__version__, "machine": platform.platform()}
    text = json.dumps(found, indent=1)
    if args.write:
        (RESULTS / "engine.json").write_text(text + "\n")
    sys.stdout.write(text + "\n")


if __name__ == "__main__":
    main()
