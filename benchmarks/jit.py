"""Whole steps as graphs against eager steps: a GPT on Gloo ranks in every stage, and how long tracing takes.

    python benchmarks/jit.py
    python benchmarks/jit.py --layers 8 --width 384 --rounds 20
    python benchmarks/jit.py --width 16 --context 8 --batch 2          (host time: kernels take next to none)
    python benchmarks/jit.py --stages 3 --backend inductor

Both contenders have states of their own and take turns in the same processes. "tracing" is the time of the step in which a
graph is traced, passes, compilation and the ranks' agreement included, less an eager step. "host" is the processor time of
rank 0 for a step, all its threads included, as a ratio of the eager step's. "predicted" is what the graph costs on this
machine, whose rates are measured first, as for `functional-ds plan --machine here`; "fitted" is that times the factor by which
the first row was slower than predicted.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import functional_ds as fds
from functional_ds import comm
from functional_ds import transforms as T
from functional_ds.cli.planning.known_machines import measured_here
from functional_ds.compiling import GraphCost

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))
import gpt
import interleaved


def contender(
    jits: bool, stage: int, args: argparse.Namespace
) -> tuple[Callable[[], None], list[float], Callable[[], Any], GraphCost | None]:
    """A step that keeps its own state, the seconds of its first steps, the params that it has come to, and its graph's cost."""
    torch.manual_seed(0)
    apply, params = fds.functional(gpt.GPT(gpt.Config(args.layers, args.width, args.heads, args.context)))
    ids = torch.randint(0, 64, (args.batch, args.context + 1))
    step: Any = fds.train_step(lambda p, ids: gpt.next_token_loss(apply(p, ids[:, :-1]), ids[:, 1:]), fds.adamw(1e-3))
    step = fds.compose(T.zero(stage), T.clip(1.0))(step)
    step = fds.jit(step, backend=args.backend) if jits else step
    state = step.init(params)

    def once() -> None:
        nonlocal state
        state, _ = step(state, ids)

    first = []
    for _ in range(3):
        comm.barrier()
        begin = time.perf_counter()
        once()
        first.append(time.perf_counter() - begin)
    if jits and step.reasons:
        raise SystemExit(f"stage {stage} runs eagerly: {step.reasons}")
    cost = step.graph(state, ids).cost(args.machine) if jits else None
    return once, first, lambda: step.params(state), cost


def host_seconds(once: Callable[[], None], steps: int = 10) -> float:
    """The least processor time of a step."""
    found = []
    for _ in range(steps):
        comm.barrier()
        begin = time.process_time()
        once()
        found.append(time.process_time() - begin)
    return min(found)


def program(args: argparse.Namespace) -> dict[str, Any]:
    torch.set_num_threads(1)
    rows: dict[str, Any] = {}
    for stage in args.stages:
        made = {"ours": contender(True, stage, args), "eager": contender(False, stage, args)}
        times = interleaved.seconds({name: once for name, (once, *_) in made.items()}, args.rounds)
        row = interleaved.compared(times, "eager")
        row["difference"] = interleaved.difference(made["ours"][2](), made["eager"][2]())
        row["host"] = host_seconds(made["ours"][0]) / host_seconds(made["eager"][0])
        row["tracing"] = made["ours"][1][1] - statistics.median(times["eager"])
        cost = made["ours"][3]
        if cost is not None:
            waits = sum(cost.exposed.values())
            row["predicted"] = {"step": cost.seconds, "compute": cost.compute, "host": cost.host, "exposed": waits}
        rows[f"stage {stage}"] = row
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    numbers = {"ranks": 2, "layers": 8, "width": 128, "heads": 4, "context": 32, "batch": 4, "rounds": 10}
    for name, default in numbers.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--stages", type=int, nargs="+", default=[0, 1, 2, 3])
    parser.add_argument("--backend", default="fx")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    args.machine = measured_here(args.ranks)
    rows = comm.spawn(program, args, world_size=args.ranks)[0]
    for label, row in rows.items():
        print(interleaved.shown(label, row, 1.0), f"  host {row['host']:.2f}  tracing {row['tracing']:.2f} s", flush=True)
        first = next(iter(rows.values()))
        factor = statistics.median(first["seconds"]["ours"]) / first["predicted"]["step"]
        row["fitted"] = factor * row["predicted"]["step"]
        parts = ", ".join(f"{name} {seconds * 1e3:.1f}" for name, seconds in row["predicted"].items())
        print(f"    predicted, ms: {parts}; fitted {row['fitted'] * 1e3:.1f}", flush=True)
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
