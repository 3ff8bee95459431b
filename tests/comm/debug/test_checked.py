"""Programs with planted faults: the simulator names each; checked processes do, and none hangs."""

from datetime import timedelta
from typing import Any

import pytest
import torch

from functional_ds import comm
from functional_ds.testing import assert_same
from tests.comm import cases, faults


@pytest.mark.parametrize("fault", faults.FAULTS, ids=lambda fault: fault.name)
@pytest.mark.parametrize("seed", range(5))
def test_the_simulator_names_the_fault(fault: faults.Fault, seed: int) -> None:
    with pytest.raises(fault.error) as caught:
        comm.simulate(fault.program, world_size=3, seed=seed)
    story = "\n".join([str(caught.value), *getattr(caught.value, "__notes__", [])])
    for said in fault.says:
        assert said in story


@pytest.fixture(scope="module")
def found() -> list[dict[str, str | None]]:
    """What each of three checked processes said to every fault: starting them costs seconds, so it is done once."""
    return comm.spawn(faults.caught, [fault.name for fault in faults.FAULTS], 1.5, world_size=3)


@pytest.mark.parametrize("fault", faults.FAULTS, ids=lambda fault: fault.name)
def test_checked_processes_name_the_fault(fault: faults.Fault, found: list[dict[str, str | None]]) -> None:
    for rank, said in enumerate(found):
        story = said[fault.name]
        if rank not in fault.ranks:
            assert story is None, f"rank {rank} has nothing to complain of"
            continue
        assert story is not None, f"rank {rank} should have raised"
        for expected in fault.ranks[rank]:
            assert expected in story


def checked_cases(world_size: int) -> list[Any]:
    drawn = [case for case in cases.draw(96, world_size, seed=5) if not case.special]
    with comm.debug.checked():
        return cases.run(drawn)


@pytest.mark.law(18)
def test_checking_changes_no_result() -> None:
    """spawn(checked program) = simulate(program), for every row of the table."""
    spawned = comm.spawn(checked_cases, 2, world_size=2)
    simulated = comm.simulate(checked_cases, 2, world_size=2)
    assert_same(spawned, simulated)


def keeps_the_store_small() -> int:
    """Entries are deleted once all have read them."""
    with comm.debug.checked():
        for _ in range(50):
            comm.all_reduce(torch.ones(1))
            comm.start(comm.all_gather, torch.ones(1)).wait()
    comm.debug.monitored_barrier()
    world: Any = comm.world().world
    return world.store.num_keys()


def test_the_store_does_not_grow() -> None:
    assert max(comm.spawn(keeps_the_store_small, world_size=2)) < 40


def with_a_dead_rank() -> str:
    """Rank 1 dies without a word."""
    with comm.debug.checked(timeout=timedelta(seconds=1)):
        faults.dies_on_one_rank()
    return "no error"


def test_a_rank_that_dies_ends_the_run_and_is_named() -> None:
    with pytest.raises(comm.errors.RankFailedError, match=r"rank 1 of 3 ended without a result \(exit code 3\)"):
        comm.spawn(with_a_dead_rank, world_size=3)


def missing_at_a_barrier() -> str:
    try:
        if comm.world().rank != 1:
            comm.debug.monitored_barrier(timeout=timedelta(seconds=0.5))
    except comm.errors.TimedOutError as error:
        return str(error)
    finally:
        comm.debug.monitored_barrier(comm.new_group(range(comm.world().size), "after"), timeout=timedelta(seconds=30))
    return "nothing"


def test_a_monitored_barrier_names_who_is_missing() -> None:
    first, second, third = comm.spawn(missing_at_a_barrier, world_size=3)
    assert second == "nothing"
    for story in (first, third):
        assert "in barrier() of [] on group 'world' at test_checked.py" in story
        assert "rank 1 had not come" in story
    with pytest.raises(comm.errors.DeadlockError, match="for rank 1"):
        comm.simulate(skips_the_barrier, world_size=3)


def skips_the_barrier() -> None:
    if comm.world().rank != 1:
        comm.debug.monitored_barrier()


def test_bad_timeouts_are_refused() -> None:
    with pytest.raises(ValueError, match="must be positive"):
        comm.spawn(waits_for_no_time, world_size=1)


def waits_for_no_time() -> None:
    with comm.debug.checked(timeout=timedelta(0)):
        pass


def leaves_a_message_behind() -> str | None:
    """Nobody waits for the message, and nobody receives it."""
    try:
        with comm.debug.checked(timeout=timedelta(seconds=1)):
            if comm.world().rank == 0:
                comm.start(comm.send, torch.ones(2), 1)
    except comm.errors.TimedOutError as error:
        return str(error)
    return None


def test_a_message_that_nobody_receives_is_reported_at_the_end() -> None:
    first, second = comm.spawn(leaves_a_message_behind, world_size=2)
    assert first is not None
    assert second is None
    assert "in send(dst=1) of [float32[2]]" in first
    assert "rank 1 has left the checked block" in first


def goes_on_after_errors() -> tuple[int, bool, int]:
    """A tree without leaves is a call, too; an error that the program has caught does not come again at the end."""
    caught = 0
    with comm.debug.checked(timeout=timedelta(seconds=20)):
        comm.all_reduce([])
        try:
            comm.all_reduce(torch.ones(1 + comm.world().rank))
        except comm.errors.MismatchError:
            caught += 1
        total = comm.all_reduce(torch.ones(1)).item()
    inner = comm.simulate(lambda: comm.init_distributed().size, world_size=3)  # a rank may simulate a world of its own
    return caught, total == comm.world().size, inner[0]


def test_a_checked_block_goes_on_after_errors() -> None:
    assert comm.spawn(goes_on_after_errors, world_size=2) == [(1, True, 3)] * 2
