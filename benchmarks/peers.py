"""One GPT, one text, one AdamW under PyTorch's and DeepSpeed's data parallelism and ours: time, memory, bytes.

    python benchmarks/peers.py --ranks 2 --rounds 5
    python benchmarks/peers.py --only floor ddp fsdp2 zero3 --dtype bf16

Ranks are processes that talk over Gloo on loopback. Each contender has its own processes, which live for the whole run
and sleep in a blocking read while others work: no contender inherits another's memory, and nothing spins. Every round
gives each contender a few steps in turn, so noise hits all alike; ratios are taken within a round. Where memory is too
short for all of them at once (or with --fresh), each turn starts its processes anew, which takes longer.

"sent MB" is what our ledger counts for a rank and step; "wire MB" is what the host's loopback carried, for every
contender alike.
"""

import argparse
import importlib.util
import json
import os
import platform
import resource
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from functools import partial
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import attrs
import torch
import torch.distributed as dist
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))
import corpus
import gpt

Batch = tuple[Tensor, Tensor]
Train = Callable[[Batch], float]  # one step on this rank's batch; returns its loss

RESULTS = Path(__file__).parent / "results"
CORPUS_BYTES = 1_000_000
SETTLE = 3  # steps before the first round: buckets are rebuilt, traces recorded, optimizer states made
ANSWER_SECONDS = 300.0  # a contender that is silent for longer has hung
TOLERANCE = {"fp32": 1e-4, "bf16": 3e-2}  # relative; bf16 keeps 8 bits, and contenders round at different places
ADAMW: dict[str, Any] = {"lr": 3e-4, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}


@attrs.frozen
class Setup:
    """What is trained, and by how many ranks; `batch` is rows on each rank."""

    layers: int
    width: int
    heads: int
    batch: int
    context: int
    ranks: int
    dtype: str
    seed: int = 0

    def __str__(self) -> str:
        rows = f"{self.batch} x {self.context} a rank"
        return f"GPT {self.layers} x {self.width}, {rows}, {self.ranks} ranks, {self.dtype}"

    def model(self) -> gpt.GPT:
        config = gpt.Config(layers=self.layers, width=self.width, heads=self.heads, context=self.context)
        return gpt.GPT(config, seed=self.seed)

    def batches(self, rank: int, first_step: int, steps: int) -> list[Batch]:
        text = corpus.load(context=self.context, max_bytes=CORPUS_BYTES)
        shape = {"rows": self.batch, "context": self.context, "seed": self.seed, "first_row": rank * self.batch}
        return [text.batch("train", step, **shape) for step in range(first_step, first_step + steps)]

    def threads(self) -> int:
        return max(1, cores() // self.ranks)


# The contenders. Each function builds its model inside the rank's process and returns what trains it by one step.


def loss_of(forward: Callable[[Tensor], Tensor], batch: Batch) -> Tensor:
    tokens, targets = batch
    return gpt.next_token_loss(forward(tokens), targets)


def torch_loop(model: nn.Module, optimizer: torch.optim.Optimizer, *, autocast: bool) -> Train:
    def train(batch: Batch) -> float:
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = loss_of(model, batch)
        loss.backward()
        optimizer.step()
        return loss.item()

    return train


def floor(setup: Setup) -> Train:
    """No communication: every rank trains by itself, so only its first loss is comparable."""
    model = setup.model()
    return torch_loop(model, torch.optim.AdamW(model.parameters(), fused=True, **ADAMW), autocast=setup.dtype == "bf16")


def ddp(setup: Setup) -> Train:
    dist.init_process_group("gloo")
    model = nn.parallel.DistributedDataParallel(setup.model(), gradient_as_bucket_view=True)
    return torch_loop(model, torch.optim.AdamW(model.parameters(), fused=True, **ADAMW), autocast=setup.dtype == "bf16")


def zro(setup: Setup) -> Train:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    dist.init_process_group("gloo")
    model = nn.parallel.DistributedDataParallel(setup.model(), gradient_as_bucket_view=True)
    optimizer = ZeroRedundancyOptimizer(
        model.parameters(), optimizer_class=torch.optim.AdamW, parameters_as_bucket_view=True, fused=True, **ADAMW
    )
    return torch_loop(model, optimizer, autocast=setup.dtype == "bf16")


def fsdp2(setup: Setup) -> Train:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (setup.ranks,))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16 if setup.dtype == "bf16" else None)
    model = setup.model()
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    return torch_loop(model, torch.optim.AdamW(model.parameters(), fused=True, **ADAMW), autocast=False)


