"""Saving and loading an AdamW state beside torch.distributed.checkpoint of an FSDP2 state, torch.save, and dd.

    python benchmarks/checkpoint.py --params 400e6 --ranks 2 --folder /where/the/disk/is

All save the same values: fp32 params and two moments, 12 bytes a parameter. Each measurement starts its own processes; rounds
are interleaved, and figures are medians over them. The time of a save includes fsync. Before a load the files are dropped
from the page cache. ``dd`` writes as many bytes with ``conv=fsync``, and reads them back.

The last measurement is a save in the background: how long the step waits for it, compared with one copy of the same memory.
"""

import argparse
import contextlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import attrs
import torch
from torch import Tensor, nn

from functional_ds import comm

RESULTS = Path(__file__).parent / "results"
LAYERS = 24
SAMPLING = 0.002  # seconds between two samples of the resident memory
READ = 16 << 20


@attrs.frozen
class Timed:
    """Seconds of a save and a load, and the peak of additional memory of each in bytes."""

    save: float
    load: float
    save_memory: int
    load_memory: int
    shard: int


@attrs.frozen
class Stall:
    """A save in the background: seconds until the step continues, and seconds of a copy of the same memory."""

    first: float
    next: float
    copy: float
    fresh_copy: float
    memory: int
    shard: int


@attrs.frozen
class Contender:
    """A library's ``save`` and ``load`` of a state that was built before."""

    save: Callable[[Path], None]
    load: Callable[[Path], None]
    shard: int


def width_for(params: float) -> int:
    """The width of square layers with about this many elements in all."""
    return max(16, round((params / LAYERS) ** 0.5))


def weights(width: int) -> dict[str, Tensor]:
    """Random numbers, as copying pages that were never written would cost nothing."""
    return {f"layers.{i}.weight": torch.randn(width, width) for i in range(LAYERS)}


# -- the contenders ------------------------------------------------------------------------------------------------------


def ours(width: int) -> Contender:
    import functional_ds as fds
    from functional_ds import transforms

    step = transforms.zero(3)(fds.train_step(lambda params, batch: batch.sum(), fds.adamw(1e-3)))
    state = step.init(weights(width))
    for moment in (*state.optimizer.exp_avg, *state.optimizer.exp_avg_sq):
        moment.normal_()

    def load(path: Path) -> None:
        nonlocal state
        state = fds.load(path, like=state, donate=True)

    def save(path: Path) -> None:
        fds.save(state, path)

    return Contender(save, load, sum(leaf.nbytes for leaf in fds.tree.leaves(state)))


def fsdp2(width: int) -> Contender:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(LAYERS)))
    mesh = init_device_mesh("cpu", (comm.world().size,))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    for param in model.parameters():
        param.grad = torch.full_like(param, 1e-3)
    optimizer.step()
    optimizer.zero_grad()

    def state() -> dict[str, Any]:
        return {"model": model.state_dict(), "optimizer": optimizer.state_dict()["state"]}

    local = [leaf.to_local() for leaf in torch.utils._pytree.tree_leaves(state()) if hasattr(leaf, "to_local")]
    return Contender(
        lambda path: dcp.save(state(), checkpoint_id=path) and None,
        lambda path: dcp.load(state(), checkpoint_id=path),
        sum(leaf.nbytes for leaf in local),
    )


def torch_save(width: int) -> Contender:
    """One process with everything."""
    held = {kind: weights(width) for kind in ("params", "exp_avg", "exp_avg_sq")}

    def save(path: Path) -> None:
        with path.open("wb") as file:
            torch.save(held, file)
            file.flush()
            os.fsync(file.fileno())

    def load(path: Path) -> None:
        found = torch.load(path, weights_only=True)
        for kind, tree in held.items():
            for name, leaf in tree.items():
                leaf.copy_(found[kind][name])

    return Contender(save, load, sum(leaf.nbytes for tree in held.values() for leaf in tree.values()))


