"""Laws 32 and 33: what is right is accepted, what is wrong is refused by name."""

import random
import re
from collections.abc import Sequence

import attrs
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from functional_ds import comm
from functional_ds.pipelining import Kind, Schedule, ScheduleError, gpipe, inference, lower, one_f_one_b, validate, zb_h1, zbv
from functional_ds.testing import schedules, seeds
from tests.pipelining.cases import generated, mutation


@pytest.mark.law(32)
@given(schedules() | generated())
def test_valid_schedules_are_accepted(schedule: Schedule) -> None:
    """Whatever places its stages anyhow and lets data flow, lowered or not."""
    assert validate(schedule) is schedule
    validate(lower(schedule, gathers=True))


@given(schedules(training=False))
def test_inference_is_accepted_as_such(schedule: Schedule) -> None:
    """Forwards alone are a schedule if no training was asked for, and none if it was."""
    validate(schedule, training=False)
    validate(lower(schedule), training=False)
    with pytest.raises(ScheduleError, match="is missing"):
        validate(schedule)


def test_training_is_no_inference() -> None:
    """A backward is refused where none is wanted."""
    with pytest.raises(ScheduleError, match=r"1W2 is a backward; without training"):
        validate(zb_h1(2, 3), training=False)


@pytest.mark.law(33)
@given(schedules() | generated(), seeds())
def test_every_mutation_is_rejected(schedule: Schedule, seed: int) -> None:
    """Law 33: drop, duplicate, swap across a dependency, wrong micro-batch, wrong rank: the action is named."""
    broken = mutation(schedule, random.Random(seed))
    assume(broken is not None)
    assert broken is not None
    with pytest.raises(ScheduleError) as error:
        validate(broken.schedule)
    assert broken.culprits & set(re.findall(r"\w+", str(error.value))), broken
    if any(action.kind is not Kind.F for row in broken.schedule for action in row):  # else it is an inference now
        with pytest.raises(ScheduleError):
            lower(broken.schedule)


@pytest.mark.law(33)
@given(schedules() | generated(), seeds(), st.sampled_from(["drop", "duplicate", "move", "micro-batch", "rank"]))
def test_every_mutation_of_what_was_lowered_is_rejected(schedule: Schedule, seed: int, name: str) -> None:
    """A message that is missing, there twice, on the wrong side of its compute action, of a wrong micro-batch or rank."""
    chooser, rows = random.Random(seed), [list(row) for row in lower(schedule, gathers=True)]
    there = [
        (rank, place)
        for rank, row in enumerate(rows)
        for place, action in enumerate(row)
        if action.kind in (MESSAGES if name in ("move", "micro-batch") else OTHERS)
    ]
    assume(there)
    rank, place = chooser.choice(there)
    assume(name != "drop" or schedule.stages > 1 or rows[rank][place].kind is not Kind.REDUCE)  # then nobody reduces
    row = rows[rank]
    action = culprit = row[place]
    if name == "drop":
        del row[place]
    elif name == "duplicate":
        row.insert(place, action)
    elif name == "move":
        row.insert(0 if action.kind in (Kind.SEND_F, Kind.SEND_B) else len(row), row.pop(place))
    elif name == "micro-batch":
        row[place] = culprit = action._replace(microbatch=(action.microbatch + 1) % (schedule.microbatches + 1))
    else:
        assume(schedule.ranks > 1)
        row.remove(action)
        rows[(rank + 1) % schedule.ranks].append(action)
    broken = Schedule.of(rows, schedule.placement, schedule.microbatches)
    with pytest.raises(ScheduleError) as error:
        validate(broken)
    if name != "drop" or action.kind < Kind.GATHER:  # what comes of a missing gather is noticed at the next action
        assert str(culprit) in str(error.value)


MESSAGES = (Kind.SEND_F, Kind.RECV_F, Kind.SEND_B, Kind.RECV_B)
OTHERS = (*MESSAGES, Kind.GATHER, Kind.EVICT, Kind.REDUCE)


def run(schedule: Schedule, *, tags: bool = False) -> bool:
    """Sends the messages of a lowered schedule in the simulator, as rendezvous; whether each value came where it belongs."""

    def program() -> bool:
        here, right = comm.world(), True
        for step in schedule.steps(here.rank):
            batch = [_message(schedule, *action) for action in step if Kind.SEND_F <= action.kind <= Kind.RECV_B]
            ops = [attrs.evolve(op, tag=op.tag if tags else 0) for op in batch]
            for op, value in zip(batch, comm.batch_p2p(ops), strict=True):
                right &= not isinstance(op, comm.Recv) or value.item() == op.tag
        return right

    return all(comm.simulate(program, world_size=schedule.ranks))


