"""A rank that dies while ranks join: the others raise TimedOutError within one time-out, and name it."""

import multiprocessing
import os
import re
import signal
import time
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from functional_ds import comm
from functional_ds.comm import setup
from functional_ds.comm.worlds import rendezvous
from functional_ds.fitting.watchdog import _reconnected
from tests.fitting.ranks import free_port

TIMEOUT, SLACK = 4.0, 4.0  # seconds; the slack is for a busy machine
PHASES = ("never", "opened", "here", "accepted", "met", "connecting")


def die(*args: Any, **options: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def dying(phase: str) -> None:
    """This process will be killed when it comes to this phase of joining."""
    if phase == "never":
        die()
    if phase == "opened":  # it holds the store, or has opened it
        setup.meet = die  # type: ignore[assignment]
    if phase == "here":  # others see that it has come
        rendezvous._proposed = rendezvous._agreed = die  # type: ignore[assignment]
    if phase == "accepted":
        before: dict[str, Callable[..., Any]] = {name: getattr(rendezvous, name) for name in ("_proposed", "_agreed")}

        def after(name: str, *args: Any) -> Any:
            before[name](*args)
            die()

        rendezvous._proposed = lambda *args: after("_proposed", *args)  # type: ignore[assignment]
        rendezvous._agreed = lambda *args: after("_agreed", *args)  # type: ignore[assignment]
    if phase == "met":
        setup.connect = die  # type: ignore[assignment]
    if phase == "connecting":  # in torch's own connecting, which asks the store for addresses
        setup.connect = lambda store, joining, begin: begin(timedelta(seconds=0.1))  # type: ignore[assignment]
        dist.init_process_group = lambda *args, **options: die()  # type: ignore[assignment]


def join(pipe: Connection, rank: int, size: int, init_method: str, phase: str | None) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    if phase is not None:
        dying(phase)
    began = time.monotonic()
    try:
        comm.init_distributed("gloo", size, rank, init_method, timedelta(seconds=TIMEOUT))
        error: BaseException | None = None
    except BaseException as raised:
        error = raised
    pipe.send((type(error).__name__, str(error), time.monotonic() - began))


def outcomes(init_method: str, victim: int, phase: str, size: int) -> dict[int, tuple[str, str, float]]:
    """What the ranks that are left say, and after how many seconds."""
    context = multiprocessing.get_context("forkserver")
    processes, pipes = [], {}
    for rank in range(size):
        receiver, sender = context.Pipe(duplex=False)
        process = context.Process(target=join, args=(sender, rank, size, init_method, phase if rank == victim else None))
        process.start()
        sender.close()
        processes.append(process)
        pipes[rank] = receiver
    found = {rank: pipe.recv() for rank, pipe in pipes.items() if rank != victim}
    for process in processes:
        process.join(5)
        process.kill()
    return found


@pytest.mark.sample(7)
@pytest.mark.parametrize("where", ["tcp", "file"])
@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize(("victim", "size"), [(0, 2), (1, 2), (1, 3)])
def test_a_rank_that_dies_while_it_joins(where: str, phase: str, victim: int, size: int, tmp_path: Path) -> None:
    init_method = f"tcp://127.0.0.1:{free_port()}" if where == "tcp" else f"file://{tmp_path / 'store'}"
    for rank, (name, words, seconds) in outcomes(init_method, victim, phase, size).items():
        assert name == "TimedOutError", words
        named = re.search(rf"\brank {victim}\b|rank [\d, ]*\b{victim}\b", words.partition("; ")[2])
        assert named or (rank and "the process that holds the store has ended: rank 0" in words), words  # rank 0 came earlier
        assert seconds < TIMEOUT + SLACK


def test_a_folder_that_is_not_there_is_refused_at_once(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"init_method='file://.*/gone/store': there is no folder .*/gone"):
        comm.init_distributed("gloo", 2, 0, f"file://{tmp_path}/gone/store")


class DeadStore:
    """A store whose other end is gone, as torch's raises after its own time-out."""

    timeout = timedelta(minutes=10)

    def set_timeout(self, timeout: timedelta) -> None:
        self.timeout = timeout

    def clone(self) -> Any:
        time.sleep(self.timeout.total_seconds())
        raise RuntimeError("connection refused")


def test_a_watchdog_does_not_wait_for_a_store_that_is_gone() -> None:
    store = DeadStore()
    with pytest.raises(comm.TimedOutError, match=r"the process that holds the store has not answered for 0\.2 s"):
        _reconnected(store, 0.2)
    assert store.timeout == timedelta(minutes=10)
