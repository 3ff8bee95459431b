"""Where the memory of a rank goes: its process at the peak, by kind, predicted beside measured.

    python benchmarks/peak.py
    python benchmarks/peak.py --sizes 8x384 --stages 3 --json /tmp/peak.json --png /tmp/peak.png

Model, batch and step are those of peers.py. Each row has processes of its own, which train a tiny model first, so that what
is loaded once counts as the base. The parts of a row add up to the most resident memory that a rank's process had:

- base: the interpreter, torch and the library, before the model is made;
- alive tensors by kind, in a later step when most bytes are alive, from allocation events;
- kept: the rest, which is freed memory that the allocator keeps, and workspaces of kernels. It cannot be negative.

Predicted is the same from a dry run on shapes, as `functional-ds plan` makes it.
"""

import argparse
import gc
import json
import os
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import attrs
import peers
import torch
from torch import Tensor

import functional_ds as fds
from functional_ds import comm
from functional_ds import transforms as T
from functional_ds.comm.debug.trace import opened
from functional_ds.comm.worlds.gloo_shapes import GlooShapesWorld
from functional_ds.comm.worlds.process_handle import ProcessHandle
from functional_ds.comm.worlds.shapes import rank_on_shapes
from functional_ds.dry_run.dry_run import kernels_of
from functional_ds.dry_run.events import AllocationEvent, EventRecorder, _CallEvents
from functional_ds.transforms.zero.reduce import Reducer

RESULT = peers.RESULTS / "peak.json"
KINDS = ("params", "optimizer", "gradients", "gathered", "exchange", "activations", "other")
PARTS = ("base", *KINDS, "kept")
COLOURS = ("#8c8c8c", "#4c72b0", "#c44e52", "#ccb974", "#55a868", "#dd8452", "#64b5cd", "#000000", "#dddddd")
_RESULT_OF = {"all_gather": "gathered", "reduce_scatter": "gradients", "all_reduce": "gradients"}


class KindRecorder(EventRecorder):
    """Records events, and of what kind each storage is: the last name that it gets, else what runs when it is allocated.

    Attributes:
        kinds: by the storage's number.
        during: the kind of what is allocated now and gets no name.
        state: the numbers of those that keep their kind.
    """

    def __init__(self) -> None:
        super().__init__(world=comm.world().world)
        self.kinds, self.during, self.state = dict[int, str](), "other", frozenset[int]()

    def note(self, held: Any, label: str = "") -> None:
        super().note(held)
        for number in self.allocated(held).keys() - self.state:
            self.kinds[number] = _RESULT_OF.get(label, label) or self.kinds.get(number, self.during)

    def at_peak(self) -> dict[str, int]:
        """The bytes of each kind when most are alive."""
        alive, most = Counter[str](), Counter[str]()
        for event in self.events:
            if isinstance(event, AllocationEvent):
                alive[self.kinds.get(event.storage, "exchange")] += event.bytes
                most = max(most, Counter(alive), key=Counter.total)
        return {kind: most[kind] for kind in KINDS}


def alive_at_peak(step: fds.Step, state: fds.State, batch: Any) -> dict[str, int]:
    """The bytes of a step by kind, when most are alive on this rank; the state is donated."""
    run = KindRecorder()
    for kind, held in {"other": (state, batch), "params": state.params, "optimizer": state.optimizer}.items():
        run.note(held, kind)
    run.state = frozenset(run.kinds)

    def gradients(inner: Any, *args: Any) -> Any:
        with during(run, "activations"):
            return inner(*args)

    with opened(_CallEvents(recorder=run)), named(run), run:
        step.wrapped("by kind", gradients=gradients)(state, batch)
    return run.at_peak()


@contextmanager
def during(run: KindRecorder, kind: str) -> Iterator[None]:
    before, run.during = run.during, kind
    yield
    run.during = before


@contextmanager
def named(run: KindRecorder) -> Iterator[None]:
    """Within the block the library says which tensors are gradients of leaves, and which are made to be sent or received."""
    accumulate, begin = Reducer._accumulate, ProcessHandle.begin

    def accumulated(reducer: Reducer, index: int, leaves: Sequence[Tensor | None], device: torch.device) -> None:
        run.note([leaf for leaf in leaves if leaf is not None], "gradients")
        accumulate(reducer, index, leaves, device)
        run.note(reducer.local[index], "exchange")  # stage 0 reduces it in place, so there it becomes a gradient

    def begun(*args: Any) -> ProcessHandle:
        with during(run, "exchange"):
            return begin(*args)

    with mock.patch.object(Reducer, "_accumulate", accumulated), mock.patch.object(ProcessHandle, "begin", begun):
        yield


def trained(setup: peers.Setup, stage: int) -> tuple[fds.Step, fds.State]:
    """The step of `our_training` in peers.py, and a fresh state."""
    apply, params = fds.functional(setup.model())
    step = fds.train_step(lambda params, batch: peers.loss_of(partial(apply, params), batch), fds.adamw(**peers.ADAMW))
    step = T.zero(stage, comm.world())(step)
    return step, step.init(params)


def resident(name: str) -> int:
    """The process's VmRSS or VmHWM in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))


def rank(setup: peers.Setup, stage: int, steps: int) -> dict[str, int]:
    """The peak of this rank's process in some steps, its base, and what is alive in the next one, in bytes."""
    torch.set_num_threads(setup.threads())
    *batches, last = setup.batches(comm.world().rank, 0, steps + 1)
    step, state = trained(attrs.evolve(setup, layers=1, width=64, heads=1), stage)
    for batch in batches:
        state, _ = step(state, batch)
    del step, state
    gc.collect()
    base = resident("VmRSS")
    step, state = trained(setup, stage)
    for batch in batches:
        state, _ = step(state, batch)
    peak = resident("VmHWM")
    return accounted({"base": base, **alive_at_peak(step, state, last)}, peak)


