"""Rendezvous: processes meet in a store, which may hold keys of earlier attempts, and connect, within one timeout."""

import hashlib
import os
import socket
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path
from threading import Thread
from time import monotonic, sleep
from typing import TypeVar
from urllib.parse import parse_qsl, urlsplit

import attrs
from torch.distributed import DistNetworkError, FileStore, TCPStore  # type: ignore[attr-defined]  # public, but torch's __all__ lacks them
from torch.distributed.distributed_c10d import PrefixStore, Store

from functional_ds.comm.table.errors import CommError, TimedOutError

_PAUSE = 2e-3  # seconds between two requests to the store
_KNOCKS = 0.1  # seconds between two attempts to reach the process that holds the store
_GRACE = 1.0  # seconds: for a store's error to come first; for ranks that time out together to report it to each other
_HOLDER_MISSING = ("rank 0 had not come", "torchrun's agent does not answer")
_REMAINING, _DONE, _FAILED = "left", "connected {}", "failed {}"

T = TypeVar("T")


@attrs.frozen
class Deadline:
    """The deadline for joining, shared by all its parts.

    Attributes:
        timeout: the whole time.
    """

    timeout: timedelta
    _end: float = attrs.field(init=False)

    @_end.default
    def _of(self) -> float:
        return monotonic() + self.timeout.total_seconds()

    @property
    def remaining(self) -> timedelta:
        """The remaining time, at least a millisecond, since torch takes zero for no limit."""
        return timedelta(seconds=max(self._end - monotonic(), 1e-3))

    @property
    def grace(self) -> float:
        """Seconds until the deadline and a little more, so that calls with that deadline can raise their own errors."""
        return self.remaining.total_seconds() + _GRACE

    @property
    def passed(self) -> bool:
        """Whether the deadline has passed."""
        return monotonic() > self._end


def within(seconds: float, work: Callable[[], T]) -> T:
    """Runs ``work()`` in a thread, with a timeout: torch's stores wait without limit for a process that is stopped.

    Raises:
        TimeoutError: it takes longer than ``seconds``.

    >>> within(5.0, lambda: 3)
    3
    """
    result: Future[T] = Future()

    def run() -> None:
        try:
            result.set_result(work())
        except BaseException as error:  # raised by ``result``
            result.set_exception(error)

    Thread(target=run, daemon=True, name="request to a store").start()
    return result.result(seconds)


def holder(store: Store) -> str:
    """Describes which process holds a store, and its address."""
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    who = "torchrun holds" if _agents_store() else "rank 0 or its parent holds"
    host, port = getattr(store, "host", None), getattr(store, "port", None)
    return who if host is None else f"{who} at {host}:{port}"


@contextmanager
def answering(store: Store, who: str) -> Iterator[None]:
    """Turns torch's errors inside the block, such as a reset connection, into an error that names the store.

    Raises:
        TimedOutError: the process that holds the store has ended.
    """
    try:
        yield
    except CommError:
        raise
    except RuntimeError as error:
        raise ended_store(store, who, error) from error


def ended_store(store: Store, who: str, error: RuntimeError) -> TimedOutError:
    """The error for a store whose process has ended, from torch's error."""
    return TimedOutError(f"{who}, and the store that {holder(store)} has ended: {_first_line(error)}")


