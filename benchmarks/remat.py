"""What recomputation, offload and their exceptions cost in time and save in bytes, on the GPT of the examples.

    python benchmarks/remat.py
    python benchmarks/remat.py --layers 2 --width 64 --heads 2 --rounds 2

One process. All contenders train the same model by the same step, and take turns; ratios are taken within a round. "torch"
calls ``torch.utils.checkpoint`` around each block in the model's own forward; the others are policies of ``T.remat``.

"held" is what lives between the forward pass and the backward, counted apart from the library: every piece of memory that
an operation made during the forward pass and that is still there when it ends. "hooks" is the same by saved-tensor hooks
around the loss, which do not see what a checkpoint keeps for itself. "report" is what ``fds.remat_report`` says. On a CPU the
host's memory is the device's: what is offloaded is held all the same, and its copies cost time that a GPU would hide.
"""

import argparse
import json
import platform
import statistics
import sys
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import functional_ds as fds
from functional_ds import transforms as T
from functional_ds.remat.policy import Keep

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))
import gpt

RESULTS = Path(__file__).parent / "results"
POLICIES = ("recompute", "recompute,matmuls=save", "recompute,inputs=offload", "offload")
CONTENDERS = ("alone", "torch", *POLICIES)
TOLERANCE = 1e-6  # of the losses; they come from the same operations in the same order


class Checkpointed(gpt.GPT):
    """The GPT with torch's checkpoint around each block."""

    def forward(self, tokens_BT: Tensor) -> Tensor:
        x_BTC = self.wte(tokens_BT) + self.wpe(torch.arange(tokens_BT.shape[1], device=tokens_BT.device))
        for block in self.blocks:
            x_BTC = checkpoint(block, x_BTC, use_reentrant=False)
        return self.head(self.ln_f(x_BTC))


