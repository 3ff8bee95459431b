"""How processes that join a world find those of the same attempt in a store that outlives attempts."""

import hashlib
import uuid
from datetime import timedelta
from time import monotonic, sleep

from torch.distributed.distributed_c10d import PrefixStore, Store

from functional_ds.comm.record.errors import TimedOutError

__all__ = ["meet"]

_PAUSE = 2e-3  # seconds between two looks


def meet(store: Store, *, rank: int, size: int, timeout: timedelta) -> Store:
    """A part of the store that these processes alone use, once all have come.

    A launcher that starts dead ranks again may keep the store, and what ranks of an earlier attempt left there must not be
    taken for this one's. Each process leaves a token of its own. Rank 0 proposes the tokens that it finds; who sees its own
    among them agrees, which the dead do not; rank 0 goes ahead when all have agreed to one proposal.

    Cost: a few requests to the store, and one every 2 ms while ranks are missing.

    Raises:
        TimedOutError: some ranks have not come; which.

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
    """What rank 0 does in a turn: the name under which all meet, once all have agreed."""
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
    """What every other rank does in a turn."""
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
