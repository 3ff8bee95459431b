"""``clock_offsets``: how far the clocks of a group's ranks are from the clock of its first."""

import socket
from collections.abc import Callable
from pathlib import Path
from time import perf_counter

import attrs
import torch

from functional_ds.comm.dispatch import resolve_group
from functional_ds.comm.objects import all_gather_object, broadcast_object
from functional_ds.comm.p2p import recv, send
from functional_ds.comm.record.group import Group

__all__ = ["Offsets", "clock_offsets"]

_ROUNDS = 16


@attrs.frozen
class Offsets:
    """What brings times of several ranks onto one clock.

    Attributes:
        seconds: for each rank of the group, what to add to its clock to have the first rank's.
        error: the most by which one of them can be wrong, where clocks run at one speed; 0 where ranks share a clock.
    """

    seconds: tuple[float, ...]
    error: float = 0.0


def clock_offsets(group: Group | None = None, *, clock: Callable[[], float] = perf_counter) -> Offsets:
    """How far each rank's clock is from that of the group's first rank; collective.

    Processes of one machine read one ``time.perf_counter``: offsets are 0. Other ranks exchange their times with the first one,
    as NTP does: of some round trips the fastest counts, whose middle is when the other rank answered. It is wrong by at most
    half of that round trip.

    Args:
        group: the ranks; None for the whole world.
        clock: in seconds.

    Cost: one small message from each rank, and for a rank that does not share the clock 32 messages of 8 bytes.

    >>> from functional_ds import comm
    >>> def program():
    ...     ahead = 100.0 * comm.world().rank
    ...     return [round(seconds) for seconds in comm.debug.clock_offsets(clock=lambda: perf_counter() + ahead).seconds]
    >>> comm.simulate(program, world_size=3)
    [[0, -100, -200], [0, -100, -200], [0, -100, -200]]
    """
    group = resolve_group(group)
    clocks = all_gather_object(_identity(clock), group)
    found = Offsets((0.0,) * group.size)
    for rank in range(1, group.size):
        if clocks[0] is None or clocks[rank] != clocks[0]:
            if group.rank == 0:
                offset, error = min((_ask(rank, group, clock) for _ in range(_ROUNDS)), key=lambda pair: pair[1])
                seconds = (*found.seconds[:rank], offset, *found.seconds[rank + 1 :])
                found = Offsets(seconds, max(found.error, error))
            elif group.rank == rank:
                for _ in range(_ROUNDS):
                    recv(_time(0.0, group), 0, group).item()
                    send(_time(clock(), group), 0, group)
    told: Offsets = broadcast_object(found, 0, group)
    return told


def _ask(rank: int, group: Group, clock: Callable[[], float]) -> tuple[float, float]:
    """A rank's offset by one round trip, and the most by which it can be wrong."""
    began = clock()
    send(_time(began, group), rank, group)
    there = recv(_time(0.0, group), rank, group).item()
    ended = clock()
    return (began + ended) / 2 - there, (ended - began) / 2


def _time(seconds: float, group: Group) -> torch.Tensor:
    return torch.tensor(seconds, dtype=torch.float64, device=group.world.device)


def _identity(clock: Callable[[], float]) -> tuple[object, ...] | None:
    """What processes that read the same clock have in common; None where that is not known."""
    if clock is not perf_counter:
        return None
    try:
        started = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii")
        return started, Path("/proc/self/ns/time").stat().st_ino, socket.gethostname()
    except OSError:
        return None
