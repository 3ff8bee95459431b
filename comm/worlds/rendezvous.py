"""A rendezvous of the processes of one attempt, in a store that may hold the keys of earlier attempts."""

import hashlib
import uuid
from datetime import timedelta
from time import monotonic, sleep

from torch.distributed.distributed_c10d import PrefixStore, Store

from functional_ds.comm.record.errors import TimedOutError

__all__ = ["meet"]

_PAUSE = 2e-3  # seconds between two requests to the store


def meet(store: Store, *, rank: int, size: int, timeout: timedelta) -> Store:
    """Waits for all processes; returns a part of the store that they alone use.

    A launcher that restarts dead ranks may keep the store, and keys of an earlier attempt must not be mistaken for this
    attempt's. Each process writes a random token. Rank 0 proposes the list of tokens that it finds. A process whose token is in
    the list accepts it; dead processes cannot. Rank 0 confirms the list that all have accepted.

    Args:
        store: the shared store.
        rank: this process's rank.
        size: the number of processes.
        timeout: for the other processes to join.

    Cost: a few requests to the store, and one every 2 ms while ranks are missing.

    Raises:
        TimedOutError: some ranks have not joined; names them.

    >>> from torch.distributed import HashStore
    >>> type(meet(HashStore(), rank=0, size=1, timeout=timedelta(seconds=1))).__name__
    'PrefixStore'
    """
    store, token = PrefixStore("functional_ds/meeting", store), uuid.uuid4().hex
    store.set(f"here {rank}", token)
    deadline = monotonic() + timeout.total_seconds()
    while (name := _proposed(store, size) if rank == 0 else _agreed(store, token, rank)) is None:
        if monotonic() > deadline:
            missing = [other for other in range(size) if not store.check([f"here {other}"])]
            raise TimedOutError(
                f"rank {rank} of {size} waited {timeout} for the others to join; "
                + (f"rank {', '.join(map(str, missing))} had not come" if missing else "those that came are of another attempt")
            )
        sleep(_PAUSE)
    return PrefixStore(name, store)


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
