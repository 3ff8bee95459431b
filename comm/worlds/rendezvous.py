"""A rendezvous of the processes of one attempt, in a store that may hold the keys of earlier attempts."""

import hashlib
import os
import socket
import uuid
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from time import monotonic, sleep
from urllib.parse import unquote, urlparse

import attrs
from torch.distributed import FileStore, TCPStore  # type: ignore[attr-defined]  # public, but torch's __all__ lacks them
from torch.distributed.distributed_c10d import PrefixStore, Store

from functional_ds.comm.record.errors import TimedOutError

__all__ = ["Joining", "connect", "meet", "open_store"]

_PAUSE = 2e-3  # seconds between two requests to the store
_KNOCK = 5e-2  # seconds between two attempts to connect
_LOOK = 0.25  # seconds between two looks at who has come
_ECHO = 1.0  # seconds after the deadline in which other ranks say that they have waited, too


@attrs.frozen
class Joining:
    """A rank that joins a world, and the one deadline for all that it waits for meanwhile.

    Attributes:
        rank: this process's.
        size: the number of processes.
        timeout: from the beginning to the deadline.
        deadline: by ``time.monotonic``.
    """

    rank: int
    size: int
    timeout: timedelta
    deadline: float = attrs.field(init=False)

    @deadline.default
    def _from_now(self) -> float:
        return monotonic() + self.timeout.total_seconds()

    @property
    def remaining(self) -> timedelta:
        """The time that is left; never zero, which torch takes for no limit."""
        return timedelta(seconds=max(self.deadline - monotonic(), 0.1))

    def error(self, words: str) -> TimedOutError:
        """What a rank raises that could not join."""
        return TimedOutError(f"rank {self.rank} of {self.size} waited {self.timeout} for the others to join; {words}")


def open_store(init_method: str, joining: Joining) -> Store:
    """The store at an address; waits for the process that holds it, and for no other.

    Args:
        init_method: "tcp://host:port", "file:///path", or "env://" for MASTER_ADDR and MASTER_PORT.
        joining: this rank.

    Raises:
        ValueError: the file's folder does not exist, or there is no port.
        TimedOutError: the process that holds the store has not come.
    """
    parts = urlparse(init_method)
    if parts.scheme == "file":
        path = Path(unquote(parts.netloc + parts.path))
        if not path.parent.is_dir():
            raise ValueError(f"init_method={init_method!r}: there is no folder {path.parent}")
        return FileStore(str(path), joining.size)
    host, port = parts.hostname, parts.port
    if parts.scheme == "env":
        host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    if host is None or port is None:
        raise ValueError(f"init_method={init_method!r} should have a host and a port, as 'tcp://host:port'")
    agents = parts.scheme == "env" and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"  # torchrun holds the store
    master = joining.rank == 0 and not agents
    if master:
        return TCPStore(host, port, is_master=True, timeout=joining.timeout, wait_for_workers=False, multi_tenant=True)
    try:
        _wait_for_listener(host, port, joining)
        # torch may try twice, each time for as long as it is given
        return TCPStore(host, port, timeout=joining.remaining / 2, wait_for_workers=False, multi_tenant=not agents)
    except (OSError, RuntimeError) as error:
        holder = "torchrun's agent" if agents else "rank 0"
        raise joining.error(f"{holder}, which holds the store at {host}:{port}, had not come") from error


def _wait_for_listener(host: str, port: int, joining: Joining) -> None:
    """Tries to connect until the deadline; then the last attempt's OSError."""
    while True:
        try:
            socket.create_connection((host, port), timeout=joining.remaining.total_seconds()).close()
        except OSError:
            if monotonic() > joining.deadline:
                raise
            sleep(_KNOCK)
        else:
            return


