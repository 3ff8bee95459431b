"""Law 35, and what a timeline says of costs, messages and memory."""

import random
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from functional_ds.comm.algorithms.cost import Link
from functional_ds.pipelining import (
    Action,
    Costs,
    Kind,
    Schedule,
    breadth_first,
    dualpipe_v,
    gpipe,
    in_flight,
    inference,
    interleaved_one_f_one_b,
    lower,
    measured,
    observed,
    one_f_one_b,
    timeline,
    zb_2p,
    zb_h1,
    zbv,
)
from functional_ds.testing import schedules, seeds
from tests.pipelining.cases import SIZES, generated


@pytest.mark.law(35)
def test_makespan_and_bubble_of_gpipe_and_1f1b() -> None:
    """Law 35, all p <= 16, m <= 64: (m + p - 1) (tF + tB), bubble (p - 1) / (m + p - 1), for changing tF and tB."""
    for p, m in SIZES:
        forward, backward = 1 + (p * m) % 3, 1 + (p + m) % 5
        costs = Costs(forward=forward, backward=backward)
        for schedule in (gpipe(p, m), one_f_one_b(p, m)):
            timed = timeline(schedule, costs)
            assert timed.makespan == (m + p - 1) * (forward + backward)
            assert timed.bubble == pytest.approx((p - 1) / (m + p - 1), abs=1e-12)


def test_a_value_is_there_after_what_stands_before_its_send() -> None:
    """Sends right after what computes them change nothing; those that a schedule has later hold up whoever waits."""
    plain = one_f_one_b(2, 2)
    assert timeline(lower(plain)).makespan == timeline(plain).makespan == 9
    late = Schedule.of(
        [
            "0F0 0F1 0SEND_F0 0SEND_F1 0RECV_B0 0RECV_B1 0B0 0B1",
            "1RECV_F0 1RECV_F1 1F0 1F1 1B0 1B1 1SEND_B0 1SEND_B1",
        ]
    )
    timed = timeline(late, Costs(link=Link(0.5, 1e9)))
    assert timed.makespan == 13
    assert [(str(span.action), span.start, span.end) for span in timed.spans(1)[:3]] == [
        ("1RECV_F0", 0, 2.5),
        ("1RECV_F1", 0, 2.5),
        ("1F0", 2.5, 3.5),
    ]
    assert timed.spans(0)[2].end == 2.5
    assert [str(span.action) for span in timed.critical_path] == ["0F0", "0F1", "1F0", "1F1", "1B0", "1B1", "0B0", "0B1"]


@pytest.mark.law(35)
def test_makespan_of_interleaved() -> None:
    """Law 35, all p <= 16, m <= 64 that p divides, v <= 3: (m v + p - 1) (tF + tB) in chunk times; breadth-first for m >= p."""
    for p, m in SIZES:
        costs = Costs(forward=1 + (p * m) % 3, backward=1 + (p + m) % 5)
        for v in (2, 3) if m % p == 0 else ():
            expected = (m * v + p - 1) * (costs.forward + costs.backward)
            assert timeline(interleaved_one_f_one_b(p, m, v=v), costs).makespan == expected
            assert timeline(breadth_first(p, m, v=v), costs).makespan == expected
            assert timeline(inference(p, m, v=v), costs).makespan == (m * v + p - 1) * costs.forward


@pytest.mark.law(35)
def test_makespan_of_split_backwards() -> None:
    """Law 35, unit times, all p <= 16, m <= 64: ZB-H1 3 m + p - 1 for m >= p; so ZB-2p, without gaps, for m >= 2 p - 1."""
    for p, m in SIZES:
        if m >= p:
            assert timeline(zb_h1(p, m)).makespan == 3 * m + p - 1
        if m >= 2 * p - 1:
            timed = timeline(zb_2p(p, m))
            assert timed.makespan == 3 * m + p - 1
            assert timed.gaps == (0,) * p


