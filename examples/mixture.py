"""Trains a small mixture of experts on Python's own sources, three times: without balancing, by a loss, and by biases.

    python examples/mixture.py                              two processes, half of the experts on each
    python examples/mixture.py --ranks 4 --ep 2 --zero 3    experts twice, sharded by ZeRO over their copies
    python examples/mixture.py --simulate --balance loss    all ranks in this process, one way alone
    torchrun --nproc-per-node 2 examples/mixture.py         wherever torchrun runs

Attention and embeddings are on every rank, and each rank has its own rows of the batch. A block's MLP is a mixture: every byte
goes to the ranks of its `--top` experts and back. "loss" adds the balance loss of the global batch; "bias" moves a bias of each
expert against its load once an update (`T.balance`), and leaves the loss alone.

Writes out/mixture.svg: each expert's load over the steps, and the loss on held-out text.
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
from torch import Tensor, nn

import functional_ds as fds
from functional_ds import comm, moe
from functional_ds import transforms as T

WAYS = ("none", "loss", "bias")


class Experts(nn.Module):
    """A router and gated MLPs; `forward` gives the result, and the routing."""

    def __init__(self, width: int, experts: int, *, inner: int, top: int, name: str) -> None:
        super().__init__()
        self.top, self.name = top, name
        self.router = nn.Parameter(torch.zeros(experts, width))
        self.gate_up = nn.Parameter(torch.zeros(experts, 2 * inner, width))
        self.down = nn.Parameter(torch.zeros(experts, width, inner))

    def forward(self, x_BTC: Tensor) -> tuple[Tensor, moe.Routing]:
        bias = moe.router_bias(self.name)  # None but with T.balance
        routing = moe.route(x_BTC @ self.router.T, self.top, gate="sigmoid", normalise=True, bias=bias)
        moe.count_demand(self.name, routing.demand())
        return moe.exchange(moe.gated_mlp(self.gate_up, self.down), x_BTC, routing=routing), routing


class Block(nn.Module):
    """Attention, then a mixture of experts, each added to the residual stream."""

    def __init__(self, flags: argparse.Namespace, name: str) -> None:
        super().__init__()
        config = gpt.Config(layers=flags.layers, width=flags.width, heads=4, context=flags.context)
        self.ln_1, self.attn, self.ln_2 = nn.LayerNorm(flags.width), gpt.Attention(config), nn.LayerNorm(flags.width)
        self.experts = Experts(flags.width, flags.experts, inner=flags.inner, top=flags.top, name=name)

    def forward(self, x_BTC: Tensor) -> tuple[Tensor, moe.Routing]:
        x_BTC = x_BTC + self.attn(self.ln_1(x_BTC))
        y_BTC, routing = self.experts(self.ln_2(x_BTC))
        return x_BTC + y_BTC, routing


class Mixture(nn.Module):
    """`Mixture(flags)(tokens_BT) -> logits_BTV, a routing for each block`; equal on every rank."""

    def __init__(self, flags: argparse.Namespace) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(256, flags.width), nn.Embedding(flags.context, flags.width)
        self.blocks = nn.ModuleList(Block(flags, f"block {i}") for i in range(flags.layers))
        self.ln_f = nn.LayerNorm(flags.width)
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for name, param in self.named_parameters():
                if param.dim() > 1:
                    param.normal_(std=0.2 if name.endswith("router") else param.shape[-1] ** -0.5, generator=generator)
                elif name.endswith("bias"):
                    param.zero_()

    def forward(self, tokens_BT: Tensor) -> tuple[Tensor, list[moe.Routing]]:
        x_BTC = self.wte(tokens_BT) + self.wpe(torch.arange(tokens_BT.shape[1]))
        routings = []
        for block in self.blocks:
            x_BTC, routing = block(x_BTC)
            routings.append(routing)
        return self.ln_f(x_BTC) @ self.wte.weight.T, routings


def train(flags: argparse.Namespace, way: str) -> dict[str, Any]:
    """What each rank runs; the loads of the experts, and the losses on held-out text."""
    torch.set_num_threads(1)
    mesh = comm.mesh(dp=flags.ranks).split("dp", edp=flags.ranks // flags.ep, ep=flags.ep)
    everyone, rows = mesh["edp", "ep"], flags.batch // flags.ranks
    text = corpus.load(flags.data, context=flags.context)
    apply, params = fds.functional(Mixture(flags))
    names = [f"block {i}" for i in range(flags.layers)]

    def batch(split: str, index: int) -> Any:
        return text.batch(split, index, rows=rows, context=flags.context, first_row=everyone.rank * rows)

    def loss_fn(params: Any, batch: Any) -> Any:
        x, y = batch
        logits, routings = apply(params, x)
        total = cross_entropy = gpt.next_token_loss(logits, y) * y.numel()
        if way == "loss":
            total = total + flags.weight * sum(moe.balance_loss(routing, group=everyone) for routing in routings)
        metrics = {"cross_entropy": fds.Weighted(cross_entropy, y.numel())}
        for name, routing in zip(names, routings, strict=True):
            metrics |= moe.load_metrics(routing, prefix=f"{name}/")
        return fds.Weighted(total, y.numel()), metrics

    step = fds.compose(
        T.zero(flags.zero, everyone),
        T.experts(r"experts\.(gate_up|down)", mesh["ep"], edp=mesh["edp"]),
        *([T.balance(flags.rate, dict.fromkeys(names, flags.experts))] if way == "bias" else []),
        T.clip(1.0),
    )(fds.train_step(loss_fn, fds.adamw(flags.lr)))
    state = step.init(params)
    leads = comm.world().rank == 0
    loads: list[list[list[float]]] = []  # by step and block
    losses: list[tuple[int, float]] = []
    if leads:
        print(f"balance={way}: {step}", flush=True)
    for index in range(flags.steps):
        state, metrics = step(state, batch("train", index))
        loads.append([[metrics[f"{name}/load.{e}"].item() for e in range(flags.experts)] for name in names])
        if (index + 1) % flags.every == 0 or index + 1 == flags.steps:
            losses.append((index + 1, step.measure(state, batch("validation", 0))["cross_entropy"].item()))
            if leads:
                fullest = max(max(found) for found in loads[-1])
                print(f"  step {index + 1:>4}: held-out loss {losses[-1][1]:.4f}, fullest expert {fullest:.2f}", flush=True)
    return {"loads": loads, "losses": losses}


def violation(loads: list[float]) -> float:
    """How far the fullest expert is above the mean, which is 1."""
    return max(loads) - 1


def picture(flags: argparse.Namespace, found: dict[str, dict[str, Any]]) -> Path:
    """Every expert's load in the last block, a panel for each way of balancing, and the losses."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4 * (len(found) + 1), 3.4), layout="constrained")
    *panels, last = figure.subplots(1, len(found) + 1)
    for panel, (way, run) in zip(panels, found.items(), strict=True):
        panel.plot([loads[-1] for loads in run["loads"]], linewidth=0.8)
        panel.set(title=f"balance={way}", xlabel="step", ylim=(0, 1.05 * flags.experts / flags.top))
        panel.axhline(1, color="black", linewidth=0.5)
        last.plot(*zip(*run["losses"], strict=True), marker=".", label=way)
    panels[0].set_ylabel("load of each expert, relative to an even one")
    last.set(title="held-out text", xlabel="step", ylabel="nats a byte")
    last.legend()
    flags.out.mkdir(parents=True, exist_ok=True)
    figure.savefig(flags.out / "mixture.svg")
    return Path(flags.out / "mixture.svg")


