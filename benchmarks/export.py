"""Export and import of a sharded model: seconds, bandwidth, and memory beside the params.

    python benchmarks/export.py --ranks 2 --blocks 8 --width 1024 --rounds 3
    python benchmarks/export.py --blocks 24 --width 2048 --dtype bf16

Each round measures, in the same processes: our export of a ZeRO-3 state into one file and into shards; an export by hand
(``step.params`` on every rank, then ``safetensors.torch.save_file`` on rank 0); and ``dd`` of as many zeros with ``fsync``.
Then imports: ``load_params`` into ZeRO-3 shards, and a whole ``load_file`` on every rank with ``init``. Memory is the kernel's
high-water mark of a rank minus what it had before; for imports, samples of its own memory without the files' pages, which
include the shards that stay. Ratios are medians over rounds.
"""

import argparse
import gc
import json
import os
import shutil
import statistics
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import torch

import functional_ds as fds
from functional_ds import comm
from functional_ds import transforms as T

RESULTS = Path(__file__).parent / "results"


@attrs.frozen
class Setup:
    """What is written: an embedding and square blocks, on so many ranks."""

    ranks: int
    blocks: int
    width: int
    vocabulary: int
    rounds: int
    dtype: str
    folder: str

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The params: a few leaves of each of a block's usual shapes."""
        w = self.width
        block = {"attn.weight": (4 * w, w), "up.weight": (4 * w, w), "down.weight": (w, 4 * w), "norm.weight": (w,)}
        blocks = {f"blocks.{i}.{name}": shape for i in range(self.blocks) for name, shape in block.items()}
        return {"embed.weight": (self.vocabulary, w), **blocks}


@attrs.frozen
class Measured:
    """Seconds, and bytes that a rank took on top."""

    seconds: float
    grown: int


def resident(key: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(key))
    return int(line.split()[1]) * 1024


def measured(work: Callable[[], Any]) -> Measured:
    """All ranks begin and end together."""
    gc.collect()
    comm.barrier()
    Path("/proc/self/clear_refs").write_text("5")
    before, start = resident("VmRSS"), time.perf_counter()
    result = work()
    comm.barrier()
    found = Measured(time.perf_counter() - start, resident("VmHWM") - before)
    del result
    return found


def sampled(work: Callable[[], Any]) -> Measured:
    """For reads of mapped files, whose pages are the cache's and not a rank's: the most of its own memory, looked at often."""
    gc.collect()
    comm.barrier()
    before, start, done = resident("RssAnon"), time.perf_counter(), threading.Event()
    seen = [before]

    def watch() -> None:
        while not done.wait(0.002):
            seen.append(resident("RssAnon"))

    watcher = threading.Thread(target=watch)
    watcher.start()
    result = work()
    done.set()
    watcher.join()
    comm.barrier()
    found = Measured(time.perf_counter() - start, max(*seen, resident("RssAnon")) - before)
    del result
    return found


def begun(setup: Setup) -> tuple[fds.Step, dict[str, torch.Tensor]]:
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // setup.ranks))
    dtype = getattr(torch, setup.dtype)
    like = {name: torch.empty(shape, dtype=dtype, device="meta") for name, shape in setup.shapes().items()}
    return T.zero(3)(fds.train_step(lambda p, x: p["embed.weight"].sum(), fds.sgd(0.1))), like


