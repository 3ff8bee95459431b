"""Programs that other processes cannot import are refused before any process is started."""

import functools
import multiprocessing
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from functional_ds import comm


class Adds:
    """A program with state."""

    def __init__(self, by: int) -> None:
        self.by = by

    def __call__(self, x: int) -> int:
        return x + self.by

    def method(self, x: int) -> int:
        """A bound method is a program, too."""
        return x - self.by

    @classmethod
    def of_class(cls, x: int) -> int:
        """So is a class method."""
        return 2 * x


def adds(x: int, y: int) -> int:
    """A plain function."""
    return x + y


def closure() -> Callable[[int], int]:
    """A function that pickles by no name."""

    def inner(x: int) -> int:
        return x

    return inner


def replaced(x: int) -> int:
    """Its name means something else by the time it is passed."""
    return x


hidden, replaced = replaced, adds  # type: ignore[assignment]

REFUSED: dict[str, Callable[..., Any]] = {
    "a lambda": lambda x: x,
    "a partial of a lambda": functools.partial(lambda x, y: x, y=1),
    "a closure": closure(),
    "a replaced function": hidden,
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_imported_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the name, what would do, and no process started."""
    process = multiprocessing.get_context("spawn").Process
    monkeypatch.setattr(process, "start", lambda self: pytest.fail("a process was started"))
    with pytest.raises(ValueError, match=r"spawn: the new processes cannot import tests\.comm\.test_spawn\.") as found:
        comm.spawn(REFUSED[name], 1, world_size=2)
    assert "define it at the top level of a module" in str(found.value)
    assert "comm.simulate" in str(found.value)


def test_importable_programs_run() -> None:
    """Partials of functions and of objects, methods and class methods."""
    program = Adds(2)
    assert comm.spawn(functools.partial(adds, 5), 1, world_size=1) == [6]
    assert comm.spawn(functools.partial(program), 1, world_size=1) == [3]
    assert comm.spawn(program.method, 1, world_size=1) == [-1]
    assert comm.spawn(Adds.of_class, 4, world_size=1) == [8]


SOURCE = "from functional_ds import comm\ndef program(): return 1\ncomm.spawn(program, world_size=1)\n"


@pytest.mark.parametrize("on_stdin", [True, False], ids=["stdin", "-c"])
def test_a_program_without_a_file_is_refused(on_stdin: bool) -> None:
    """As in a notebook, other processes cannot import what was typed in."""
    command = [sys.executable, "-"] if on_stdin else [sys.executable, "-c", SOURCE]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    run = subprocess.run(
        command, input=SOURCE if on_stdin else None, capture_output=True, text=True, timeout=120, check=False, env=environment
    )
    assert run.returncode == 1
    last = run.stderr.strip().splitlines()[-1]
    assert last.startswith("ValueError: spawn: program is defined in a notebook, on stdin or with python -c"), run.stderr
    assert "define it at the top level of a module" in last


@pytest.mark.parametrize("size", [0, -1, 2.0, "2", True])
def test_a_world_has_a_whole_number_of_ranks(size: Any) -> None:
    """Refused at once."""
    with pytest.raises(ValueError, match="world_size="):
        comm.spawn(adds, 1, 2, world_size=size)


# -- ranks that do not end by themselves -------------------------------------------------------------------------------


def stays(how: str) -> None:
    """Rank 0 raises; rank 1 does not hear SIGTERM."""
    if comm.world().rank == 0:
        time.sleep(0.2)
        raise ValueError("seven")
    if how == "ignores":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    else:
        os.kill(os.getpid(), signal.SIGSTOP)
    time.sleep(300)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("how", ["ignores", "is stopped"])
def test_a_rank_that_does_not_hear_is_killed(how: str) -> None:
    with pytest.raises(ValueError, match="seven"):
        comm.spawn(stays, how, world_size=2)


PARENT = """
import os, sys, time
from functional_ds import comm

def ranks(folder):
    open(f"{folder}/pid-{comm.world().rank}.new", "w").write(str(os.getpid()))
    os.rename(f"{folder}/pid-{comm.world().rank}.new", f"{folder}/pid-{comm.world().rank}")
    time.sleep(300)

if __name__ == "__main__":
    comm.spawn(ranks, sys.argv[1], world_size=2)
"""


@pytest.mark.timeout(120)
def test_ranks_end_with_their_parent(tmp_path: Path) -> None:
    """Also where that is killed."""
    script = tmp_path / "parent.py"
    script.write_text(textwrap.dedent(PARENT))
    with subprocess.Popen([sys.executable, str(script), str(tmp_path)], env={**os.environ, "OMP_NUM_THREADS": "1"}) as parent:
        files = [tmp_path / f"pid-{rank}" for rank in range(2)]
        wait_until(lambda: all(file.exists() for file in files))
        parent.kill()
    wait_until(lambda: not any(is_running(int(file.read_text())) for file in files))


def wait_until(is_so: Callable[[], bool]) -> None:
    while not is_so():  # the test's time-out ends this
        time.sleep(0.05)


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False
