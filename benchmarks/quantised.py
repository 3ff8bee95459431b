"""ZeRO++ on simulated nodes: int8 params and gradients (qwZ, qgZ) beside fp32, same steps: bytes between nodes, losses.

    python benchmarks/quantised.py --steps 200

trains the GPT of the examples in stage 3 over 2 x 2 ranks, and writes ``results/quantised.json``. The goals: at most 0.27 of
fp32's bytes between nodes, and losses within 1 %.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch

import functional_ds as fds
from functional_ds import comm
from functional_ds import transforms as T

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))

import corpus
from gpt import GPT, Config, next_token_loss

GOAL_BYTES, GOAL_LOSS = 0.27, 0.01


def train(args: argparse.Namespace, data: torch.Tensor, options: dict[str, Any]) -> tuple[list[float], int, int]:
    """Losses, bytes between nodes a step, and bytes inside them, on this rank."""
    mesh = comm.mesh(inter=args.nodes, intra=args.ranks)
    apply, params = fds.functional(GPT(Config(layers=args.layers, width=args.width, heads=args.heads, context=args.context)))
    zero = T.zero(3, mesh["inter", "intra"], intra_node=mesh["intra"], **options)
    step = zero(fds.train_step(lambda p, x: next_token_loss(apply(p, x[:, :-1]), x[:, 1:]), fds.adamw(args.rate)))
    state, losses = step.init(params), []
    with comm.ledger() as book:
        for i in range(args.steps):
            generator = torch.Generator().manual_seed(i * mesh["inter", "intra"].size + mesh["inter", "intra"].rank)
            starts = torch.randint(len(data) - args.context - 1, (args.batch,), generator=generator)
            state, metrics = step(state, torch.stack([data[s : s + args.context + 1].long() for s in starts.tolist()]))
            losses.append(metrics["loss"].item())
    between = sum(row.bytes for row in book.rows if ":inter_node" in row.group)
    return losses, between // args.steps, (book.bytes - between) // args.steps


def main() -> None:
    """Runs fp32 and the quantised ones, prints a table, writes the figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    sizes = {"steps": 200, "nodes": 2, "ranks": 2, "layers": 4, "width": 128, "heads": 4, "context": 64, "batch": 4}
    for name, default in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--rate", type=float, default=1e-3)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "quantised.json")
    args = parser.parse_args()
    narrow = {
        name: comm.codecs.compressed(getattr(comm, name), comm.codecs.Blocks(8)) for name in ("all_gather", "reduce_scatter")
    }
    data = corpus.load(context=args.context).train
    found: dict[str, Any] = {}
    for name, options in {"fp32": {}, "qwZ+qgZ": narrow, "qwZ+qgZ+hpZ": {**narrow, "hpz": True}}.items():
        losses, between, inside = comm.simulate(lambda o=options: train(args, data, o), world_size=args.nodes * args.ranks)[0]
        found[name] = {"losses": losses, "between": between, "inside": inside}
        plain = found["fp32"]
        tail = max(1, args.steps // 20)
        mean, other = (sum(run["losses"][-tail:]) / tail for run in (found[name], plain))
        found[name] |= {"bytes_ratio": between / plain["between"], "loss_ratio": mean / other}
        print(f"{name:<12} across {between:>12,} ({between / plain['between']:.3f}) loss {mean:.4f} ({mean / other - 1:+.2%})")
    narrowed = [run for name, run in found.items() if name != "fp32"]
    reached = all(run["bytes_ratio"] <= GOAL_BYTES and abs(run["loss_ratio"] - 1) <= GOAL_LOSS for run in narrowed)
    print("goals reached" if reached else "goals missed")
    args.out.write_text(json.dumps({"sizes": {**vars(args), "out": args.out.name}, "runs": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