def _agents_store() -> bool:
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def open_store(init_method: str, *, rank: int, size: int, deadline: Deadline) -> Store:
    """Opens the store at an address, waiting for it if necessary. Rank 0 creates it, unless torchrun's agent has.

    Raises:
        ValueError: the address lacks a part, or has an unsupported one; a file's folder does not exist.
        TimedOutError: rank 0 has not created it in time.
    """
    url = urlsplit(init_method)
    query = dict(parse_qsl(url.query))
    if query.keys() - {"use_libuv"}:
        raise ValueError(f"init_method={init_method!r}: pass rank and world_size as arguments, not within the address")
    if url.scheme == "file":
        if not url.path or not Path(url.path).parent.is_dir():
            raise ValueError(f"init_method={init_method!r}: name a file in a folder that exists and that all ranks see")
        return FileStore(url.path, size)
    host, port = url.hostname, url.port
    if url.scheme == "env":
        host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    if not host or port is None:
        raise ValueError(f"init_method={init_method!r}: name a host and a port, as in 'tcp://host:29500'")
    makes = rank == 0 and not _agents_store()
    if not makes:
        _reach(host, port, rank=rank, size=size, deadline=deadline)
    libuv = query.get("use_libuv", os.environ.get("USE_LIBUV", "1")) == "1"
    # Without a size the store does not wait for ranks: ``meet`` does, and can name those that are missing.
    make = partial(TCPStore, host, port, is_master=makes, wait_for_workers=False, timeout=deadline.remaining, use_libuv=libuv)
    try:
        return within(deadline.grace, partial(make, multi_tenant=makes))
    except (TimeoutError, DistNetworkError) as error:  # the process that listened may have ended since
        if makes and isinstance(error, DistNetworkError):
            raise
        silent = f"what listens at {host}:{port} does not answer"
        raise TimedOutError(f"{_waited(rank, size, deadline)}; {_HOLDER_MISSING[_agents_store()]}: {silent}") from None


def _reach(host: str, port: int, *, rank: int, size: int, deadline: Deadline) -> None:
    """Waits until a process listens at the address. torch's store would try for up to 2.4 times its timeout."""
    while True:
        try:
            socket.create_connection((host, port), timeout=deadline.remaining.total_seconds()).close()
        except OSError as error:
            if deadline.passed:
                silent = f"no process listens at {host}:{port} ({error})"
                raise TimedOutError(f"{_waited(rank, size, deadline)}; {_HOLDER_MISSING[_agents_store()]}: {silent}") from error
            sleep(min(_KNOCKS, deadline.remaining.total_seconds()))
        else:
            return


def _waited(rank: int, size: int, deadline: Deadline) -> str:
    return f"rank {rank} of {size} waited {deadline.timeout} for the others to join"


def meet(store: Store, *, rank: int, size: int, deadline: Deadline) -> Store:
    """Waits for all processes; returns a prefix of the store that only they use.

    A launcher that restarts ranks may keep the store, and keys of earlier attempts must not be confused with this attempt's.
    Each process writes a random token, rank 0 proposes the list of tokens, the processes whose tokens it contains accept it,
    and rank 0 confirms the list that all have accepted. It also writes the least time that any of them has left.

    Args:
        store: the shared store.
        rank: this process's rank.
        size: the number of processes.
        deadline: for the other processes to join.

    Cost: a few requests to the store, and one every 2 ms while ranks are missing.

    Raises:
        TimedOutError: some ranks have not joined; names them. The process that holds the store has ended, or does not answer.

    >>> from torch.distributed import HashStore
    >>> type(meet(HashStore(), rank=0, size=1, deadline=Deadline(timedelta(seconds=1)))).__name__
    'PrefixStore'
    """
    try:
        with answering(store, f"rank {rank} of {size} waits for the others to join"):
            return within(deadline.grace, lambda: _meet(store, rank, size, deadline))
    except TimeoutError:
        raise TimedOutError(f"{_waited(rank, size, deadline)}; the store that {holder(store)} does not answer") from None


def _meet(store: Store, rank: int, size: int, deadline: Deadline) -> Store:
    store, token = PrefixStore("functional_ds/meeting", store), uuid.uuid4().hex
    store.set(f"here {rank}", token)
    while (name := _proposed(store, size, deadline) if rank == 0 else _agreed(store, token, rank, deadline)) is None:
        if deadline.passed:
            missing = [other for other in range(size) if not store.check([f"here {other}"])]
            raise TimedOutError(
                f"{_waited(rank, size, deadline)}; "
                + (f"rank {', '.join(map(str, missing))} had not come" if missing else "those that came are of another attempt")
            )
        sleep(_PAUSE)
    return PrefixStore(name, store)


