"""``simulate(..., rules="nccl")``: programs that would hang on NCCL are named; the library's own strategies run clean."""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import permutations
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import functional_ds as fds
from functional_ds import comm
from functional_ds import pipelining as pp
from functional_ds import transforms as T
from functional_ds.pipelining import Schedule
from tests.pipelining.cases import generated
from tests.transforms.staged import on_mesh

ONE = torch.ones(1)


def _wait(*pendings: comm.Pending[Any]) -> list[Any]:
    return [pending.wait() for pending in pendings]


# -- planted faults ---------------------------------------------------------------------------------------------------


def facing() -> Any:
    """Both send first, asynchronously: legal here and over Gloo."""
    other = 1 - comm.world().rank
    return _wait(comm.start(comm.send, ONE, other), comm.start(comm.recv, ONE, other))


def crossed_tags() -> Any:
    """Two messages, received in another order than they are sent in."""
    if comm.world().rank == 0:
        return _wait(comm.start(comm.send, ONE, 1, tag=0), comm.start(comm.send, ONE, 1, tag=1))
    return _wait(comm.start(comm.recv, ONE, 0, tag=1), comm.start(comm.recv, ONE, 0, tag=0))


def ring() -> Any:
    """Each sends to the next: all hosts connect to the next rank first, and wait for it there."""
    here = comm.world()
    return _wait(
        comm.start(comm.send, ONE, (here.rank + 1) % here.size), comm.start(comm.recv, ONE, (here.rank - 1) % here.size)
    )


def crossed_channels() -> Any:
    """Two channels, each in one order, and the two in different orders."""
    here = comm.world()
    return _wait(*(comm.start(comm.all_reduce, ONE, here.channel(name)) for name in ("ab" if here.rank else "ba")))


def groups_in_a_circle() -> Any:
    """Three pairs: each rank has two of them, and no two ranks contradict each other."""
    here = comm.world()
    for pair in ([0, 1], [1, 2], [2, 0])[here.rank :] + ([0, 1], [1, 2], [2, 0])[: here.rank]:
        if here.rank in pair:
            comm.start(comm.all_reduce, ONE, comm.new_group(sorted(pair)))
    return None


def a_message_across_a_collective() -> Any:
    """One rank sends before the collective, the other receives after it."""
    if comm.world().rank == 0:
        sent = comm.start(comm.send, ONE, 1)
        comm.all_reduce(ONE)
        return sent.wait()
    comm.all_reduce(ONE)
    return comm.recv(ONE, 0)


def a_batch_that_another_rank_splits() -> Any:
    """One rank's two messages in a batch, with a collective between them on the other."""
    if comm.world().rank == 0:
        result = comm.start(comm.batch_p2p, [comm.Send(ONE, 1), comm.Recv(ONE, 1)])
        comm.all_reduce(ONE)
        return result.wait()
    comm.recv(ONE, 0)
    pending = comm.start(comm.all_reduce, ONE)
    comm.send(ONE, 0)
    return pending.wait()


FAULTS: list[tuple[Callable[[], Any], int, tuple[str, ...]]] = [
    (facing, 2, ("rank 0 launched send(dst=1)", "rank 1 launched send(dst=0)", "waits there for rank 1")),
    (crossed_tags, 2, ("rank 0 launched send(dst=1) of", "rank 1 launched recv(src=0, tag=1)")),
    (ring, 3, ("rank 0 launched send(dst=1)", "which connects the two ranks", "rank 2 launched send(dst=0)")),
    (crossed_channels, 2, ("on group 'world/a'", "on group 'world/b'", "all_reduce(op='sum') of [float32[1]]")),
    (groups_in_a_circle, 3, ("waits there for rank 0", "waits there for rank 1", "waits there for rank 2")),
    (a_message_across_a_collective, 2, ("rank 0 launched send(dst=1)", "rank 1 launched all_reduce")),
    (a_batch_that_another_rank_splits, 2, ("rank 0 launched recv(src=1)", "rank 1 launched all_reduce")),
]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("program", "ranks", "parts"), FAULTS, ids=[fault[0].__name__ for fault in FAULTS])
def test_a_planted_fault_is_named(program: Callable[[], Any], ranks: int, parts: Sequence[str], seed: int) -> None:
    """The program runs on every other transport; here its calls and their lines are named."""
    if program is not groups_in_a_circle:
        comm.simulate(program, world_size=ranks, seed=seed)
    with pytest.raises(comm.errors.DeadlockError, match='under rules="nccl"') as caught:
        comm.simulate(program, world_size=ranks, seed=seed, rules="nccl")
    text = str(caught.value)
    assert all(part in text for part in parts), text
    assert text.count("test_nccl_rules.py:") >= 2


