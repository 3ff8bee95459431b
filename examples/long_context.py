"""Trains a byte-level model on long contexts that are split among ranks, and draws what length costs.

    python examples/long_context.py                                    two processes, ring attention in zigzag, 2,048 bytes
    python examples/long_context.py --way ulysses --context 4096
    python examples/long_context.py --way both --ranks 4 --simulate    Ulysses on pairs of ranks inside of a ring of pairs
    torchrun --nproc-per-node 4 examples/long_context.py --ranks 4     wherever torchrun runs

The model is pure functions: grouped heads, rotary positions, an MLP and a loss in tiles. It knows nothing of ranks but the name
of its attention; the strategy is `T.zero(3, ranks)` and `T.sequence(ranks)`.

Writes, into out/long-context: loss.png, the loss over the steps; length.png, on four simulated ranks, what a rank keeps for the
backward pass and what it sends, against the length and beside the formulas.
"""

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import attrs
import corpus
import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

import functional_ds as fds
from functional_ds import comm, seq
from functional_ds import transforms as T
from functional_ds.memory.counting import stored

HEADS, KEY_HEADS, LAYERS, WIDTH, VOCABULARY = 8, 4, 2, 64, 256
SIZE = WIDTH // HEADS
MEASURED_RANKS, LENGTHS = 4, [256, 512, 1024, 2048, 4096]
LAYOUTS = {
    "ring": seq.SequenceLayout("zigzag"),
    "ulysses": seq.SequenceLayout("contiguous"),
    "both": seq.SequenceLayout("zigzag", inner=2),
}


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--way", default="ring", choices=LAYOUTS, help="how attention crosses ranks")
    parser.add_argument("--ranks", type=int, default=2, help="that share a sequence")
    parser.add_argument("--context", type=int, default=2048, help="bytes of a sequence")
    parser.add_argument("--batch", type=int, default=2, help="sequences of a step")
    parser.add_argument("--tiles", type=int, default=8, help="of the MLP and of the loss")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--lr", type=float, default=5e-3)
    parser.add_argument("--lengths", type=int, nargs="*", default=LENGTHS, help="that are measured")
    parser.add_argument("--data", type=Path, default=None, help="a file; by default Python's own sources")
    parser.add_argument("--out", type=Path, default=Path("out/long-context"))
    parser.add_argument("--simulate", action="store_true", help="all ranks in this process")
    return parser.parse_args(argv)


# -- the model ----------------------------------------------------------------------------------------------------------


def fresh() -> dict[str, Any]:
    """The params, the same on every rank."""
    generator = torch.Generator().manual_seed(0)

    def matrix(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator) * shape[0] ** -0.5

    def block() -> dict[str, Tensor]:
        return {
            "q": matrix(WIDTH, WIDTH),
            "kv": matrix(WIDTH, 2 * KEY_HEADS * SIZE),
            "o": matrix(WIDTH, WIDTH) / LAYERS,
            "up": matrix(WIDTH, 4 * WIDTH),
            "down": matrix(4 * WIDTH, WIDTH) / LAYERS,
        }

    return {"embedding": 0.5 * matrix(VOCABULARY, WIDTH), "blocks": [block() for _ in range(LAYERS)]}


def attention(way: str) -> Callable[..., Tensor]:
    """Attention over cut sequences, which finds its ranks in the step."""

    def both(q: Tensor, k: Tensor, v: Tensor, **mask: Any) -> Tensor:
        axis = seq.sequence_axis("both")
        around = seq.ring(axis.ring_group, layout=attrs.evolve(axis.layout, inner=1))
        return seq.ulysses(around, axis.ulysses_group)(q, k, v, **mask)

    return {"ring": seq.ring(), "ulysses": seq.ulysses(), "both": both}[way]


def rotated(x_BHTD: Tensor, positions_BT: Tensor) -> Tensor:
    """Rotary embedding: each pair of features turned by an angle that grows with the position."""
    half = x_BHTD.shape[-1] // 2
    angles = positions_BT[:, None, :, None] * 10_000.0 ** (-torch.arange(half) / half)
    first, second = x_BHTD.chunk(2, -1)
    return torch.cat([first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin()], -1)


