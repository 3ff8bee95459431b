"""Programs that other processes cannot import are refused before any process is started; how ranks end."""

import contextlib
import functools
import importlib
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
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch

from functional_ds import comm
from tests.planting import Bug, planted


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


def test_an_argument_that_cannot_be_pickled_is_named() -> None:
    with pytest.raises(TypeError, match=r"spawn: an argument cannot be sent to a new process: .*lock.*make it in the program"):
        comm.spawn(adds, threading.Lock(), 2, world_size=1)


@pytest.mark.parametrize(("timeout", "error"), [(5, TypeError), (None, TypeError), (timedelta(0), ValueError)])
def test_a_timeout_is_a_length_of_time(timeout: Any, error: type[Exception]) -> None:
    """Refused at once, by name; by ``init_distributed``, too."""
    for join in (lambda: comm.spawn(adds, 1, 2, world_size=1, timeout=timeout), lambda: comm.init_distributed(timeout=timeout)):
        with pytest.raises(error, match="timeout="):
            join()


# -- how ranks end ----------------------------------------------------------------------------------------------------

MODULE = importlib.import_module("functional_ds.comm.spawn")
LONG = 300.0  # seconds: longer than a test may take


def lingers(how: str, folder: str) -> None:
    """Rank 1 cannot be ended by SIGTERM, and rank 0 raises; with "returns", rank 1 returns and its process stays."""
    there = Path(folder, "there")
    if comm.world().rank == 0:
        while not there.exists():
            time.sleep(0.01)
        if how != "returns":
            raise ValueError("rank 0's own")
        return
    if how == "ignores":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    there.touch()
    if how == "stops":
        os.kill(os.getpid(), signal.SIGSTOP)
    if how == "returns":
        threading.Thread(target=time.sleep, args=(LONG,)).start()
        return
    time.sleep(LONG)


@pytest.mark.parametrize("how", ["ignores", "stops"])
def test_a_rank_that_sigterm_does_not_end_is_killed(how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error is the cause's."""
    monkeypatch.setattr(MODULE, "_TERMINATION", 0.5)
    with pytest.raises(ValueError, match="rank 0's own"):
        comm.spawn(lingers, how, str(tmp_path), world_size=2)


def test_a_rank_that_returns_and_does_not_end(tmp_path: Path) -> None:
    with pytest.raises(comm.errors.RankFailedError, match=r"rank 1 returned, and did not end within 0:00:10"):
        comm.spawn(lingers, "returns", str(tmp_path), world_size=2, timeout=timedelta(seconds=10))


@attrs.frozen
class Deadly:
    """The first process that unpickles it is killed by that, before it joins."""

    folder: str

    def __reduce__(self) -> Any:
        return _first_dies, (self.folder,)


def exits(code: int | None) -> None:
    if comm.get_rank() == 1:
        sys.exit(code)


def test_a_rank_that_exits_as_if_all_were_well_is_an_error() -> None:
    """Else the program that called spawn would end with status 0; another code is its status, as in a program of one rank."""
    with pytest.raises(comm.errors.RankFailedError, match=r"rank 1 of 2 called exit\(0\) before it returned"):
        comm.spawn(exits, 0, world_size=2)
    with pytest.raises(SystemExit, match="3"):
        comm.spawn(exits, 3, world_size=2)


def _first_dies(folder: str) -> Deadly:
    with contextlib.suppress(FileExistsError):
        Path(folder, "first").touch(exist_ok=False)
        os.kill(os.getpid(), signal.SIGKILL)
    return Deadly(folder)


def test_a_rank_that_dies_before_it_joins_ends_all(tmp_path: Path) -> None:
    """At once: the other one would wait for it for ten minutes."""
    with pytest.raises(comm.errors.RankFailedError, match=r"rank [01] of 2 ended without a result \(exit code -9\)"):
        comm.spawn(adds, 1, Deadly(str(tmp_path)), world_size=2)  # type: ignore[arg-type]


def connected(port: int, stops: bool) -> None:
    """Tells the test that this rank lives, as long as it does. The last one stops, and a child tells it once that is so."""
    line = socket.create_connection(("127.0.0.1", port))
    if not stops or comm.world().rank == 0:
        line.sendall(b"!")
    elif os.fork() == 0:
        os.kill(os.getppid(), signal.SIGSTOP)
        line.sendall(b"!")
        os._exit(0)
    while True:
        comm.all_reduce(torch.ones(3))
        time.sleep(0.05)


SPAWNS = """
import multiprocessing, sys
from functional_ds import comm
from tests.comm.test_spawn import connected

if __name__ == "__main__":
    context = multiprocessing.get_context(sys.argv[1])
    multiprocessing.get_context = lambda method=None: context
    comm.spawn(connected, int(sys.argv[2]), sys.argv[3] == "True", world_size=2)
"""


STOPPED = pytest.param("spawn", True, marks=pytest.mark.skipif(sys.platform != "linux", reason="Linux continues it"))


@pytest.mark.parametrize(("method", "stops"), [("spawn", False), ("forkserver", False), STOPPED])
def test_ranks_end_with_the_process_that_called_spawn(method: str, stops: bool, tmp_path: Path) -> None:
    """Also if that is killed, though a server is the parent of those that it forks, and a rank that is stopped."""
    script = tmp_path / "spawns.py"
    script.write_text(SPAWNS)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[2])}
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(120)
        words = [sys.executable, str(script), method, str(server.getsockname()[1]), str(stops)]
        with subprocess.Popen(words, env=environment, stderr=subprocess.PIPE, text=True) as process:
            try:
                lines = [server.accept()[0] for _ in range(2)]
                assert [line.recv(1) for line in lines] == [b"!", b"!"]
            finally:
                process.kill()
            for line in lines:
                line.settimeout(60)
                with contextlib.suppress(ConnectionResetError):
                    assert line.recv(1) == b"", "the rank lives"
                line.close()
            assert process.stderr is not None
            assert process.stderr.read().count("ends: the process that called spawn has ended") == 2