# -- what the library's lowering makes safe ---------------------------------------------------------------------------


def unequal_counts() -> float:
    """Ranks 0 and 2 have a group that the others never make."""
    rank = comm.world().rank
    if rank % 2 == 0:
        comm.all_reduce(ONE, comm.new_group([0, 2]))
    return comm.all_reduce(ONE, comm.new_group([0, 1] if rank < 2 else [2, 3])).item()


def partial_first_call() -> float:
    """The first call of a group is a message between two of its ranks, and then a permutation that leaves some out."""
    group = comm.new_group([0, 1, 2, 3])
    if group.rank in (1, 3):
        comm.batch_p2p([comm.Send(ONE, 4 - group.rank), comm.Recv(ONE, 4 - group.rank)], group)
    return 2.0 + comm.permute(ONE * 0, [(2, 0)], group).item()


def rings_in_a_batch() -> float:
    here = comm.world()
    sends = [comm.Send(ONE, (here.rank + 1) % here.size), comm.Recv(ONE, (here.rank - 1) % here.size)]
    return sum(comm.batch_p2p(sends)[1].item() for _ in range(2))


def test_what_is_safe_on_nccl_is_not_named() -> None:
    """Communicators go by name, and messages have their own."""
    for program in (unequal_counts, partial_first_call, rings_in_a_batch):
        assert comm.simulate(program, world_size=4, rules="nccl") == [2.0] * 4


@given(data=st.data())
def test_one_order_on_all_ranks_is_never_named(data: st.DataObject) -> None:
    """Any calls on any groups, if all ranks launch what they take part in in one order, and wait at the end."""
    n = data.draw(st.integers(2, 4))
    ranks = st.lists(st.integers(0, n - 1), min_size=2, max_size=n, unique=True)
    calls = data.draw(st.lists(st.tuples(ranks, st.sampled_from(["all_reduce", "message"]), st.integers(0, 1)), max_size=8))

    def program() -> None:
        here, pendings = comm.world(), []
        for members, kind, tag in calls:
            group = comm.new_group(members, f"group {tag}")
            if kind == "all_reduce" and group.rank >= 0:
                pendings.append(comm.start(comm.all_reduce, ONE, group))
            elif kind == "message" and group.rank in (0, 1):
                message = comm.recv if group.rank else comm.send
                pendings.append(comm.start(message, ONE, 1 - group.rank, group, tag=tag))
        _wait(*pendings)
        assert here.size == n

    comm.simulate(program, world_size=n, rules="nccl")


def test_rules_are_known() -> None:
    with pytest.raises(ValueError, match=r"rules='gloo' are unknown; use 'nccl', or None"):
        comm.simulate(comm.world, world_size=2, rules="gloo")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"shapes_only=True and rules='nccl'"):
        comm.simulate(comm.world, world_size=2, rules="nccl", shapes_only=True)


# -- the library's own strategies -------------------------------------------------------------------------------------


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(4)))


def _trained(*transforms: Any, steps: int = 3) -> None:
    apply, params = fds.functional(_model())
    step = fds.compose(*transforms)(fds.train_step(lambda p, x: apply(p, x).square().mean(), fds.adamw(1e-2)))
    state, here = step.init(params), comm.world()
    for seed in range(steps):
        x = torch.randn(4 * here.size, 4, generator=torch.Generator().manual_seed(seed))
        state, _ = step(state, x[here.rank :: here.size])
    step.params(state)


def _narrow() -> dict[str, Any]:
    return {
        name: comm.codecs.compressed(getattr(comm, name), comm.codecs.Blocks(8)) for name in ("all_gather", "reduce_scatter")
    }


def _nodes() -> comm.Mesh:
    return comm.mesh(inter=2, intra=2)