def mlp(params: dict[str, Tensor], x_BTC: Tensor) -> Tensor:
    """Of each token."""
    return F.gelu(F.layer_norm(x_BTC, (WIDTH,)) @ params["up"]) @ params["down"]


def loss_of(attend: Callable[..., Tensor], tiles: int) -> Callable[[Any, dict[str, Tensor]], fds.Weighted]:
    """The sum of the cross entropy over a rank's tokens, and their number."""
    tiled = fds.tiled(mlp, tiles) if tiles > 1 else mlp

    def loss(params: Any, batch: dict[str, Tensor]) -> fds.Weighted:
        x_BTC, at = params["embedding"][batch["input_ids"]], batch["position_ids"]
        for layer in params["blocks"]:
            normed = F.layer_norm(x_BTC, (WIDTH,))
            heads = [part.unflatten(-1, (-1, SIZE)).transpose(1, 2) for part in (normed @ layer["q"], normed @ layer["kv"])]
            k, v = heads[1].chunk(2, 1)
            mixed = attend(rotated(heads[0], at), rotated(k, at), v, causal=True)
            x_BTC = x_BTC + mixed.transpose(1, 2).flatten(2) @ layer["o"]
            x_BTC = x_BTC + tiled(layer, x_BTC)
        x_BTC = F.layer_norm(x_BTC, (WIDTH,))
        return seq.tiled_loss(x_BTC, params["embedding"], batch["shift_labels"], tiles=tiles)

    return loss


# -- training -----------------------------------------------------------------------------------------------------------


def train(flags: argparse.Namespace) -> list[float]:
    """What each rank runs; the losses of the steps."""
    here = comm.world()
    text = corpus.load(flags.data, context=flags.context)
    strategy = fds.compose(T.zero(3, here), T.sequence(here, layout=LAYOUTS[flags.way]), T.clip(1.0))
    step = strategy(fds.train_step(loss_of(attention(flags.way), flags.tiles), fds.adamw(flags.lr)))
    state, losses = step.init(fresh()), []
    for index in range(flags.steps):
        x, y = text.batch("train", index, rows=flags.batch, context=flags.context)  # the same on every rank
        state, metrics = step(state, {"input_ids": x, "shift_labels": y})
        losses.append(metrics["loss"].item())
        if here.rank == 0 and (index % 10 == 0 or index == flags.steps - 1):
            print(f"step {index + 1:>3}: loss {losses[-1]:.4f}", flush=True)
    x, y = text.batch("validation", 0, rows=flags.batch, context=flags.context)
    found = step.evaluate(state, {"input_ids": x, "shift_labels": y}).item()
    if here.rank == 0:
        print(f"validation loss {found:.4f}", flush=True)
    return losses


# -- what length costs --------------------------------------------------------------------------------------------------


@attrs.frozen
class Cost:
    """Of one forward and backward pass on a rank.

    Attributes:
        kept: bytes that autograd keeps between the two, params apart.
        sent: bytes that attention sends.
    """

    kept: int
    sent: int


def cost(way: str, length: int, tiles: int) -> Cost:
    """Measured on this rank, for one sequence."""
    here, kept = comm.world(), list[Tensor]()
    loss = loss_of(attention(way), tiles)

    def counted(params: Any, batch: dict[str, Tensor]) -> fds.Weighted:
        def keep(tensor: Tensor) -> Tensor:
            kept.append(tensor.detach())
            return tensor

        with saved_tensors_hooks(keep, lambda tensor: tensor):
            found = loss(params, batch)
        weights = {leaf.untyped_storage().data_ptr() for leaf in state.params}
        kept[:] = [tensor for tensor in kept if tensor.untyped_storage().data_ptr() not in weights]
        return found

    step = fds.compose(T.zero(0, here), T.sequence(here, layout=LAYOUTS[way]))(fds.train_step(counted, fds.sgd(0.1)))
    tokens = torch.arange(length)[None] % VOCABULARY
    state = step.init(fresh())
    state, _ = step(state, tokens)  # a first step also looks at the loss in two orders
    kept.clear()
    with comm.ledger() as book:
        step(state, tokens)
    return Cost(stored(kept), sum(row.bytes for row in book.rows if row.collective in ("permute", "all_to_all")))