def _message(schedule: Schedule, kind: Kind, stage: int, microbatch: int) -> comm.Send | comm.Recv:
    forward, sends = kind in (Kind.SEND_F, Kind.RECV_F), kind in (Kind.SEND_F, Kind.SEND_B)
    other = stage + (1 if forward == sends else -1)
    tag = (min(stage, other) * 2 + forward) * schedule.microbatches + microbatch
    value, peer = torch.tensor(tag), schedule.placement[other]
    return comm.Send(value, peer, tag=tag) if sends else comm.Recv(value, peer, tag=tag)


def shuffled(rows: Sequence[Sequence], chooser: random.Random) -> list[list]:
    """Messages elsewhere in their rows, still after what computes them and before what needs them."""
    moved = []
    for old in rows:
        row = list(old)
        for action in [action for action in row if action.kind > Kind.B]:
            row.remove(action)
            sends = action.kind in (Kind.SEND_F, Kind.SEND_B)
            forward = action.kind in (Kind.SEND_F, Kind.RECV_F)
            kinds = (Kind.F,) if forward else (Kind.I, Kind.B)
            beside = next(i for i, (kind, *ids) in enumerate(row) if kind in kinds and ids == [*action[1:]])
            row.insert(chooser.randint(beside + 1, len(row)) if sends else chooser.randint(0, beside), action)
        moved.append(row)
    return moved


@pytest.mark.law(33)
@given(schedules(microbatches=3), seeds())
def test_deadlocks_are_the_simulators(schedule: Schedule, seed: int) -> None:
    """Law 33: validate refuses a cycle if and only if the simulator, sending the messages, comes to a deadlock.

    Without a cycle it refuses what overtakes, which tags alone would bring where it belongs.
    """
    lowered = lower(schedule)
    assert run(lowered)
    rows = shuffled(lowered.actions, random.Random(seed))
    moved = Schedule.of(rows, schedule.placement, schedule.microbatches)
    try:
        validate(moved)
        why = ""
    except ScheduleError as error:
        why = str(error)
    if "waits in a cycle" in why:
        with pytest.raises(comm.errors.DeadlockError):
            run(moved, tags=True)
    elif why:
        assert "messages keep their order" in why
        assert run(moved, tags=True)
        assert not run(moved)
    else:
        assert run(moved)


def test_a_cycle_of_compute_actions_is_printed() -> None:
    """Each rank's line says what it waits for, and where that stands."""
    crossed = Schedule.of(["0F0 0B0 0F1 0B1", "1F1 1B1 1F0 1B0"])
    with pytest.raises(ScheduleError) as error:
        validate(crossed)
    assert str(error.value) == (
        "rank 0, place 1: 0B0 waits in a cycle:\n"
        "  rank 0 at place 1: 0B0 waits for 1B0, at place 3 of rank 1\n"
        "  rank 1 at place 0: 1F1 waits for 0F1, at place 2 of rank 0"
    )
    assert (error.value.rank, error.value.place, str(error.value.action)) == (0, 1, "0B0")


def test_a_cycle_of_messages_is_printed() -> None:
    """Data flows in order, but each rank waits for the other at another message."""
    crossed = Schedule.of(
        ["0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1", "1RECV_F1 1F1 1RECV_F0 1F0 1B0 1SEND_B0 1B1 1SEND_B1"]
    )
    validate(crossed.compute_only())
    with pytest.raises(ScheduleError) as error:
        validate(crossed)
    assert str(error.value) == (
        "rank 0, place 1: 0SEND_F0 waits in a cycle:\n"
        "  rank 0 at place 1: 0SEND_F0 waits for its other end on rank 1\n"
        "  rank 1 at place 0: 1RECV_F1 waits for its other end on rank 0"
    )


