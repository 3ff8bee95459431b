"""Runs a program on n local processes."""

import contextlib
import ctypes
import functools
import multiprocessing
import os
import pickle
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, TypeVar, TypeVarTuple

import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # public, but torch's __all__ lacks it

from functional_ds.comm.record.group import check_ranks_per_node
from functional_ds.comm.table.errors import RankFailedError, of_rank
from functional_ds.comm.worlds.process import check_timeout

from .setup import destroy_process_group, init_distributed

_HOST = "127.0.0.1"
_GRACE = 0.5  # seconds to wait for the cause of an error, which another rank may report later than the error
_PR_SET_PDEATHSIG = 1  # <sys/prctl.h>
_GUARD = 'A script must call spawn under `if __name__ == "__main__":`'
_TERMINATION = 5.0  # seconds that ranks have to end after SIGTERM; then they are killed

T = TypeVar("T")
Ts = TypeVarTuple("Ts")


def _check_importable(program: Callable[..., Any]) -> None:
    """Raises ValueError if a new process cannot import the program; the process itself would not report the cause."""
    function: Any = program
    while isinstance(function, functools.partial):
        function = function.func
    if not hasattr(function, "__qualname__"):  # an object with __call__ is pickled as its class and state
        function = type(function)
    function = getattr(function, "__func__", function)
    module, name = function.__module__, function.__qualname__
    if module is None:  # some builtins; pickle searches for their module
        return
    advice = "define it at the top level of a module that can be imported, or of a script file"
    if module == "__main__":
        main = sys.modules[module]
        if main.__spec__ is None and not Path(getattr(main, "__file__", None) or "<none>").is_file():
            raise ValueError(
                f"spawn: {name} is defined in a notebook, on stdin or with python -c, and the new processes cannot import it "
                f"from there; {advice}. comm.simulate runs it as it is"
            )
    resolved: Any = sys.modules.get(module)
    for part in name.split("."):
        resolved = getattr(resolved, part, None)
    if getattr(resolved, "__func__", resolved) is not function:
        raise ValueError(
            f"spawn: the new processes cannot import {module}.{name}, since it is a lambda, or defined inside a function, or "
            f"replaced under its name; {advice}, and pass values as arguments. comm.simulate runs it as it is"
        )


def _check_guard() -> None:
    """Raises RuntimeError in a new process that is importing the script that called ``spawn``."""
    if getattr(multiprocessing.current_process(), "_inheriting", False):  # multiprocessing sets it during the import
        raise RuntimeError(f"spawn: a new process imports this script, and calls spawn again. {_GUARD}")


def _carry(error: BaseException, rank: int, world_size: int) -> tuple[BaseException, str]:
    """The error in a form that can be pickled, and a note with this rank's traceback."""
    story = f"raised on rank {rank} of {world_size}:\n{traceback.format_exc().rstrip()}"
    error = of_rank(error, rank, world_size)
    try:
        copy: BaseException = pickle.loads(pickle.dumps(error))
    except Exception:  # raised by the error's own pickling
        copy = RankFailedError(f"{type(error).__name__}: {error}")
    return copy, story


def _become(
    rank: int, world_size: int, port: int, backend: str | None, threads: int, timeout: timedelta, ranks_per_node: int
) -> None:
    """Makes this process rank ``rank``, as torchrun would."""
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_WORLD_SIZE=str(world_size))
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # loopback, whatever the host's name resolves to
    torch.set_num_threads(threads)
    store = TCPStore(_HOST, port, is_master=False, timeout=timeout)
    init_distributed(backend, store=store, timeout=timeout, ranks_per_node=ranks_per_node)


def _end_with_the_parent(rank: int) -> None:
    """Ends this process when the process that called ``spawn`` has ended, in any way.

    On Linux this includes stopped processes, which the kernel continues when their parent ends. ``parent.join`` reads a pipe
    that only the calling process holds open, so it also works with a fork server, which is the children's kernel parent.
    """
    parent = multiprocessing.parent_process()
    if parent is None:
        return
    parent.join()
    if sys.stderr is not None:
        sys.stderr.write(f"rank {rank} ends: the process that called spawn has ended\n")
        sys.stderr.flush()
    os._exit(1)


def _run(pipe: Connection, program: Callable[..., Any], args: tuple[Any, ...], rank: int, setting: tuple[Any, ...]) -> None:
    world_size = setting[0]
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGCONT)
    watch = threading.Thread(target=_end_with_the_parent, args=(rank,), daemon=True, name="watch of the parent")
    watch.start()
    try:
        _become(rank, *setting)
        message: tuple[str, Any, float] = ("result", program(*args), time.monotonic())
        payload = pickle.dumps(message)
    except BaseException as error:  # KeyboardInterrupt and SystemExit, too
        when = time.monotonic()
        payload = pickle.dumps(("error", _carry(error, rank, world_size), when))
    try:
        pipe.send_bytes(payload)
    except BrokenPipeError:  # the process that called spawn has ended, or ends this one
        watch.join()
        raise
    pipe.close()
    with contextlib.suppress(Exception):
        destroy_process_group()


