"""Interrupts, sent to a whole group of processes as a terminal does, or to the first alone as a supervisor does."""

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

from functional_ds.fitting import stop_on_signals

PROGRAM = """
import os, time

from functional_ds import comm
from functional_ds.fitting import signals


def stubborn(flag):
    os.write(1, b"ready\\n")  # in one piece, for both ranks write to one pipe
    while not flag.is_set():
        time.sleep(0.01)
    os.write(1, b"asked\\n")
    time.sleep(300)


if __name__ == "__main__":
    with signals.stop_ranks_on_signals() as flag:
        try:
            comm.spawn(stubborn, flag, world_size=2)
        except comm.errors.RankFailedError:
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


def test_a_signal_is_noted_once_and_then_meant(tmp_path: Path) -> None:
    """The flag says which; handlers are put back."""
    before = signal.getsignal(signal.SIGTERM)
    with stop_on_signals() as flag:
        assert not flag.is_set()
        os.kill(os.getpid(), signal.SIGTERM)
        assert flag.is_set()
        assert flag.number == signal.SIGTERM
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
        os.kill(os.getpid(), signal.SIGINT)  # of another kind: the first one counts
        assert flag.number == signal.SIGTERM
    assert signal.getsignal(signal.SIGTERM) == before


def test_other_threads_note_nothing() -> None:
    def elsewhere() -> None:
        with stop_on_signals() as flag:
            found.append(flag.is_set())

    found: list[bool] = []
    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert found == [False]
