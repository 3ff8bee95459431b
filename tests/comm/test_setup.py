"""Joining and leaving worlds of processes, groups of some ranks, and asking where one is."""

import re
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import functional_ds as fds
from functional_ds import comm
from functional_ds import transforms as T

VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def rank() -> int:
    return comm.world().rank


@pytest.fixture(autouse=True)
def no_world(monkeypatch: pytest.MonkeyPatch) -> Any:
    """No environment says that there is a world, and none stays behind."""
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    yield
    if dist.is_initialized():
        comm.destroy_process_group()


# -- joining ----------------------------------------------------------------------------------------------------------

REFUSED: dict[str, tuple[dict[str, Any], dict[str, str], str]] = {
    "a size without a rank": (
        {"world_size": 2},
        {},
        "world_size is given and rank is not: pass both, or start the program with",
    ),
    "a rank without a size": ({"rank": 0}, {}, "rank is given and world_size is not: pass both"),
    "no ranks": ({"world_size": 0, "rank": 0}, {}, "world_size=0: a world has at least one rank"),
    "a rank too large": ({"world_size": 2, "rank": 2}, {}, "rank=2 is not a rank of a world of 2; its ranks are 0..1"),
    "a negative rank": ({"world_size": 2, "rank": -1}, {}, "rank=-1 is not a rank of a world of 2; its ranks are 0..1"),
    "an unknown backend": (
        {"backend": "mpi", "world_size": 1, "rank": 0},
        {},
        "backend='mpi' is unknown; use one of 'gloo', 'nccl', 'cpu:gloo,cuda:nccl', or None to choose",
    ),
    "no place to meet": (
        {"world_size": 2, "rank": 0},
        {},
        "MASTER_ADDR and MASTER_PORT not set: 2 processes need a place to meet; start them with torchrun, "
        "or pass init_method='tcp://host:port'",
    ),
    "half a place to meet": ({"world_size": 2, "rank": 0}, {"MASTER_ADDR": "127.0.0.1"}, "MASTER_PORT not set"),
    "the environment, and half of it": ({"init_method": "env://"}, {"RANK": "0", "WORLD_SIZE": "2"}, "MASTER_ADDR and MASTER"),
    "an unknown meeting place": (
        {"world_size": 1, "rank": 0, "init_method": "udp://here"},
        {},
        "init_method='udp://here' is unknown; use 'tcp://host:port', 'file:///path' or 'env://'",
    ),
    "no number around": (
        {},
        {"RANK": "0", "WORLD_SIZE": "two"},
        "WORLD_SIZE='two' in the environment is not an integer; torchrun sets it",
    ),
    "a rank that is not a number": ({}, {"RANK": "x", "WORLD_SIZE": "2"}, "RANK='x' in the environment is not an integer"),
    "a local rank that is not a number": (
        {"world_size": 1, "rank": 0},
        {"LOCAL_RANK": "x"},
        "LOCAL_RANK='x' in the environment is not an integer; torchrun sets it: start the program with torchrun, or unset",
    ),
    "local ranks that are not a number": (
        {"world_size": 1, "rank": 0},
        {"LOCAL_WORLD_SIZE": ""},
        "LOCAL_WORLD_SIZE='' in the environment is not an integer",
    ),
    "a port that is not a number": (
        {"world_size": 1, "rank": 0},
        {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "http"},
        "MASTER_PORT='http' in the environment is not an integer",
    ),
    "a rank alone around": ({}, {"RANK": "0"}, "rank is given and world_size is not"),
    "a rank too large around": ({}, {"RANK": "5", "WORLD_SIZE": "2"}, "rank=5 is not a rank of a world of 2"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_bad_arguments_are_refused(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error names the argument or the variable, its value, and what would do; nothing is joined."""
    arguments, environment, message = REFUSED[what]
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=re.escape(message)):
        comm.init_distributed(**arguments)
    assert not dist.is_initialized()
    assert not comm.is_initialized()


def test_a_local_rank_is_a_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """Asked for without a world, too."""
    monkeypatch.setenv("LOCAL_RANK", "3")
    assert comm.get_local_rank() == 3
    monkeypatch.setenv("LOCAL_RANK", "x")
    with pytest.raises(ValueError, match=r"LOCAL_RANK='x' in the environment is not an integer"):
        comm.get_local_rank()


def test_a_world_of_one_process(tmp_path: Path) -> None:
    """Joined by arguments, it needs no place to meet; joined twice it is the same; left, it can be joined anew."""
    for init_method in (None, f"file://{tmp_path / 'store'}", None):
        here = comm.init_distributed("gloo", world_size=1, rank=0, init_method=init_method)
        assert comm.is_initialized()
        assert dist.is_initialized()
        assert (here.rank, here.size, here.ranks) == (0, 1, (0,))
        assert comm.init_distributed() == comm.init_distributed(world_size=1, rank=0) == here == comm.world()
        assert comm.all_reduce(torch.tensor(3)).item() == 3
        comm.destroy_process_group()
        assert not comm.is_initialized()
        assert comm.world() != here


def test_other_numbers_than_those_of_the_world_are_refused() -> None:
    """Whoever asks for another world while in one is told so, in a world of processes and in a simulation."""
    comm.init_distributed("gloo", world_size=1, rank=0)
    with pytest.raises(ValueError, match=r"world_size=2, and this process is rank 0 of a world of 1 already; call destroy_"):
        comm.init_distributed(world_size=2, rank=0)
    comm.destroy_process_group()

    def program() -> None:
        assert comm.init_distributed() == comm.world()
        assert comm.init_distributed(world_size=3, rank=rank()) == comm.world()
        with pytest.raises(ValueError, match=r"rank=[120], and this process is rank [012] of a world of 3 already"):
            comm.init_distributed(rank=(rank() + 1) % 3)

    comm.simulate(program, world_size=3)


def test_a_group_of_a_world_that_was_left_raises() -> None:
    """Also one made before, and also after another world was joined."""
    here = comm.init_distributed("gloo", world_size=1, rank=0)
    some = comm.new_group([0], "some")
    assert comm.all_reduce(torch.tensor(1), some).item() == 1
    comm.destroy_process_group()
    for again in (False, True):
        if again:
            comm.init_distributed("gloo", world_size=1, rank=0)
        for group in (here, some):
            with pytest.raises(comm.errors.CommError, match=r"all_reduce\(op='sum'\) on Group.*was destroyed; take a group of"):
                comm.all_reduce(torch.tensor(1), group)
    assert comm.all_reduce(torch.tensor(1)).item() == 1


def test_a_group_raises_after_torchs_own_destroy_process_group() -> None:
    """As after ours: collectives, messages and barriers, also once another world was joined."""
    here = comm.init_distributed("gloo", world_size=1, rank=0)
    some, channel = comm.new_group([0], "some"), here.channel("other")
    late = comm.start(comm.all_reduce, torch.tensor(1), channel)
    dist.destroy_process_group()
    for again in (False, True):
        if again:
            comm.init_distributed("gloo", world_size=1, rank=0)
        for group in (here, some, channel):
            for call in (partial(comm.all_reduce, torch.tensor(1)), comm.debug.monitored_barrier, comm.barrier):
                with pytest.raises(comm.errors.CommError, match=r"on Group.*was destroyed; take a group of the new world"):
                    call(group=group)
    assert comm.all_reduce(torch.tensor(1)).item() == late.wait().item() == 1


@pytest.mark.parametrize("call", [comm.barrier, comm.debug.monitored_barrier, partial(comm.broadcast_object, 1)])
def test_a_first_call_after_torchs_own_destroy_process_group_raises(call: Callable[..., Any]) -> None:
    here = comm.init_distributed("gloo", world_size=1, rank=0)
    dist.destroy_process_group()
    with pytest.raises(comm.errors.CommError, match=r"on Group.*was destroyed; take a group of the new world"):
        call(group=here)


def test_torchs_own_destroy_process_group_ends_the_threads() -> None:
    """As soon as anybody asks for the world; nothing is said, since nothing is under way."""
    here = comm.init_distributed("gloo", world_size=1, rank=0)
    comm.start(comm.all_reduce, torch.tensor(1), here.channel("other"))
    assert [thread.name for thread in threading.enumerate() if "worker" in thread.name] == ["worker world/other"]
    dist.destroy_process_group()
    assert comm.world().world is not here.world
    assert not [thread.name for thread in threading.enumerate() if "worker" in thread.name]


def test_leaving_no_world_does_nothing() -> None:
    """Alone, twice, and in a simulation, which goes on."""
    comm.destroy_process_group()
    comm.destroy_process_group()

    def program() -> int:
        comm.destroy_process_group()
        return comm.all_reduce(torch.tensor(1)).item()

    assert comm.simulate(program, world_size=2) == [2, 2]
    here = comm.init_distributed("gloo", world_size=1, rank=0)
    assert comm.simulate(program, world_size=2) == [2, 2]
    assert comm.world() == here


def test_where_one_is_alone_and_in_a_simulation(monkeypatch: pytest.MonkeyPatch) -> None:
    """get_rank, get_world_size, get_local_rank and is_initialized; of the world and of a group."""

    def answers() -> tuple[Any, ...]:
        pair = comm.new_group([1, 0], "pair") if comm.get_world_size() > 1 else None
        return comm.is_initialized(), comm.get_rank(), comm.get_world_size(), comm.get_local_rank(), comm.get_rank(pair)

    assert answers() == (False, 0, 1, 0, 0)
    monkeypatch.setenv("LOCAL_RANK", "3")
    assert answers() == (False, 0, 1, 3, 0)
    assert comm.simulate(answers, world_size=3) == [(True, 0, 3, 0, 1), (True, 1, 3, 1, 0), (True, 2, 3, 2, -1)]
    assert comm.simulate(lambda: comm.get_world_size(comm.new_group([1, 2])), world_size=3) == [2, 2, 2]


# -- groups -----------------------------------------------------------------------------------------------------------

BAD_GROUPS: dict[str, tuple[Callable[[], Any], str]] = {
    "too large": (lambda: comm.new_group([0, 3]), "ranks=[0, 3]: rank 3 is not one of the world's, which are 0..2"),
    "negative": (lambda: comm.new_group([-1]), "ranks=[-1]: rank -1 is not one of the world's, which are 0..2"),
    "twice": (lambda: comm.new_group([1, 0, 1]), "ranks=[1, 0, 1]: a rank is listed twice"),
    "none": (lambda: comm.new_group([]), "ranks=[]: a group needs a rank"),
}


@pytest.mark.parametrize("what", BAD_GROUPS)
def test_bad_groups_are_refused(what: str) -> None:
    call, message = BAD_GROUPS[what]
    with pytest.raises(ValueError, match=re.escape(message)):
        comm.simulate(call, world_size=3)


OUTSIDE: dict[str, Callable[[comm.Group], Any]] = {
    "all_reduce(op='sum')": lambda group: comm.all_reduce(torch.ones(2), group),
    "all_reduce(op='sum') ": lambda group: comm.all_reduce(torch.ones(2), group, op="avg"),
    "all_gather(dim=0, tiled=True)": lambda group: comm.start(comm.all_gather, torch.ones(2), group),
    "all_gather(dim=0, tiled=False)": lambda group: comm.all_gather(torch.ones(2), group, uneven=True),
    "reduce_scatter(dim=0, op='sum', tiled=True)": lambda group: comm.reduce_scatter(torch.ones(2), group),
    "broadcast(src=0)": lambda group: comm.broadcast(torch.ones(2), 0, group),
    "reduce(dst=1, op='max')": lambda group: comm.reduce(torch.ones(2), 1, group, op="max"),
    "gather(dst=0, dim=0, tiled=True)": lambda group: comm.gather(torch.ones(2), 0, group),
    "scatter(src=0, dim=0, tiled=True)": lambda group: comm.scatter(torch.ones(2), 0, group),
    "all_to_all(split_dim=0, concat_dim=0)": lambda group: comm.all_to_all(torch.ones(2), group),
    "all_to_all(": lambda group: comm.all_to_all(torch.ones(2), group, input_splits=[1, 1], output_splits=[1, 1]),
    "permute(perm=[(0, 1)])": lambda group: comm.permute(torch.ones(2), [(0, 1)], group),
    "barrier()": comm.barrier,
    "send(dst=0)": lambda group: comm.send(torch.ones(2), 0, group),
    "recv(src=1)": lambda group: comm.recv(torch.ones(2), 1, group),
    "copy_to()": lambda group: comm.copy_to(torch.ones(2), group),
    "reduce_from(op='sum')": lambda group: comm.reduce_from(torch.ones(2), group),
    "scatter_to(dim=0)": lambda group: comm.scatter_to(torch.ones(2), group),
    "gather_from(dim=0, tiled=True)": lambda group: comm.gather_from(torch.ones(2), group),
    "broadcast(src=0) ": lambda group: comm.broadcast_object(1, 0, group),
    "all_gather(dim=0, tiled=False) ": lambda group: comm.all_gather_object(1, group),
}


@pytest.mark.parametrize("shown", OUTSIDE)
def test_a_rank_outside_of_a_group_may_not_call_its_collectives(shown: str) -> None:
    """The error names the call, the rank of the world, and the group with its ranks; nothing was sent."""

    def program() -> str:
        group = comm.new_group([0, 2], "some")
        if rank() != 1:
            return ""
        with comm.ledger() as book, pytest.raises(comm.errors.CommError) as caught:
            OUTSIDE[shown](group)
        assert not book.rows
        return str(caught.value)

    message = comm.simulate(program, world_size=3)[1]
    assert message.startswith(shown.rstrip())
    assert ": rank 1 is not in Group('some', not a member, ranks [0, 2]); only its ranks may call its collectives" in message


def test_groups_of_one_name_and_ranks_are_one() -> None:
    """They share one order of collectives; another name, or another order of the ranks, is another group."""

    def program() -> list[int]:
        x = torch.tensor(rank())
        first, second = comm.new_group([0, 1], "a"), comm.new_group([0, 1], "a")
        assert first == second
        pendings = [comm.start(comm.all_reduce, x + step, group) for step, group in enumerate((first, second))]
        turned = comm.new_group([1, 0], "a")
        gathered = comm.all_gather(x.view(1), turned)
        return [int(pending.wait()) for pending in pendings] + gathered.tolist()

    assert comm.simulate(program, world_size=2) == [[1, 3, 1, 0]] * 2


# -- processes --------------------------------------------------------------------------------------------------------


def groups_of_some() -> Any:
    """Each rank makes another number of groups, and only those that it is in; messages in a group whose third member does
    nothing at all."""
    x = torch.tensor([rank() + 1])
    found: dict[str, Any] = {}
    if rank() < 2:
        low = comm.new_group([0, 1], "low")
        found["low"] = comm.all_reduce(x, low).tolist()
    if rank() > 0:
        for step in range(3):
            high = comm.new_group([2, 1], f"high {step}")
            found[f"high {step}"] = comm.all_gather(x + step, high).tolist()
    if rank() != 1:  # rank 1 is a member and never makes the group
        everyone = comm.new_group([0, 1, 2], "everyone")
        if rank() == 0:
            comm.send(x * 7, 2, everyone)
        else:
            found["message"] = comm.recv(x, 0, everyone).tolist()
    outside = comm.new_group([1, 2], "outside")
    if rank() == 0:
        try:
            comm.barrier(outside)
        except comm.errors.CommError as error:
            found["outside"] = str(error)
    found["all"] = comm.all_reduce(x).tolist()
    found["objects"] = comm.all_gather_object({"rank": rank(), "long": "x" * 1000 * rank()}), comm.broadcast_object(rank(), 1)
    return found


def joins_again(directory: str) -> list[Any]:
    """Leaves and joins twice, with the ranks in another order the second time."""
    found: list[Any] = [
        groups_of_some(),
        (comm.get_rank(), comm.get_world_size(), comm.get_local_rank(), comm.is_initialized()),
    ]
    first, me = comm.world(), rank()
    for turn in range(2):
        comm.destroy_process_group()
        found.append((comm.is_initialized(), comm.get_rank(), comm.get_world_size()))
        place = (me + turn) % 3
        here = comm.init_distributed("gloo", world_size=3, rank=place, init_method=f"file://{directory}/store{turn}")
        found.append((here.rank, here == first, comm.all_gather(torch.tensor([me])).tolist()))
        try:
            comm.barrier(first)
        except comm.errors.CommError as error:
            found.append("take a group of the new world" in str(error))
        pending = comm.start(comm.recv, torch.tensor(0), (place - 1) % 3)
        comm.send(torch.tensor(me), (place + 1) % 3)
        found.append(int(pending.wait()))
    return found


def test_processes_leave_and_join_again(tmp_path: Path) -> None:
    """Three processes: groups of some ranks, then two more worlds, each met through a file of its own."""
    for r, result in enumerate(comm.spawn(joins_again, str(tmp_path), world_size=3)):
        groups, where, *turns = result
        assert groups == {
            **({"low": [3]} if r < 2 else {}),
            **({f"high {step}": [3 + step, 2 + step] for step in range(3)} if r > 0 else {}),
            **({"message": [7]} if r == 2 else {}),
            **({"outside": groups.get("outside")} if r == 0 else {}),
            "all": [6],
            "objects": ([{"rank": r, "long": "x" * 1000 * r} for r in range(3)], 1),
        }
        if r == 0:
            assert groups["outside"].startswith("barrier(): rank 0 is not in Group('outside', not a member, ranks [1, 2])")
        assert where == (r, 3, r, True)
        for turn in range(2):
            left, (place, same, ranks), refused, came = turns[4 * turn : 4 * turn + 4]
            assert left == (False, 0, 1)
            assert (place, same, ranks) == ((r + turn) % 3, False, [0, 1, 2] if turn == 0 else [2, 0, 1])
            assert refused is True
            assert came == (r - 1) % 3


def test_a_dtensor_is_refused_by_name() -> None:
    """By collectives, and by steps that cut params; a step alone takes it, as torch does."""
    comm.init_distributed("gloo", world_size=1, rank=0)
    mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("dp",))
    leaf = distribute_tensor(torch.ones(4), mesh, [Shard(0)])
    with pytest.raises(ValueError, match=r"a DTensor cannot be sent: pass this rank's part, leaf.to_local\(\), or"):
        comm.all_gather([torch.ones(1), leaf])
    assert comm.all_gather(leaf.to_local()).tolist() == [1.0] * 4
    for stage in range(4):
        step = T.zero(stage)(fds.train_step(lambda p, x: (p["w"] * x).sum(), fds.sgd(0.1)))
        with pytest.raises(TypeError, match=r"params: the leaf 'w' is a DTensor.*pass whole tensors, leaf.full_tensor\(\)"):
            step.init({"w": leaf})
        assert step.params(step.init({"w": leaf.full_tensor()}))["w"].tolist() == [1.0] * 4
