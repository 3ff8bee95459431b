"""Ranks as processes that a test may stop and kill. The server of tests/conftest.py forks them."""

import multiprocessing
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import attrs
import torch

from functional_ds import comm

PATIENCE = 90.0  # seconds
JOINING = 20.0  # seconds: a rank that is killed before the others have joined ends them after this time, within the patience


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port


def become(rank: int, world_size: int, port: int, stderr: str, program: Callable[..., Any], args: Sequence[Any]) -> None:
    """Makes this process a rank, whose words go into a file."""
    handle = os.open(stderr, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(handle, 2)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    os.environ.update(GLOO_SOCKET_IFNAME="lo", RANK=str(rank), WORLD_SIZE=str(world_size))
    torch.set_num_threads(1)
    comm.init_distributed("gloo", init_method=f"tcp://127.0.0.1:{port}", timeout=timedelta(seconds=JOINING))
    program(*args)


@attrs.define
class Ranks:
    """Some ranks that run a program."""

    processes: list[BaseProcess]
    folder: Path

    @staticmethod
    def start(program: Callable[..., Any], *args: Any, world_size: int, folder: Path) -> "Ranks":
        context = multiprocessing.get_context("forkserver")
        folder.mkdir(parents=True, exist_ok=True)
        port, processes = free_port(), []
        for rank in range(world_size):
            words = (rank, world_size, port, str(folder / f"stderr-{rank}"), program, args)
            processes.append(context.Process(target=become, args=words))
            processes[-1].start()
        return Ranks(processes, folder)

    def send(self, rank: int, number: signal.Signals) -> None:
        """A signal for a rank, which this test started."""
        pid = self.processes[rank].pid
        assert pid is not None
        os.kill(pid, number)

    def wait_for(self, name: str) -> None:
        """Until a file is there that a rank makes."""
        deadline = time.monotonic() + PATIENCE
        while not (self.folder / name).exists():
            assert time.monotonic() < deadline, f"no {name} in {PATIENCE} s: {self.said(0)}"
            time.sleep(0.01)

    def code(self, rank: int) -> int | None:
        """How a rank has ended."""
        self.processes[rank].join(PATIENCE)
        return self.processes[rank].exitcode

    def said(self, rank: int) -> str:
        return (self.folder / f"stderr-{rank}").read_text()

    def end(self) -> None:
        """Leaves nothing behind."""
        for process in self.processes:
            if process.is_alive():
                process.kill()
            process.join()
