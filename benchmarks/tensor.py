"""Transformer blocks under tensor parallelism: ours against ``torch.distributed.tensor.parallel``, on Gloo processes.

    python benchmarks/tensor.py --ranks 2 --rounds 20

All contenders live in the same processes, train the same blocks on the same batch with SGD, and must give equal losses. Every
round runs each of them once, in turn, so noise hits all alike; a ratio is taken within a round, and the median over rounds is
printed. torch's plain plan gets one shared input for the linears of a block (``PrepareModuleInput``), which saves it three
all-reduces a layer; without it, as Hugging Face does, it sends five.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

import functional_ds as fds
from functional_ds import comm
from functional_ds import transforms as T

RATE = 1e-3
SETTLE = 3  # rounds that do not count
TOLERANCE = 1e-4


class Attention(nn.Module):
    """Causal attention, whose heads are those that it has."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.size = width // heads
        self.q, self.k, self.v, self.o = (nn.Linear(width, width, bias=False) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (each(x).unflatten(-1, (-1, self.size)).transpose(1, 2) for each in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o(y.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


class MLP(nn.Module):
    """A gated MLP."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        for each in (self.gate, self.up, self.down):
            each.bias = None

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))  # type: ignore[no-any-return]


class Block(nn.Module):
    """A transformer's layer."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention, self.mlp = Attention(width, heads), MLP(width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))  # type: ignore[no-any-return]


class Model(nn.Module):
    """Layers alone."""

    def __init__(self, layers: int, width: int, heads: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(*(Block(width, heads) for _ in range(layers)))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)  # type: ignore[no-any-return]


PLAN: dict[str, Any] = {
    **dict.fromkeys(("attention.q", "attention.k", "attention.v", "mlp.gate", "mlp.up"), "colwise"),
    **dict.fromkeys(("attention.o", "mlp.down"), "rowwise"),
}


def ours(build: Callable[[], Model], mesh: comm.Mesh, *, sequence: bool) -> Callable[[Tensor], float]:
    """A step of the library."""
    apply, params = fds.functional(build())
    plan = PLAN | ({"layers": "sequence_parallel"} if sequence else {})
    step = fds.train_step(lambda p, x: apply(p, x).square().mean(), fds.sgd(RATE))
    step = T.tensor_parallel(plan, mesh["tp"])(step)
    state = step.init(params)

    def train(x: Tensor) -> float:
        nonlocal state
        state, metrics = step(state, x)
        return metrics["loss"].item()

    return train


def theirs(build: Callable[[], Model], mesh: comm.Mesh, *, sequence: bool, shared: bool = True) -> Callable[[Tensor], float]:
    """A loop with torch's parallel styles."""
    model, device_mesh = build(), mesh.device_mesh("cpu")
    whole, cut = Replicate(), Shard(1)
    entry = cut if sequence else whole
    columns = {name: ColwiseParallel() for name, word in PLAN.items() if word == "colwise"}
    rows = {
        name: RowwiseParallel(output_layouts=entry, use_local_output=not sequence) for name, w in PLAN.items() if w == "rowwise"
    }
    inputs = PrepareModuleInput(input_layouts=(entry,), desired_input_layouts=(whole,))
    styles: dict[str, Any] = {**columns, **rows}
    if shared or sequence:
        styles |= {"attention": inputs, "mlp": PrepareModuleInput(input_layouts=(entry,), desired_input_layouts=(whole,))}
    if sequence:
        styles |= {"norm1": SequenceParallel(), "norm2": SequenceParallel()}
    for block in model.layers:
        parallelize_module(block, device_mesh, styles)
    if sequence:
        ends = {
            "layers.0": PrepareModuleInput(input_layouts=(whole,), desired_input_layouts=(cut,)),
            f"layers.{len(model.layers) - 1}": PrepareModuleOutput(output_layouts=(cut,), desired_output_layouts=(whole,)),
        }
        parallelize_module(model, device_mesh, ends)
    optimizer = torch.optim.SGD(model.parameters(), RATE)

    def train(x: Tensor) -> float:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss.item()  # type: ignore[no-any-return]

    return train


CONTENDERS: dict[str, Any] = {
    "ours": partial(ours, sequence=False),
    "torch": partial(theirs, sequence=False),
    "torch, an input each": partial(theirs, sequence=False, shared=False),
    "ours, sequence parallel": partial(ours, sequence=True),
    "torch, sequence parallel": partial(theirs, sequence=True),
}
PAIRS = (("ours", "torch"), ("ours", "torch, an input each"), ("ours, sequence parallel", "torch, sequence parallel"))


def measure(rounds: int, layers: int, width: int, heads: int, rows: int, length: int) -> Any:
    """Seconds of each contender in each round, and the bytes that ours sends."""
    torch.set_num_threads(1)
    here = comm.world()
    mesh = comm.mesh(tp=here.size)
    build = partial(Model, layers, width, heads)
    trains = {name: make(build, mesh) for name, make in CONTENDERS.items()}
    x = torch.randn(rows, length, width, generator=torch.Generator().manual_seed(1))
    seconds: dict[str, list[float]] = {name: [] for name in trains}
    sent = {}
    for turn in range(SETTLE + rounds):
        losses = {}
        names = list(trains)
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            comm.barrier()
            began = time.perf_counter()
            with comm.ledger() as ledger:
                losses[name] = trains[name](x)
            comm.barrier()
            sent[name] = ledger.bytes
            if turn >= SETTLE:
                seconds[name].append(time.perf_counter() - began)
        low, high = min(losses.values()), max(losses.values())
        if high - low > TOLERANCE * abs(high):
            raise RuntimeError(f"the losses differ in round {turn}: {losses}")
    return seconds, sent


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, value in (("ranks", 2), ("rounds", 20), ("layers", 4), ("width", 256), ("heads", 8), ("rows", 4), ("length", 64)):
        parser.add_argument(f"--{name}", type=int, default=value)
    given = parser.parse_args()
    sizes = given.layers, given.width, given.heads, given.rows, given.length
    seconds, sent = comm.spawn(measure, given.rounds, *sizes, world_size=given.ranks)[0]
    print(f"{given.layers} layers of width {given.width}, {given.rows} x {given.length} tokens, {given.ranks} Gloo ranks")
    for name, times in seconds.items():
        counted = f", {sent[name] / 1e6:.2f} MB sent a rank" if name.startswith("ours") else ""
        print(f"{name:26} {statistics.median(times) * 1e3:8.1f} ms a step{counted}")
    for one, other in PAIRS:
        ratio = statistics.median(a / b for a, b in zip(seconds[one], seconds[other], strict=True))
        print(f"{one} / {other}: {ratio:.2f}")


if __name__ == "__main__":
    main()
