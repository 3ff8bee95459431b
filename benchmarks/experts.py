"""Compares a mixture of experts with transformers' expert parallelism and DeepSpeed's MoE layer, in turns, in one run.

    python benchmarks/experts.py                        2 Gloo processes
    python benchmarks/experts.py --ranks 4 --rounds 9

A contest is a forward and backward pass of one layer: router, exchange, gated MLPs of all experts, dropless; with few large
experts as in Mixtral, where the products take the time, and with many small ones as in Qwen3-MoE. All contenders hold
equal weights and get equal tokens; their results and gradients are compared with ours before anything is timed. A round
times each contender once, by its slowest rank. The ratio is our median over the rounds divided by theirs. Those that are
not installed take no part. "products" is a bound: the experts' MLPs alone, one after the other, on as many rows as they get,
without router and exchange.
"""

import argparse
import importlib.util
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from interleaved import compared, difference, run, seconds, shown, verdict
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from functional_ds import comm, moe

RESULTS = Path(__file__).parent / "results"
TARGET = 0.9
SHAPES = {"coarse": {"experts": 8, "top": 2, "inner": 512}, "fine": {"experts": 32, "top": 8, "inner": 64}}
TOLERANCE = 1e-4  # relative to the largest element; sums are in another order

Found = dict[str, Tensor]
Contender = Callable[[], Found]


def numbers(seed: int, *shape: int) -> Tensor:
    """Standard normal numbers."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def weights_of(flags: argparse.Namespace) -> Found:
    """The layer's, whole."""
    e, m, i = flags.experts, flags.width, flags.inner
    skewed = torch.linspace(0, flags.skew, e)[:, None]  # some experts get more tokens than others
    return {
        "router": numbers(1, e, m) / m**0.5 + skewed * numbers(4, 1, m) / m,
        "gate_up": numbers(2, e, 2 * i, m) / m**0.5,
        "down": numbers(3, e, m, i) / i**0.5,
    }


def ours(flags: argparse.Namespace, x: Tensor, probe: Tensor, own: slice) -> Contender:
    """``route`` and ``exchange``."""
    whole = weights_of(flags)
    leaves = [x.clone(), whole["router"], whole["gate_up"][own].clone(), whole["down"][own].clone()]
    leaves = [leaf.requires_grad_() for leaf in leaves]
    rows, router, gate_up, down = leaves

    def once() -> Found:
        routing = moe.route(rows @ router.T, flags.top, normalise=True)
        y = moe.exchange(moe.gated_mlp(gate_up, down), rows, routing=routing, group=comm.world())
        grads = torch.autograd.grad((y * probe).sum(), leaves)
        return {"y": y.detach(), **dict(zip(("x", "router", "gate_up", "down"), grads, strict=True))}

    return once


def hugging_face(flags: argparse.Namespace, x: Tensor, probe: Tensor, own: slice) -> Contender:
    """Mixtral's router and experts, and the exchange with which transformers trains."""
    from transformers import MixtralConfig
    from transformers.distributed.expert_parallel import AllToAllEP
    from transformers.models.mixtral.modeling_mixtral import MixtralExperts, MixtralTopKRouter

    world, whole = comm.world().size, weights_of(flags)
    config = MixtralConfig(
        hidden_size=flags.width,
        intermediate_size=flags.inner,
        num_local_experts=flags.experts,
        num_experts_per_tok=flags.top,
        experts_implementation="grouped_mm",
    )
    router, experts = MixtralTopKRouter(config), MixtralExperts(config)
    router.weight = nn.Parameter(whole["router"])
    experts.gate_up_proj, experts.down_proj = (nn.Parameter(whole[name][own].clone()) for name in ("gate_up", "down"))
    experts.num_experts = flags.experts // world
    mesh = init_device_mesh("cpu", (world, 1), mesh_dim_names=("ep", "tp"))
    exchange = AllToAllEP(experts, mesh["ep"], mesh["tp"])
    rows = x.clone().requires_grad_()
    leaves = [rows, router.weight, experts.gate_up_proj, experts.down_proj]

    def once() -> Found:
        _, scores, chosen = router(rows)
        y = exchange(rows, chosen, scores)
        grads = torch.autograd.grad((y * probe).sum(), leaves)
        return {"y": y.detach(), **dict(zip(("x", "router", "gate_up", "down"), grads, strict=True))}

    return once


