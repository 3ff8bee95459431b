"""Joining takes one time-out in all, whichever rank ends wherever, and the error names the ranks that are missing."""

import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path

import attrs
import pytest
import torch
from torch.distributed import DistNetworkError, HashStore, TCPStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import Store

from functional_ds import comm
from functional_ds.comm import setup
from functional_ds.comm.table.errors import TimedOutError
from functional_ds.comm.worlds import rendezvous
from functional_ds.comm.worlds.rendezvous import Deadline, connect, holder, meet, open_store, reconnect
from tests.fitting.ranks import PATIENCE, free_port

TIMEOUT = timedelta(seconds=3)
SLACK = 12.0  # seconds that a busy machine may add; torch's own waits, one after the other, are minutes


def end(number: signal.Signals) -> None:
    os.kill(os.getpid(), number)


# Where a rank ends: what of joining it reaches last.
STAGES = {"before it comes": "open_store", "before it is seen": "meet", "before it connects": "connect"}


def joining(pipe: Connection, rank: int, init_method: str, stage: str, number: signal.Signals | None) -> None:
    """A rank that reports how it joined, or ends at a stage."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    if number is not None:
        setattr(setup, STAGES[stage], lambda *_, **__: end(number))
    begun = time.monotonic()
    try:
        comm.init_distributed("gloo", world_size=2, rank=rank, init_method=init_method, timeout=TIMEOUT)
        pipe.send(("joined", "", time.monotonic() - begun))
    except BaseException as error:
        pipe.send((type(error).__name__, str(error), time.monotonic() - begun))


@attrs.frozen
class Survivor:
    """How joining ended for the rank that was left."""

    error: str
    message: str
    seconds: float


def survivor(init_method: str, victim: int, stage: str, number: signal.Signals) -> Survivor:
    context = multiprocessing.get_context("forkserver")
    processes, pipe = [], None
    for rank in range(2):
        receiver, sender = context.Pipe(duplex=False)
        args = (sender, rank, init_method, stage, number if rank == victim else None)
        processes.append(context.Process(target=joining, args=args))
        processes[-1].start()
        sender.close()
        pipe = pipe if rank == victim else receiver
    try:
        assert pipe is not None
        assert pipe.poll(PATIENCE), "the other rank waits"
        return Survivor(*pipe.recv())
    finally:
        for process in processes:
            process.kill()
            process.join()


@pytest.mark.sample(4)
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("scheme", ["tcp", "file"])
def test_a_rank_that_ends_while_it_joins(scheme: str, victim: int, stage: str, number: signal.Signals, tmp_path: Path) -> None:
    """The other one raises within the time-out; the error names the missing rank, or says whose store is gone."""
    init_method = f"tcp://127.0.0.1:{free_port()}" if scheme == "tcp" else f"file://{tmp_path}/store"
    other = survivor(init_method, victim, stage, number)
    assert other.error == "TimedOutError", other
    gone = scheme == "tcp" and victim == 0 and "the store that rank 0 or its parent holds at 127.0.0.1" in other.message
    assert gone or f"rank {victim} had" in other.message, other
    assert other.seconds < TIMEOUT.total_seconds() + SLACK, other


def test_all_parts_share_one_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock that the test moves: each part takes most of what is left, and what it is given grows less."""
    now, given = [0.0], list[float]()
    monkeypatch.setattr(rendezvous, "monotonic", lambda: now[0])
    deadline = Deadline(timedelta(seconds=100))

    def part(seconds: float) -> None:
        given.append(round(seconds, 3))
        now[0] += 40

    part(deadline.remaining.total_seconds())
    store = meet(HashStore(), rank=0, size=1, deadline=deadline)
    part(deadline.remaining.total_seconds())
    monkeypatch.setattr(rendezvous, "within", lambda seconds, work: (part(seconds), work())[1])
    connect(store, rank=0, size=1, timeout=deadline.timeout, make=lambda: None)
    assert given == [100, 60, 60]  # what is left is written as ranks meet
    assert deadline.passed
    assert deadline.remaining == timedelta(milliseconds=1)