def _proposed(store: Store, size: int, deadline: Deadline) -> str | None:
    """One round of rank 0: the name of the prefix, once all ranks have accepted."""
    keys = [f"here {rank}" for rank in range(size)]
    if not store.check(keys):
        return None
    tokens = ",".join(store.get(key).decode() for key in keys)
    store.set("proposal", tokens)
    name = _name(tokens)
    accepted = [f"yes {name} {rank}" for rank in range(1, size)]
    if accepted and not store.check(accepted):
        return None
    remaining = min([deadline.remaining.total_seconds(), *(float(store.get(key)) for key in accepted)])
    PrefixStore(name, store).set(_REMAINING, str(remaining))
    store.set(f"go {name}", "")
    return name


def _agreed(store: Store, token: str, rank: int, deadline: Deadline) -> str | None:
    """One round of the other ranks."""
    if not store.check(["proposal"]):
        return None
    tokens = store.get("proposal").decode()
    if tokens.split(",")[rank : rank + 1] != [token]:
        return None
    name = _name(tokens)
    store.set(f"yes {name} {rank}", str(deadline.remaining.total_seconds()))
    return name if store.check([f"go {name}"]) else None


def _name(tokens: str) -> str:
    return hashlib.sha256(tokens.encode()).hexdigest()[:16]


def connect(store: Store, *, rank: int, size: int, timeout: timedelta, make: Callable[[], None]) -> None:
    """Calls ``make()``, in which all ranks that have met connect to each other.

    All ranks time out together, so those that are alive can report to each other which are not.

    Args:
        store: as ``meet`` returns it.
        rank: this process's rank.
        size: the number of processes.
        timeout: the whole time for joining, for error messages.
        make: connects; runs in a thread, so it may block for longer.

    Raises:
        TimedOutError: a rank ended before all were connected; names it. The process that holds the store has ended.
    """
    who = f"rank {rank} of {size} connects to the others"
    with answering(store, who):
        remaining = float(store.get(_REMAINING))
    try:
        within(remaining, make)
    except (RuntimeError, TimeoutError) as error:
        early = "" if isinstance(error, TimeoutError) else _first_line(error)
        try:
            others = within(3 * _GRACE, lambda: _others(store, rank, size, early))
        except (RuntimeError, TimeoutError):
            early, others = "", f"the store that {holder(store)} has ended"
        if early:
            raise
        raise TimedOutError(f"rank {rank} of {size} did not connect to the others within {timeout}; {others}") from error
    with answering(store, who):
        store.set(_DONE.format(rank), "")


def _others(store: Store, rank: int, size: int, early: str) -> str:
    """Tells the other ranks that this one has failed; returns what happened to them, once they have timed out too."""
    store = _clone(store)  # a wait of the thread that connects may have the connection
    store.set(_FAILED.format(rank), early)
    others, end = [other for other in range(size) if other != rank], monotonic() + _GRACE
    while silent := [r for r in others if not store.check([_DONE.format(r)]) and not store.check([_FAILED.format(r)])]:
        if early or monotonic() > end:
            return f"rank {', '.join(map(str, silent))} had come, and has ended or hangs"
        sleep(_KNOCKS)
    said = [(r, store.get(_FAILED.format(r)).decode()) for r in others if store.check([_FAILED.format(r)])]
    return "; ".join(f"rank {r} failed: {why}" for r, why in said if why) or "all have come, and cannot reach each other"


def reconnect(store: Store, timeout: float) -> Store:
    """The same store over another connection, which is not delayed by a request that blocks on the first one.

    Raises:
        TimedOutError: the process that holds the store has ended, or does not answer within ``timeout`` seconds.
    """

    def clone() -> Store:
        store.check(["functional_ds"])  # raises at once if the process has ended, where ``clone`` would try for minutes
        return _clone(store)

    try:
        return within(timeout, clone)
    except (RuntimeError, TimeoutError) as error:
        raise TimedOutError(f"the store that {holder(store)} does not answer: {_first_line(error)}") from error


def _clone(store: Store) -> Store:
    clone: Store = store.clone()  # type: ignore[attr-defined]  # torch's stubs lack it
    return clone


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
