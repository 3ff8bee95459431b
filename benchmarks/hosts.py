"""Two hosts joined by a link of known speed, on one machine: milliseconds of a step, and bytes that leave a host.

    python benchmarks/hosts.py
    python benchmarks/hosts.py --layers 8 --width 384 --rates 1gbit --only ddp fsdp2 zero0 zero3
    python benchmarks/hosts.py --into benchmarks/results/hosts.json --rates 10gbit --only "no communication" ddp DiLoCo
    python benchmarks/hosts_tables.py           the tables of docs/benchmarks.md from the file
    python benchmarks/hosts.py --predict        no measurements: predicts those of the file, without root's rights, in minutes

With ``--into`` the run is added to a file, with the file's model: what is there stays, and each run has its machine, load and
commit.

Hosts are network namespaces, joined by a veth pair whose ends have a token bucket (``tc ... tbf``). That needs Linux and root's
rights; without them it says why, and ends. Every rank is one process, in which all contenders take turns on the same model and
batches: a round gives each a step, so noise hits all alike. DiLoCo gets a whole period, and its figures are means over it.
"sent MB" is what the link's counter says for a host and step, headers and acknowledgements included; "ledger MB" is what the
library's ledger says. "link_gbit" is what a broadcast between the hosts got of the rate, which a machine need not reach.
Predictions are those of ``hosts_predicted.py``.
"""

import argparse
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import functional_ds as fds
from functional_ds import comm
from functional_ds import transforms as T

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.append(str(Path(__file__).resolve().parents[1] / "examples/research"))
import peers
from diloco import diloco
from hosts_predicted import add_predictions, built, transforms

from tests.fitting import hosts

Batch = tuple[Tensor, Tensor]
Train = Callable[[Batch], Any]

PORT = 29731
SETTLE = 3  # steps before the rounds: connections, buckets, traces, optimizer states, 1-bit Adam's warm-up
TOLERANCE = 1e-4  # of losses, relative
PATIENCE = 1800.0  # seconds
SETUP = {"layers": 4, "width": 256, "heads": 4, "batch": 2, "context": 64}
PERIODS = {"DiLoCo 10": 10}  # steps of a turn


# -- contenders -------------------------------------------------------------------------------------------------------------


def torch_loop(model: nn.Module, wrap: Callable[[nn.Module], nn.Module], *, zro: bool = False) -> Train:
    """A loop of plain PyTorch."""
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model = wrap(model)
    if zro:
        kept: dict[str, Any] = {"optimizer_class": torch.optim.AdamW, "parameters_as_bucket_view": True}
        optimizer: torch.optim.Optimizer = ZeroRedundancyOptimizer(model.parameters(), fused=True, **kept, **peers.ADAMW)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), fused=True, **peers.ADAMW)
    return peers.torch_loop(model, optimizer, autocast=False)


def ddp(model: nn.Module, *, power_sgd: bool = False) -> nn.Module:
    """PyTorch's data parallelism."""
    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

    # One bucket for PowerSGD: over Gloo, hooks of several buckets call collectives in orders that differ between ranks.
    cap = 10_000 if power_sgd else None
    wrapped = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True, bucket_cap_mb=cap)
    if power_sgd:
        state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=4, start_powerSGD_iter=2)
        wrapped.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    return wrapped