def exports(setup: Setup) -> list[dict[str, Measured]]:
    """A rank's measurements, a dict for each round."""
    from safetensors.torch import save_file

    here, folder = comm.world(), Path(setup.folder)
    step, like = begun(setup)
    state = step.init(
        fds.from_source(like, lambda path: torch.full(like[path].shape, float(len(path)), dtype=like[path].dtype))
    )
    total = sum(x.numel() * x.element_size() for x in like.values())

    def gathered() -> None:
        whole = step.params(state)
        if here.rank == 0:
            save_file(whole, folder / "gathered.safetensors")
            synced(folder / "gathered.safetensors")

    def zeros() -> None:
        if here.rank == 0:
            options = ["if=/dev/zero", f"of={folder}/dd", "bs=1M", f"count={max(1, total // 2**20)}", "conv=fsync"]
            subprocess.run(["dd", *options], check=True, capture_output=True)

    works = {
        "dd": zeros,
        "export, one file": lambda: fds.export(state, folder / "one.safetensors", overwrite=True),
        "export, shards": lambda: fds.export(state, folder / "many", shard_bytes=total // 4, overwrite=True),
        "step.params, save_file": gathered,
    }
    return [{name: measured(work) for name, work in works.items()} for _ in range(setup.rounds)]


def imports(setup: Setup, name: str) -> list[dict[str, Measured]]:
    """In processes of their own, as memory that was freed before would not show."""
    from safetensors.torch import load_file

    step, like = begun(setup)
    path = Path(setup.folder) / "one.safetensors"

    def read() -> Any:
        return step.init(fds.load_params(path, like=like) if name == "load_params, init" else load_file(path))

    return [{name: sampled(read)} for _ in range(setup.rounds)]


def synced(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


def summary(setup: Setup, ranks: list[list[dict[str, Measured]]]) -> dict[str, Any]:
    """Medians over rounds; memory of the rank that took most."""
    size = getattr(torch, setup.dtype).itemsize
    leaves = [torch.Size(shape).numel() * size for shape in setup.shapes().values()]
    disk = statistics.median(found["dd"].seconds for found in ranks[0])
    rows = {}
    for name in ranks[0][0]:
        seconds = statistics.median(found[name].seconds for found in ranks[0])
        grown = max(found[name].grown for rounds in ranks for found in rounds)
        rows[name] = {
            "seconds": seconds,
            "mb_per_second": sum(leaves) / 1e6 / seconds,
            "times_dd": statistics.median(found[name].seconds / found["dd"].seconds for found in ranks[0]),
            "grown_mb": grown / 1e6,
            "grown_largest_leaves": grown / max(leaves),
        }
    model = {"model_mb": sum(leaves) / 1e6, "shard_mb": sum(leaves) / 1e6 / setup.ranks, "largest_leaf_mb": max(leaves) / 1e6}
    return {"setup": attrs.asdict(setup), **model, "dd_seconds": disk, "rows": rows}


def show(result: dict[str, Any]) -> None:
    sizes = f"model {result['model_mb']:.0f} MB, a rank's shard {result['shard_mb']:.0f} MB"
    print(f"{sizes}, largest leaf {result['largest_leaf_mb']:.0f} MB, medians of rounds")
    print(f"{'':24}{'s':>8}{'MB/s':>8}{'x dd':>8}{'grown MB':>10}{'largest leaves':>16}")
    for name, row in result["rows"].items():
        numbers = f"{row['seconds']:8.2f}{row['mb_per_second']:8.0f}{row['times_dd']:8.2f}"
        print(f"{name:24}{numbers}{row['grown_mb']:10.1f}{row['grown_largest_leaves']:16.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--blocks", type=int, default=6)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--vocabulary", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--folder", type=Path, help="where to write; by default a temporary folder")
    args = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="export-", dir=args.folder))
    options = {key: value for key, value in vars(args).items() if key != "folder"}
    setup = Setup(folder=str(folder), **options)
    try:
        teams = [comm.spawn(exports, setup, world_size=setup.ranks)]
        teams += [comm.spawn(imports, setup, name, world_size=setup.ranks) for name in ("load_params, init", "load_file, init")]
        rounds = [
            [{k: v for each in found for k, v in each.items()} for found in zip(*rank, strict=True)]
            for rank in zip(*teams, strict=True)
        ]
        result = summary(setup, rounds)
    finally:
        shutil.rmtree(folder)
    show(result)
    result["setup"].pop("folder")
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "export.json").write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