def meet(store: Store, joining: Joining) -> Store:
    """Waits for all processes; returns a part of the store that they alone use.

    A launcher that restarts dead ranks may keep the store, and keys of an earlier attempt must not be mistaken for this
    attempt's. Each process writes a random token. Rank 0 proposes the list of tokens that it finds. A process whose token is in
    the list accepts it; dead processes cannot. Rank 0 confirms the list that all have accepted.

    Args:
        store: the shared store.
        joining: this rank.

    Cost: a few requests to the store, and one every 2 ms while ranks are missing.

    Raises:
        TimedOutError: some ranks have not joined; names them.

    >>> from torch.distributed import HashStore
    >>> type(meet(HashStore(), Joining(rank=0, size=1, timeout=timedelta(seconds=1)))).__name__
    'PrefixStore'
    """
    store, token = PrefixStore("functional_ds/meeting", store), uuid.uuid4().hex
    rank, size = joining.rank, joining.size
    known, look = "", monotonic() + _LOOK
    try:
        store.set(f"here {rank}", token)
        while (name := _proposed(store, size) if rank == 0 else _agreed(store, token, rank)) is None:
            if (now := monotonic()) > min(look, joining.deadline):
                known, look = _missing(store, size), now + _LOOK
                if now > joining.deadline:
                    raise joining.error(known)
            sleep(_PAUSE)
    except TimedOutError:
        raise
    except RuntimeError as error:  # torch's, of a connection
        raise _gone(joining, known) from error
    return PrefixStore(name, store)


def connect(store: Store, joining: Joining, begin: Callable[[timedelta], None]) -> None:
    """Connects ranks that have met.

    Args:
        store: what ``meet`` gave.
        joining: this rank.
        begin: connects this rank to all others, within a time.

    Raises:
        TimedOutError: a rank has ended meanwhile; names those that have not connected.
    """
    status = PrefixStore("functional_ds/connecting", store)
    try:
        begin(joining.remaining)
    except RuntimeError as error:
        until = joining.deadline + _ECHO * (1 if joining.rank else 2)  # rank 0 may hold the store: the others end first
        known, missing = "", list[int]()
        try:
            status.set(f"{joining.rank}", "waits")
            while (missing := _without(status, "", joining.size)) and monotonic() < until:
                known = f"rank {_listed(missing)} had not connected"
                sleep(_KNOCK)
        except RuntimeError as lost:
            raise _gone(joining, known) from lost
        raise joining.error(known if missing else str(error)) from error
    status.set(f"{joining.rank}", "connected")


def _gone(joining: Joining, known: str) -> TimedOutError:
    before = f"; before that, {known}" if known else ""
    return joining.error(f"the process that holds the store has ended: rank 0, or torchrun's agent{before}")


def _without(store: Store, prefix: str, size: int) -> list[int]:
    return [rank for rank in range(size) if not store.check([f"{prefix}{rank}"])]


def _listed(ranks: list[int]) -> str:
    return ", ".join(map(str, ranks))


def _missing(store: Store, size: int) -> str:
    """Why ranks have not met."""
    if missing := _without(store, "here ", size):
        return f"rank {_listed(missing)} had not come"
    if not store.check(["proposal"]):
        return "rank 0 had not proposed who takes part"
    name = _name(store.get("proposal").decode())
    late = [rank for rank in _without(store, f"yes {name} ", size) if rank]
    return f"rank {_listed(late)} had come and did not answer, or was of another attempt" if late else "rank 0 did not answer"


def _proposed(store: Store, size: int) -> str | None:
    """One step of rank 0: the name of the part, once all ranks have accepted."""
    keys = [f"here {rank}" for rank in range(size)]
    if not store.check(keys):
        return None
    tokens = ",".join(store.get(key).decode() for key in keys)
    store.set("proposal", tokens)
    name = _name(tokens)
    if size > 1 and not store.check([f"yes {name} {rank}" for rank in range(1, size)]):
        return None
    store.set(f"go {name}", "")
    return name


def _agreed(store: Store, token: str, rank: int) -> str | None:
    """One step of every other rank."""
    if not store.check(["proposal"]):
        return None
    tokens = store.get("proposal").decode()
    if tokens.split(",")[rank : rank + 1] != [token]:
        return None
    name = _name(tokens)
    store.set(f"yes {name} {rank}", "")
    return name if store.check([f"go {name}"]) else None


def _name(tokens: str) -> str:
    return hashlib.sha256(tokens.encode()).hexdigest()[:16]