def deepspeed(setup: Setup, *, stage: int) -> Train:
    import deepspeed as ds

    ds.utils.logger.setLevel("ERROR")
    # Serves inference only, and would be compiled here, by a C++ compiler that need not be there.
    ds.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    dist.init_process_group("gloo")
    model = setup.model()
    # Small buckets and no norm are its fastest setting here; its default buckets hold this whole model.
    zero = {"stage": stage, "reduce_bucket_size": 2_000_000, "compute_grad_norm": stage == 3}
    config = {
        "train_micro_batch_size_per_gpu": setup.batch,
        "zero_optimization": zero,
        "gradient_clipping": 0.0,  # its default is 1.0
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "bf16": {"enabled": setup.dtype == "bf16"},
    }
    optimizer = torch.optim.AdamW(model.parameters(), fused=True, **ADAMW)
    engine, *_ = ds.initialize(model=model, optimizer=optimizer, config=config, dist_init_required=False)

    def train(batch: Batch) -> float:
        loss = loss_of(engine, batch)
        engine.backward(loss)
        engine.step()
        return loss.item()

    return train


def ours(setup: Setup, *, stage: int) -> Train:
    from functional_ds import comm

    comm.init_distributed("gloo")
    train = our_training(setup.model(), stage=stage, dtype=setup.dtype)
    return lambda batch: float(train(batch))


def our_training(model: nn.Module, *, stage: int, dtype: str) -> Callable[[Batch], Tensor]:
    """Our step as a closure over its state, in the world that has been joined."""
    import functional_ds as fds
    from functional_ds import comm
    from functional_ds import transforms as T

    apply, params = fds.functional(model)
    precision = [T.mixed_precision("bf16")] if dtype == "bf16" else []
    strategy = fds.compose(*precision, T.zero(stage, comm.world()))
    step = strategy(fds.train_step(lambda params, batch: loss_of(partial(apply, params), batch), fds.adamw(**ADAMW)))
    state = step.init(params)
    del model, params  # the closure below must not keep them alive

    def train(batch: Batch) -> Tensor:
        nonlocal state
        state, metrics = step(state, batch)
        loss: Tensor = metrics["loss"]
        return loss

    return train


@attrs.frozen
class Contender:
    """How to build it, the package it needs, and the names of those it is measured against."""

    build: Callable[[Any], Callable[[Batch], Any]]
    package: str = "torch"
    rivals: tuple[str, ...] = ()

    @property
    def is_ours(self) -> bool:
        return self.package == "functional_ds"


SHARDED_OPTIMIZER = ("zro", "deepspeed1", "deepspeed2")
CONTENDERS = {
    "floor": Contender(floor),
    "ddp": Contender(ddp),
    "zro": Contender(zro),
    "fsdp2": Contender(fsdp2),
    "deepspeed1": Contender(partial(deepspeed, stage=1), "deepspeed"),
    "deepspeed2": Contender(partial(deepspeed, stage=2), "deepspeed"),
    "deepspeed3": Contender(partial(deepspeed, stage=3), "deepspeed"),
    "zero0": Contender(partial(ours, stage=0), "functional_ds", ("ddp",)),
    "zero1": Contender(partial(ours, stage=1), "functional_ds", SHARDED_OPTIMIZER),
    "zero2": Contender(partial(ours, stage=2), "functional_ds", SHARDED_OPTIMIZER),
    "zero3": Contender(partial(ours, stage=3), "functional_ds", ("fsdp2", "deepspeed3")),
}


# A rank's process: it builds its contender, then answers orders until it is told to stop.


@attrs.frozen
class Ready:
    """The first answer: the losses of the settling steps, and the bytes that this rank sends in a step, if known."""

    losses: list[float]
    sent_bytes: int | None = None


@attrs.frozen
class Order:
    """Train these steps, the first of them as a warm-up."""

    first_step: int
    steps: int


@attrs.frozen
class Report:
    """Losses and seconds of an order's steps, and the peak memory so far."""

    losses: list[float]
    seconds: list[float]
    peak_mb: float


