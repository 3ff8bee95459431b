"""``balanced``, ``uniformly``: where to split a sequence of blocks into stages."""

from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate, pairwise


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

    Law: no other split of the sequence has a smaller maximum. Cost: O(blocks² · log blocks), by bisection over the sums of
    ranges.

    Args:
        costs: each block's cost, not negative.
        stages: their number; each gets at least one block.

    Raises:
        ValueError: fewer blocks than stages, or a cost that is negative or not a number.

    >>> balanced([1, 1, 1, 1, 4], 2), balanced([3, 1, 1, 3, 1, 1], 3)
    ((0, 4), (0, 2, 4))
    """
    _refuse(len(costs), stages)
    for place, cost in enumerate(costs):
        if not 0 <= cost < float("inf"):
            raise ValueError(f"costs[{place}] is {cost}; costs are finite and not negative")
    total = [0.0, *accumulate(costs)]
    dearest = max(end - begin for begin, end in pairwise(total))
    sums = sorted({total[end] - total[begin] for end in range(len(total)) for begin in range(end)})

    def starts(limit: float) -> list[int]:
        """The fewest stages none of which costs more than a limit."""
        firsts = [0]
        for block in range(len(costs)):
            if total[block + 1] - total[firsts[-1]] > limit:
                firsts.append(block)
        return firsts

    least = bisect_left(sums, True, key=lambda limit: limit >= dearest and len(starts(limit)) <= stages)
    firsts = starts(sums[least])
    spare = [block for block in range(len(costs)) if block not in firsts]  # more stages than that cost no more
    return tuple(sorted([*firsts, *spare[: stages - len(firsts)]]))


def _refuse(blocks: int, stages: int) -> None:
    if stages < 1:
        raise ValueError(f"stages={stages}: there is at least one")
    if blocks < stages:
        raise ValueError(f"{blocks} blocks do not make {stages} stages, each of at least one")
