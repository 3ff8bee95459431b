"""Successive halving: many candidates run for a few steps, the better half for twice as many, until one is left.

Jamieson & Talwalkar 2016, arXiv:1502.07943.
"""

from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

import attrs

__all__ = ["Measurement", "TrialRun", "halve"]

C = TypeVar("C")


@attrs.frozen
class Measurement:
    """What one short run found.

    Attributes:
        seconds: of a step, the median; None where the run did not end well.
        peak: bytes of the rank that had most.
        state: bytes of the largest rank's state.
        why: why the run did not end well; empty where it did.
    """

    seconds: float | None = None
    peak: int | None = None
    state: int | None = None
    why: str = ""


@attrs.frozen
class TrialRun(Generic[C]):
    """A candidate's last run: in which round, for how many steps, and what it found."""

    candidate: C
    round: int
    steps: int
    found: Measurement


def halve(candidates: Sequence[C], measure: Callable[[C, int], Measurement], *, steps: int = 4) -> list[TrialRun[C]]:
    """The last run of each candidate, the fastest first, those that did not end well last. A run that dies ends only itself.

    Law: of candidates whose times do not depend on the number of steps, the first is the fastest. n candidates cost
    n · steps in each of about log2 n rounds.

    Args:
        candidates: what to compare.
        measure: runs one for so many steps.
        steps: of the first round; each later round has twice as many.

    >>> times = {"a": 3.0, "b": 1.0, "c": 2.0}
    >>> found = halve(list(times), lambda name, steps: Measurement(times[name]), steps=2)
    >>> [(run.candidate, run.steps) for run in found]
    [('b', 8), ('c', 4), ('a', 2)]
    """
    done: list[TrialRun[C]] = []
    left, round_ = list(candidates), 0
    while left:
        runs = [TrialRun(each, round_, steps << round_, measure(each, steps << round_)) for each in left]
        well = sorted((run for run in runs if run.found.seconds is not None), key=lambda run: run.found.seconds or 0.0)
        kept = (len(well) + 1) // 2 if len(well) > 1 else 0  # one alone has nobody to be compared with
        done += well[kept:] + [run for run in runs if run.found.seconds is None]
        left, round_ = [run.candidate for run in well[:kept]], round_ + 1
    return sorted(done, key=lambda run: (run.found.seconds is None, -run.round, run.found.seconds or 0.0))