def run_rank(conn: Connection, name: str, rank: int, setup: Setup, port: int) -> None:
    torch.set_num_threads(setup.threads())
    with answering(conn, rank, setup.ranks, port):
        serve(conn, CONTENDERS[name], rank, setup)


@contextmanager
def answering(conn: Connection, rank: int, ranks: int, port: int) -> Iterator[None]:
    """Gives the process torchrun's environment, and sends what goes wrong in it to the parent."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends its ranks itself
    warnings.simplefilter("ignore")  # formatting a peer's notices is not what is measured
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "MASTER_PORT": port}
    os.environ.update({key: str(value) for key, value in place.items()}, MASTER_ADDR="127.0.0.1")
    try:
        yield
        if dist.is_initialized():
            dist.destroy_process_group()
    except (EOFError, BrokenPipeError):
        pass  # the parent is gone
    except Exception:
        conn.send(traceback.format_exc())


def serve(conn: Connection, contender: Contender, rank: int, setup: Setup) -> None:
    train = contender.build(setup)
    *batches, last = setup.batches(rank, 0, SETTLE)
    losses = [train(batch) for batch in batches]
    last_loss, sent = counted(train, last) if contender.is_ours else (train(last), None)
    conn.send(Ready([*losses, last_loss], sent))
    while (order := conn.recv()) is not None:
        losses, seconds = [], []
        for batch in setup.batches(rank, order.first_step, order.steps):
            begin = time.perf_counter()
            losses.append(train(batch))
            seconds.append(time.perf_counter() - begin)
        conn.send(Report(losses, seconds, peak_rss_mb()))


def counted(train: Train, batch: Batch) -> tuple[float, int]:
    """The loss of a step, and the bytes that this rank sent in it by our ledger."""
    from functional_ds import comm

    with comm.ledger() as book:
        loss = train(batch)
    return loss, book.bytes


def peak_rss_mb() -> float:
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e6


# The parent: teams of processes, and rounds.


class ContenderFailed(Exception):
    """A rank raised, died or fell silent."""


class Team:
    """The processes of one contender, and a pipe to each."""

    def __init__(self, target: Callable[..., None], name: str, setup: Any) -> None:
        context, port = get_context("spawn"), free_port()
        self.pipes: list[Connection] = []
        self.processes = []
        for rank in range(setup.ranks):
            pipe, theirs = context.Pipe()
            process = context.Process(target=target, args=(theirs, name, rank, setup, port), daemon=True)
            process.start()
            theirs.close()  # so that a rank that dies is an end of file here
            self.pipes.append(pipe)
            self.processes.append(process)

    def ask(self, order: Order) -> list[Report]:
        for pipe in self.pipes:
            pipe.send(order)
        return self.answers()

    def answers(self) -> list[Any]:
        """One answer from each rank; the first rank that fails ends the wait for the others."""
        answers: dict[int, Any] = {}
        waiting = {pipe: rank for rank, pipe in enumerate(self.pipes)}
        while waiting:
            ready = wait(list(waiting), timeout=ANSWER_SECONDS)
            if not ready:
                raise ContenderFailed(f"no answer from ranks {sorted(waiting.values())} in {ANSWER_SECONDS:.0f} s")
            for pipe in [pipe for pipe in waiting if pipe in ready]:
                rank = waiting.pop(pipe)
                try:
                    answers[rank] = pipe.recv()
                except (EOFError, ConnectionError):
                    raise ContenderFailed(f"the process of rank {rank} {self.death(rank)}") from None
                if isinstance(answers[rank], str):
                    raise ContenderFailed(f"rank {rank} raised\n{answers[rank]}")
        return [answers[rank] for rank in range(len(self.pipes))]

    def death(self, rank: int) -> str:
        self.processes[rank].join(timeout=5.0)
        code = self.processes[rank].exitcode
        return f"died with exit code {code}" + (", out of memory perhaps: try --fresh" if code == -signal.SIGKILL else "")

    def stop(self, *, patience: float = 5.0) -> None:
        for pipe in self.pipes:
            with suppress(OSError):  # a rank that is gone needs no word
                pipe.send(None)
        deadline = time.monotonic() + patience
        for process in self.processes:
            process.join(timeout=max(0.0, deadline - time.monotonic()))
            process.kill()


@attrs.define
class Record:
    """All that was measured of one contender: losses by step, milliseconds and bytes on loopback by round."""

    ours: bool
    rivals: tuple[str, ...]
    losses: list[float]
    sent_bytes: int | None
    peak_mb: float = 0.0
    ms: list[float] = attrs.field(factory=list)
    wire_bytes: list[float] = attrs.field(factory=list)

    @classmethod
    def opened(cls, contender: Contender, answers: Sequence[Ready]) -> "Record":
        sent = [answer.sent_bytes for answer in answers if answer.sent_bytes is not None]
        return cls(contender.is_ours, contender.rivals, means(answers), max(sent, default=None))

    def add(self, reports: Sequence[Report], wire_bytes: float | None) -> None:
        """Takes a round's reports: the slowest rank's median step, the warm-up left out."""
        self.losses += means(reports)
        self.ms.append(1e3 * max(statistics.median(report.seconds[1:]) for report in reports))
        self.peak_mb = max(report.peak_mb for report in reports)
        if wire_bytes is not None:
            self.wire_bytes.append(wire_bytes)

    @property
    def median_ms(self) -> float:
        return statistics.median(self.ms)


def means(answers: Sequence[Ready] | Sequence[Report]) -> list[float]:
    """The mean over ranks of each step's loss."""
    return [statistics.fmean(step) for step in zip(*(answer.losses for answer in answers), strict=True)]