class Unread:
    """A pipe without a reader."""

    def __init__(self) -> None:
        self.written = threading.Event()

    def send_bytes(self, payload: bytes) -> None:
        """Raises what a pipe does whose reader has ended."""
        self.written.set()
        raise BrokenPipeError


def check_the_watch_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank whose caller has ended is ended by its watch, which says why, and not by a traceback of its pipe."""
    pipe, ended = Unread(), []

    def watch(rank: int) -> None:
        pipe.written.wait()
        time.sleep(0.1)
        ended.append(rank)

    monkeypatch.setattr(MODULE, "_end_with_the_parent", watch)
    with pytest.raises(BrokenPipeError):
        MODULE._run(pipe, adds, (1, 2), 0, (1,))
    assert ended == [0]


def test_a_rank_that_cannot_report_waits_for_its_watch(monkeypatch: pytest.MonkeyPatch) -> None:
    check_the_watch_comes_first(monkeypatch)
    with planted(Bug("the rank does not wait", "comm.spawn:_run", "watch.join()", "pass")), pytest.raises(AssertionError):
        check_the_watch_comes_first(monkeypatch)


def test_a_script_without_a_guard_is_told(tmp_path: Path) -> None:
    """The new process says that it would spawn again, and the caller's error what to write."""
    script = tmp_path / "unguarded.py"
    script.write_text("from functional_ds import comm\ndef program(): return 1\nprint(comm.spawn(program, world_size=1))\n")
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    words = [sys.executable, str(script)]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 1
    assert "RuntimeError: spawn: a new process imports this script, and calls spawn again" in done.stderr
    told = done.stderr.strip().splitlines()[-1]
    assert told.startswith("functional_ds.comm.table.errors.RankFailedError: rank 0 of 1 ended without a result (exit code 1)")
    assert told.endswith('A script must call spawn under `if __name__ == "__main__":`')