CONTENDERS = {"ours": ours, "dcp of fsdp2": fsdp2, "torch.save": torch_save}


# -- what a rank measures ------------------------------------------------------------------------------------------------


class Memory:
    """The largest resident memory beyond what there was before."""

    def __enter__(self) -> "Memory":
        self.before = self.most = self._now()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    @property
    def extra(self) -> int:
        return self.most - self.before

    def _watch(self) -> None:
        while not self._over.wait(SAMPLING):
            self.most = max(self.most, self._now())

    @staticmethod
    def _now() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def timed(work: Callable[[], None]) -> tuple[float, int]:
    """Seconds on the slowest rank, and this one's further memory."""
    comm.barrier()
    with Memory() as memory:
        start = time.perf_counter()
        work()
        own = time.perf_counter() - start
    return max(comm.all_gather_object(own)), memory.extra


def forget(path: Path) -> None:
    """Drops files from the page cache."""
    for file in [path] if path.is_file() else path.rglob("*"):
        if file.is_file():
            handle = os.open(file, os.O_RDONLY)
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(handle)


def measure(name: str, width: int, folder: Path) -> Timed:
    torch.manual_seed(comm.world().rank)
    contender, path = CONTENDERS[name](width), folder / "state"
    contender.save(folder / "warm")  # imports, first calls
    save, save_memory = timed(lambda: contender.save(path))
    comm.barrier()
    if comm.world().rank == 0:
        forget(path)
    load, load_memory = timed(lambda: contender.load(path))
    return Timed(save, load, save_memory, load_memory, contender.shard)


def stall(width: int, folder: Path) -> Stall:
    import functional_ds as fds
    from functional_ds import transforms
    from functional_ds.checkpointing import Saver

    step = transforms.zero(3)(fds.train_step(lambda params, batch: batch.sum(), fds.adamw(1e-3)))
    state = step.init(weights(width))
    leaves = fds.tree.leaves(state)
    seconds = []
    with Saver(folder / "async", keep_last=1) as saver:
        fds.checkpointing.save(step.init({"w": torch.ones(3)}), folder / "warm")
        with Memory() as memory:
            for count in range(3):
                seconds.append(timed(lambda count=count: saver.save(state, tag=str(count)) and None)[0])
                saver.wait()
    fresh, _ = timed(lambda: [leaf.clone() for leaf in leaves] and None)
    room = [leaf.clone() for leaf in leaves]
    copy, _ = timed(lambda: [into.copy_(leaf) for into, leaf in zip(room, leaves, strict=True)] and None)
    return Stall(seconds[0], statistics.median(seconds[1:]), copy, fresh, memory.extra, sum(leaf.nbytes for leaf in leaves))


# -- the disk itself -----------------------------------------------------------------------------------------------------