def fsdp(model: nn.Module, *sizes: int) -> nn.Module:
    """FSDP2; with two sizes HSDP, replicas on hosts."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("replicate", "shard")[-len(sizes) :])
    for block in model.blocks:  # type: ignore[union-attr]
        fully_shard(block, mesh=mesh)  # type: ignore[arg-type]
    return fully_shard(model, mesh=mesh)


def ours(model: nn.Module, transform: fds.Transform, optimizer: Any = None) -> Train:
    """A step of this library as a closure over its state."""
    step, params = built(model, transform, optimizer)
    state = step.init(params)

    def train(batch: Batch) -> float:
        nonlocal state
        state, metrics = step(state, batch)
        return float(metrics["loss"])

    return train


def power_sgd(rank: int) -> fds.Transform:
    """PowerSGD as docs/phases.md has it, with one all-reduce for all factors of a side."""

    def init(leaves: list[Tensor], group: comm.Group) -> list[Any]:
        return [(torch.zeros_like(x), torch.randn(x.shape[-1], rank)) if x.dim() == 2 else None for x in leaves]

    def reduce(grads: list[Tensor], memory: list[Any], group: comm.Group) -> tuple[list[Tensor], list[Any]]:
        grads = [grad if kept is None else grad + kept[0] for grad, kept in zip(grads, memory, strict=True)]
        left = [grad if kept is None else grad @ kept[1] for grad, kept in zip(grads, memory, strict=True)]
        left = comm.all_reduce(left, group, op="avg")
        left = [x if kept is None else torch.linalg.qr(x).Q for x, kept in zip(left, memory, strict=True)]
        pairs = [(grad, q) for grad, q, kept in zip(grads, left, memory, strict=True) if kept is not None]
        right = iter(comm.all_reduce([grad.T @ q for grad, q in pairs], group, op="avg"))
        found, later = [], []
        for grad, q, kept in zip(grads, left, memory, strict=True):
            factor = None if kept is None else next(right)
            found.append(q if factor is None else q @ factor.T)
            later.append(None if factor is None else (grad - found[-1], factor))
        return found, later

    return T.replicated(reduce=reduce, init=init, slot="power_sgd", name=f"power_sgd({rank})")


def contenders(per_host: int) -> dict[str, Callable[[nn.Module], Train]]:
    """What builds each of them."""
    everyone = comm.world()
    one_bit = fds.one_bit_adam(**{**peers.ADAMW, "warmup": 2})
    mesh = comm.mesh(host=2, place=per_host)
    workers = fds.compose(diloco(PERIODS["DiLoCo 10"], mesh["host"]), T.zero(0, mesh["place"]), T.apart(mesh["host"]))
    found: dict[str, Callable[[nn.Module], Train]] = {
        "no communication": partial(torch_loop, wrap=lambda model: model),
        "ddp": partial(torch_loop, wrap=ddp),
        "ddp powerSGD 4": partial(torch_loop, wrap=partial(ddp, power_sgd=True)),
        "zro": partial(torch_loop, wrap=ddp, zro=True),
        "fsdp2": partial(torch_loop, wrap=lambda model: fsdp(model, everyone.size)),
        **{name: partial(ours, transform=transform) for name, transform in transforms(per_host).items()},
        "1-bit Adam": partial(ours, transform=T.local_gradients(), optimizer=one_bit),
        "1-bit gradients": partial(ours, transform=T.compressed_gradients(comm.codecs.OneBit())),
        "powerSGD 4": partial(ours, transform=power_sgd(4)),
        "DiLoCo 10": partial(ours, transform=workers),
    }
    if per_host > 1:
        found["hsdp"] = partial(torch_loop, wrap=lambda model: fsdp(model, 2, per_host))
    return found


# Those that do not compute what DDP does.
APPROXIMATE = ("no communication", "ddp powerSGD 4", "1-bit Adam", "1-bit gradients", "powerSGD 4", "DiLoCo 10")


# -- a rank -----------------------------------------------------------------------------------------------------------------


def sent() -> int:
    """Bytes that this host has sent over the link."""
    lines = Path("/proc/self/net/dev").read_text().splitlines()
    return next(int(line.split()[9]) for line in lines if line.strip().startswith("cable:"))


def limit(rate: str) -> None:
    """Gives the host's end of the link this speed."""
    subprocess.run(hosts.shaping(rate), check=True, capture_output=True)


def measured(train: Train, batch: Batch, times: int = 1) -> tuple[float, float, float, int]:
    """A step's loss, the slowest rank's milliseconds, MB that left a host by its counter, this rank's bytes by the ledger.

    Of so many steps on a batch they are means.
    """
    comm.barrier()
    before, began = sent(), time.perf_counter()
    with comm.ledger() as book:
        loss = [train(batch) for _ in range(times)][-1]
    spent = time.perf_counter() - began
    comm.barrier()
    slowest, bytes_sent = comm.all_reduce(torch.tensor([spent, float(sent() - before)], dtype=torch.float64), op="max").tolist()
    mean = comm.all_reduce(torch.tensor(loss, dtype=torch.float64), op="avg").item()
    return mean, slowest * 1e3 / times, bytes_sent / 1e6 / times, book.bytes // times


