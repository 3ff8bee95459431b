"""Whose fault an end is. How processes end stands in tests/ends."""

import pytest
import torch
import torch.distributed as dist

from functional_ds import comm
from functional_ds.comm.worlds.leaving import ending_error, follows_another_rank


def raised(error: BaseException, cause: BaseException | None = None) -> BaseException:
    try:
        raise error from cause
    except BaseException as found:
        return found


def test_an_error_after_a_lost_connection_follows_another_ranks() -> None:
    """Also where the program raised another one then."""
    lost = raised(comm.errors.CommError("rank 0 failed"), RuntimeError("Connection closed by peer"))
    assert follows_another_rank(lost)
    assert follows_another_rank(raised(ValueError("no batch"), lost))
    assert follows_another_rank(comm.errors.TimedOutError("rank 1 had not come"))


def test_other_errors_are_this_ranks() -> None:
    assert not follows_another_rank(None)
    assert not follows_another_rank(raised(ValueError("ours"), RuntimeError("torch's")))
    assert not follows_another_rank(comm.errors.MismatchError("different collectives"))
    assert not follows_another_rank(
        raised(comm.errors.CommError("outer"), comm.errors.CommError("its process group was destroyed"))
    )


def test_an_exception_on_its_way_is_the_reason_for_an_end() -> None:
    found: list[BaseException | None] = []

    def program() -> None:
        try:
            raise KeyError("ours")
        finally:
            found.append(ending_error())

    with pytest.raises(KeyError):
        program()
    assert isinstance(found[0], KeyError)


def test_calls_at_the_end_of_a_process_need_no_thread() -> None:
    """Those of functions that run after the world's threads have ended."""
    here = comm.init_distributed("gloo", world_size=1, rank=0)
    try:
        here.world.finish()  # type: ignore[attr-defined]
        pending = comm.start(comm.all_reduce, torch.ones(2))
        assert pending.poll()
        assert pending.wait().tolist() == comm.all_reduce(torch.ones(2)).tolist() == [1.0, 1.0]
    finally:
        comm.destroy_process_group()
    assert not dist.is_initialized()