@attrs.define
class Contest:
    """Contenders that take turns; one that fails is left out from there on, and its reason kept."""

    target: Callable[..., None]  # what a rank's process runs: run_rank, or another with its arguments
    contenders: Mapping[str, Contender]
    setup: Any
    fresh: bool = False  # new processes for every turn
    teams: dict[str, Team] = attrs.field(factory=dict)
    records: dict[str, Record] = attrs.field(factory=dict)
    failures: dict[str, str] = attrs.field(factory=dict)

    def run(self, *, rounds: int, steps: int) -> None:
        try:
            for name in self.contenders:
                self.attempt(name, partial(self.enter, name), f"starting {name}")
            for number in range(rounds):
                order = Order(SETTLE + (0 if self.fresh else number * (1 + steps)), 1 + steps)
                for name in rotated(list(self.records), number):  # no contender always follows the same one
                    turn = partial(self.take_turn, name, order)
                    self.attempt(name, turn, f"round {number + 1} of {rounds}: {name}")
        finally:
            progress("")
            for team in self.teams.values():
                team.stop()

    def attempt(self, name: str, action: Callable[[], None], label: str) -> None:
        progress(label)
        try:
            action()
        except (ContenderFailed, OSError) as error:
            self.failures[name] = str(error)
            print(f"{name}: failed: {error}", file=sys.stderr)
            self.records.pop(name, None)
            self.leave(name, patience=0.0)

    def enter(self, name: str) -> None:
        self.records[name] = Record.opened(self.contenders[name], self.start(name))
        if self.fresh:
            self.leave(name)

    def start(self, name: str) -> list[Ready]:
        self.teams[name] = Team(self.target, name, self.setup)
        return self.teams[name].answers()

    def leave(self, name: str, *, patience: float = 5.0) -> None:
        if team := self.teams.pop(name, None):
            team.stop(patience=patience)

    def take_turn(self, name: str, order: Order) -> None:
        if self.fresh:
            self.start(name)
        before = loopback_bytes()
        reports = self.teams[name].ask(order)
        after = loopback_bytes()
        wire = None if before is None or after is None else (after - before) / (len(reports) * order.steps)
        self.records[name].add(reports, wire)
        if self.fresh:
            self.leave(name)


def rotated(names: Sequence[str], by: int) -> list[str]:
    by %= max(1, len(names))
    return [*names[by:], *names[:by]]


def progress(text: str) -> None:
    if sys.stderr.isatty():
        print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def loopback_bytes() -> int | None:
    """All bytes that this host has sent over loopback: Gloo's while one contender runs, and little else."""
    if importlib.util.find_spec("psutil") is None:
        return None
    import psutil

    counters = psutil.net_io_counters(pernic=True)
    loopback = counters.get("lo") or counters.get("lo0")
    return None if loopback is None else loopback.bytes_sent


