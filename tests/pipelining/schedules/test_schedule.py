"""Schedules as values."""

import pickle

import pytest
from hypothesis import given
from torch.distributed.pipelining._utils import generate_stage_to_rank_mapping

from functional_ds.pipelining import Action, Kind, Schedule, ScheduleError, gpipe, one_f_one_b, stage_to_rank, validate, zbv
from functional_ds.testing import schedules


@given(schedules())
def test_a_schedule_is_its_rows(schedule: Schedule) -> None:
    """Schedule.of ∘ actions = id; equal schedules have equal hashes; text rows mean the same."""
    again = Schedule.of(schedule.actions, schedule.placement, schedule.microbatches)
    assert again == schedule
    assert hash(again) == hash(schedule)
    assert Schedule.of([" ".join(map(str, row)) for row in schedule], schedule.placement, schedule.microbatches) == schedule


def test_schedules_differ() -> None:
    """In rows, placement or micro-batches."""
    row = ["0F0 1F0 1B0 0B0"]
    assert Schedule.of(row) != Schedule.of(["0F0 1F0 0B0 1B0"])
    assert Schedule.of(row) != Schedule.of(row, microbatches=2)
    assert Schedule.of(["0F0", ""], [0]) != Schedule.of(["0F0", ""], [1])
    assert gpipe(2, 2) != "gpipe"


def test_codes_cannot_be_written() -> None:
    """A schedule is a value."""
    with pytest.raises(ValueError, match="read-only"):
        gpipe(1, 1).codes[0][0] = 0


@pytest.mark.parametrize("style", ["loop", "v"])
def test_placements_are_torchs(style: str) -> None:
    """As generate_stage_to_rank_mapping has them."""
    for ranks in range(1, 6):
        for chunks in range(1, 5):
            theirs = generate_stage_to_rank_mapping(ranks, ranks * chunks, style)
            assert stage_to_rank(ranks, chunks, style) == tuple(theirs[stage] for stage in range(ranks * chunks))


def test_refusals() -> None:
    """Sizes and placements that cannot be are refused by name."""
    with pytest.raises(ValueError, match="stage 0 of 2 is in no rank's row"):
        Schedule.of(["1F0"])
    with pytest.raises(ValueError, match="placement puts stage 1 on rank 2; there are 2"):
        Schedule.of(["0F0", "1F0"], placement=(0, 2))
    with pytest.raises(ValueError, match="0 ranks"):
        Schedule.of([], placement=(0,))
    with pytest.raises(TypeError, match=r"microbatches=4\.0: how many there are is an int"):
        Schedule.of(["0F0"], microbatches=8 / 2)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="style='x'"):
        stage_to_rank(2, 2, "x")
    with pytest.raises(ValueError, match="ranks=0"):
        stage_to_rank(0)


def test_schedules_and_errors_leave_processes() -> None:
    """Pickled and made again, they are the same."""
    assert pickle.loads(pickle.dumps(zbv(2, 4))) == zbv(2, 4)
    with pytest.raises(ScheduleError) as error:
        validate(Schedule.of(["0F0"]))
    again = pickle.loads(pickle.dumps(error.value))
    assert (str(again), again.action) == (str(error.value), Action(Kind.B, 0, 0))


def test_what_is_printed_is_small() -> None:
    """However large the schedule."""
    assert len(str(one_f_one_b(200, 400))) < 5000
    assert "184 more ranks" in str(one_f_one_b(200, 400))
    assert repr(gpipe(2, 3)) == "<Schedule: 2 stages on 2 ranks, 3 micro-batches, 12 actions>"
    assert gpipe(1, 1)._repr_html_() == "<pre>1 stages on 1 ranks, 1 micro-batches\nrank 0: 0F0 0B0</pre>"
