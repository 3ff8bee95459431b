"""Run as a script: starts the two ranks of programs, watches them as torchrun does, and prints how they ended, a line a start.

    starts.py COUNT [NAME ...]

A process that has imported everything forks the ranks, so a start takes little time. Each rank's interpreter ends by itself.
"""

import json
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).absolute().parents[2]))

import torch

from functional_ds import comm
from tests.ends.programs import ALONE, ENDS

RANKS = 2
PATIENCE = 60.0  # seconds; a rank that takes longer hangs, even on a busy machine
POLL = 0.1  # seconds, as torchrun does


def run(program: Callable[[], None], rank: int, folder: Path) -> None:
    """Makes this process a rank, whose words go into a file, and runs the program."""
    os.setsid()
    handle = os.open(folder / f"stderr-{rank}", os.O_WRONLY | os.O_CREAT)
    os.dup2(handle, 2)
    torch.set_num_threads(1)
    comm.init_distributed("gloo", world_size=RANKS, rank=rank, init_method=f"file://{folder}/store")
    program()


def watch(pids: list[int]) -> tuple[list[int | None], int | None]:
    """Exit codes, None for a rank that hangs; the rank to blame, the first that is seen to fail. The others are then ended."""
    codes: list[int | None] = [None] * len(pids)
    blamed, deadline = None, time.monotonic() + PATIENCE
    while None in codes and time.monotonic() < deadline:
        time.sleep(POLL)
        for rank, pid in enumerate(pids):
            if codes[rank] is None and (ended := os.waitpid(pid, os.WNOHANG))[0]:
                codes[rank] = os.waitstatus_to_exitcode(ended[1])
        failed = [rank for rank, code in enumerate(codes) if code]
        if failed and blamed is None:
            blamed = failed[0]
            end(pids, codes, signal.SIGTERM)
    for rank, pid in enumerate(pids):
        if codes[rank] is None:  # with its children
            os.killpg(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
    return codes, blamed


def end(pids: list[int], codes: list[int | None], number: signal.Signals) -> None:
    for pid, code in zip(pids, codes, strict=True):
        if code is None:
            os.kill(pid, number)


def start(name: str) -> Callable[[], None] | None:
    """Starts the ranks and prints how they ended. In a rank, returns what it has to run."""
    program = ENDS[name].program if name in ENDS else ALONE[name]
    folder, pids = Path(tempfile.mkdtemp()), []
    for rank in range(RANKS):
        pids.append(os.fork())
        if pids[-1] == 0:
            return partial(run, program, rank, folder)
    codes, blamed = watch(pids)
    said = [path.read_text() for path in sorted(folder.glob("stderr-*"))]
    shutil.rmtree(folder)
    print(json.dumps({"name": name, "codes": codes, "blamed": blamed, "said": said}), flush=True)
    return None


def main(count: int, names: list[str]) -> Callable[[], None] | None:
    for name in names:
        for _ in range(count):
            program = start(name)
            if program is not None:
                return program
    return None


if __name__ == "__main__":
    program = main(int(sys.argv[1]), sys.argv[2:])
    if program is not None:
        program()