def memory_is_short(setup: Setup, contenders: int) -> bool:
    """Whether the processes of all contenders might not fit: for each the imports and ten copies of the parameters."""
    if importlib.util.find_spec("psutil") is None:
        return False
    import psutil

    parameter_bytes = 4 * 12 * setup.layers * setup.width**2
    needed = contenders * setup.ranks * (300e6 + 10 * parameter_bytes)
    return needed > float(psutil.virtual_memory().available)


def cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


# What is said of the records. The floor is a contender's name, which others are divided by.


def ratio(record: Record, other: Record) -> float:
    """The median over rounds of the ratio within a round, where noise is shared."""
    return statistics.median(mine / theirs for mine, theirs in zip(record.ms, other.ms, strict=True))


def rival_ratios(record: Record, records: Mapping[str, Record]) -> dict[str, float]:
    """The ratio to each rival of the same class, the fastest rival first."""
    present = sorted((name for name in record.rivals if name in records), key=lambda name: records[name].median_ms)
    return {name: ratio(record, records[name]) for name in present}


def disagreement(records: Mapping[str, Record]) -> dict[str, float]:
    """The largest relative difference of each contender's losses from those of the first that communicates.

    The floor's ranks train apart, so only its first loss counts.
    """
    reference = next((record.losses for name, record in records.items() if name != "floor"), [])
    comparable = {name: record.losses[: 1 if name == "floor" else None] for name, record in records.items()}
    return {
        name: max((abs(loss / expected - 1) for loss, expected in zip(losses, reference, strict=False)), default=0.0)
        for name, losses in comparable.items()
    }


def report_agreement(records: Mapping[str, Record], tolerance: float) -> bool:
    differences = disagreement(records)
    wrong = {name: value for name, value in differences.items() if not value <= tolerance}  # NaN is wrong too
    if wrong:
        print(f"losses DISAGREE, relative differences above {tolerance:g}: {wrong}")
    else:
        steps = max(len(record.losses) for record in records.values())
        worst = max(differences.values())
        print(f"losses agree over {steps} steps: largest relative difference {worst:.1e}, allowed {tolerance:g}")
    return not wrong


def table(records: Mapping[str, Record], *, floor: str) -> str:
    """One line a contender; an empty column is left out."""
    head = ("contender", "ms a step (min..max)", f"x {floor}", "x rivals", "peak MB", "sent MB", "wire MB")
    rows = [table_row(name, records, floor) for name in records]
    columns = [column for column in zip(head, *rows, strict=True) if set(column[1:]) != {"-"}]
    widths = [max(map(len, column)) for column in columns]
    lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in zip(*columns, strict=True)]
    return "\n".join([lines[0], "  ".join("-" * width for width in widths), *lines[1:]])


def table_row(name: str, records: Mapping[str, Record], floor: str) -> tuple[str, ...]:
    record = records[name]
    return (
        name,
        f"{shown(record.median_ms)} ({shown(min(record.ms))}..{shown(max(record.ms))})",
        f"{ratio(record, records[floor]):.2f}" if floor in records else "-",
        ", ".join(f"{value:.2f} {rival}" for rival, value in rival_ratios(record, records).items()) or "-",
        f"{record.peak_mb:.0f}",
        "-" if record.sent_bytes is None else f"{record.sent_bytes / 1e6:.1f}",
        f"{statistics.median(record.wire_bytes) / 1e6:.1f}" if record.wire_bytes else "-",
    )


def shown(ms: float) -> str:
    return f"{ms:.0f}" if ms >= 100 else f"{ms:.1f}"


def cpu_model() -> str:
    """Its name as Linux has it, or nothing."""
    text = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    return text.partition("model name")[2].partition("\n")[0].strip("\t :")


def commit() -> str:
    """The checkout's commit, with "+" where files are changed; nothing without git."""
    words = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--exclude=*", "--dirty=+"]
    return subprocess.run(words, capture_output=True, text=True, check=False).stdout.strip() if shutil.which("git") else ""


def facts() -> dict[str, Any]:
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "cores": cores(),
        "processor": cpu_model() or platform.processor() or platform.machine(),
        "commit": commit(),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def summary(record: Record, records: Mapping[str, Record], floor: str) -> dict[str, Any]:
    return {
        **attrs.asdict(record),
        "median_ms": record.median_ms,
        "floor_ratio": ratio(record, records[floor]) if floor in records else None,
        "rival_ratios": rival_ratios(record, records),
    }