class Gated(nn.Module):
    """One expert of DeepSpeed's layer."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.gate_up, self.down = nn.Linear(width, 2 * inner, bias=False), nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, -1)
        return self.down(F.silu(gate) * up)


def deepspeed_layer(flags: argparse.Namespace, x: Tensor, probe: Tensor, own: slice) -> Contender:
    """DeepSpeed's layer, which pads every expert to the fullest where no token may be dropped."""
    import deepspeed
    from deepspeed.moe.layer import MoE

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # else it is compiled, for minutes
    deepspeed.init_distributed(dist_backend="gloo")
    whole = weights_of(flags)
    layer = MoE(
        flags.width,
        Gated(flags.width, flags.inner),
        num_experts=flags.experts,
        ep_size=comm.world().size,
        k=flags.top,
        drop_tokens=False,
        use_rts=False,
        top2_2nd_expert_sampling=False,
    )
    layer.set_deepspeed_parallelism()
    router = layer.deepspeed_moe.gate.wg.weight
    experts = list(layer.deepspeed_moe.experts.deepspeed_experts)
    with torch.no_grad():
        router.copy_(whole["router"])
        for expert, gate_up, down in zip(experts, whole["gate_up"][own], whole["down"][own], strict=True):
            expert.gate_up.weight.copy_(gate_up)
            expert.down.weight.copy_(down)
    rows = x.clone().requires_grad_()
    leaves = [rows, router, *(e.gate_up.weight for e in experts), *(e.down.weight for e in experts)]

    def once() -> Found:
        y, _, _ = layer(rows)
        by_rows, by_router, *by_experts = torch.autograd.grad((y * probe).sum(), leaves)
        half = len(experts)
        return {
            "y": y.detach(),
            "x": by_rows,
            "router": by_router,
            "gate_up": torch.stack(by_experts[:half]),
            "down": torch.stack(by_experts[half:]),
        }

    return once


def products(flags: argparse.Namespace, own: slice, counts: Sequence[int]) -> Callable[[], object]:
    """Forward and backward pass of this rank's experts, each on as many rows as it gets."""
    whole = weights_of(flags)
    experts = zip(whole["gate_up"][own], whole["down"][own], [numbers(7, rows, flags.width) for rows in counts], strict=True)
    leaves = [[leaf.clone().requires_grad_() for leaf in expert] for expert in experts]

    def once() -> object:
        found = []
        for gate_up, down, rows in leaves:
            gate, up = F.linear(rows, gate_up).chunk(2, -1)
            found += torch.autograd.grad(F.linear(F.silu(gate) * up, down).sum(), (gate_up, down, rows))
        return found

    return once


def measure(flags: argparse.Namespace) -> list[dict[str, Any]]:
    """What each rank runs; a row for each shape and other contender."""
    torch.set_num_threads(1)
    return [row for shape in flags.shapes for row in contest(argparse.Namespace(**vars(flags), **SHAPES[shape]), shape)]


def contest(flags: argparse.Namespace, shape: str) -> list[dict[str, Any]]:
    """All contenders on layers of one shape."""
    world = comm.world()
    each = flags.experts // world.size
    own = slice(world.rank * each, (world.rank + 1) * each)
    x, probe = (numbers(seed + 2 * world.rank, flags.tokens, flags.width) for seed in (10, 11))
    makers = {
        "ours": (ours, "torch"),
        "hugging_face": (hugging_face, "transformers"),
        "deepspeed": (deepspeed_layer, "deepspeed"),
    }
    passes = {
        name: make(flags, x, probe, own)
        for name, (make, package) in makers.items()
        if importlib.util.find_spec(package) is not None
    }
    expected = passes["ours"]()
    gaps = {"products": 0.0} | {name: difference(once(), expected) for name, once in passes.items()}
    chosen = moe.route(x @ weights_of(flags)["router"].T, flags.top).experts
    counts = comm.all_reduce(torch.bincount(chosen.flatten(), minlength=flags.experts))[own].tolist()
    times = seconds({**passes, "products": products(flags, own, counts)}, flags.rounds)
    others = [name for name in times if name != "ours"]
    rows = [{"shape": shape, "against": name, "difference": gaps[name], **compared(times, name)} for name in others]
    if world.rank == 0:
        print("\n".join(shown(shape, row, TARGET) for row in rows), flush=True)
    return rows


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the contest and writes the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--tokens", type=int, default=1024, help="of each rank")
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES), choices=list(SHAPES))
    parser.add_argument("--skew", type=float, default=0.0, help="above 0, some experts get more tokens")
    parser.add_argument("--out", type=Path, default=RESULTS)
    flags = parser.parse_args(argv)
    rows = run(measure, flags, "experts")
    return verdict([f"{row['shape']} {row['against']}" for row in rows if row["difference"] > TOLERANCE], TOLERANCE)


if __name__ == "__main__":
    sys.exit(main())
