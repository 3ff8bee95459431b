"""What lower puts into a schedule."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from functional_ds.pipelining import (
    Action,
    Kind,
    Schedule,
    inference,
    interleaved_one_f_one_b,
    lower,
    one_f_one_b,
    timeline,
    validate,
    zbv,
)
from functional_ds.testing import schedules
from tests.pipelining.cases import everyone, generated


@pytest.mark.law(33)
def test_no_generator_deadlocks() -> None:
    """Law 33, for every generator and all p <= 6, m <= 12, with and without gathers: rendezvous messages get through."""
    for p in range(1, 7):
        for m in range(1, 13):
            for schedule in everyone(p, m, chunks=2):
                validate(lower(schedule, gathers=m % 2 == 0, resident=1 + m % 3))
            validate(lower(inference(p, m, v=2)), training=False)


@given(schedules() | generated(), st.booleans(), st.integers(1, 3))
def test_compute_actions_stay_as_they_are(schedule: Schedule, gathers: bool, resident: int) -> None:
    """lower(s).compute_only() = s."""
    lowered = lower(schedule, gathers=gathers, resident=resident)
    assert lowered.compute_only() == schedule
    assert lowered.lowered or (schedule.ranks == 1 and not gathers)


@given(schedules() | generated())
def test_messages_between_two_ranks_keep_their_order(schedule: Schedule) -> None:
    """What one rank sends another, it receives in that order: a transport without tags will do."""
    lowered = lower(schedule)
    sent: dict[tuple[int, int], list[Action]] = {}
    received: dict[tuple[int, int], list[Action]] = {}
    for rank, row in enumerate(lowered):
        for action in row:
            kind, stage, microbatch = action
            if kind in (Kind.SEND_F, Kind.SEND_B):
                forward = kind is Kind.SEND_F
                to = stage + 1 if forward else stage - 1
                other = Action(Kind.RECV_F if forward else Kind.RECV_B, to, microbatch)
                sent.setdefault((rank, schedule.placement[to]), []).append(other)
            elif kind in (Kind.RECV_F, Kind.RECV_B):
                source = stage - 1 if kind is Kind.RECV_F else stage + 1
                received.setdefault((schedule.placement[source], rank), []).append(action)
    assert sent == received


@given(schedules() | generated(), st.integers(1, 3))
def test_parameters_are_gathered_when_needed(schedule: Schedule, resident: int) -> None:
    """Each use finds them whole; never more stages than allowed; all are evicted and reduced at the end."""
    for row in lower(schedule, gathers=True, resident=resident):
        held: set[int] = set()
        reduced: set[int] = set()
        for kind, stage, _ in row:
            if kind is Kind.GATHER:
                held.add(stage)
            elif kind is Kind.EVICT:
                held.remove(stage)
            elif kind is Kind.REDUCE:
                reduced.add(stage)
            elif kind <= Kind.B:
                assert stage in held
                assert stage not in reduced or kind is Kind.F
            assert len(held) <= resident
        assert not held
        assert reduced == {action.stage for action in row}


def test_both_directions_meet() -> None:
    """In 1F1B's steady state, activations and gradients are exchanged in one step."""
    steps = list(lower(one_f_one_b(4, 16)).steps(1))
    both = [step for step in steps if {Kind.SEND_F, Kind.RECV_B} <= {action.kind for action in step}]
    assert len(both) >= 12


def test_one_rank_sends_nothing() -> None:
    """Nor do neighbouring stages of one rank."""
    assert not lower(zbv(1, 4)).lowered
    messages = [action for action in lower(zbv(3, 6))[2] if action.kind > Kind.B]
    assert {action.stage for action in messages if action.kind is Kind.SEND_F} == {3}


def test_one_stage_at_a_time() -> None:
    """With resident=1 a stage is evicted before the next is gathered; with 2, the next one comes while one computes."""
    row = lower(interleaved_one_f_one_b(1, 2, v=2), gathers=True, resident=1)[0]
    text = "0GATHER 0F0 0EVICT 1GATHER 1F0 1B0 1EVICT 0GATHER 0F1 0B0 0EVICT 1GATHER 1F1 1B1 1REDUCE 1EVICT 0GATHER 0B1"
    assert " ".join(map(str, row)) == text + " 0REDUCE 0EVICT"
    assert str(lower(interleaved_one_f_one_b(1, 2, v=2), gathers=True)).count("GATHER") == 2
    assert "REDUCE" in str(lower(one_f_one_b(1, 2), reduces=True))
    assert "REDUCE" not in str(lower(one_f_one_b(1, 2), gathers=True, reduces=False))


@given(schedules() | generated(), st.integers(1, 3))
def test_what_is_written_stays(schedule: Schedule, resident: int) -> None:
    """Messages first and gathers later, or the other way round, are both at once; lowering again changes nothing."""
    both = lower(schedule, gathers=True, resident=resident)
    assert lower(lower(schedule), gathers=True, resident=resident) == both
    rows = [[action for action in row if action.kind <= Kind.B or action.kind >= Kind.GATHER] for row in both]
    assert lower(Schedule.of(rows, schedule.placement, schedule.microbatches)) == both
    assert lower(both, gathers=True) == both


def test_refusals() -> None:
    """Less than one resident stage, and rows that are no schedule."""
    with pytest.raises(ValueError, match="resident=0"):
        lower(one_f_one_b(2, 2), resident=0)
    with pytest.raises(TypeError, match=r"schedule=\['0F0'\] is not a Schedule; make one with Schedule\.of"):
        lower(["0F0"])  # type: ignore[arg-type]


def test_a_rank_without_stages() -> None:
    """It has nothing to do, and does no harm."""
    schedule = validate(Schedule.of(["0F0 0B0", "", "1F0 1B0"]))
    lowered = validate(lower(schedule, gathers=True))
    assert lowered[1] == ()
    timed = timeline(lowered)
    assert (timed.makespan, timed.peak, timed.gaps[1]) == (6, (1, 0, 1), 0)
    assert str(timed).splitlines()[2] == "rank 1 |............|"