def save_json(path: Path, contest: Contest, *, floor: str) -> None:
    records = contest.records
    content = {
        "machine": facts(),
        "setup": attrs.asdict(contest.setup),
        "disagreement": disagreement(records),
        "contenders": {name: summary(record, records, floor) for name, record in records.items()},
        "failures": contest.failures,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=1) + "\n")


def save_png(path: Path, title: str, records: Mapping[str, Record], *, floor: str) -> None:
    """Bars of the median step, with its least and greatest round, and of the peak memory; ours in another colour."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    names, runs = list(records), list(records.values())
    colours = ["#c44e52" if run.ours else "#8c9bb0" for run in runs]
    spread = [[run.median_ms - min(run.ms) for run in runs], [max(run.ms) - run.median_ms for run in runs]]
    figure, (left, right) = plt.subplots(1, 2, figsize=(13, 4.5), layout="constrained")
    left.bar(names, [run.median_ms for run in runs], color=colours, yerr=spread, capsize=3)
    left.set_ylabel("ms a step (median round, least to greatest)")
    right.bar(names, [run.peak_mb for run in runs], color=colours)
    right.set_ylabel("peak memory of a rank, MB")
    if floor in records:
        left.axhline(records[floor].median_ms, color="black", linewidth=0.8, linestyle="--", label=floor)
        left.legend()
    for axes in (left, right):
        axes.tick_params(axis="x", rotation=45)
    figure.suptitle(title)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def present(contest: Contest, title: str, *, tolerance: float, path: Path, picture: Path, floor: str) -> bool:
    """Prints the table, writes the files, and says whether all contenders ran and agreed."""
    if not contest.records:
        print("nothing was measured")
        return False
    print(f"{title}\n\n{table(contest.records, floor=floor)}\n")
    agreed = report_agreement(contest.records, tolerance)
    save_json(path, contest, floor=floor)
    save_png(picture, title, contest.records, floor=floor)
    print(f"written: {path}, {picture}")
    return agreed and not contest.failures


# The command line.


def available(contenders: Mapping[str, Contender]) -> dict[str, Contender]:
    """Those whose package is installed; says which are left out."""
    found = {}
    for name, contender in contenders.items():
        if importlib.util.find_spec(contender.package) is None:
            print(f"{name}: skipped, {contender.package} is not installed")
        else:
            found[name] = contender
    return found


def positive(text: str) -> int:
    if (value := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"{value} is less than 1")
    return value


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, default in {"layers": 8, "width": 384, "heads": 6, "batch": 4, "context": 128, "ranks": 2}.items():
        parser.add_argument(f"--{name}", type=positive, default=default)
    parser.add_argument("--rounds", type=positive, default=5)
    parser.add_argument("--steps", type=positive, default=4, help="timed steps of each contender in a round")
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--only", nargs="+", choices=CONTENDERS, default=list(CONTENDERS), metavar="NAME")
    parser.add_argument("--fresh", action="store_true", help="start processes anew for each turn: less memory, slower")
    parser.add_argument("--json", type=Path, help="default: benchmarks/results/peers-RANKS-ranks-DTYPE.json")
    parser.add_argument("--png", type=Path, help="default: next to the JSON")
    return parser.parse_args()


def main() -> int:
    args = parse()
    setup = Setup(**{field.name: getattr(args, field.name) for field in attrs.fields(Setup) if field.name != "seed"})
    # Inherited by the ranks: CPU and loopback whatever else this machine has.
    os.environ.update(CUDA_VISIBLE_DEVICES="", DS_ACCELERATOR="cpu", OMP_NUM_THREADS=str(setup.threads()))
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
    chosen = {name: contender for name, contender in CONTENDERS.items() if name in args.only}
    contenders = available(chosen)
    fresh = args.fresh or memory_is_short(setup, len(contenders))
    if fresh and not args.fresh:
        print("too little memory for all at once: each turn starts its processes anew")
    contest = Contest(run_rank, contenders, setup, fresh)
    contest.run(rounds=args.rounds, steps=args.steps)
    path = args.json or RESULTS / f"peers-{setup.ranks}-ranks-{setup.dtype}.json"
    picture = args.png or path.with_suffix(".png")
    title = f"{setup}, {cores()} cores, {args.rounds} rounds of {args.steps} steps"
    good = present(contest, title, tolerance=TOLERANCE[setup.dtype], path=path, picture=picture, floor="floor")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