def link_gbit(per_host: int) -> float:
    """The most that one of three broadcasts between hosts gets of the link, once its bucket is empty."""
    pair, megabytes, best = comm.mesh(host=2, place=per_host)["host"], 40, 0.0
    comm.broadcast(torch.zeros(8 * 2**20, dtype=torch.uint8), group=pair)
    for _ in range(3):
        comm.barrier()
        began = time.perf_counter()
        comm.broadcast(torch.zeros(megabytes * 10**6 // per_host, dtype=torch.uint8), group=pair)
        slowest = comm.all_reduce(torch.tensor(time.perf_counter() - began), op="max").item()
        best = max(best, megabytes * 8e-3 / slowest)
    return best


def rank_main(flags: argparse.Namespace) -> None:
    """What each process runs; rank 0 writes the rows."""
    comm.init_distributed("gloo")
    per_host, here = int(os.environ["LOCAL_WORLD_SIZE"]), comm.world()
    torch.set_num_threads(max(1, peers.cores() // here.size))
    setup = peers.Setup(flags.layers, flags.width, flags.heads, flags.batch, flags.context, here.size, "fp32")
    steps = SETTLE + flags.rounds * len(flags.rates)
    batches = setup.batches(here.rank, 0, steps)
    passes: dict[str, Train] = {}
    losses: dict[str, list[float]] = {}
    for name, build in contenders(per_host).items():
        if flags.only and not any(name == only or name.startswith(f"{only} ") for only in flags.only):
            continue
        if here.rank == 0:
            peers.progress(f"{per_host} a host: {name}")
        passes[name] = build(setup.model())
        losses[name] = [measured(passes[name], batch)[0] for batch in batches[:SETTLE]]
    rows = []
    for number, rate in enumerate(flags.rates):
        if here.rank % per_host == 0:
            limit(rate)
        comm.barrier()
        gbit = link_gbit(per_host)
        found: dict[str, list[tuple[float, float, int]]] = {name: [] for name in passes}
        for turn in range(flags.rounds):
            if here.rank == 0:
                peers.progress(f"{per_host} a host: {rate}, round {turn + 1} of {flags.rounds}")
            for name in peers.rotated(list(passes), turn):
                loss, *figures = measured(passes[name], batches[SETTLE + number * flags.rounds + turn], PERIODS.get(name, 1))
                losses[name].append(loss)
                found[name].append(tuple(figures))
        for name, rounds in found.items():
            ms, megabytes, ledger = zip(*rounds, strict=True)
            row = {
                "ranks_per_host": per_host,
                "rate": rate,
                "link_gbit": gbit,
                "contender": name,
                "ms": ms,
                "sent_mb": statistics.median(megabytes),
            }
            rows.append({**row, "median_ms": statistics.median(ms), "ledger_mb": statistics.median(ledger) / 1e6})
    if here.rank == 0:
        Path(flags.rank_file).write_text(json.dumps({"rows": rows, "losses": losses}))
    comm.destroy_process_group()


# -- the parent -------------------------------------------------------------------------------------------------------------


def contest(flags: argparse.Namespace, per_host: int, words: list[str]) -> dict[str, Any]:
    """Runs all contenders on two hosts with so many ranks each; the hosts and the ranks are gone afterwards."""
    with hosts.joined() as pair, tempfile.TemporaryDirectory() as folder:
        answer, port = Path(folder) / "rows.json", PORT + random.randrange(1000)
        running: list[subprocess.Popen[bytes]] = []
        try:
            for rank in range(2 * per_host):
                host, local = divmod(rank, per_host)
                place = {"RANK": rank, "LOCAL_RANK": local, "WORLD_SIZE": 2 * per_host, "LOCAL_WORLD_SIZE": per_host}
                environment = {**os.environ, **{key: str(value) for key, value in place.items()}, "MASTER_PORT": str(port)}
                environment |= {"MASTER_ADDR": pair.addresses[0], "GLOO_SOCKET_IFNAME": "cable", "OMP_NUM_THREADS": "1"}
                command = pair.command(host, [sys.executable, __file__, *words, "--rank-file", str(answer)])
                running.append(subprocess.Popen(command, env=environment))
            deadline = time.monotonic() + PATIENCE
            while any(process.poll() is None for process in running):
                if any(process.poll() for process in running) or time.monotonic() > deadline:
                    raise RuntimeError(
                        f"ranks ended with {[process.poll() for process in running]}; None stands for one that runs"
                    )
                time.sleep(0.1)
        finally:
            for process in running:
                process.kill()
                process.wait()
        found: dict[str, Any] = json.loads(answer.read_text())
        return found


def disagreements(losses: Mapping[str, list[float]]) -> dict[str, float]:
    """The largest relative difference of losses from the first exact contender's."""
    exact = {name: values for name, values in losses.items() if name not in APPROXIMATE}
    reference = next(iter(exact.values()), [])
    limits = {name: 1 if "int8" not in name else 100 for name in exact}
    gaps = {name: max(abs(a / b - 1) for a, b in zip(values, reference, strict=True)) for name, values in exact.items()}
    return {name: gap for name, gap in gaps.items() if not gap <= TOLERANCE * limits[name]}


def table(rows: list[dict[str, Any]]) -> str:
    """A line a contender and number of ranks a host, a column a rate."""
    rates = list(dict.fromkeys(row["rate"] for row in rows))
    lines = [
        f"{'ranks a host':<13}{'contender':<20}{'sent MB':>9}{'ledger MB':>11}"
        + "".join(f"{rate + ' ms':>16}" for rate in rates)
    ]
    for key in dict.fromkeys((row["ranks_per_host"], row["contender"]) for row in rows):
        mine = {row["rate"]: row for row in rows if (row["ranks_per_host"], row["contender"]) == key}
        first = next(iter(mine.values()))
        text = f"{key[0]:<13}{key[1]:<20}{first['sent_mb']:>9.1f}{first['ledger_mb']:>11.1f}"
        lines.append(text + "".join(f"{mine[rate]['median_ms']:>16.0f}" for rate in rates))
    links = {(row["ranks_per_host"], row["rate"]): row["link_gbit"] for row in rows}
    lines += [f"link of {rate}, {per_host} a host: {gbit:.3g} Gbit/s" for (per_host, rate), gbit in links.items()]
    return "\n".join(lines)


def main() -> int:
    """Prints a table and writes the figures."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    for name, default in {**SETUP, "rounds": 3}.items():
        parser.add_argument(f"--{name}", type=peers.positive, default=default)
    parser.add_argument("--ranks-per-host", type=peers.positive, nargs="+", default=[1, 2])
    parser.add_argument(
        "--rates", nargs="+", default=["10gbit", "1gbit", "100mbit"], help=f"as tc writes them, or {hosts.UNLIMITED}"
    )
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="names, or their first words")
    parser.add_argument("--json", type=Path, default=peers.RESULTS / "hosts.json")
    parser.add_argument("--into", type=Path, help="a file of an earlier run, to which this one is added, with its model")
    parser.add_argument(
        "--predict", action="store_true", help="only predict the measurements of the file, and write them there"
    )
    parser.add_argument("--rank-file", help=argparse.SUPPRESS)
    flags = parser.parse_args()
    if flags.rank_file:
        rank_main(flags)
        return 0
    if flags.predict:
        known = json.loads(flags.json.read_text())
        print(*map(add_predictions, [known, *known.get("added", [])]), sep="\n")
        flags.json.write_text(json.dumps(known, indent=1) + "\n")
        return 0
    reason = hosts.why_not()
    if reason is not None:
        print(f"skipped: {reason}")
        return 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the hosts go, too
    load, words, known = os.getloadavg()[0], sys.argv[1:], json.loads(flags.into.read_text()) if flags.into else None
    if known:
        words += [f"--{name}={known['flags'][name]}" for name in SETUP]
        flags = parser.parse_args(words)
    found = [contest(flags, per_host, words) for per_host in flags.ranks_per_host]
    rows = [row for each in found for row in each["rows"]]
    print(table(rows))
    wrong = {n: gaps for n, each in zip(flags.ranks_per_host, found, strict=True) if (gaps := disagreements(each["losses"]))}
    print(f"losses DISAGREE: {wrong}" if wrong else "losses agree")
    kept = {flag: value for flag, value in vars(flags).items() if flag not in ("json", "into", "predict", "rank_file")}
    whole = {"machine": {**peers.facts(), "load": load}, "flags": kept, "wrong": wrong, "rows": rows}
    print(add_predictions(whole))
    if known:
        whole = {**known, "added": [*known.get("added", []), whole]}
    to = flags.into or flags.json
    to.parent.mkdir(parents=True, exist_ok=True)
    to.write_text(json.dumps(whole, indent=1) + "\n")
    print(f"written: {to}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
