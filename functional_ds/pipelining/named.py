"""``named``: all schedules with a name for given sizes, to compare them or to start a search from."""

from collections.abc import Sequence

from .generators import breadth_first, gpipe, interleaved_one_f_one_b, one_f_one_b, zb_2p, zb_h1
from .schedule import Schedule, stage_to_rank
from .vee import dualpipe_v, zbv

__all__ = ["named"]


def named(p: int, m: int, placement: Sequence[int] | None = None) -> dict[str, Schedule]:
    """The generators' schedules that train on p ranks with m micro-batches and place stages like that.

    Args:
        p: ranks.
        m: micro-batches; schedules that need more are left out.
        placement: the rank that holds each stage; by default stage s is on rank s.

    >>> sorted(named(2, 3)), sorted(named(2, 3, (0, 1, 1, 0)))
    (['gpipe', 'one_f_one_b', 'zb_2p', 'zb_h1'], ['zbv'])
    """
    placement = tuple(range(p)) if placement is None else tuple(placement)
    if placement == stage_to_rank(p):
        return {each.__name__: each(p, m) for each in (gpipe, one_f_one_b, zb_h1, zb_2p)}
    if placement == stage_to_rank(p, 2, "v"):
        found = {"zbv": zbv(p, m)}
        return found | {"dualpipe_v": dualpipe_v(p, m)} if m >= 2 * p else found
    v, rest = divmod(len(placement), p)
    if not rest and placement == stage_to_rank(p, v):
        return {each.__name__: each(p, m, v=v) for each in (interleaved_one_f_one_b, breadth_first)}
    return {}
