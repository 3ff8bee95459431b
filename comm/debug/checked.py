"""Checks for processes: ranks compare their calls before they start them."""

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

from torch.distributed.distributed_c10d import PrefixStore

from functional_ds.comm.api import barrier
from functional_ds.comm.dispatch import resolve_group
from functional_ds.comm.record.group import Group
from functional_ds.comm.table.collective import Call, Here
from functional_ds.comm.table.rooted_rows import BARRIER
from functional_ds.comm.worlds.call_log import CallLog
from functional_ds.comm.worlds.current import world
from functional_ds.comm.worlds.process import ProcessWorld, check_timeout

__all__ = ["checked", "monitored_barrier"]


@contextmanager
def checked(timeout: timedelta | None = None) -> Iterator[None]:
    """While the block runs, all ranks compare every call before it starts.

    A call starts once all its ranks have announced the same: collective, options, shapes, dtypes, group. Otherwise it
    raises on each of them. Every rank of the world enters the block. In a simulation nothing is left to check; alone neither.

    ``send`` becomes a rendezvous, as it is in a simulation, so a program that needs the transport to buffer is found, too.

    Args:
        timeout: how long to wait for other ranks; by default that of ``init_distributed``.

    Cost: three to four requests to the store for each call, about a millisecond where
    ``benchmarks/comm.py`` measured it.
    On CUDA the host waits for the other hosts at each call, asynchronous ones included.

    Raises:
        MismatchError: on all ranks of the group: what this rank called and what another did, with both call sites.
        TimedOutError: on a rank that waited, or started something and left: for what, where, for which ranks, and what those
            were doing.

    >>> import torch
    >>> from functional_ds import comm
    >>> with comm.debug.checked():
    ...     comm.all_reduce(torch.ones(2))
    tensor([1., 1.])
    """
    here = world().world
    if not isinstance(here, ProcessWorld):
        yield
        return
    seconds = _seconds(timeout, here)
    outer, here.checked_blocks = here.call_log, here.checked_blocks + 1
    store = PrefixStore(f"functional_ds/checked/{here.checked_blocks}", here.store)
    here.call_log = CallLog(here.rank, store, seconds, given_up=lambda: here.given_up)
    try:
        yield
        here.call_log.finish()
    except BaseException as error:
        here.call_log.leave(error)
        raise
    else:
        here.call_log.leave(None)
    finally:
        here.call_log = outer


def monitored_barrier(group: Group | None = None, *, timeout: timedelta | None = None) -> None:
    """A barrier with a time-out, after which every waiting rank raises and names the missing ones.

    In a simulation a missing rank is a deadlock, whose error names it as well.

    Args:
        group: the ranks that take part; None for the whole world.
        timeout: how long to wait; by default that of ``init_distributed``.

    Cost: a few requests to the store for each rank; nothing over the connections that carry tensors.

    Raises:
        TimedOutError: names the missing ranks and, under ``checked``, what they were doing.

    >>> from functional_ds import comm
    >>> comm.simulate(comm.debug.monitored_barrier, world_size=2)
    [None, None]
    """
    group = resolve_group(group)
    here = group.world
    if not isinstance(here, ProcessWorld) or group.rank < 0:
        barrier(group)
        return
    if here.is_over:
        here.refuse(Call(BARRIER), group)
    if here.barrier_log is None:
        here.barrier_log = CallLog(here.rank, PrefixStore("functional_ds/barriers", here.store), 0, False)
    log = here.call_log or here.barrier_log
    seconds = log.timeout
    try:
        log.timeout = _seconds(timeout, here)
        log.announce(Call(BARRIER), [], group, Here({}, group.rank, group.size))()
    finally:
        log.timeout = seconds


def _seconds(timeout: timedelta | None, here: ProcessWorld) -> float:
    found = here.timeout if timeout is None else timeout
    check_timeout(found)
    return found.total_seconds()
