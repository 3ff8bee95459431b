"""Offsets between the clocks of a group's ranks."""

import socket
from collections.abc import Callable
from pathlib import Path
from time import perf_counter

import attrs
import torch

from functional_ds.comm.calls.dispatch import resolve_group
from functional_ds.comm.objects import all_gather_object, broadcast_object
from functional_ds.comm.p2p import recv, send
from functional_ds.comm.record.group import Group

_ROUNDS = 16


@attrs.frozen
class Offsets:
    """Offsets that convert the times of several ranks to one clock.

    Attributes:
        seconds: for each rank of the group, the offset to add to its times to get the first rank's.
        error: a bound on the offsets' errors in seconds, if all clocks run at the same speed; 0 for a shared clock.
    """

    seconds: tuple[float, ...]
    error: float = 0.0


def clock_offsets(group: Group | None = None, *, clock: Callable[[], float] = perf_counter) -> Offsets:
    """Measures the offset of each rank's clock from that of the group's first rank; all ranks must call it.

    Processes of one machine share ``time.perf_counter``, so their offsets are 0. Other ranks exchange times with the first,
    as in NTP: the other rank is assumed to answer in the middle of the fastest of several round trips, which is wrong by at
    most half of that round trip.

    Args:
        group: the ranks; None for the whole world.
        clock: returns seconds.

    Cost: an all_gather_object, a broadcast_object, and 32 messages of 8 bytes for each rank that does not share the clock.

    >>> from functional_ds import comm
    >>> def program():
    ...     ahead = 100.0 * comm.world().rank
    ...     return [round(seconds) for seconds in comm.debug.clock_offsets(clock=lambda: perf_counter() + ahead).seconds]
    >>> comm.simulate(program, world_size=3)
    [[0, -100, -200], [0, -100, -200], [0, -100, -200]]
    """
    group = resolve_group(group)
    clocks = all_gather_object(_identity(clock), group)
    offsets = Offsets((0.0,) * group.size)
    for rank in range(1, group.size):
        if clocks[0] is None or clocks[rank] != clocks[0]:
            if group.rank == 0:
                offset, error = min((_ask(rank, group, clock) for _ in range(_ROUNDS)), key=lambda pair: pair[1])
                seconds = (*offsets.seconds[:rank], offset, *offsets.seconds[rank + 1 :])
                offsets = Offsets(seconds, max(offsets.error, error))
            elif group.rank == rank:
                for _ in range(_ROUNDS):
                    recv(_time(0.0, group), 0, group).item()
                    send(_time(clock(), group), 0, group)
    told: Offsets = broadcast_object(offsets, 0, group)
    return told


def _ask(rank: int, group: Group, clock: Callable[[], float]) -> tuple[float, float]:
    """A rank's offset from one round trip, and a bound on its error."""
    began = clock()
    send(_time(began, group), rank, group)
    there = recv(_time(0.0, group), rank, group).item()
    ended = clock()
    return (began + ended) / 2 - there, (ended - began) / 2


def _time(seconds: float, group: Group) -> torch.Tensor:
    return torch.tensor(seconds, dtype=torch.float64, device=group.world.device)


def _identity(clock: Callable[[], float]) -> tuple[object, ...] | None:
    """A value that is equal on processes that share the clock; None if unknown."""
    if clock is not perf_counter:
        return None
    try:
        started = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii")
        return started, Path("/proc/self/ns/time").stat().st_ino, socket.gethostname()
    except OSError:
        return None