def pair(work: Callable[[Store, int], None]) -> list[BaseException | None]:
    """What two ranks, in threads, that have met in a store raise as they connect."""
    store, errors = HashStore(), list[BaseException | None]([None, None])

    def run(rank: int) -> None:
        try:
            work(meet(store, rank=rank, size=2, deadline=Deadline(timedelta(seconds=2))), rank)
        except BaseException as error:
            errors[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    return errors


def failing(why: str) -> Callable[[Store, int], None]:
    """Rank 1 fails at once by an error of its own, and rank 0 waits for it."""

    def make(rank: int) -> None:
        if rank == 1:
            raise RuntimeError(why)
        time.sleep(PATIENCE)

    return lambda store, rank: connect(store, rank=rank, size=2, timeout=timedelta(seconds=2), make=lambda: make(rank))


def test_a_rank_that_cannot_connect_says_why() -> None:
    """Its own error is torch's, at once; the other rank's repeats it."""
    first, second = pair(failing("no interface wan0\nframe 1"))
    assert type(second) is RuntimeError
    assert isinstance(first, TimedOutError)
    assert str(first) == "rank 0 of 2 did not connect to the others within 0:00:02; rank 1 failed: no interface wan0"


def test_ranks_that_cannot_reach_each_other() -> None:
    """None is missing."""
    for error in pair(
        lambda store, rank: connect(store, rank=rank, size=2, timeout=timedelta(seconds=2), make=lambda: time.sleep(PATIENCE))
    ):
        assert isinstance(error, TimedOutError)
        assert str(error).endswith("all have come, and cannot reach each other")


def test_torchs_messages_keep_the_whole_time(tmp_path: Path) -> None:
    """Though less was left when the ranks connected."""
    store = open_store(f"file://{tmp_path}/store", rank=0, size=1, deadline=Deadline(TIMEOUT))
    comm.init_distributed("gloo", world_size=1, rank=0, store=store, timeout=timedelta(seconds=77))
    try:
        backend = torch.distributed.group.WORLD._get_backend(torch.device("cpu"))
        assert backend.options._timeout == timedelta(seconds=77)
    finally:
        comm.destroy_process_group()


class EndedStore(HashStore):
    """A store whose process ended once ranks had met in it: it answers a few requests more."""

    def __init__(self, requests: int) -> None:
        super().__init__()
        self.requests = requests

    def _ask(self) -> None:
        self.requests -= 1
        if self.requests < 0:
            raise DistNetworkError("Failed to recv, got 0 bytes")

    def get(self, key: str) -> bytes:
        self._ask()
        return b"2.0"

    def set(self, key: str, value: str) -> None:
        self._ask()


@pytest.mark.parametrize("requests", [0, 1])
def test_a_store_that_ends_while_ranks_connect(requests: int) -> None:
    """The first request asks for the rest of the time, the second says that this rank is connected."""
    with pytest.raises(
        TimedOutError, match=r"rank 1 of 2 connects to the others, and the store that .* has ended: Failed to recv"
    ):
        connect(EndedStore(requests), rank=1, size=2, timeout=timedelta(seconds=2), make=lambda: None)


# -- addresses --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("init_method", "message"),
    [
        ("file:///no/such/folder/store", "name a file in a folder that exists and that all ranks see"),
        ("file://", "name a file in a folder that exists"),
        ("tcp://host", "name a host and a port"),
        ("tcp://:29500", "name a host and a port"),
        ("tcp://host:29500?rank=0&world_size=2", "pass rank and world_size as arguments"),
    ],
)
def test_addresses_that_cannot_be_met_at(init_method: str, message: str) -> None:
    """Refused at once, not after the time-out."""
    with pytest.raises(ValueError, match=message) as found:
        comm.init_distributed("gloo", world_size=2, rank=1, init_method=init_method)
    assert repr(init_method) in str(found.value)


def test_an_address_where_another_program_listens() -> None:
    """It takes the connection and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"tcp://127.0.0.1:{server.getsockname()[1]}"
        with pytest.raises(TimedOutError, match=r"what listens at 127\.0\.0\.1:\d+ does not answer"):
            comm.init_distributed("gloo", world_size=2, rank=1, init_method=address, timeout=timedelta(seconds=1))


# -- a store whose holder ends ----------------------------------------------------------------------------------------

HOLDER = """
import time
from torch.distributed import TCPStore
store = TCPStore("127.0.0.1", PORT, is_master=True, wait_for_workers=False)
print("up", flush=True)
time.sleep(300)
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_a_watchdogs_connection_to_a_store_that_is_gone(number: signal.Signals) -> None:
    """It says so in the watchdog's time, not after the store's ten minutes."""
    port = free_port()
    words = [sys.executable, "-c", HOLDER.replace("PORT", str(port))]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "up\n"
            store = TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(minutes=10))
            assert reconnect(store, 20.0).check(["nothing"]) is False
            process.send_signal(number)
            if number == signal.SIGKILL:
                process.wait()
            with pytest.raises(TimedOutError, match=f"the store that rank 0 or its parent holds at 127.0.0.1:{port} does not"):
                reconnect(store, 1.0)
        finally:
            process.kill()
    assert holder(store).endswith(f"127.0.0.1:{port}")
