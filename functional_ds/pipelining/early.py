"""``receives_early``: receives that are posted some actions before their values are needed."""

from bisect import bisect_left
from collections.abc import Sequence

from .action import COMPUTE, Action, Kind

__all__ = ["receives_early"]

Steps = list[tuple[Action, ...]]


def receives_early(steps: Sequence[tuple[Action, ...]], lead: int) -> Steps:
    """A rank's row with each receive posted up to ``lead`` compute actions earlier.

    Law: all else keeps its order, and so do the receives. A schedule that is proved even if each step of messages waits stays
    so if receives do not wait; where a transport carries messages in the order in which they are posted it may not.

    Where the receiver must have posted before a sender can send (Gloo), a value then travels while both compute. Each rank has
    room for ``lead`` more values.

    >>> from functional_ds.pipelining import lower, one_f_one_b
    >>> row = list(lower(one_f_one_b(2, 2)).steps(1))
    >>> [" ".join(map(str, step)) for step in receives_early(row, 1)]
    ['1RECV_F0', '1RECV_F1', '1F0', '1B0', '1SEND_B0', '1F1', '1B1', '1SEND_B1']
    """
    computes = [i for i, step in enumerate(steps) if step[0].kind in COMPUTE]
    posted: dict[int, list[Action]] = {}
    for i, step in enumerate(steps):
        earlier = bisect_left(computes, i)
        place = computes[max(0, earlier - lead)] if earlier else i
        posted.setdefault(place, []).extend(action for action in step if _receives(action))
    made: Steps = []
    for i, step in enumerate(steps):
        rest = tuple(action for action in step if not _receives(action))
        made += [each for each in (tuple(posted.get(i, ())), rest) if each]
    return made


def _receives(action: Action) -> bool:
    return action.kind in (Kind.RECV_F, Kind.RECV_B)
