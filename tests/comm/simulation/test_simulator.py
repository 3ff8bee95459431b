"""The simulator: one schedule for a seed, one result for all seeds, and errors that say who, what and where."""

import os
import random
import signal
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from functional_ds import comm
from functional_ds.testing import Inputs, assert_same, inputs, seeds, world_sizes

HERE = Path(__file__).name


def rank() -> int:
    return comm.world().rank


def next_line() -> str:
    """The file and line behind the caller's, as errors name them."""
    return f"{HERE}:{sys._getframe(1).f_lineno + 1}"


# -- the schedule -----------------------------------------------------------------------------------------------------


def interleaving(world_size: int, seed: int) -> list[tuple[int, int]]:
    """Who ran when, in a program with a few collectives."""
    seen: list[tuple[int, int]] = []

    def program() -> None:
        for step in range(3):
            seen.append((rank(), step))
            comm.all_reduce(torch.ones(1))

    comm.simulate(program, world_size=world_size, seed=seed)
    return seen


@given(world_sizes(), seeds())
def test_a_seed_gives_one_interleaving(world_size: int, seed: int) -> None:
    """The schedule is a function of the seed."""
    assert interleaving(world_size, seed) == interleaving(world_size, seed)


def test_seeds_give_different_interleavings() -> None:
    """Ten seeds try more than one schedule; else independence of the seed would say nothing."""
    assert len({tuple(interleaving(4, seed)) for seed in range(10)}) > 5


@given(inputs(max_leaves=2), st.lists(seeds(), min_size=2, max_size=3, unique=True))
def test_the_result_does_not_depend_on_the_seed(case: Inputs, tried: list[int]) -> None:
    """simulate(program, seed=s) = simulate(program, seed=t)."""

    def program() -> Any:
        x = case.of(rank())
        pending = comm.start(comm.all_gather, x, tiled=False)
        total = comm.all_reduce(x)
        draw = torch.rand(2)
        return pending.wait(), total, comm.broadcast(draw, src=case.size - 1), torch.rand(1)

    first, *others = [comm.simulate(program, world_size=case.size, seed=seed) for seed in tried]
    for other in others:
        assert_same(other, first)


def test_results_come_in_rank_order() -> None:
    """simulate(program)[r] is rank r's; arguments are handed on."""
    for seed in range(5):
        assert comm.simulate(lambda a, b: (rank(), comm.world().size, a, b), 1, "x", world_size=3, seed=seed) == [
            (0, 3, 1, "x"),
            (1, 3, 1, "x"),
            (2, 3, 1, "x"),
        ]


def test_many_ranks() -> None:
    """64 ranks on a mesh of 4 × 4 × 4."""

    def program() -> tuple[int, int]:
        mesh = comm.mesh(a=4, b=4, c=4)
        x = torch.tensor(rank())
        for axis in "abc":
            x = comm.all_reduce(x, mesh[axis])
        return int(x), int(comm.all_reduce(torch.tensor(rank())))

    assert comm.simulate(program, world_size=64) == [(2016, 2016)] * 64


def test_many_ranks_with_gradients_and_messages() -> None:
    """64 ranks: a permutation's gradient comes back around, and pairs swap while the others go on."""

    def program() -> tuple[float, float, int]:
        x = torch.tensor([1.0 + rank()], requires_grad=True)
        y = comm.permute(x, comm.Permutation.shift(64, 5))
        (y * rank()).sum().backward()
        other = rank() ^ 1
        swapped = comm.batch_p2p([comm.Send(torch.tensor(rank()), other), comm.Recv(torch.tensor(0), other)])[1]
        return y.item(), x.grad.item(), int(swapped)

    expected = [(1.0 + (r - 5) % 64, float((r + 5) % 64), r ^ 1) for r in range(64)]
    assert comm.simulate(program, world_size=64) == expected


def test_a_simulation_inside_a_simulation() -> None:
    """Each rank has a world of its own inside, and is itself again outside."""

    def program() -> Any:
        inner = comm.simulate(lambda x: comm.all_gather(torch.tensor([x, rank()])).tolist(), rank(), world_size=2)
        return inner, rank(), comm.all_reduce(torch.tensor(1)).item()

    for r, (inner, outer_rank, total) in enumerate(comm.simulate(program, world_size=3)):
        assert inner == [[r, 0, r, 1]] * 2
        assert (outer_rank, total) == (r, 3)


