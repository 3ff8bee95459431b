"""``balanced``, ``uniformly``: where to cut a row of blocks into stages."""

from collections.abc import Sequence
from itertools import accumulate

__all__ = ["balanced", "uniformly"]


def uniformly(blocks: int, stages: int) -> tuple[int, ...]:
    """The first block of each stage; stages differ by at most one block.

    Later stages get the additional blocks, because under 1F1B earlier stages hold more activations.

    Raises:
        ValueError: fewer blocks than stages, or no stage.

    >>> uniformly(10, 4)
    (0, 2, 4, 7)
    """
    _refuse(blocks, stages)
    few, more = divmod(blocks, stages)
    return tuple(few * stage + max(0, stage - (stages - more)) for stage in range(stages))


def balanced(costs: Sequence[float], stages: int) -> tuple[int, ...]:
    """The first block of each stage, such that the most expensive stage costs as little as possible.

    Law: no other cut of the row has a smaller maximum. Cost: O(stages · blocks · log blocks), by dynamic programming.

    Args:
        costs: each block's cost, not negative.
        stages: their number; each gets at least one block.

    Raises:
        ValueError: fewer blocks than stages, or a cost that is negative or no number.

    >>> balanced([1, 1, 1, 1, 4], 2), balanced([3, 1, 1, 3, 1, 1], 3)
    ((0, 4), (0, 2, 4))
    """
    _refuse(len(costs), stages)
    for place, cost in enumerate(costs):
        if not 0 <= cost < float("inf"):
            raise ValueError(f"costs[{place}] is {cost}; costs are finite and not negative")
    total = [0.0, *accumulate(costs)]
    count = len(costs)
    worst = [total[count] - total[begin] for begin in range(count + 1)]  # the least maximum for the blocks from each on
    choices: list[list[int]] = []
    for rest in range(1, stages):  # the number of stages that follow
        ends = [_first_end(total, worst, begin, count - rest) for begin in range(count - rest)]
        choices.append(ends)
        worst = [max(total[end] - total[begin], worst[end]) for begin, end in enumerate(ends)]
    starts = [0]
    for ends in reversed(choices):
        starts.append(ends[starts[-1]])
    return tuple(starts)


def _first_end(total: Sequence[float], worst: Sequence[float], begin: int, latest: int) -> int:
    """The best end of a stage that begins at ``begin``, by bisection: with the end its cost grows, that of the rest falls."""
    low, high = begin + 1, latest
    while low < high:
        middle = (low + high) // 2
        if total[middle] - total[begin] >= worst[middle]:
            high = middle
        else:
            low = middle + 1
    before = low - 1
    if before > begin and max(total[before] - total[begin], worst[before]) <= max(total[low] - total[begin], worst[low]):
        return before
    return low


def _refuse(blocks: int, stages: int) -> None:
    if stages < 1:
        raise ValueError(f"stages={stages}: there is at least one")
    if blocks < stages:
        raise ValueError(f"{blocks} blocks do not make {stages} stages, each of at least one")
