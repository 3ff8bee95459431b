"""AdamW's states on a disk: memory, the disk's bandwidth against dd's, and how much of the update waits for it.

    python benchmarks/offload.py --params 400e6 --path /mnt/nvme

One rank in fp32. Each round times updates, then writes and reads a file of as many bytes with dd, past the page cache.
Bandwidth is bytes over seconds: of an update, what it reads and writes over all of its time; of dd, the same bytes over the
times of its two runs together. Memory is the process's peak resident set during a step beyond what it had before the params
were made, against params + gradients + buffers; glibc is told to keep nothing that was freed. The last two numbers of a row
tell whether computing hides behind the disk: how long an update waited for it, and how long it did everything else.

Needs 16 bytes a parameter on the disk for the states' two versions, and 8 more for dd's file; in memory 12 (the model is
copied once). 400e6 parameters: 10 GB of disk, 5 GB of memory, five minutes or so at 1 GB/s.
"""

import argparse
import ctypes
import gc
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import functional_ds as fds
from functional_ds import transforms as T

RESULTS = Path(__file__).parent / "results"
WIDTH = 2048
BLOCK = 2**25  # bytes of one of dd's reads and writes, as large as a buffer


def model(count: int) -> dict[str, Tensor]:
    """Square matrices, of about so many parameters in all."""
    generator = torch.Generator().manual_seed(0)
    width = min(WIDTH, int((count / 4) ** 0.5))
    number = max(1, round(count / width**2))
    return {f"layers.{i}.w": torch.randn(width, width, generator=generator) / width**0.5 for i in range(number)}


def loss_fn(params: dict[str, Tensor], x: Tensor) -> Tensor:
    """Of a chain of them."""
    for weight in params.values():
        x = torch.tanh(x @ weight)
    return x.square().mean()


def resident(name: str) -> int:
    """The process's VmRSS or VmHWM in bytes."""
    text = Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) * 1024 for line in text.splitlines() if line.startswith(f"{name}:"))


def reset_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def without_holes() -> None:
    """Large tensors come from the system and go back to it: else what glibc keeps for later would count as resident."""
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).mallopt(-3, 2**20)  # M_MMAP_THRESHOLD, in bytes