def test_messages_overtake_no_others() -> None:
    """A receive before that of what the same rank sends first, as transports without tags would mix them up."""
    rows = ["0F0 0F1 0SEND_F0 0SEND_F1 0B0 0B1", "1RECV_F1 1F1 1RECV_F0 1F0 1B0 1SEND_B0 1B1 1SEND_B1"]
    rows[0] = rows[0].replace("0B0", "0RECV_B0 0B0 0RECV_B1")
    with pytest.raises(ScheduleError) as error:
        validate(Schedule.of(rows))
    assert str(error.value) == (
        "rank 1, place 0: 1RECV_F1 comes before 1RECV_F0, at place 2, which rank 0 sends first; messages keep their order"
    )
    validate(Schedule.of([rows[0].replace("0SEND_F0 0SEND_F1", "0SEND_F1 0SEND_F0"), rows[1]]))


def test_messages_are_demanded_where_there_are_some() -> None:
    """Gathers and reductions may stand alone; with one message all others must be there."""
    rows = ["0GATHER 0F0 0B0 0REDUCE 0EVICT", "1GATHER 1F0 1B0 1REDUCE 1EVICT"]
    validate(Schedule.of(rows))
    with pytest.raises(ScheduleError, match="0SEND_F0 is missing"):
        validate(Schedule.of([rows[0], "1GATHER 1RECV_F0 1F0 1B0 1REDUCE 1EVICT"]))


def test_rows_are_no_schedule() -> None:
    """They are refused as such."""
    with pytest.raises(TypeError, match=r"schedule=\[\['0F0', '0B0'\]\] is not a Schedule"):
        validate([["0F0", "0B0"]])  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (["0F0 0B0 5F0"], r"rank 0, place 2: 5F0 is of stage 5, but there are 1"),
        (["0F0 0B0 0F3"], r"place 2: 0F3 is of micro-batch 3, but there are 1"),
        (["0F0 0F0 0B0"], r"place 1: 0F0 is there again: 0F0 at place 0 has done it"),
        (["0F0 0I0 0W0 0B0"], r"place 3: 0B0 is there again: 0I0 at place 1 has done it"),
        (["0F0 0B0 0W0"], r"place 2: 0W0 is there again: 0B0 has done it"),
        (["0F0 0W0"], r"rank 0: 0I0 is missing; the backward for weights builds on it"),
        (["0F0 0I0"], r"rank 0: 0W0 is missing; I leaves the weights' gradients to it"),
        (["0B0 0F0"], r"place 0: 0B0 needs 0F0, which comes after it, at place 1"),
        (["0F0 0W0 0I0"], r"place 1: 0W0 needs 0I0"),
        (["1F0 0F0 1B0 0B0"], r"place 0: 1F0 needs 0F0"),
        (["0F0 0SEND_F0 1F0 1B0 0B0"], r"0SEND_F0 is needless: stages 0 and 1 are both on rank 0"),
        (["0F0 0RECV_F0 0B0"], r"0RECV_F0 has no other end"),
        (["0GATHER 0F0 0EVICT 0B0"], r"place 3: 0B0 comes while the parameters are not gathered"),
        (["0GATHER 0GATHER 0F0 0B0"], r"place 1: 0GATHER finds the parameters whole already"),
        (["0F0 0REDUCE 0B0"], r"place 1: 0REDUCE comes before the stage's last backward"),
        (["0F0 0B0 0REDUCE 0REDUCE"], r"place 3: 0REDUCE is there again"),
        (["0F0 1F0 1B0 0B0 0REDUCE"], r"rank 0: 1REDUCE is missing"),
    ],
)
def test_what_is_wrong_is_named(rows: list[str], message: str) -> None:
    """The first offending action, its rank, its place, and why."""
    stages = 2 if any("1F0" in row for row in rows) else 1
    with pytest.raises(ScheduleError, match=message):
        validate(Schedule.of(rows, [0] * stages, 1))


def test_in_flight_is_bounded() -> None:
    """For all ranks, or each of them; the action that is one too many is named."""
    validate(one_f_one_b(3, 8), in_flight=(3, 2, 1))
    validate(zbv(3, 8), in_flight=6)
    with pytest.raises(ScheduleError, match=r"rank 0, place 3: 0F3 puts 4 in flight; in_flight allows 3"):
        validate(gpipe(3, 8), in_flight=3)
    with pytest.raises(ScheduleError, match="rank 2"):
        validate(one_f_one_b(3, 8), in_flight=(3, 2, 0))
    with pytest.raises(ValueError, match="has 2 bounds for 3 ranks"):
        validate(gpipe(3, 8), in_flight=(3, 2))
    validate(inference(2, 3), training=False, in_flight=3)
