"""Trains an unmodified Llama of Hugging Face on Python's own sources, on one mesh, then goes on from its checkpoint on another.

    python examples/llama_mesh.py                                    2 x 2 x 2 simulated ranks, then four processes
    python examples/llama_mesh.py --first dp=4,tp=2 --then pp=2      any meshes
    python examples/llama_mesh.py --simulate --zero 2                all ranks in this process

A mesh has the axes dp (data), pp (pipeline), sp (sequence) and tp (tensor parallelism). Beside both runs one device trains the
same model on the same text: all losses are its losses. At the end: what a rank of each mesh sends in a step, axis by axis.
"""

import argparse
import math
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs
import corpus
import torch
import transformers
from torch import Tensor

import functional_ds as fds
from functional_ds import comm, seq
from functional_ds import pipelining as pp
from functional_ds import transforms as T

AXES = ("dp", "pp", "sp", "tp")
MICRO_BATCHES = 2  # of a pipeline


def mesh_of(text: str) -> dict[str, int]:
    """The sizes of "dp=2,tp=4", 1 for other axes."""
    try:
        given = {name: int(size) for name, size in (part.split("=") for part in text.split(",") if part)}
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a mesh; write dp=2,sp=2,tp=2") from None
    if not given.keys() <= {*AXES} or any(size < 1 for size in given.values()):
        raise argparse.ArgumentTypeError(f"{text!r} is not a mesh of {', '.join(AXES)}; write dp=2,sp=2,tp=2")
    return {axis: given.get(axis, 1) for axis in AXES}


def shown(sizes: dict[str, int]) -> str:
    """Such as "dp=2 x tp=4"."""
    return " x ".join(f"{axis}={size}" for axis, size in sizes.items() if size > 1) or "one device"


@attrs.frozen
class Trained:
    """What a run did.

    Attributes:
        losses: of its steps.
        sent: elements that a rank sent in the last step, by the group's name.
    """

    losses: list[float]
    sent: dict[str, int]


def llama(flags: argparse.Namespace, sizes: dict[str, int]) -> Any:
    """The model of transformers, the same on every rank."""
    torch.manual_seed(0)
    seq.register_attention()
    config = transformers.LlamaConfig(
        vocab_size=256,
        hidden_size=flags.width,
        intermediate_size=2 * flags.width,
        num_hidden_layers=flags.layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=flags.context,
        attn_implementation="fds_ring" if sizes["sp"] > 1 else "sdpa",
        use_cache=False,
    )
    return transformers.LlamaForCausalLM(config)