def dd(folder: Path, nbytes: int) -> tuple[float, float]:
    """Seconds to write and to read so many bytes in one file, past the page cache."""
    file, count = folder / "dd", max(1, nbytes // BLOCK)
    runs = []
    for words in (
        ["if=/dev/zero", f"of={file}", "oflag=direct", "conv=notrunc"],
        [f"if={file}", "of=/dev/null", "iflag=direct"],
    ):
        began = time.perf_counter()
        subprocess.run(["dd", *words, f"bs={BLOCK}", f"count={count}"], check=True, stderr=subprocess.DEVNULL)
        runs.append((time.perf_counter() - began) * nbytes / (count * BLOCK))
    return runs[0], runs[1]


def round_of(step: fds.Step, state: fds.State, x: Tensor, folder: Path, steps: int) -> tuple[fds.State, dict[str, float]]:
    """One round's numbers: dd's, and the medians of some updates."""
    found: list[dict[str, float]] = []
    for _ in range(steps):
        before = T.offloading.traffic(state)
        read, written, waited, computed = before.read, before.written, before.waited, before.computed
        reset_peak()
        state, metrics = step(state, x)
        after = T.offloading.traffic(state)
        found.append(
            {
                "loss": metrics["loss"].item(),
                "peak": resident("VmHWM"),
                "read": after.read - read,
                "written": after.written - written,
                "waited": after.waited - waited,
                "computed": after.computed - computed,
            }
        )
    row = {name: statistics.median(one[name] for one in found) for name in found[0]}
    row["dd_write"], row["dd_read"] = dd(folder, int(row["written"]))
    row["bandwidth"] = (row["read"] + row["written"]) / (row["waited"] + row["computed"])
    row["dd_bandwidth"] = (row["read"] + row["written"]) / (row["dd_write"] + row["dd_read"])
    return state, row


def warm(folder: Path) -> None:
    """A small run, for all that torch loads and makes when it is first used."""
    step = T.offload("disk", path=folder, buffer_bytes=2**16)(fds.train_step(loss_fn, fds.adamw(1e-3)))
    state = step.init(model(512 * 512 * 4))
    for _ in range(2):
        state, _ = step(state, torch.randn(8, 512))


def measure(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    warm(folder)
    gc.collect()
    base = resident("VmRSS")
    params = model(int(args.params))
    count = sum(p.numel() for p in params.values())
    offload = T.offload("disk", path=folder, buffers=args.buffers, buffer_bytes=args.buffer_bytes, threads=args.threads)
    step = offload(fds.train_step(loss_fn, fds.adamw(1e-3)))
    began = time.perf_counter()
    state, width = step.init(params), next(iter(params.values())).shape[0]
    started = time.perf_counter() - began
    del params
    x = torch.randn(8, width, generator=torch.Generator().manual_seed(1))
    dd(folder, 16 * BLOCK)
    state, _ = round_of(step, state, x, folder, 1)  # files' blocks are written for the first time
    rows = []
    for _ in range(args.rounds):
        state, row = round_of(step, state, x, folder, args.steps)
        rows.append(row)
        print(describe(row), flush=True)
    held = sum(buffer.memory.untyped_storage().nbytes() for buffer in state.slots["offload"].storage.buffers)
    bound = 2 * 4 * count + held
    peak = statistics.median(row["peak"] for row in rows) - base
    median = {name: statistics.median(row[name] for row in rows) for name in rows[0]}
    return {
        "params": count,
        "buffers": held,
        "init": started,
        "peak": peak,
        "bound": bound,
        "memory_ratio": peak / bound,
        "bandwidth_ratio": median["bandwidth"] / median["dd_bandwidth"],
        "waited_part": median["waited"] / (median["waited"] + median["computed"]),
        "median": median,
        "rounds": rows,
    }


def describe(row: dict[str, float]) -> str:
    waited, computed = row["waited"], row["computed"]
    ours, theirs = row["bandwidth"] / 1e6, row["dd_bandwidth"] / 1e6
    return (
        f"update {waited + computed:.2f} s, {ours:.0f} MB/s; dd {theirs:.0f} MB/s (write {row['dd_write']:.2f} s, "
        f"read {row['dd_read']:.2f} s); waited {waited:.2f} s, else {computed:.2f} s"
    )


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--params", type=float, default=400e6, help="how many parameters")
    parser.add_argument("--path", type=Path, default=Path(tempfile.gettempdir()), help="a folder on the disk")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=2, help="timed updates in a round")
    parser.add_argument("--buffers", type=int, default=2)
    parser.add_argument("--buffer-bytes", type=int, default=BLOCK)
    parser.add_argument("--threads", type=int, default=4)
    parser.add_argument("--results", type=Path, default=RESULTS, help="the folder of offload.json")
    return parser.parse_args()


def main() -> int:
    args = parse()
    without_holes()
    with tempfile.TemporaryDirectory(dir=args.path) as folder:
        found = measure(args, Path(folder))
    print(
        f"{found['params'] / 1e6:.0f} M parameters, {os.cpu_count()} CPUs: peak {found['peak'] / 1e6:.0f} MB of at most "
        f"{found['bound'] / 1e6:.0f} MB for params, gradients and {args.buffers} buffers ({found['memory_ratio']:.3f}); "
        f"{found['bandwidth_ratio']:.2f} of dd's bandwidth; {100 * found['waited_part']:.0f}% of an update waits for the disk"
    )
    args.results.mkdir(parents=True, exist_ok=True)
    (args.results / "offload.json").write_text(json.dumps(found, indent=1) + "\n")
    return 0 if found["memory_ratio"] <= 1 and found["bandwidth_ratio"] >= 0.8 else 1


if __name__ == "__main__":
    sys.exit(main())