def test_outside_there_is_a_world_of_one_again() -> None:
    comm.simulate(comm.barrier, world_size=2)
    assert (comm.world().rank, comm.world().size) == (0, 1)


def test_a_world_has_a_rank() -> None:
    with pytest.raises(ValueError, match=r"world_size=0: a world has at least one rank"):
        comm.simulate(rank, world_size=0)


# -- the surroundings -------------------------------------------------------------------------------------------------


@given(seeds(), seeds())
def test_each_rank_has_a_generator_of_its_own(mine: int, seed: int) -> None:
    """Draws of a rank are those of a program that runs alone, however the ranks interleave."""

    def program() -> list[float]:
        torch.manual_seed(mine + rank())
        draws = []
        for _ in range(3):
            draws.append(torch.rand(1).item())
            comm.barrier()
        return draws

    def alone(r: int) -> list[float]:
        torch.manual_seed(mine + r)
        return [torch.rand(1).item() for _ in range(3)]

    with torch.random.fork_rng(devices=[]):
        assert comm.simulate(program, world_size=3, seed=seed) == [alone(r) for r in range(3)]


def test_the_ranks_start_from_the_callers_generator_and_leave_it_alone() -> None:
    """All ranks' first draw is the caller's next one, which is still to come after the run; also after an error."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        before = torch.get_rng_state()
        first = comm.simulate(lambda: (comm.barrier(), torch.rand(3))[1], world_size=3)
        assert torch.equal(torch.get_rng_state(), before)
        with pytest.raises(KeyError):
            comm.simulate(lambda: (torch.rand(3), {}[0]), world_size=3)
        assert torch.equal(torch.get_rng_state(), before)
        expected = torch.rand(3)
        assert all(torch.equal(draw, expected) for draw in first)


GENERATORS: dict[str, tuple[Callable[[int], None], Callable[[], float]]] = {
    "random": (random.seed, random.random),
    "random.gauss": (random.seed, lambda: random.gauss(0, 1)),  # keeps every second number for the next call
    "numpy": (np.random.seed, np.random.rand),
    "numpy.random.randint": (np.random.seed, lambda: int(np.random.randint(2**31))),
}


@pytest.mark.parametrize("which", GENERATORS)
@given(seeds(), seeds())
def test_pythons_and_numpys_generators_are_each_ranks_own(which: str, mine: int, seed: int) -> None:
    """A rank's draws are those of a program that runs alone; the caller's generator is as it was."""
    start, draw = GENERATORS[which]

    def program() -> list[float]:
        start((mine + rank()) % 2**31)
        draws = []
        for _ in range(3):
            draws.append(draw())
            comm.barrier()
        return draws

    def alone(r: int) -> list[float]:
        start((mine + r) % 2**31)
        return [draw() for _ in range(3)]

    expected = [alone(r) for r in range(3)]
    start(5)
    following = draw()
    start(5)
    assert comm.simulate(program, world_size=3, seed=seed) == expected
    assert comm.simulate(lambda: (comm.barrier(), draw())[1], world_size=3, seed=seed) == [following] * 3
    assert draw() == following


@pytest.mark.parametrize("seed", range(6))
def test_warning_filters_are_each_ranks_own(seed: int) -> None:
    """A catch_warnings block that is open over a collective catches its own rank's warnings, and nobody else's."""

    def program() -> list[str]:
        if rank() == 0:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                warnings.warn("one", stacklevel=1)
                comm.barrier()
                warnings.warn("two", stacklevel=1)
                comm.barrier()
            comm.barrier()
            return [str(warning.message) for warning in caught]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore" if rank() == 1 else "error")
            raised = []
            for _ in range(3):
                try:
                    warnings.warn(f"of rank {rank()}", stacklevel=1)
                except UserWarning as warning:
                    raised.append(str(warning))
                comm.barrier()
        return raised

    before = warnings.filters, list(warnings.filters), warnings.showwarning
    assert comm.simulate(program, world_size=3, seed=seed) == [["one", "two"], [], ["of rank 2"] * 3]
    assert (warnings.filters, list(warnings.filters), warnings.showwarning) == before
    assert warnings.filters is before[0]


def test_the_warning_filters_outlive_an_error() -> None:
    before = warnings.filters

    def program() -> None:
        with warnings.catch_warnings():
            comm.barrier()
            if rank() == 1:
                raise OurError
            comm.barrier()

    with pytest.raises(OurError):
        comm.simulate(program, world_size=3)
    assert warnings.filters is before


@pytest.mark.parametrize("world", ["simulate", "shapes_only", "symmetric"])
def test_settings_of_a_rank_are_its_own(world: str) -> None:
    """Filters set without catch_warnings, and the default dtype: neither another rank nor the caller has them afterwards."""

    def program() -> tuple[Any, ...]:
        warnings.simplefilter("error" if rank() else "ignore")
        torch.set_default_dtype(torch.float64 if rank() else torch.float16)
        comm.barrier()
        return warnings.filters[0][0], torch.get_default_dtype(), torch.ones(1, device="meta").dtype

    before = [*warnings.filters], torch.get_default_dtype()
    if world == "symmetric":
        assert comm.symmetric(program, world_size=2) == ("ignore", torch.float16, torch.float16)
    else:
        found = comm.simulate(program, world_size=2, shapes_only=world == "shapes_only")
        assert found == [("ignore", torch.float16, torch.float16), ("error", torch.float64, torch.float64)]
    assert ([*warnings.filters], torch.get_default_dtype()) == before


def test_a_warning_shown_once_is_shown_once_whoever_ran_between() -> None:
    """Ranks that take turns do not make modules forget what they have shown."""

    def program() -> None:
        for _ in range(5):
            warnings.warn("seen", stacklevel=1)
            comm.barrier()

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        comm.simulate(program, world_size=2)
    assert [str(warning.message) for warning in caught] == ["seen"]


def interrupted(program: Callable[[], Any]) -> None:
    """Simulates three ranks until Ctrl-C."""
    timer = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        comm.simulate(program, world_size=3)
    timer.join()


def test_ctrl_c_ends_ranks_that_call_no_collective() -> None:
    """Where they are, with what they do at the end; then there may be another simulation."""
    ended = []

    def program() -> None:
        comm.barrier()
        try:
            while rank() == 1:
                pass
            comm.barrier()
        finally:
            ended.append(rank())

    interrupted(program)
    assert sorted(ended) == [0, 1, 2]
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("rank")]
    assert comm.simulate(rank, world_size=2) == [0, 1]


def test_ctrl_c_leaves_a_rank_behind_that_python_cannot_end() -> None:
    """It ends by itself, and changes nothing of the caller's."""
    held = threading.Event()

    def program() -> None:
        if rank() == 1:
            held.wait()
        comm.barrier()

    before = torch.get_rng_state()
    interrupted(program)
    torch.manual_seed(7)
    mine = torch.get_rng_state()
    held.set()
    for thread in threading.enumerate():
        if thread.name.startswith("rank"):
            thread.join(10)
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("rank")]
    assert torch.equal(torch.get_rng_state(), mine)
    torch.set_rng_state(before)