@pytest.mark.law(35)
def test_makespan_of_the_vees() -> None:
    """Law 35, unit times, all p <= 16, m <= 64: no bubble but the p - 1 by which the last rank begins later.

    ZBV has no gaps at all from m = 2 p - 1 on; DualPipeV has rank r's p - 1 - r.
    """
    for p, m in SIZES:
        if m >= 2 * p - 1:
            timed = timeline(zbv(p, m))
            assert timed.makespan == 6 * m + p - 1
            assert timed.gaps == (0,) * p
        if m >= 2 * p:
            timed = timeline(dualpipe_v(p, m))
            assert timed.makespan == 6 * m + p - 1
            assert timed.gaps == tuple(range(p - 1, -1, -1))


@pytest.mark.law(35)
@given(schedules() | generated())
def test_peak_memory_is_what_is_in_flight(schedule: Schedule) -> None:
    """With one unit for each forward until its backward is complete."""
    assert timeline(schedule).peak == in_flight(schedule)


def naive(schedule: Schedule, costs: Costs) -> dict[Action, tuple[float, float]]:
    """A timeline by hand: one action after another, with its start and end."""
    seconds, crossing = costs.seconds(schedule.stages), costs.crossing(schedule.stages)
    rows, clock, found = [list(row) for row in schedule.compute_only()], [0.0] * schedule.ranks, {}
    while any(rows):
        for rank, row in enumerate(rows):
            if not row:
                continue
            kind, stage, j = row[0]
            other = {Kind.F: stage - 1, Kind.W: -1}.get(kind, stage + 1)
            come = 0.0
            if 0 <= other < schedule.stages:
                kinds = (Kind.F,) if kind is Kind.F else (Kind.I, Kind.B)
                ends = [found[Action(each, other, j)][1] for each in kinds if Action(each, other, j) in found]
                if not ends:
                    continue
                come = ends[0] + (crossing[min(stage, other)] if schedule.placement[other] != rank else 0.0)
            start = max(clock[rank], come)
            clock[rank] = start + seconds[stage, kind]
            found[row.pop(0)] = (start, clock[rank])
    return found


def drawn(stages: int, seed: int) -> Costs:
    """Costs that differ from stage to stage."""
    chooser = random.Random(seed)
    each = [[chooser.randint(1, 9) for _ in range(stages)] for _ in range(6)]
    return Costs(
        forward=each[0],
        inputs=each[1],
        weights=each[2],
        backward=None if seed % 2 else each[3],
        link=Link(latency=chooser.randint(0, 3), bandwidth=4.0),
        message=each[3],
        activations=each[4],
        kept=[min(pair) for pair in zip(each[4], each[5], strict=True)],
    )


@given(schedules() | generated(), seeds())
def test_times_are_those_by_hand(schedule: Schedule, seed: int) -> None:
    """For any costs, messages included; lowering changes none of them."""
    costs = drawn(schedule.stages, seed)
    expected = naive(schedule, costs)
    for each in (schedule, lower(schedule, gathers=True)):
        timed = timeline(each, costs)
        spans = [span for rank in range(each.ranks) for span in timed.spans(rank) if span.action.kind <= Kind.B]
        assert {span.action: (span.start, span.end) for span in spans} == expected
        assert timed.makespan == max(end for _, end in expected.values())


@given(schedules() | generated(), seeds())
def test_the_critical_path_explains_the_makespan(schedule: Schedule, seed: int) -> None:
    """It begins at 0 and ends last; between one action and the next lies nothing, or a message."""
    costs = drawn(schedule.stages, seed)
    timed = timeline(schedule, costs)
    path = timed.critical_path
    assert path[0].start == 0
    assert path[-1].end == timed.makespan
    for earlier, later in pairwise(path):
        boundary = min(earlier.action.stage, later.action.stage)
        wait = 0.0 if earlier.rank == later.rank else costs.crossing(schedule.stages)[boundary]
        assert later.start == earlier.end + wait