STRATEGIES: dict[str, Callable[[], tuple[Any, ...]]] = {
    **{f"zero({stage})": lambda stage=stage: (T.clip(1.0), T.accumulate(2), T.zero(stage)) for stage in range(4)},  # type: ignore[misc]
    "hsdp": lambda: (T.zero(3, _nodes()["intra"], replicate=_nodes()["inter"]),),
    "stage 1 with replicas": lambda: (T.accumulate(2), T.zero(1, _nodes()["intra"], replicate=_nodes()["inter"])),
    "stage 0 with replicas": lambda: (T.zero(0, _nodes()["intra"], replicate=_nodes()["inter"]),),
    "hierarchical": lambda: (T.clip(1.0), T.zero(3, _nodes()["inter", "intra"], intra_node=_nodes()["intra"])),
    "hpz": lambda: (T.zero(3, _nodes()["inter", "intra"], intra_node=_nodes()["intra"], hpz=True, max_live_units=1),),
    "owner": lambda: (T.zero(2, aggregate="owner"),),
    "all_reduce": lambda: (T.zero(2, aggregate="all_reduce"),),
    "int8": lambda: (T.zero(3, **_narrow()),),
    "int8 in two levels": lambda: (T.zero(3, intra_node=2, **_narrow()),),
    "prefetch": lambda: (T.accumulate(2), T.zero(3, prefetch=3, max_live_units=2, reshard_last_units=False)),
    "fp16": lambda: (T.mixed_precision("fp16"), T.zero(3)),
    "remat": lambda: (T.remat(), T.zero(3, max_live_units=1, prefetch=2)),
}


@pytest.mark.sample(5)
@pytest.mark.parametrize("name", STRATEGIES)
def test_a_data_parallel_strategy_runs_clean(name: str) -> None:
    """Nothing is named, in steps with and without a plan of the gathers."""
    comm.simulate(lambda: _trained(*STRATEGIES[name]()), world_size=4, rules="nccl")


SCHEDULES: dict[str, Schedule] = {
    "gpipe": pp.gpipe(2, 3),
    "1f1b": pp.one_f_one_b(4, 5),
    "interleaved": pp.interleaved_one_f_one_b(2, 4),
    "breadth first": pp.breadth_first(2, 4),
    "zb-h1": pp.zb_h1(3, 4),
    "zb-2p": pp.zb_2p(2, 4),
    "zbv": pp.zbv(2, 4),
    "dualpipe-v": pp.dualpipe_v(2, 4),
}


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", SCHEDULES)
def test_a_pipeline_runs_clean(name: str) -> None:
    """Stages with a tied leaf and a skip connection, with ZeRO-2 along another axis."""
    schedule = SCHEDULES[name]
    comm.simulate(partial(on_mesh, zero=2, dp=2), schedule, 12, world_size=2 * schedule.ranks, rules="nccl")


@settings(max_examples=max(1, settings.default.max_examples // 4))
@given(schedule=generated(p=3, m=3).filter(lambda schedule: schedule.stages <= 6), zero=st.sampled_from((None, 1, 3)))
def test_any_schedule_runs_clean(schedule: Schedule, zero: int | None) -> None:
    """With receives where the schedule's proof has them."""
    comm.simulate(partial(on_mesh, zero=zero, dp=1, accumulate=2), schedule, 24, world_size=schedule.ranks, rules="nccl")


def _ulysses(x: Tensor) -> Tensor:
    """Heads for positions and back, and an exchange of rows in which some ranks have none."""
    rank, n = comm.world().rank, comm.world().size
    heads = comm.all_to_all(x, split_dim=1, concat_dim=0)
    back = comm.all_to_all(heads * 2, split_dim=0, concat_dim=1)
    splits = [[2 * (dst == 0) for dst in range(n)] if src % 2 else [0] * n for src in range(n)]
    rows = back[: sum(splits[rank])]
    sent = comm.all_to_all(rows, input_splits=splits[rank], output_splits=[split[rank] for split in splits])
    return back.sum() + sent.sum()


def test_exchanges_and_algorithms_run_clean() -> None:
    """Forward and backward."""

    def program() -> None:
        x = torch.ones(4, 8, requires_grad=True)
        _ulysses(x).backward()  # type: ignore[no-untyped-call]
        for algorithm in (comm.algorithms.ring, comm.algorithms.tree, comm.algorithms.double_tree):
            algorithm(x.detach())
        mine = comm.permute(x, [(a, b) for a, b in permutations(range(4), 2) if b == a + 1])
        mine.sum().backward()  # type: ignore[no-untyped-call]

    comm.simulate(program, world_size=4, rules="nccl")