def predicted(way: str, length: int, ranks: int) -> float:
    """Bytes that attention sends, of fp32 and one sequence: the formulas of docs/sequence-parallel.md."""
    inner = {"ring": 1, "ulysses": ranks, "both": 2}[way]
    rings, own = ranks // inner, length / ranks
    exchanged = 2 * (2 * HEADS + 2 * KEY_HEADS) * SIZE * own * (inner - 1) / inner
    circulated = 3 * (rings - 1) * 2 * (KEY_HEADS / inner) * SIZE * (length / rings)
    return 4 * LAYERS * (exchanged + circulated)


def curve(flags: argparse.Namespace, losses: Sequence[float]) -> Figure:
    """The loss over the steps."""
    figure = Figure(figsize=(6, 3.5), layout="constrained")
    axes = figure.subplots()
    axes.plot(range(1, len(losses) + 1), losses)
    axes.set(xlabel="step", ylabel="nats a byte", title=f"{flags.context:,} bytes on {flags.ranks} ranks, {flags.way}")
    return figure


def costs(lengths: Sequence[int], tiles: int) -> Figure:
    """What a rank keeps and sends against the length, measured on simulated ranks, the latter beside the formulas."""
    figure = Figure(figsize=(11, 4), layout="constrained")
    memory, traffic = figure.subplots(1, 2)
    runs = [("one device, no tiles", "ring", 1, 1, "o-"), ("one device", "ring", 1, tiles, "s-")]
    runs += [(way, way, MEASURED_RANKS, tiles, style) for way, style in zip(LAYOUTS, ("o-", "^-", "x:"), strict=True)]
    for name, way, ranks, count, style in runs:
        found = [comm.simulate(cost, way, length, count, world_size=ranks)[0] for length in lengths]
        label = name if ranks == 1 else f"{ranks} ranks, {name}"
        memory.plot(lengths, [each.kept / 1e6 for each in found], style, label=label)
        if ranks > 1:
            (line,) = traffic.plot(lengths, [each.sent / 1e6 for each in found], style[0], label=f"{way}, measured")
            sent = [predicted(way, length, ranks) / 1e6 for length in lengths]
            traffic.plot(lengths, sent, color=line.get_color(), label=f"{way}, formula")
    memory.set(xlabel="bytes of a sequence", ylabel="MB", title="kept for the backward pass, on each rank")
    traffic.set(xlabel="bytes of a sequence", ylabel="MB", title=f"sent by attention, on each of {MEASURED_RANKS} ranks")
    for each in (memory, traffic):
        each.set_xscale("log", base=2)
        each.set_yscale("log")
        each.grid(alpha=0.3)
        each.legend(fontsize=8)
    return figure


def picture(flags: argparse.Namespace, losses: Sequence[float]) -> None:
    """Both pictures, as files."""
    flags.out.mkdir(parents=True, exist_ok=True)
    for name, figure in (("loss", curve(flags, losses)), ("length", costs(flags.lengths, flags.tiles))):
        figure.savefig(flags.out / f"{name}.png", dpi=120)
    print(f"the pictures: {flags.out / 'loss.png'}, {flags.out / 'length.png'}")


def main(argv: Sequence[str] | None = None) -> int:
    """Starts the ranks, or is one."""
    flags = parse(argv)
    layout = LAYOUTS[flags.way]
    if flags.ranks % layout.inner or flags.context % layout.multiple(flags.ranks):
        raise SystemExit(
            f"--context {flags.context} on --ranks {flags.ranks} by --way {flags.way}: --ranks has to be a multiple of "
            f"{layout.inner}, and --context one of {2 * flags.ranks}"
        )
    if "TORCHELASTIC_RUN_ID" in os.environ:
        comm.init_distributed("gloo")
        losses = train(flags)
        leads = comm.world().rank == 0
        torch.distributed.destroy_process_group()
    else:
        start = comm.simulate if flags.simulate else comm.spawn
        losses, leads = start(train, flags, world_size=flags.ranks)[0], True
    if leads:
        picture(flags, losses)
    return 0


if __name__ == "__main__":
    sys.exit(main())