def inputs(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """What the model gets: all but the labels, which are shifted already."""
    return {name: leaf for name, leaf in batch.items() if name != "shift_labels"}


def loss_of(output: Any, batch: dict[str, Tensor]) -> fds.Weighted:
    """The sum over this rank's tokens, and their number; each tensor-parallel rank has a part of the vocabulary."""
    return fds.tp.cross_entropy(output.logits, batch["shift_labels"])


def train(flags: argparse.Namespace, sizes: dict[str, int], steps: range, folder: Path | None) -> Trained:
    """What each rank runs: steps of one training, from the folder's checkpoint but for the first ones; then it saves there."""
    torch.set_num_threads(1)
    mesh = comm.mesh(**sizes)
    text, rows = corpus.load(flags.data, context=flags.context), flags.batch // sizes["dp"]

    def batch(index: int) -> dict[str, Tensor]:
        first = mesh["dp"].rank * rows  # ranks of other axes have the same rows
        x, y = text.batch("train", index, rows=rows, context=flags.context, first_row=first)
        return {"input_ids": x, "shift_labels": y}

    model, stages = llama(flags, sizes), None
    plan = {**fds.tp.plan_of(model), "lm_head": "vocab"}
    loss: Any
    if sizes["pp"] > 1:
        stages, params = pp.cut(model, sizes["pp"], example=batch(0), inputs=inputs, loss=loss_of)
        loss = stages
    else:
        apply, params = fds.functional(model)

        def loss(params: Any, batch: dict[str, Tensor]) -> fds.Weighted:
            return loss_of(apply(params, **inputs(batch)), batch)

    strategy = fds.compose(
        T.zero(flags.zero, mesh["dp", "sp"]),
        *([] if stages is None else [T.pipeline(pp.one_f_one_b(sizes["pp"], MICRO_BATCHES), stages, mesh["pp"])]),
        T.sequence(mesh["sp"], layout="zigzag"),
        T.tensor_parallel(plan, mesh["tp"]),
        T.clip(1.0),
    )
    step = strategy(fds.train_step(loss, fds.adamw(flags.lr)))
    state, losses = step.init(params), []
    if steps.start:
        if folder is None:
            raise ValueError("steps after the first need a checkpoint")
        state = fds.load(folder, like=state)
    sent: dict[str, int] = {}
    for index in steps:
        with comm.ledger() as book:
            state, metrics = step(state, batch(index))
        losses.append(metrics["loss"].item())
        sent = {}
        for row in book.rows:
            sent[row.group] = sent.get(row.group, 0) + row.elements
    if folder is not None:
        fds.save(state, folder)
    return Trained(losses, sent)


def main(argv: Sequence[str] | None = None) -> int:
    """Three runs: one device, the first mesh, and the second, which goes on from the first's checkpoint."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--first", type=mesh_of, default=mesh_of("dp=2,sp=2,tp=2"), help="the mesh of simulated ranks")
    parser.add_argument("--then", type=mesh_of, default=mesh_of("pp=2,tp=2"), help="the mesh of processes")
    parser.add_argument("--zero", type=int, default=3, choices=range(4))
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--width", type=int, default=32)
    parser.add_argument("--context", type=int, default=64)
    parser.add_argument("--batch", type=int, default=8, help="rows of a step, over all ranks")
    parser.add_argument("--steps", type=int, default=10, help="on each of the two meshes")
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--data", type=Path, default=None, help="a file; by default Python's own sources")
    parser.add_argument("--simulate", action="store_true", help="no processes: the second mesh is simulated, too")
    flags = parser.parse_args(argv)
    for sizes in (flags.first, flags.then):
        if flags.batch % sizes["dp"] or (sizes["pp"] > 1 and flags.batch // sizes["dp"] < MICRO_BATCHES):
            raise SystemExit(f"--batch {flags.batch} gives no whole rows, or too few micro-batches, on {shown(sizes)}")
        if flags.context % (2 * sizes["sp"]):
            raise SystemExit(f"--context {flags.context} has to be a multiple of {2 * sizes['sp']}, twice sp")

    before, after = range(flags.steps), range(flags.steps, 2 * flags.steps)
    alone = train(flags, mesh_of(""), range(2 * flags.steps), None).losses
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        runs = []
        for sizes, steps, start in (
            (flags.first, before, comm.simulate),
            (flags.then, after, comm.simulate if flags.simulate else comm.spawn),
        ):
            world = math.prod(sizes.values())
            where = "simulated ranks" if start is comm.simulate else "processes"
            print(f"{shown(sizes)}, {world} {where}, steps {steps.start + 1} to {steps.stop}", flush=True)
            found = start(train, flags, sizes, steps, folder, world_size=world)[0]
            for index, loss in zip(steps, found.losses, strict=True):
                print(f"  step {index + 1:>3}: loss {loss:.4f}, one device {alone[index]:.4f}", flush=True)
            runs.append(found)
    for sizes, found in zip((flags.first, flags.then), runs, strict=True):
        print(f"elements that rank 0 sends in a step on {shown(sizes)}:")
        for group, elements in found.sent.items():
            if elements:
                print(f"  {group:<12} {elements:>10,}")
    apart = max(abs(a - b) for a, b in zip(alone, runs[0].losses + runs[1].losses, strict=True))
    print(f"the losses differ from one device's by {apart:.1e} at most")
    return 0


if __name__ == "__main__":
    sys.exit(main())