@given(schedules() | generated(), seeds())
def test_memory_is_what_is_taken_and_freed(schedule: Schedule, seed: int) -> None:
    """It begins and ends with nothing; at any time it is what forwards took and backwards have not freed."""
    costs = drawn(schedule.stages, seed)
    timed = timeline(schedule, costs)
    taken, freed = costs.of("activations", schedule.stages), costs.freed(schedule.stages)
    for rank in range(schedule.ranks):
        times, held = timed.memory(rank)
        assert held[0] == held[-1] == 0
        assert (np.diff(times) >= 0).all()
        for span in timed.spans(rank):
            before = [other for other in timed.spans(rank) if other.end <= span.start]
            now = sum(taken[other.action.stage] * (other.action.kind is Kind.F) for other in [*before, span])
            now -= sum(freed[other.action.stage, other.action.kind] for other in before)
            middle = np.searchsorted(times, (span.start + span.end) / 2) - 1
            assert held[middle] == now
    assert timed.peak == tuple(timed.memory(rank)[1].max() for rank in range(schedule.ranks))


def test_messages_and_gathers_have_their_times() -> None:
    """A send lasts from its value's end until arrival; a gather holds up its stage; a reduction ends the makespan."""
    costs = Costs(link=Link(latency=0.5, bandwidth=4.0), message=2.0, gather=3.0, reduce=10.0)
    timed = timeline(lower(one_f_one_b(2, 1), gathers=True), costs)
    spans = {str(span.action): (span.start, span.end) for rank in range(2) for span in timed.spans(rank)}
    assert spans["0GATHER"] == (0, 3)
    assert spans["0F0"] == (3, 4)
    assert spans["0SEND_F0"] == (4, 5)
    assert spans["1RECV_F0"] == (0, 5)
    assert spans["1F0"] == (5, 6)
    assert spans["1B0"] == (6, 8)
    assert spans["0RECV_B0"] == (4, 9)
    assert spans["0REDUCE"] == (11, 21)
    assert timed.makespan == 21


def test_inference_keeps_nothing() -> None:
    """Each micro-batch's activations are gone after its forward."""
    assert timeline(inference(2, 5)).peak == (1, 1)


@given(schedules() | generated(), seeds())
def test_a_run_measured_is_predicted(schedule: Schedule, seed: int) -> None:
    """observed and measured are the inverse of timeline, for costs that do not change."""
    costs = drawn(schedule.stages, seed)
    timed = timeline(schedule, costs)
    pairs = [
        [(start + 7.0, end + 7.0) for start, end in zip(*timed.times(rank), strict=True)] for rank in range(schedule.ranks)
    ]
    run = observed(lower(schedule), pairs, costs)
    assert (run.makespan, run.peak, run.gaps) == (timed.makespan, timed.peak, timed.gaps)
    assert run.bubble == pytest.approx(timed.bubble)
    assert timeline(schedule, measured(run)).makespan == timed.makespan


@given(st.sampled_from(["forward", "inputs", "weights", "backward", "message", "activations"]))
def test_unequal_stages_are_refused(name: str) -> None:
    """Costs for other stages than the schedule's, and numbers that are no costs."""
    with pytest.raises(ValueError, match=f"costs.{name} has 3 values for 4 stages"):
        timeline(gpipe(4, 2), Costs(**{name: [1, 1, 1]})).peak  # noqa: B018
    with pytest.raises(ValueError, match=f"{name}=.*-1"):
        Costs(**{name: -1})


def test_times_for_other_actions_are_refused() -> None:
    """Both numbers are named."""
    with pytest.raises(ValueError, match=r"times have \[1\] pairs for the ranks; the schedule has \[2\]"):
        observed(gpipe(1, 1), [[(0.0, 1.0)]])
    with pytest.raises(ValueError, match=r"times\[0\]\[1\]=\(0.5, 2.0\): 0B0 starts or ends too early"):
        observed(gpipe(1, 1), [[(0.0, 1.0), (0.5, 2.0)]])
    with pytest.raises(ValueError, match=r"times\[0\]\[0\]=\(1.0, 0.0\): 0F0"):
        observed(gpipe(1, 1), [[(1.0, 0.0), (1.5, 2.0)]])
