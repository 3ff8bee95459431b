"""Where a rank's memory goes at the peak of a step: tensors by phase, predicted beside measured, and the whole process.

    python benchmarks/peak.py
    python benchmarks/peak.py --ranks 2 --layers 6 --width 512 --stages 0 1 2 3

Each stage has processes of its own, which train a small model first, so that nothing is loaded or grown for the first time in
what is measured. Memory is the process's resident memory beyond that before the model was made, read every millisecond in two
steps. In "live" rows the C library gives freed tensors back at once (a threshold of 64 KB), so these are the tensors; in
"default" rows it keeps what it likes. "plain" is each rank's loop of plain PyTorch with a fused AdamW.
"""

import argparse
import ctypes
import gc
import json
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import functional_ds as fds
from functional_ds import comm, memory
from functional_ds import transforms as T

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))
import gpt

_TRIM, _MMAP = -1, -3  # glibc's names for mallopt


def resident() -> int:
    """Bytes of this process that are in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


class Watch:
    """The most that is resident in each phase, looked at every millisecond.

    Attributes:
        phase: the one that the step is in.
        most: by phase.
    """

    def __init__(self) -> None:
        self.phase, self.most = "between", dict[str, int]()

    @contextmanager
    def looks(self) -> Iterator[None]:
        """Within the block it looks."""
        stop = threading.Event()

        def look() -> None:
            while not stop.wait(0.001):
                phase, now = self.phase, resident()
                self.most[phase] = max(self.most.get(phase, 0), now)

        thread = threading.Thread(target=look, daemon=True)
        thread.start()
        yield
        stop.set()
        thread.join()

    def transform(self, step: Any) -> Any:
        """The step, saying in which phase it is."""

        def saying(name: str) -> Callable[..., Any]:
            def run(inner: Callable[..., Any], step: Any, *args: Any) -> Any:
                before, self.phase = self.phase, name
                try:
                    return inner(step, *args)
                finally:
                    self.phase = before

            return run

        phases: dict[str, Any] = {"loss": "forward", "gradients": "backward", "update": "update"}
        return step.wrapped("watched", **{phase: saying(name) for phase, name in phases.items()})


def loss_of(apply: Any) -> Callable[[Any, tuple[Tensor, Tensor]], Tensor]:
    """The model's loss."""
    return lambda params, batch: gpt.next_token_loss(apply(params, batch[0]), batch[1])


def model(args: argparse.Namespace) -> Any:
    """A GPT of the given size."""
    return gpt.GPT(gpt.Config(layers=args.layers, width=args.width, heads=args.width // 64, context=args.context), seed=0)


def trained(stage: int, args: argparse.Namespace, watch: Watch) -> Callable[[], None]:
    """A step of a new model; a stage of -1 is plain PyTorch."""
    tokens = torch.randint(0, 256, (args.batch, args.context), generator=torch.Generator().manual_seed(comm.world().rank))
    module = model(args)
    if stage < 0:
        optimizer = torch.optim.AdamW(module.parameters(), fused=True)

        def plain() -> None:
            optimizer.zero_grad()
            gpt.next_token_loss(module(tokens), tokens).backward()
            optimizer.step()

        return plain
    apply, params = fds.functional(module)
    step = fds.compose(T.zero(stage), watch.transform)(fds.train_step(loss_of(apply), fds.adamw(1e-3)))
    state = step.init(params)
    params.clear()

    def ours() -> None:
        nonlocal state
        state, _ = step(state, (tokens, tokens))

    return ours


def rank(stage: int, args: argparse.Namespace, at_once: bool) -> dict[str, int]:
    """What one rank holds."""
    torch.set_num_threads(1)
    if at_once:
        libc = ctypes.CDLL(None)
        libc.mallopt(_MMAP, 1 << 16)
        libc.mallopt(_TRIM, 1 << 16)
    small = trained(stage, argparse.Namespace(**{**vars(args), "layers": 1, "width": 64}), Watch())
    for _ in range(3):
        small()
    gc.collect()
    before, watch = resident(), Watch()
    go = trained(stage, args, watch)
    for _ in range(3):
        go()
    gc.collect()
    state = resident() - before
    with watch.looks():
        go()
        go()
    most = {name: bytes - before for name, bytes in watch.most.items()}
    return {"state": state, "peak": max(most.values()), **{k: most[k] for k in ("forward", "backward", "update") if k in most}}


def predicted(stage: int, args: argparse.Namespace) -> dict[str, int]:
    """The same, from shapes."""
    with torch.device("meta"):
        module = model(args)
    apply, params = fds.functional(module)
    tokens = torch.empty(args.batch, args.context, dtype=torch.int64, device="meta")
    passes = memory.activations(loss_of(apply), params, (tokens, tokens))

    def make() -> Any:
        return T.zero(stage)(fds.train_step(loss_of(apply), fds.adamw(1e-3)))

    held = memory.predicted(make, params, world_size=args.ranks, rank=0)
    whole = sum(x.numel() * x.element_size() for x in params.values())
    state = held.params + held.masters + held.optimizer + held.buffers
    gradients = whole if stage == 0 else held.gradients
    return {
        "state": state,
        "forward": state + passes.forward + held.gathered,
        "backward": state + passes.backward - whole + gradients + held.gathered,
        "update": state + held.gradients,
    }


def main() -> None:
    """Prints a row a stage."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    for name, default in {"ranks": 2, "layers": 6, "width": 512, "batch": 2, "context": 64}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--stages", type=int, nargs="+", default=[-1, 0, 1, 2, 3])
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    rows: dict[str, Any] = {}
    for stage in args.stages:
        row = rows["plain" if stage < 0 else f"stage {stage}"] = {} if stage < 0 else {"predicted": predicted(stage, args)}
        for kind in ("live", "default"):
            row[kind] = comm.spawn(rank, stage, args, kind == "live", world_size=args.ranks)[0]
        for kind, numbers in row.items():
            shown = ", ".join(f"{name} {number / 1e6:.1f}" for name, number in numbers.items())
            print(f"{stage if stage >= 0 else 'plain':>5} {kind:>9}, MB: {shown}", flush=True)
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
