"""Checks for processes: ranks compare their calls before starting them."""

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

from torch.distributed.distributed_c10d import PrefixStore

from functional_ds.comm.api import barrier
from functional_ds.comm.calls.dispatch import resolve_group
from functional_ds.comm.record.group import Group
from functional_ds.comm.table.collective import Call, CallContext
from functional_ds.comm.table.rooted_rows import BARRIER
from functional_ds.comm.worlds.call_log import CallLog
from functional_ds.comm.worlds.current import world
from functional_ds.comm.worlds.process import ProcessWorld, check_timeout


@contextmanager
def checked(timeout: timedelta | None = None) -> Iterator[None]:
    """Checks inside the block, before each call starts, that all its ranks make the same call.

    A call starts once all its ranks have announced the same collective, options, shapes, dtypes and group; otherwise it raises
    on all of them. All ranks of the world must enter the block. Simulations always check this, so there the block does nothing.
    ``send`` waits for the receiver, as in a simulation, which reveals programs that rely on buffering.

    Args:
        timeout: how long to wait for other ranks; by default the timeout of ``init_distributed``.

    Cost: three to four requests to the store per call, about a millisecond as measured by ``benchmarks/comm.py``. On CUDA the
    host waits for the other hosts at each call, also at asynchronous ones.

    Raises:
        MismatchError: on all ranks of the group: names this rank's call, another rank's, and both call sites.
        TimedOutError: other ranks did not make a call that this rank waited in, or started in the block: names the call, those
            ranks and what they were doing.

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
    """A barrier with a timeout, after which every waiting rank raises and names the missing ranks.

    In a simulation a missing rank is a DeadlockError, which names it as well.

    Args:
        group: the ranks that take part; None for the whole world.
        timeout: how long to wait; by default the timeout of ``init_distributed``.

    Cost: a few requests to the store per rank; nothing over the connections that carry tensors.

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
        log.announce(Call(BARRIER), [], group, CallContext({}, group.rank, group.size))()
    finally:
        log.timeout = seconds


def _seconds(timeout: timedelta | None, here: ProcessWorld) -> float:
    limit = here.timeout if timeout is None else timeout
    check_timeout(limit)
    return limit.total_seconds()