def test_threads_are_as_before() -> None:
    """No thread stays behind, and torch has as many of its own as before, in new threads, too."""

    def torch_threads() -> list[int]:
        found = [torch.get_num_threads()]
        thread = threading.Thread(target=lambda: found.append(torch.get_num_threads()))
        thread.start()
        thread.join()
        return found

    threads, at_first = threading.active_count(), torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        comm.simulate(comm.barrier, world_size=8)
        with pytest.raises(KeyError):
            comm.simulate(lambda: {}[0], world_size=8)
        assert (threading.active_count(), torch_threads()) == (threads, [3, 3])
    finally:
        torch.set_num_threads(at_first)


# -- autograd ---------------------------------------------------------------------------------------------------------


def test_backward_runs_through_a_whole_network() -> None:
    """A data-parallel network's gradients, by an all_reduce of the loss, are those of the whole batch."""
    weights = [torch.randn(4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(i)) for i in range(2)]
    batch = torch.randn(6, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(9))

    def gradients(rows: torch.Tensor, total: Callable[[torch.Tensor], torch.Tensor]) -> list[torch.Tensor]:
        first, second = (w.clone().requires_grad_() for w in weights)
        # a collective inside of the network and one behind it
        mean = total((rows @ first).sum(0)) / len(batch)
        loss = total((torch.tanh(rows @ first - mean) @ second).square().sum())
        return list(torch.autograd.grad(loss, (first, second)))

    alone = gradients(batch, lambda x: x)

    def program() -> list[torch.Tensor]:
        mine = gradients(batch.tensor_split(3)[rank()], comm.all_reduce)
        return comm.all_reduce(mine, op="avg")  # each rank's loss is the total: the sum of three equal losses

    for result in comm.simulate(program, world_size=3):
        for got, expected in zip(result, alone, strict=True):
            torch.testing.assert_close(got, expected)


