"""Processes that join find those of their own attempt, whatever an earlier attempt left in the store."""

import threading
from datetime import timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch._C._distributed_c10d import HashStore, PrefixStore, Store

from functional_ds.comm.table.errors import TimedOutError
from functional_ds.comm.worlds.rendezvous import Deadline, meet

SOON, LATER = timedelta(seconds=0.05), timedelta(seconds=20)


def attempt(store: Store, ranks: list[int], size: int, timeout: timedelta) -> dict[int, Store | TimedOutError]:
    """What each of these ranks of a world comes to; the others do not come."""
    found: dict[int, Store | TimedOutError] = {}

    def join(rank: int) -> None:
        try:
            found[rank] = meet(store, rank=rank, size=size, deadline=Deadline(timeout))
        except TimedOutError as error:
            found[rank] = error

    threads = [threading.Thread(target=join, args=(rank,)) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


@given(st.data(), st.integers(1, 4))
def test_an_attempt_meets_itself(data: st.DataObject, size: int) -> None:
    """After attempts in which some ranks did not come, all ranks share a part of the store, in which nobody wrote before."""
    store = HashStore()
    for _ in range(data.draw(st.integers(0, 2))):
        came = data.draw(st.lists(st.integers(0, size - 1), unique=True, max_size=size))
        rooms = attempt(store, came, size, LATER if len(came) == size else SOON)
        met_each_other = [room for room in rooms.values() if isinstance(room, PrefixStore)]
        assert len(met_each_other) == (size if len(came) == size else 0)
        assert not any(room.check(["left over"]) for room in met_each_other)
        for room in met_each_other:
            room.set("left over", "")
    rooms = attempt(store, list(range(size)), size, LATER)
    for rank, room in rooms.items():
        assert isinstance(room, PrefixStore), room
        room.set(f"rank {rank}", "")
    for room in rooms.values():
        assert room.check([f"rank {rank}" for rank in range(size)])
        assert not room.check(["left over"])


def test_who_does_not_come_is_named() -> None:
    found = attempt(HashStore(), [0, 2], 3, timedelta(seconds=2))  # in which rank 0 comes on a busy machine, too
    with pytest.raises(TimedOutError, match=r"rank 2 of 3 waited .* rank 1 had not come"):
        raise found[2]