def accounted(parts: Mapping[str, int], peak: int) -> dict[str, int]:
    """The parts with what the allocator keeps, and their sum.

    Raises:
        ValueError: more is alive than the process ever had.
    """
    kept = peak - sum(parts.values())
    if kept < 0:
        raise ValueError(
            f"the parts {dict(parts)} are {-kept:,} bytes more than the process ever had: the measurement is wrong"
        )
    return {**parts, "kept": kept, "peak": peak}


def predicted(setup: peers.Setup, stage: int) -> dict[str, int]:
    """What is alive at the peak, from shapes."""

    def program() -> dict[str, int]:
        tokens = torch.empty(setup.batch, setup.context, dtype=torch.int64, device="meta")
        with torch.device("meta"):
            step, state = trained(setup, stage)
        for _ in range(2):  # which learn the order of units
            state, _ = step(state, (tokens, tokens))
        return alive_at_peak(step, state, (tokens, tokens))

    with kernels_of("cpu", whole=False):
        return rank_on_shapes(program, world_size=setup.ranks, rank=0, kind=GlooShapesWorld)


def account(setup: peers.Setup, stage: int, steps: int) -> dict[str, Any]:
    """A row: of the rank with the greatest peak."""
    found = comm.spawn(rank, setup, stage, steps, world_size=setup.ranks, backend="gloo")
    size = f"{setup.layers}x{setup.width}"
    measured = max(found, key=lambda row: row["peak"])
    return {"size": size, "stage": stage, "measured": measured, "predicted": predicted(setup, stage)}


def cells(row: Mapping[str, Any], which: str) -> list[str]:
    """A row of the table in docs/profile.md, in MB."""
    sizes, alive = row[which], sum(row[which][kind] for kind in KINDS)
    shown = {**{part: sizes.get(part) for part in PARTS}, "alive": alive, "peak": sizes.get("peak")}
    order = ("base", *KINDS, "alive", "kept", "peak")
    numbers = ("-" if shown[part] is None else f"{shown[part] / 1e6:.1f}" for part in order)
    return [row["size"].replace("x", " × "), str(row["stage"]), which, *numbers]


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """In Markdown."""
    head = ["size", "stage", "MB", "base", *KINDS, "alive", "kept", "peak"]
    lines = [head, ["---"] * len(head), *(cells(row, which) for row in rows for which in ("measured", "predicted"))]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def save_png(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """A panel for each size: a stacked bar for each stage, and a line where base and predicted tensors end."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    sizes = list(dict.fromkeys(row["size"] for row in rows))
    figure, panels = plt.subplots(1, len(sizes), figsize=(5.5 * len(sizes), 4.5), layout="constrained", squeeze=False)
    for size, axes in zip(sizes, panels[0], strict=True):
        mine = [row for row in rows if row["size"] == size]
        places, floors = range(len(mine)), [0.0] * len(mine)
        for part, colour in zip(PARTS, COLOURS, strict=True):
            heights = [row["measured"][part] / 1e6 for row in mine]
            axes.bar(places, heights, 0.6, bottom=floors, color=colour, label=part)
            floors = [floor + height for floor, height in zip(floors, heights, strict=True)]
        ends = [(row["measured"]["base"] + sum(row["predicted"].values())) / 1e6 for row in mine]
        axes.hlines(ends, [x - 0.4 for x in places], [x + 0.4 for x in places], "black", "--", label="base + predicted")
        axes.set_xticks(places, [f"stage {row['stage']}" for row in mine])
        axes.set_title(f"GPT {size.replace('x', ' × ')}")
        axes.set_ylabel("MB of a rank's process at its peak")
    handles, names = panels[0][-1].get_legend_handles_labels()
    figure.legend(handles[::-1], names[::-1], loc="outside right center", frameon=False)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def size_of(text: str) -> tuple[int, int]:
    layers, width = map(int, text.split("x"))
    return layers, width


def main() -> None:
    """Measures, prints the table, and writes the files."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    for name, default in {"ranks": 2, "batch": 4, "context": 128, "steps": 3}.items():
        parser.add_argument(f"--{name}", type=peers.positive, default=default)
    parser.add_argument("--sizes", type=size_of, nargs="+", default=[(8, 384), (12, 768)], metavar="LAYERSxWIDTH")
    parser.add_argument("--stages", type=int, nargs="+", default=[0, 1, 3])
    parser.add_argument("--json", type=Path, default=RESULT)
    parser.add_argument("--png", type=Path, help="default: next to the JSON")
    args = parser.parse_args()
    load, rows, same = os.getloadavg()[0], list[dict[str, Any]](), (args.batch, args.context, args.ranks)
    flags = {"batch": args.batch, "context": args.context, "ranks": args.ranks, "steps": args.steps}
    for layers, width in args.sizes:
        setup = peers.Setup(layers, width, width // 64, *same, "fp32")
        for stage in args.stages:
            rows.append(account(setup, stage, args.steps))
            print(table(rows[-1:]), flush=True)
            machine = {**peers.facts(), "load": round(load, 2), "load_after": round(os.getloadavg()[0], 2)}
            args.json.write_text(json.dumps({"machine": machine, "flags": flags, "rows": rows}, indent=1) + "\n")
    save_png(args.png or args.json.with_suffix(".png"), rows)


if __name__ == "__main__":
    sys.exit(main())
