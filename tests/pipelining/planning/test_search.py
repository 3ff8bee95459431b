"""The search for better orders."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from functional_ds.pipelining import Costs, by_name, optimize, stage_to_rank, timeline, validate
from functional_ds.pipelining.planning.search import ListScheduler, PriorityRule
from tests.pipelining.planning.test_timeline import drawn


@settings(max_examples=12)
@given(
    p=st.integers(1, 3),
    m=st.integers(1, 5),
    chunks=st.sampled_from([(1, "loop"), (2, "loop"), (2, "v")]),
    seed=st.integers(0, 1000),
    room=st.floats(1, 4),
)
def test_never_worse_than_the_best_published(p: int, m: int, chunks: tuple[int, str], seed: int, room: float) -> None:
    """Under any limit that it can keep; what it finds is valid, keeps the limit, and is the same for the same seed."""
    placement = stage_to_rank(p, *chunks)
    costs = drawn(len(placement), seed)
    least = max(
        sum(costs.activations[stage] for stage in range(len(placement)) if placement[stage] == rank) for rank in range(p)
    )
    limit = least * room
    found = optimize(p, m, costs, memory_limit=limit, placement=placement, rounds=5, seed=seed)
    timed = timeline(validate(found), costs)
    assert found.placement == placement
    assert max(timed.peak) <= limit
    for schedule in by_name(p, m, placement).values():
        other = timeline(schedule, costs)
        assert max(other.peak) > limit or timed.makespan <= other.makespan
    assert found == optimize(p, m, costs, memory_limit=limit, placement=placement, rounds=5, seed=seed)


def test_zero_bubble_is_found() -> None:
    """At unit times, within the memory of 1F1B, the search does no worse than ZB-H1; with twice that, no gaps are left."""
    assert timeline(optimize(3, 6, Costs(), memory_limit=3, rounds=0)).makespan <= 3 * 6 + 2
    assert timeline(optimize(3, 6, Costs(), memory_limit=5, rounds=0)).makespan == 3 * 6 + 2


def test_a_placement_without_a_name() -> None:
    """List scheduling needs no generator."""
    placement = (0, 1, 0, 2, 1)
    found = optimize(3, 4, Costs(), placement=placement, rounds=5)
    assert validate(found).placement == placement
    assert by_name(3, 4, placement) == {}


def test_rules_are_kept() -> None:
    """No more in flight than allowed; a rule that comes to a halt gives None."""
    found = ListScheduler(Costs(), (0, 1, 2), [float("inf")] * 3, PriorityRule((2, 1, 1), (0, 0, 0), True)).run(6)
    assert found is not None
    validate(found, in_flight=(2, 1, 1))
    assert ListScheduler(Costs(), (0, 1, 2), [0.5] * 3, PriorityRule((2, 1, 1), (0, 0, 0), True)).run(6) is None


def test_limits_that_nothing_keeps() -> None:
    """The refusal names the rank and what it takes."""
    with pytest.raises(ValueError, match=r"memory_limit=0.5 on rank 0: one micro-batch at a time already takes 1"):
        optimize(2, 2, Costs(), memory_limit=0.5)
    with pytest.raises(ValueError, match=r"memory_limit=1 on rank 1: one micro-batch at a time already takes 3"):
        optimize(2, 2, Costs(activations=[1, 3]), memory_limit=[1, 1])
    with pytest.raises(ValueError, match="has 1 limits for p=2 ranks"):
        optimize(2, 2, Costs(), memory_limit=[1])
    with pytest.raises(ValueError, match="m=0"):
        optimize(2, 0, Costs())
    with pytest.raises(ValueError, match="placement puts stage 1 on rank 5; there are 2"):
        optimize(2, 2, Costs(), placement=(0, 5))
