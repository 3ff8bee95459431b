"""Results to come: read too early, waited for twice, dropped, mapped, joined, and failing."""

from typing import Any

import pytest
import torch

from functional_ds import comm
from functional_ds.comm import Pending


def rank() -> int:
    return comm.world().rank


def started(value: float = 1.0) -> Any:
    return comm.start(comm.all_reduce, torch.tensor([value]))


# -- reading it early -------------------------------------------------------------------------------------------------


def test_reading_it_early_says_to_wait() -> None:
    """Any attribute of a tensor: the error names the call and what would do."""

    def program() -> list[str]:
        pending, messages = started(), []
        for name in ("shape", "item", "sum", "grad"):
            with pytest.raises(AttributeError) as caught:
                getattr(pending, name)
            messages.append(str(caught.value))
        pending.wait()
        return messages

    for r, messages in enumerate(comm.simulate(program, world_size=2)):
        for name, message in zip(("shape", "item", "sum", "grad"), messages, strict=True):
            assert message == (
                f"Pending(all_reduce(op='sum') on Group('world', rank {r} of 2, ranks [0, 1]), under way) "
                f"is a result to come and has no {name!r}; wait() gives the result"
            )


@pytest.mark.parametrize(
    "use", [lambda p: p + 1, lambda p: p[0], len, float, lambda p: torch.ones(1) + p, torch.sum], ids=range(6)
)
def test_computing_with_it_early_fails(use: Any) -> None:
    """It is no tensor, and no function of torch takes it for one."""

    def program() -> None:
        pending = started()
        with pytest.raises(TypeError):
            use(pending)
        pending.wait()

    comm.simulate(program, world_size=2)


def test_it_has_no_private_attributes_to_guess_at() -> None:
    """What copy and pickle probe for is simply not there."""
    assert not hasattr(started(), "__array__")
    assert not hasattr(started(), "_data")


# -- waiting ----------------------------------------------------------------------------------------------------------


def test_waiting_twice_gives_the_same_tensors() -> None:
    """wait() is wait(), in a simulation and alone."""

    def program() -> bool:
        pending = started(rank())
        first = pending.wait()
        return pending.wait() is first and pending.poll()

    assert comm.simulate(program, world_size=3) == [True] * 3
    assert program()


def test_then_is_the_function_of_the_result() -> None:
    """p.then(f).wait() = f(p.wait()), computed once, at the first wait."""

    def program() -> tuple[float, float, float, int]:
        calls: list[int] = []

        def double(x: torch.Tensor) -> float:
            calls.append(1)
            return 2 * x.item()

        pending = started(1.0 + rank())
        doubled = pending.then(double)
        squared = doubled.then(lambda value: value**2)
        assert not calls
        results = doubled.wait(), squared.wait(), pending.wait().item()
        assert doubled.wait() == results[0]
        return *results, len(calls)

    assert comm.simulate(program, world_size=2) == [(6.0, 36.0, 3.0, 1)] * 2


def test_several_as_one() -> None:
    """Pending.all(ps).wait() = [p.wait() for p in ps]; it is done when all are."""

    def program() -> Any:
        pendings = [started(10.0**i) for i in range(3)]
        together = Pending.all(pendings)
        text = repr(together)
        values = [x.item() for x in together.wait()]
        return values, together.poll(), text.count("all_reduce"), together.wait() is together.wait()

    assert comm.simulate(program, world_size=2) == [([2.0, 20.0, 200.0], True, 3, True)] * 2
    assert Pending.all([]).wait() == []
    assert Pending.all([]).poll()


def test_all_is_over_when_the_last_is() -> None:
    """A poll of several is False while one is under way."""

    def program() -> list[bool]:
        gate = comm.world().channel("gate")
        if rank() == 0:
            comm.all_reduce(torch.ones(1))
            comm.barrier(gate)
            comm.all_reduce(torch.ones(1))
            return []
        pending = Pending.all([started(), started()])
        early = pending.poll(1.0)  # rank 0 waits at the gate before the second
        comm.barrier(gate)
        return [early, pending.poll(1.0), pending.wait()[0].item() == 2]

    for seed in range(4):
        assert comm.simulate(program, world_size=2, seed=seed)[1] == [False, True, True]


def test_gradients_flow_through_then_and_all() -> None:
    def program() -> float:
        x = torch.tensor([1.0 + rank()], requires_grad=True)
        pendings = [comm.start(comm.all_reduce, x), comm.start(comm.all_reduce, x**2)]
        total = Pending.all(pendings).then(lambda results: results[0] + results[1]).wait()
        total.sum().backward()
        return x.grad.item()

    assert comm.simulate(program, world_size=2) == [2 * (1 + 2 * (1 + r)) for r in range(2)]


# -- dropping ---------------------------------------------------------------------------------------------------------


def drops() -> list[float]:
    """Only even ranks wait; the others' part is carried out all the same."""
    found = []
    for step in range(4):
        pending = comm.start(comm.all_reduce, torch.full((1000,), 1.0 + step))
        if rank() % 2 == 0:
            found.append(pending.wait()[0].item())
        del pending
    found.append(comm.all_reduce(torch.ones(1)).item())
    return found


def test_a_dropped_one_is_carried_out_for_the_others() -> None:
    expected = [[2.0, 4.0, 6.0, 8.0, 2.0], [2.0]]
    for seed in range(3):
        assert comm.simulate(drops, world_size=2, seed=seed) == expected
    assert comm.spawn(drops, world_size=2) == expected


def test_a_dropped_one_that_others_never_join_is_reported() -> None:
    """All finish, and the leftover is named: who started what on which group, and who never came."""

    def program() -> None:
        if rank() == 1:
            comm.start(comm.all_gather, torch.ones(2))

    with pytest.raises(comm.errors.UnmatchedError) as caught:
        comm.simulate(program, world_size=3)
    (line,) = str(caught.value).splitlines()[1:]
    assert line.startswith(
        "  rank 1 started all_gather(dim=0, tiled=True) of [float32[2]] on group 'world' at test_pending.py:"
    )
    assert line.endswith(" for rank 0, 2")


# -- failing ----------------------------------------------------------------------------------------------------------


class OurError(Exception):
    pass


def test_a_failing_wait_fails_again() -> None:
    """An error is not taken for a result: each wait raises it, and so do those of what was made from it."""

    def fail(result: Any) -> Any:
        raise OurError("no")

    def program() -> int:
        pending = started(1.0)
        failing = pending.then(fail)
        together = Pending.all([pending, failing])
        after = failing.then(lambda result: result)
        raised = 0
        for each in (failing, failing, together, together, after, after):
            with pytest.raises(OurError):
                each.wait()
            raised += 1
        assert "under way" in repr(failing)
        assert pending.wait().item() == comm.world().size
        return raised

    assert comm.simulate(program, world_size=2) == [6, 6]
    assert program() == 6
