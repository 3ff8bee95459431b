"""N local processes that run one program."""

import contextlib
import multiprocessing
import os
import pickle
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # public, but torch's __all__ lacks it

from functional_ds.comm.record.errors import RankFailedError

from .setup import destroy_process_group, init_distributed

__all__ = ["spawn"]

_HOST = "127.0.0.1"


def _carry(error: BaseException, rank: int, world_size: int) -> tuple[BaseException, str]:
    """The error as something that survives the trip to the parent, and this rank's traceback, to be its note there."""
    story = f"raised on rank {rank} of {world_size}:\n{traceback.format_exc().rstrip()}"
    try:
        copy: BaseException = pickle.loads(pickle.dumps(error))
    except Exception:  # whatever its class does while pickling
        copy = RankFailedError(f"{type(error).__name__}: {error}")
    return copy, story


def _become(rank: int, world_size: int, port: int, backend: str | None, threads: int, timeout: timedelta) -> None:
    """Makes this process rank ``rank``, as torchrun would."""
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_WORLD_SIZE=str(world_size))
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # these ranks meet on this host, whatever its name resolves to
    torch.set_num_threads(threads)
    store = TCPStore(_HOST, port, is_master=False, timeout=timeout)
    init_distributed(backend, store=store, timeout=timeout)


def _run(pipe: Connection, program: Callable[..., Any], args: tuple[Any, ...], rank: int, setting: tuple[Any, ...]) -> None:
    world_size = setting[0]
    try:
        _become(rank, *setting)
        message: tuple[str, Any, float] = ("result", program(*args), time.monotonic())
        payload = pickle.dumps(message)
    except BaseException as error:  # KeyboardInterrupt and SystemExit end the others too
        when = time.monotonic()
        payload = pickle.dumps(("error", _carry(error, rank, world_size), when))
    pipe.send_bytes(payload)
    pipe.close()
    with contextlib.suppress(Exception):
        destroy_process_group()


def _hint(code: int | None) -> str:
    """Gloo ends a process in which a message of another size than expected arrives."""
    return "; if ranks called different collectives, comm.checked() says which" if code == -signal.SIGABRT else ""


def _collect(pipes: list[Connection], processes: Sequence[BaseProcess]) -> list[Any]:
    """The ranks' results; raises the first error: what made others fail, not that their connections broke."""
    results: list[Any] = [None] * len(pipes)
    open_pipes = {pipe: rank for rank, pipe in enumerate(pipes)}
    while open_pipes:
        errors: list[tuple[float, BaseException]] = []
        for ready in wait(list(open_pipes)):
            rank = open_pipes.pop(ready)  # type: ignore[call-overload]  # wait returns what it was given
            try:
                kind, value, when = pickle.loads(pipes[rank].recv_bytes())  # monotonic time is the host's, not a process's
            except EOFError:
                processes[rank].join(5)
                code = processes[rank].exitcode
                died = RankFailedError(f"rank {rank} of {len(pipes)} ended without a result (exit code {code}){_hint(code)}")
                errors.append((0.0, died))  # before whatever it caused
                continue
            if kind == "error":
                error, story = value
                error.add_note(story)
                errors.append((when, error))
            else:
                results[rank] = value
        if errors:
            raise min(errors, key=lambda pair: pair[0])[1]
    return results


def spawn(
    program: Callable[..., Any],
    *args: Any,
    world_size: int,
    backend: str | None = None,
    timeout: timedelta = timedelta(minutes=10),
) -> list[Any]:
    """Runs ``program(*args)`` on ``world_size`` local processes and returns their results in rank order.

    The processes meet over loopback, on Gloo (or NCCL where there are GPUs), and share the cores evenly. ``program``, its
    arguments and results must be picklable, so ``program`` stands at the top level of an importable module.

    Law: ``spawn(program, world_size=n) = simulate(program, world_size=n)``, bit for bit.

    Raises:
        Exception: the first error that a rank raised, of its own type where that pickles (else RankFailedError), with the
            rank and its traceback as a note; the other ranks are ended.
        RankFailedError: a process ended without a result.
    """
    if world_size < 1:
        raise ValueError(f"world_size={world_size}: a world has at least one rank")
    context = multiprocessing.get_context("spawn")
    store = TCPStore(_HOST, 0, is_master=True, wait_for_workers=False, timeout=timeout)
    threads = max(1, (os.cpu_count() or 1) // world_size)
    setting = (world_size, store.port, backend, threads, timeout)
    pipes, processes = [], []
    try:
        for rank in range(world_size):
            receiver, sender = context.Pipe(duplex=False)
            process = context.Process(target=_run, args=(sender, program, args, rank, setting), daemon=False)
            process.start()
            sender.close()
            pipes.append(receiver)
            processes.append(process)
        results = _collect(pipes, processes)
        for process in processes:
            process.join()
        return results
    finally:
        for process in processes:
            if process.is_alive():
                process.terminate()
        for process in processes:
            process.join()