def run(flags: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """All ways, one after the other, on each rank."""
    return {way: train(flags, way) for way in flags.balance}


def main(argv: Sequence[str] | None = None) -> int:
    """Starts the ranks, or is one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--balance", nargs="+", default=list(WAYS), choices=WAYS)
    parser.add_argument("--weight", type=float, default=0.01, help="of the balance loss")
    parser.add_argument("--rate", type=float, default=0.01, help="of the biases")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--ep", type=int, default=None, help="ranks that share the experts; by default all")
    parser.add_argument("--zero", type=int, default=1, choices=range(4))
    parser.add_argument("--experts", type=int, default=8)
    parser.add_argument("--top", type=int, default=2, help="experts of a byte")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--inner", type=int, default=64, help="width of an expert")
    parser.add_argument("--context", type=int, default=64)
    parser.add_argument("--batch", type=int, default=32, help="rows of a step, over all ranks")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--every", type=int, default=20, help="steps between two looks at held-out text")
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--data", type=Path, default=None, help="a file; by default Python's own sources")
    parser.add_argument("--out", type=Path, default=Path("out"))
    parser.add_argument("--simulate", action="store_true", help="all ranks in this process")
    flags = parser.parse_args(argv)
    flags.ep = flags.ep or flags.ranks
    if flags.ranks % flags.ep or flags.batch % flags.ranks:
        raise SystemExit(f"--ranks {flags.ranks} has to divide by --ep {flags.ep}, and --batch {flags.batch} by --ranks")
    if "TORCHELASTIC_RUN_ID" in os.environ:
        comm.init_distributed("gloo")
        found, leads = run(flags), comm.get_rank() == 0
        torch.distributed.destroy_process_group()
        if not leads:
            return 0
    elif flags.simulate:
        found = comm.simulate(run, flags, world_size=flags.ranks)[0]
    else:
        found = comm.spawn(run, flags, world_size=flags.ranks, backend="gloo")[0]
    for way, each in found.items():
        worst = max(violation(loads) for loads in each["loads"][-1])
        print(f"{way:<5} held-out loss {each['losses'][-1][1]:.4f}, the fullest expert {worst:.0%} above the mean")
    print(f"the picture: {picture(flags, found)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
