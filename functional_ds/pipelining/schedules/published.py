"""Published training schedules by name, for jobs, the planner, the search and the command line."""

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Literal

import attrs

from functional_ds.sharding.path_patterns import nearest

from .generators import breadth_first, gpipe, interleaved_one_f_one_b, one_f_one_b, zb_2p, zb_h1
from .schedule import Schedule, stage_to_rank
from .v_shaped import dualpipe_v, zbv


@attrs.frozen
class Published:
    """A schedule of the table.

    Attributes:
        make: the generator, of ranks and micro-batches, and of ``v=`` chunks a rank where these are not fixed.
        chunks: stages on each rank; None for the generator's ``v``, 2 unless given.
        style: how stages are placed, as in ``stage_to_rank``.
        least: the fewest micro-batches, from the number of ranks.
    """

    make: Callable[..., Schedule]
    chunks: int | None = 1
    style: Literal["loop", "v"] = "loop"
    least: Callable[[int], int] = lambda p: 1


_ROWS = (
    Published(gpipe),
    Published(one_f_one_b),
    Published(zb_h1),
    Published(zb_2p),
    Published(interleaved_one_f_one_b, chunks=None),
    Published(breadth_first, chunks=None),
    Published(zbv, chunks=2, style="v"),
    Published(dualpipe_v, chunks=2, style="v", least=lambda p: 2 * p),
)
PUBLISHED: Mapping[str, Published] = MappingProxyType({row.make.__name__: row for row in _ROWS})


def published(name: str, p: int, m: int, *, v: int | None = None) -> Schedule:
    """The schedule of this name.

    Args:
        name: of ``PUBLISHED``.
        p: ranks.
        m: micro-batches.
        v: chunks a rank, of the schedules that have any number of them; None for 2.

    Raises:
        ValueError: the name is unknown, the schedule has another number of chunks, or too few micro-batches.

    >>> published("one_f_one_b", 2, 4).stages, published("breadth_first", 2, 4, v=3).stages
    (2, 6)
    """
    if name not in PUBLISHED:
        raise ValueError(f"there is no schedule {name!r}; {nearest(name, PUBLISHED)}, of {', '.join(PUBLISHED)}")
    row = PUBLISHED[name]
    if row.chunks is None:
        return row.make(p, m, v=2 if v is None else v)
    if v not in (None, row.chunks):
        raise ValueError(f"v={v}: {name} has {row.chunks} a rank; leave it out")
    return row.make(p, m)


def by_name(p: int, m: int, placement: Sequence[int] | None = None) -> dict[str, Schedule]:
    """The published schedules for these sizes and this placement.

    Args:
        p: ranks.
        m: micro-batches; schedules that need more are left out.
        placement: the rank that holds each stage; by default stage s is on rank s.

    >>> sorted(by_name(2, 3)), sorted(by_name(2, 3, (0, 1, 1, 0)))
    (['gpipe', 'one_f_one_b', 'zb_2p', 'zb_h1'], ['zbv'])
    """
    placement = tuple(range(p)) if placement is None else tuple(placement)
    chunks = max(1, len(placement) // p)
    return {
        name: published(name, p, m, v=chunks)
        for name, row in PUBLISHED.items()
        if row.chunks in (chunks, None if chunks > 1 else chunks)
        and placement == stage_to_rank(p, chunks, row.style)
        and m >= row.least(p)
    }
