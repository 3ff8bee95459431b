"""Losses that are not finite, counted without reading them."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from functional_ds import comm
from functional_ds.fitting import RollBack, Stop
from functional_ds.fitting.non_finite import Health

BAD = (float("nan"), float("inf"), -float("inf"))


@given(st.lists(st.lists(st.sampled_from((1.0, *BAD)), min_size=6, max_size=6), min_size=1, max_size=3), st.integers(0, 6))
def test_all_ranks_know_the_longest_run_on_any(losses: list[list[float]], judged: int) -> None:
    """streak and worst are those of the rank with the longest; after a verdict the worst begins at the streak."""

    def program() -> tuple[int, int]:
        health = Health()
        for i, loss in enumerate(losses[comm.world().rank]):
            health = health.judged() if i == judged else health
            health = health.after(torch.tensor(loss))
        found = health.verdict()
        return found.streak, found.worst

    expected = [by_hand(row, judged) for row in losses]
    both = max(streak for streak, _ in expected), max(worst for _, worst in expected)
    assert comm.simulate(program, world_size=len(losses)) == [both] * len(losses)


def by_hand(losses: list[float], judged: int) -> tuple[int, int]:
    streak = worst = 0
    for i, loss in enumerate(losses):
        worst = streak if i == judged else worst
        streak = streak + 1 if loss in BAD or loss != loss else 0
        worst = max(worst, streak)
    return streak, worst


@pytest.mark.parametrize("make", [lambda: Stop(0), lambda: RollBack(after=-1), lambda: RollBack(times=0), lambda: Stop(1.5)])
def test_numbers_that_make_no_sense_are_refused(make: object) -> None:
    with pytest.raises(ValueError, match="a number of at least 1"):
        make()  # type: ignore[operator]