def _hint(code: int | None) -> str:
    """A hint for an exit code: Gloo aborts when a message has an unexpected size; Python exits with 1 if an import fails."""
    hints = {-signal.SIGABRT: "if ranks called different collectives, comm.debug.checked() says which"}
    hints[1] = f"its traceback is above. {_GUARD}"
    return f"; {hints[code]}" if code in hints else ""


def _collect(pipes: list[Connection], processes: Sequence[BaseProcess]) -> list[Any]:
    """The ranks' results. Raises the earliest error, since later ones may be broken connections that it caused."""
    results: list[Any] = [None] * len(pipes)
    open_pipes = {pipe: rank for rank, pipe in enumerate(pipes)}
    errors: list[tuple[float, BaseException]] = []
    while open_pipes:
        # A lost connection is the consequence of another rank's error, which may be reported a little later.
        ready = wait(list(open_pipes), _GRACE if errors else None)
        for pipe in ready:
            rank = open_pipes.pop(pipe)  # type: ignore[call-overload]  # wait returns its arguments
            try:
                outcome, value, when = pickle.loads(pipes[rank].recv_bytes())  # monotonic time is one for all processes
            except EOFError:
                processes[rank].join(5)
                code = processes[rank].exitcode
                died = RankFailedError(f"rank {rank} of {len(pipes)} ended without a result (exit code {code}){_hint(code)}")
                errors.append((0.0, died))  # earlier than any error that it caused
                continue
            if outcome == "error":
                error, story = value
                error.add_note(story)
                errors.append((when, error))
            else:
                results[rank] = value
        if errors and not (ready and all(isinstance(error, RuntimeError) for _, error in errors)):
            break
    if errors:
        raise min(errors, key=lambda pair: pair[0])[1]
    return results


def _join(processes: Sequence[BaseProcess], seconds: float) -> list[int]:
    """Waits for processes to end; returns the ranks of those that have not."""
    deadline = time.monotonic() + seconds
    for process in processes:
        process.join(max(0.0, deadline - time.monotonic()))
    return [rank for rank, process in enumerate(processes) if process.is_alive()]


def _end(processes: Sequence[BaseProcess]) -> None:
    """Ends processes with SIGTERM, and with SIGKILL those that do not end in time."""
    for process in processes:
        if process.is_alive():
            process.terminate()
    for rank in _join(processes, _TERMINATION):
        processes[rank].kill()
    for process in processes:
        process.join()


def spawn(
    program: Callable[[*Ts], T],
    *args: *Ts,
    world_size: int,
    backend: str | None = None,
    timeout: timedelta = timedelta(minutes=10),
    ranks_per_node: int = 1,
) -> list[T]:
    """Runs ``program(*args)`` on ``world_size`` local processes and returns their results in rank order.

    The processes connect over loopback and share the CPU's cores evenly. They import ``program`` by name, so it must be at the
    top level of a module or script file; its arguments and results must be picklable. A script must call ``spawn`` under
    ``if __name__ == "__main__":``. When the calling process ends, even by SIGKILL, so do the ranks.

    Law: ``spawn(program, world_size=n) = simulate(program, world_size=n)``, bitwise.

    Args:
        program: what each rank runs.
        args: its arguments.
        world_size: the number of processes.
        backend: as for ``init_distributed``; None chooses Gloo, and also NCCL if there are GPUs.
        timeout: for joining, for each message, and for the processes to exit after they have returned.
        ranks_per_node: how many consecutive ranks count as one node, as for ``init_distributed``.

    Raises:
        ValueError: other processes cannot import ``program``, since it is a lambda, a closure, or from a notebook or stdin.
        TypeError: an argument cannot be pickled.
        Exception: the first error that a rank raised, with the rank and its traceback as a note; RankFailedError if it cannot
            be pickled. The other ranks are ended with SIGTERM and, after 5 s, SIGKILL.
        RuntimeError: in a new process: the script calls ``spawn`` when it is imported.
        RankFailedError: a process ended without a result, or returned and did not exit within ``timeout``.
    """
    check_timeout(timeout)
    if type(world_size) is not int or world_size < 1:
        raise ValueError(f"world_size={world_size!r}: a world has at least one rank")
    check_ranks_per_node(ranks_per_node, world_size)
    _check_guard()
    _check_importable(program)
    context = multiprocessing.get_context("spawn")
    store = TCPStore(_HOST, 0, is_master=True, wait_for_workers=False, timeout=timeout)
    threads = max(1, (os.cpu_count() or 1) // world_size)
    setting = (world_size, store.port, backend, threads, timeout, ranks_per_node)
    pipes, processes = [], []
    try:
        for rank in range(world_size):
            receiver, sender = context.Pipe(duplex=False)
            process = context.Process(target=_run, args=(sender, program, args, rank, setting), daemon=False)
            try:
                process.start()
            except (AttributeError, TypeError, pickle.PicklingError) as error:
                raise TypeError(
                    f"spawn: an argument cannot be sent to a new process: {error}; make it in the program"
                ) from error
            sender.close()
            pipes.append(receiver)
            processes.append(process)
        results = _collect(pipes, processes)
        late = _join(processes, timeout.total_seconds())
        if late:
            raise RankFailedError(f"rank {', '.join(map(str, late))} returned, and did not end within {timeout}")
        return results
    finally:
        _end(processes)