def dd(folder: Path, nbytes: int) -> tuple[float, float]:
    """Seconds to write and to read so many bytes."""
    path, count = folder / "dd", -(-nbytes // READ)
    write = ["dd", "if=/dev/zero", f"of={path}", f"bs={READ}", f"count={count}", "conv=fsync", "status=none"]
    read = ["dd", f"if={path}", "of=/dev/null", f"bs={READ}", "status=none"]
    found = []
    for command in (write, read):
        start = time.perf_counter()
        subprocess.run(command, check=True)
        found.append(time.perf_counter() - start)
        forget(path)
    path.unlink()
    return found[0], found[1]


@contextlib.contextmanager
def room(folder: Path | None) -> Iterator[Path]:
    place = Path(tempfile.mkdtemp(prefix="checkpoint-", dir=folder))
    try:
        yield place
    finally:
        shutil.rmtree(place, ignore_errors=True)
        os.sync()  # nobody pays for what another left to be written


def spawned(program: Callable[..., Any], *args: Any, ranks: int) -> list[Any]:
    return comm.spawn(program, *args, world_size=ranks, backend="gloo")


def run(args: argparse.Namespace) -> dict[str, Any]:
    width = width_for(args.params)
    nbytes = 12 * LAYERS * width * width
    found: dict[str, list[Timed]] = {name: [] for name in CONTENDERS}
    disk: list[tuple[float, float]] = []
    for count in range(args.rounds):
        print(f"round {count + 1} of {args.rounds}", file=sys.stderr)
        with room(args.folder) as folder:
            disk.append(dd(folder, nbytes))
        for name in CONTENDERS:
            ranks = 1 if name == "torch.save" else args.ranks
            with room(args.folder) as folder:
                results = spawned(measure, name, width, folder, ranks=ranks)
            found[name].append(max(results, key=lambda timed: timed.save_memory))
    with room(args.folder) as folder:
        stalls = spawned(stall, width, folder, ranks=args.ranks)
    return {
        "params": LAYERS * width * width,
        "bytes": nbytes,
        "ranks": args.ranks,
        "torch": torch.__version__,
        "dd_seconds": disk,
        "seconds": {name: [attrs.asdict(one) for one in rounds] for name, rounds in found.items()},
        "background": [attrs.asdict(one) for one in stalls],
    }


def report(content: dict[str, Any]) -> str:
    nbytes = content["bytes"]
    write, read = (statistics.median(pair[i] for pair in content["dd_seconds"]) for i in (0, 1))

    def median(name: str, what: str) -> float:
        return statistics.median(one[what] for one in content["seconds"][name])

    def ratio(name: str, what: str) -> float:
        """The median over the rounds of how many times as long as ours it takes."""
        pairs = zip(content["seconds"][name], content["seconds"]["ours"], strict=True)
        return statistics.median(theirs[what] / own[what] for theirs, own in pairs)

    lines = [
        f"{content['params'] / 1e6:.0f} M parameters, {nbytes / 1e9:.2f} GB, {content['ranks']} ranks",
        f"{'':<14}{'save s':>8}{'GB/s':>7}{'of dd':>7}{'x ours':>8}{'load s':>9}{'GB/s':>7}{'x ours':>8}"
        f"{'extra MB: save':>16}{'load':>7}",
        f"{'dd':<14}{write:>8.2f}{nbytes / write / 1e9:>7.2f}{'1.00':>7}{'':>8}{read:>9.2f}{nbytes / read / 1e9:>7.2f}",
    ]
    for name in CONTENDERS:
        save, load = median(name, "save"), median(name, "load")
        shares = statistics.median(
            pair[0] / one["save"] for pair, one in zip(content["dd_seconds"], content["seconds"][name], strict=True)
        )
        lines.append(
            f"{name:<14}{save:>8.2f}{nbytes / save / 1e9:>7.2f}{shares:>7.2f}{ratio(name, 'save'):>8.2f}"
            f"{load:>9.2f}{nbytes / load / 1e9:>7.2f}{ratio(name, 'load'):>8.2f}"
            f"{median(name, 'save_memory') / 1e6:>16.0f}{median(name, 'load_memory') / 1e6:>7.0f}"
        )
    worst = max(content["background"], key=lambda one: one["next"])
    lines.append(
        f"in the background: the step waits {worst['next'] * 1e3:.0f} ms (the first time {worst['first'] * 1e3:.0f}); a copy "
        f"of the shard of {worst['shard'] / 1e6:.0f} MB takes {worst['copy'] * 1e3:.0f} ms (into new memory "
        f"{worst['fresh_copy'] * 1e3:.0f}); extra memory {worst['memory'] / 1e6:.0f} MB"
    )
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--params", type=float, default=400e6, help="how many, about (default: %(default).0f)")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", type=Path, help="on the disk that is measured (default: the system's temporary folder)")
    parser.add_argument("--results", type=Path, default=RESULTS, help="the folder of checkpoint.json")
    args = parser.parse_args()
    content = run(args)
    print(report(content))
    args.results.mkdir(parents=True, exist_ok=True)
    path = args.results / "checkpoint.json"
    path.write_text(json.dumps(content, indent=1) + "\n")
    print(f"written: {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