def test_no_graph_without_gradients() -> None:
    """Under no_grad, or where nothing requires a gradient, results are plain tensors."""

    def program() -> tuple[bool, bool]:
        x = torch.ones(2, requires_grad=True)
        with torch.no_grad():
            plain = comm.all_reduce(x)
        return plain.requires_grad, comm.all_reduce(x.detach()).requires_grad

    assert comm.simulate(program, world_size=2) == [(False, False)] * 2
    assert program() == (False, False)


# -- pending ----------------------------------------------------------------------------------------------------------


def test_a_pending_gives_the_same_each_time() -> None:
    """wait() = wait(), the very same tensors; its text says how far it is."""

    def program() -> Any:
        pending = comm.start(comm.all_reduce, {"x": torch.tensor(1 + rank())})
        before = repr(pending)
        first = pending.wait()
        assert pending.wait()["x"] is first["x"]
        return first["x"].item(), before, repr(pending)

    for r, (value, before, after) in enumerate(comm.simulate(program, world_size=2)):
        assert value == 3
        assert before == f"Pending(all_reduce(op='sum') on Group('world', rank {r} of 2, ranks [0, 1]), under way)"
        assert after.endswith(", done)")


def test_a_pending_may_be_dropped() -> None:
    """Nobody has to wait; what comes after is not disturbed."""

    def program() -> int:
        comm.start(comm.all_reduce, torch.ones(3))
        if rank() == 1:
            comm.start(comm.all_gather, torch.ones(2)).wait()
        else:
            comm.start(comm.all_gather, torch.ones(2))
        return comm.all_reduce(torch.tensor(rank())).item()

    assert comm.simulate(program, world_size=3) == [3, 3, 3]


def test_pendings_are_waited_for_in_any_order() -> None:
    """Each pending has its own result, whatever the order of the waits; gradients flow through each."""

    def program() -> Any:
        x = torch.tensor([1.0 + rank()], requires_grad=True)
        pendings = [comm.start(comm.all_reduce, x * 10**i) for i in range(3)]
        order = [(i + rank()) % 3 for i in range(3)]
        results = {i: pendings[i].wait() for i in order}
        grads = [torch.autograd.grad(results[i], x, retain_graph=True)[0].item() for i in range(3)]
        return [results[i].item() for i in range(3)], grads

    assert comm.simulate(program, world_size=3) == [([6.0, 60.0, 600.0], [3.0, 30.0, 300.0])] * 3


def test_the_input_may_not_change_until_the_wait() -> None:
    """Other worlds read it at any time until then."""

    def program() -> float:
        x = torch.ones(1)
        pending = comm.start(comm.all_reduce, x)
        x.zero_()
        return pending.wait().item()

    with pytest.raises(comm.errors.WrittenError, match=r"wrote into input of all_reduce"):
        comm.simulate(program, world_size=2)


def test_a_poll_asks_without_waiting() -> None:
    """poll() is False until all have called; with patience the others run on, if they can."""

    def program() -> list[bool]:
        gate = comm.world().channel("gate")
        if rank() == 1:
            comm.barrier(gate)
            return [comm.start(comm.all_reduce, torch.ones(1)).poll()]
        pending = comm.start(comm.all_reduce, torch.ones(1))
        answers = [pending.poll(), pending.poll(1.0)]  # rank 1 stands at the gate: nobody can go on
        comm.barrier(gate)
        answers.append(pending.poll(1.0))
        pending.wait()
        return [*answers, pending.poll()]

    for seed in range(6):
        assert comm.simulate(program, world_size=2, seed=seed) == [[False, False, True, True], [True]]


# -- groups and channels ----------------------------------------------------------------------------------------------


def test_channels_have_orders_of_their_own() -> None:
    """Two channels of one group may be used in different orders on different ranks."""

    def program() -> tuple[int, int]:
        one, two = (comm.world().channel(name) for name in ("one", "two"))
        calls = [
            lambda: comm.start(comm.all_reduce, torch.tensor(1), one),
            lambda: comm.start(comm.all_gather, torch.tensor([rank()]), two),
        ]
        if rank() == 0:
            ones, twos = calls[0](), calls[1]()
        else:
            twos, ones = calls[1](), calls[0]()
        return int(ones.wait()), int(twos.wait().sum())

    assert comm.simulate(program, world_size=3) == [(3, 3)] * 3