class Living(TorchDispatchMode):
    """The storages that operations allocated, and that are alive."""

    def __init__(self) -> None:
        super().__init__()
        self._made: dict[int, weakref.ref[Any]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for value in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(value, Tensor):
                storage = value.untyped_storage()
                self._made[storage.data_ptr()] = weakref.ref(storage)
        return out

    def bytes(self, known: set[int]) -> int:
        """What is still there, but for memory at ``known`` addresses."""
        storages = {address: ref() for address, ref in self._made.items() if address not in known}
        return sum(storage.nbytes() for storage in storages.values() if storage is not None)


@attrs.define
class Held:
    """Bytes between the forward pass and the backward."""

    living: int = 0
    hooks: int = 0

    def transform(self) -> fds.Transform:
        """Counts them in each step; put it last."""

        def forward(inner: Any, step: fds.Step, state: fds.State, function: Callable[[Any], Any], batch: Any) -> Any:
            known = {leaf.untyped_storage().data_ptr() for leaf in fds.tree.leaves((state.params, batch))}
            seen: dict[int, tuple[Any, int]] = {}

            def pack(tensor: Tensor) -> Tensor:
                storage = tensor.untyped_storage()
                address, before = storage.data_ptr(), seen.get(storage.data_ptr())
                if address not in known and (before is None or before[0]() is not storage):
                    if before is not None:
                        self.hooks += before[1]
                    seen[address] = (weakref.ref(storage), storage.nbytes())
                return tensor.detach()

            self.hooks = 0
            with Living() as living, saved_tensors_hooks(pack, lambda tensor: tensor):
                found = inner(step, state, function, batch)
            self.hooks += sum(nbytes for _, nbytes in seen.values())
            self.living = living.bytes(known | {found.untyped_storage().data_ptr()})
            return found

        return fds.wrap("held", forward=forward)


@attrs.define
class Contender:
    """One way to train, and its state."""

    name: str
    step: fds.Step
    counted: fds.Step
    held: Held
    state: fds.State
    losses: list[float] = attrs.field(factory=list)

    @staticmethod
    def of(name: str, args: argparse.Namespace) -> "Contender":
        config = gpt.Config(layers=args.layers, width=args.width, heads=args.heads, context=args.context)
        apply, params = fds.functional((Checkpointed if name == "torch" else gpt.GPT)(config))
        base = fds.train_step(lambda p, b: gpt.next_token_loss(apply(p, b[0]), b[1]), fds.adamw(3e-4))
        step = T.remat("blocks", policy=name)(base) if name in POLICIES else base
        held = Held()
        return Contender(name, step, held.transform()(step), held, step.init(params))

    def count(self, batch: Any) -> fds.RematReport:
        """One step under the books."""
        with fds.remat_report() as report:
            self.state, metrics = self.counted(self.state, batch)
        self.losses.append(metrics["loss"].item())
        return report

    def run(self, batch: Any, steps: int) -> float:
        """Seconds of a step."""
        start = time.perf_counter()
        for _ in range(steps):
            self.state, metrics = self.step(self.state, batch)
        self.losses.append(metrics["loss"].item())
        return (time.perf_counter() - start) / steps


def compete(args: argparse.Namespace) -> dict[str, Any]:
    """Bytes and seconds of all contenders."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, 256, (args.batch, args.context + 1), generator=generator)
    batch = (tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())
    contenders = [Contender.of(name, args) for name in CONTENDERS]
    rows: dict[str, dict[str, Any]] = {}
    for contender in contenders:
        report = contender.count(batch)
        rows[contender.name] = {"held": contender.held.living, "hooks": contender.held.hooks, **_said(contender, report)}
    seconds: dict[str, list[float]] = {contender.name: [] for contender in contenders}
    for contender in contenders:
        contender.run(batch, 1)
    for _ in range(args.rounds):
        for contender in contenders:
            seconds[contender.name].append(contender.run(batch, args.steps))
    for contender in contenders:
        times = seconds[contender.name]
        ratios = [mine / alone for mine, alone in zip(times, seconds["alone"], strict=True)]
        rows[contender.name] |= {"ms": 1e3 * statistics.median(times), "ratio": statistics.median(ratios)}
        rows[contender.name]["same losses"] = _close(contender.losses, contenders[0].losses)
    return rows


def _said(contender: Contender, report: fds.RematReport) -> dict[str, Any]:
    """What the report says; a step without the transform has none."""
    if contender.name not in POLICIES:
        return {}
    blocks: dict[str, int] = {}
    for row in report.rows:
        if row.keep is Keep.RECOMPUTE:
            blocks[row.part] = blocks.get(row.part, 0) + row.whole
    totals = {name: getattr(report, name) for name in ("saved", "recomputed", "offloaded", "partitioned")}
    return {**totals, "largest block again": max(blocks.values(), default=0)}


def _close(found: list[float], expected: list[float]) -> bool:
    return all(abs(a - b) <= TOLERANCE * abs(b) for a, b in zip(found, expected, strict=True))


def judge(rows: dict[str, dict[str, Any]]) -> dict[str, bool]:
    """The claims, and whether they hold."""
    alone, again = rows["alone"], rows["recompute"]
    block = again["largest block again"]
    return {
        "all losses agree": all(row["same losses"] for row in rows.values()),
        "saved + offloaded = what is held, in each policy": all(
            rows[name]["saved"] + rows[name]["offloaded"] == rows[name]["held"] for name in POLICIES
        ),
        "saved = what hooks see, where no operation is left out": all(
            rows[name]["saved"] == rows[name]["hooks"] for name in POLICIES if "matmuls" not in name
        ),
        "saved + recomputed = what autograd alone holds": again["saved"] + again["recomputed"] == alone["hooks"],
        "recompute holds no more than torch's checkpoint": again["held"] <= rows["torch"]["held"],
        "boundaries and one block are at most a third": again["saved"] + block <= alone["hooks"] / 3,
        "a recomputing step takes at most 1.4 x": again["ratio"] <= 1.4,
    }


def shown(rows: dict[str, dict[str, Any]]) -> str:
    columns = ("ms", "ratio", "held", "hooks", "saved", "recomputed", "offloaded", "largest block again")
    lines = [f"{'':<26}" + "".join(f"{column:>{max(14, len(column) + 2)}}" for column in columns)]
    for name, row in rows.items():
        cells = [
            f"{row[c]:.3f}" if c == "ratio" else f"{row[c]:,.1f}" if c == "ms" else f"{row[c]:,}" if c in row else "-"
            for c in columns
        ]
        lines.append(f"{name:<26}" + "".join(f"{cell:>{max(14, len(c) + 2)}}" for cell, c in zip(cells, columns, strict=True)))
    return "\n".join(lines)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    sizes = {"layers": 8, "width": 384, "heads": 6, "batch": 4, "context": 128, "rounds": 7, "steps": 2, "threads": 1}
    for name, default in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=default, help=f"default {default}")
    parser.add_argument("--out", type=Path, default=RESULTS / "remat.json", help="where the numbers go")
    return parser.parse_args()


def main() -> int:
    args = parse()
    torch.set_num_threads(args.threads)
    rows = compete(args)
    verdicts = judge(rows)
    batch = f"{args.batch} x {args.context}"
    print(f"GPT {args.layers} x {args.width}, batch {batch}, fp32, {args.threads} threads, torch {torch.__version__}")
    print(shown(rows))
    for what, holds in verdicts.items():
        print(f"{'yes' if holds else 'NO ':<4} {what}")
    sizes = {
        name: getattr(args, name) for name in ("layers", "width", "heads", "batch", "context", "rounds", "steps", "threads")
    }
    where = {"python": platform.python_version(), "torch": torch.__version__, "machine": platform.machine()}
    args.out.parent.mkdir(exist_ok=True)
    args.out.write_text(json.dumps({"setup": sizes, "where": where, "rows": rows, "verdicts": verdicts}, indent=1) + "\n")
    return 0 if all(verdicts.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
