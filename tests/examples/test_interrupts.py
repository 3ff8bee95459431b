"""Interrupts, sent to a whole group of processes as a terminal does, or to the first alone as a supervisor does."""

import os
import signal
import subprocess
import sys
from pathlib import Path

PROGRAM = f"""
import os, sys, time

sys.path.insert(0, {str(Path(__file__).resolve().parents[2] / "examples")!r})
import interrupts
from functional_ds import comm


def stubborn(flag):
    os.write(1, b"ready\\n")  # in one piece, for both ranks write to one pipe
    while not flag.is_set():
        time.sleep(0.01)
    os.write(1, b"asked\\n")
    time.sleep(300)


if __name__ == "__main__":
    with interrupts.noted_for_ranks() as flag:
        try:
            comm.spawn(stubborn, flag, world_size=2)
        except comm.RankFailedError:
            print("ended")
"""


def test_first_interrupt_asks_and_second_ends_the_ranks(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    words = [sys.executable, str(tmp_path / "program.py")]
    kinds = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "start_new_session": True}
    with subprocess.Popen(words, **kinds) as process:
        try:
            for expected, send in (("ready", os.killpg), ("asked", os.kill)):
                assert process.stdout is not None
                assert [process.stdout.readline().strip() for _ in range(2)] == [expected, expected]
                send(process.pid, signal.SIGINT)
            shown, errors = process.communicate(timeout=60)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
    assert (process.returncode, shown.strip(), errors) == (0, "ended", "")