def test_a_channel_is_its_group_by_another_name() -> None:
    def program() -> None:
        group = comm.mesh(dp=2, tp=2)["tp"]
        channel = group.channel("gather")
        assert (channel.ranks, channel.rank, channel.name) == (group.ranks, group.rank, "tp/gather")

    comm.simulate(program, world_size=4)


def test_groups_do_not_mix() -> None:
    """Calls on one axis of a mesh do not meet those on another."""

    def program() -> tuple[list[int], list[int]]:
        mesh, x = comm.mesh(dp=2, tp=3), torch.tensor([rank()])
        return comm.all_gather(x, mesh["dp"]).tolist(), comm.all_gather(x, mesh["tp"]).tolist()

    assert comm.simulate(program, world_size=6) == [([r % 3, r % 3 + 3], [r // 3 * 3 + i for i in range(3)]) for r in range(6)]


# -- errors -----------------------------------------------------------------------------------------------------------

MISMATCHES: dict[str, tuple[Callable[[], Any], Callable[[], Any], str, str]] = {
    "name": (
        lambda: comm.all_reduce(torch.ones(2)),
        lambda: comm.broadcast(torch.ones(2)),
        "all_reduce(op='sum') of [float32[2]]",
        "broadcast(src=0) of [float32[2]]",
    ),
    "shape": (
        lambda: comm.all_reduce(torch.ones(2)),
        lambda: comm.all_reduce(torch.ones(2, 1)),
        "all_reduce(op='sum') of [float32[2]]",
        "all_reduce(op='sum') of [float32[2, 1]]",
    ),
    "dtype": (
        lambda: comm.all_gather(torch.ones(2)),
        lambda: comm.all_gather(torch.ones(2, dtype=torch.bfloat16)),
        "all_gather(dim=0, tiled=True) of [float32[2]]",
        "all_gather(dim=0, tiled=True) of [bfloat16[2]]",
    ),
    "options": (
        lambda: comm.reduce(torch.ones(2), dst=0),
        lambda: comm.reduce(torch.ones(2), dst=1),
        "reduce(dst=0, op='sum') of [float32[2]]",
        "reduce(dst=1, op='sum') of [float32[2]]",
    ),
    "leaves": (
        lambda: comm.all_reduce([torch.ones(2)]),
        lambda: comm.all_reduce([torch.ones(2), torch.ones(2)]),
        "all_reduce(op='sum') of [float32[2]]",
        "all_reduce(op='sum') of [float32[2], float32[2]]",
    ),
    "template": (
        lambda: comm.scatter(torch.ones(4)),
        lambda: comm.scatter(None, like=torch.ones(3)),
        "scatter(src=0, dim=0, tiled=True) of [float32[4]]",
        "scatter(src=0, dim=0, tiled=True) of [float32[6]]",
    ),
    "permutation": (
        lambda: comm.permute(torch.ones(2), [(0, 1)]),
        lambda: comm.permute(torch.ones(2), [(1, 0)]),
        "permute(perm=[(0, 1)]) of [float32[2]]",
        "permute(perm=[(1, 0)]) of [float32[2]]",
    ),
    "rows": (
        lambda: comm.all_to_all(torch.ones(2, 3), input_splits=[1, 1], output_splits=[1, 1]),
        lambda: comm.all_to_all(torch.ones(2, 4), input_splits=[1, 1], output_splits=[1, 1]),
        "all_to_all(split_dim=0, concat_dim=0, input_splits=(1, 1), output_splits=(1, 1)) of [float32[*, 3]]",
        "all_to_all(split_dim=0, concat_dim=0, input_splits=(1, 1), output_splits=(1, 1)) of [float32[*, 4]]",
    ),
    "async": (
        lambda: comm.start(comm.all_reduce, torch.ones(2)),
        lambda: comm.start(comm.all_reduce, torch.ones(3)),
        "all_reduce(op='sum') of [float32[2]]",
        "all_reduce(op='sum') of [float32[3]]",
    ),
}


@pytest.mark.parametrize("kind", MISMATCHES)
@pytest.mark.parametrize("seed", [0, 1, 2, 3])
def test_a_mismatch_names_both_calls(kind: str, seed: int) -> None:
    """Both ranks, both calls, both call sites, and the group."""
    call, other, text, other_text = MISMATCHES[kind]
    sites = [f"{HERE}:{function.__code__.co_firstlineno}" for function in (call, other)]

    with pytest.raises(comm.errors.MismatchError) as caught:
        comm.simulate(lambda: other() if rank() == 1 else call(), world_size=2, seed=seed)
    message = str(caught.value)
    assert message.startswith("the ranks of group 'world' [0, 1] called different collectives: ")
    assert f"rank 0 called {text} at {sites[0]}" in message
    assert f"rank 1 called {other_text} at {sites[1]}" in message
    assert any("raised on simulated rank" in note for note in caught.value.__notes__)


def test_a_mismatch_is_found_within_a_group() -> None:
    """The ranks of the group that disagrees are named; another group's are not."""

    def program() -> None:
        group = comm.mesh(outer=2, inner=2)["inner"]
        comm.all_reduce(torch.ones(3 if rank() == 3 else 2), group)

    with pytest.raises(comm.errors.MismatchError, match=r"the ranks of group 'inner' \[2, 3\] called different") as caught:
        comm.simulate(program, world_size=4)
    assert "rank 2 called" in str(caught.value)
    assert "rank 0" not in str(caught.value)


def test_a_mismatch_in_a_backward_pass_names_its_line() -> None:
    """The call site of a transpose is the line that asked for the gradient."""
    lines: dict[int, str] = {}

    def program() -> None:
        x = torch.ones(2, requires_grad=True)
        y = comm.all_gather(x)
        if rank() == 0:
            lines[0] = next_line()
            y.sum().backward()
        else:
            comm.barrier()

    with pytest.raises(
        comm.errors.MismatchError, match=r"rank 0 called reduce_scatter\(dim=0, tiled=True, op='sum'\)"
    ) as caught:
        comm.simulate(program, world_size=2)
    assert f"at {lines[0]}" in str(caught.value)


def test_a_skipped_collective_is_a_deadlock() -> None:
    """Who waits, in which call, where, for whom; and who has finished."""
    sites: dict[int, str] = {}

    def program() -> None:
        if rank() == 2:
            return
        sites[0] = next_line()
        comm.all_reduce(torch.ones(2))

    for seed in range(4):
        with pytest.raises(comm.errors.DeadlockError) as caught:
            comm.simulate(program, world_size=3, seed=seed)
        assert str(caught.value).splitlines() == [
            "deadlock: no rank can proceed",
            f"  rank 0 waits in all_reduce(op='sum') of [float32[2]] on group 'world' at {sites[0]} for rank 2",
            f"  rank 1 waits in all_reduce(op='sum') of [float32[2]] on group 'world' at {sites[0]} for rank 2",
            "  rank 2 has finished",
        ]


def test_a_circle_over_two_axes_is_a_deadlock() -> None:
    """0 waits for 2 along a, 2 for 3 along b, 3 for 1 along a, 1 for 0 along b."""
    sites: dict[str, str] = {}

    def program() -> None:
        mesh = comm.mesh(a=2, b=2)
        for axis in "ab" if rank() in (0, 3) else "ba":
            sites["call"] = next_line()
            comm.all_reduce(torch.ones(()), mesh[axis])

    for seed in range(4):
        with pytest.raises(comm.errors.DeadlockError) as caught:
            comm.simulate(program, world_size=4, seed=seed)
        assert str(caught.value).splitlines()[1:] == [
            f"  rank {r} waits in all_reduce(op='sum') of [float32[]] on group '{axis}' at {sites['call']} for rank {other}"
            for r, axis, other in [(0, "a", 2), (1, "b", 0), (2, "b", 3), (3, "a", 1)]
        ]


def test_a_swapped_order_over_two_channels_is_a_deadlock() -> None:
    """The order matters where each call is waited for."""

    def program() -> None:
        for name in ["one", "two"] if rank() == 0 else ["two", "one"]:
            comm.barrier(comm.world().channel(name))

    with pytest.raises(comm.errors.DeadlockError, match=r"rank 0 waits in barrier\(\).* on group 'world/one' .* for rank 1"):
        comm.simulate(program, world_size=2)


def test_a_deadlock_is_found_at_the_wait() -> None:
    """A pending that cannot complete is a deadlock when it is waited for."""

    def program() -> None:
        if rank() == 0:
            comm.start(comm.all_reduce, torch.ones(1)).wait()

    with pytest.raises(comm.errors.DeadlockError, match="rank 0 waits in all_reduce"):
        comm.simulate(program, world_size=2)


class OurError(Exception):
    pass


@pytest.mark.parametrize("where", ["before", "between", "after"])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_an_error_on_one_rank_ends_all(where: str, seed: int) -> None:
    """It comes out as it is, with a note that names the rank; the others unwind, and none hangs or swallows it."""
    unwound: list[int] = []
    guarded: list[Exception] = []
    raised = OurError("no")

    def program() -> None:
        try:
            for step, name in enumerate(["before", "between", "after"]):
                if step:
                    comm.all_reduce(torch.ones(1))
                if (rank(), name) == (2, where):
                    raise raised
            comm.barrier()
        except Exception as error:  # a program that guards itself must not keep running in a broken world
            guarded.append(error)
            raise
        finally:
            unwound.append(rank())

    with pytest.raises(OurError, match="no") as caught:
        comm.simulate(program, world_size=4, seed=seed)
    assert caught.value is raised
    assert caught.value.__notes__ == ["raised on simulated rank 2 of 4"]
    assert guarded == [raised]  # the others unwind by what no `except Exception` catches
    assert 2 in unwound
    assert len(unwound) == len(set(unwound))


def test_the_first_error_counts() -> None:
    """Errors that come of unwinding do not hide the one that began it."""

    def program() -> None:
        try:
            if rank() == 0:
                comm.barrier()
                raise OurError
            comm.barrier()
            comm.barrier()
        finally:
            if rank() == 1:
                raise ValueError("while unwinding")

    with pytest.raises(OurError):
        comm.simulate(program, world_size=2)


@pytest.mark.parametrize("seed", range(4))
def test_an_error_comes_before_the_deadlock_that_it_causes(seed: int) -> None:
    """The others wait for the rank that failed; what comes out is its error, with the line that raised it."""

    def fails() -> None:
        raise OurError("of rank 1")

    def program() -> None:
        comm.start(comm.all_reduce, torch.ones(1))  # a leftover, too
        if rank() == 1:
            fails()
        comm.recv(torch.ones(1), (rank() + 1) % 4)

    with pytest.raises(OurError, match="of rank 1") as caught:
        comm.simulate(program, world_size=4, seed=seed)
    assert caught.value.__notes__ == ["raised on simulated rank 1 of 4"]
    assert traceback.extract_tb(caught.value.__traceback__)[-1].name == "fails"


def test_a_leftover_is_reported_when_all_have_finished() -> None:
    """An asynchronous collective that two of three ranks started: both are named with their lines, and who never came."""
    sites: list[str] = []

    def program() -> None:
        if rank() != 1:
            sites.append(next_line())
            comm.start(comm.all_reduce, torch.ones(2), comm.world().channel("aside"))

    for seed in range(3):
        with pytest.raises(comm.errors.UnmatchedError) as caught:
            comm.simulate(program, world_size=3, seed=seed)
        assert str(caught.value).splitlines() == [
            "all ranks have finished, but some never came to what others started",
            *(
                f"  rank {r} started all_reduce(op='sum') of [float32[2]] on group 'world/aside' at {sites[0]} for rank 1"
                for r in (0, 2)
            ),
        ]


def test_collectives_while_unwinding_do_not_hang() -> None:
    """A finally that communicates is unwound too."""

    def program() -> None:
        try:
            if rank() == 0:
                raise OurError
            comm.barrier()
        finally:
            if rank() != 0:
                comm.all_reduce(torch.ones(1))

    for seed in range(3):
        with pytest.raises(OurError):
            comm.simulate(program, world_size=3, seed=seed)


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(3)])
def test_what_is_no_exception_comes_out_too(error: BaseException) -> None:
    def program() -> None:
        if rank() == 1:
            raise error
        comm.barrier()

    with pytest.raises(type(error)) as caught:
        comm.simulate(program, world_size=2)
    assert caught.value is error


@pytest.mark.parametrize("code", [0, None])
def test_a_rank_that_exits_as_if_all_were_well_is_an_error(code: int | None) -> None:
    """Else the whole program would end with status 0."""

    def program() -> None:
        if rank() == 1:
            raise SystemExit(code)
        comm.barrier()

    with pytest.raises(
        comm.errors.RankFailedError, match=rf"rank 1 of 2 called exit\({code}\) before it returned; return instead"
    ):
        comm.simulate(program, world_size=2)


# -- threads, modes, interrupts ---------------------------------------------------------------------------------------


def test_a_simulated_rank_is_one_thread() -> None:
    """A thread that a rank starts is no rank: its calls are refused, and change nothing for the ranks."""

    def program() -> list[str]:
        found: list[str] = []
        here, x = comm.world(), torch.ones(1)

        def in_vain() -> None:
            for call in (lambda: comm.all_reduce(x), lambda: comm.all_reduce(x, here), lambda: comm.world().size):
                try:
                    call()
                except comm.errors.CommError as error:
                    found.append(str(error))

        thread = threading.Thread(target=in_vain, name="mine")
        thread.start()
        thread.join()
        assert comm.all_reduce(x).item() == 2
        return found

    for found in comm.simulate(program, world_size=2):
        assert len(found) == 3
        assert all("'mine'" in said and "a simulated rank is one thread" in said for said in found)


def test_simulations_of_two_threads_take_turns() -> None:
    """Generators are the process's, so two simulations at once would disturb each other."""

    def draws(seed: int) -> list[float]:
        torch.manual_seed(seed)
        return [comm.all_reduce(torch.rand(())).item() for _ in range(10)]

    alone = {seed: comm.simulate(draws, seed, world_size=3) for seed in range(4)}
    found: dict[int, Any] = {}
    threads = [
        threading.Thread(target=lambda seed=seed: found.update({seed: comm.simulate(draws, seed, world_size=3)}))
        for seed in alone
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == alone


@pytest.mark.parametrize("seed", range(6))
def test_inference_mode_is_each_ranks_own(seed: int) -> None:
    """Whoever comes last carries the collective out for all, but not in its own modes."""

    def program() -> bool:
        if comm.world().rank == 0:
            with torch.inference_mode():
                return comm.all_reduce(torch.ones(2)).is_inference()
        y = comm.all_reduce(torch.ones(2))
        y.mul_(2)
        (y * torch.ones(2, requires_grad=True)).sum().backward()
        return y.is_inference()

    assert not any(comm.simulate(program, world_size=3, seed=seed))


@pytest.mark.parametrize("seed", range(3))
def test_what_a_collective_computes_is_no_operation_of_a_rank(seed: int) -> None:
    """The denotation of three ranks adds, and writes in place; a mode of the last rank sees none of it."""

    class Seen(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.names: list[str] = []

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.names.append(str(func.overloadpacket))
            return func(*args, **(kwargs or {}))

    def program() -> list[str]:
        x = torch.ones(2)
        with Seen() as seen:
            comm.all_reduce(x)
        return seen.names

    first, *others = comm.simulate(program, world_size=3, seed=seed)
    assert others == [first, first]
    assert not any("add" in name for name in first)


def test_results_lie_plainly_in_memory() -> None:
    """A view of a result that works in one world works in all: results are contiguous whatever the inputs are."""

    def program() -> None:
        x = torch.arange(6.0).view(2, 3).t()
        for result in (comm.all_reduce(x), comm.broadcast(x), comm.all_gather(x, dim=1, uneven=True), comm.copy_to(x)):
            assert result.is_contiguous()

    comm.simulate(program, world_size=2)
    program()


def test_an_interrupt_ends_the_ranks() -> None:
    """Ctrl-C in the thread that simulates ends every rank at its next collective."""

    def program() -> None:
        while True:
            comm.all_reduce(torch.ones(1))

    def press() -> None:
        time.sleep(0.3)
        main = threading.main_thread().ident
        assert main is not None
        signal.pthread_kill(main, signal.SIGINT)

    threading.Thread(target=press).start()
    with pytest.raises(KeyboardInterrupt):
        comm.simulate(program, world_size=3)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("rank ")]


def test_a_loop_of_polls_that_nothing_can_answer_is_a_deadlock() -> None:
    def program() -> None:
        if comm.world().rank == 0:
            pending = comm.start(comm.recv, torch.empty(1), src=1)
            while not pending.poll():
                pass

    with pytest.raises(comm.errors.DeadlockError, match=r"rank 0 waits in recv\(src=1\).* for rank 1"):
        comm.simulate(program, world_size=2)


def test_polls_see_messages_in_either_order() -> None:
    """The classical race: whose message is there first. Some seeds say rank 1, some rank 2."""

    def program() -> int:
        here = comm.world()
        if here.rank:
            comm.send(torch.ones(1), 0)
            return 0
        pendings = [comm.start(comm.recv, torch.empty(1), src=src) for src in (1, 2)]
        while True:
            for src, pending in enumerate(pendings, start=1):
                if pending.poll():
                    for other in pendings:
                        other.wait()
                    return src

    assert {comm.simulate(program, world_size=3, seed=seed)[0] for seed in range(40)} == {1, 2}
