"""Ranks as processes, over Gloo: the same programs, and an end for all when one fails."""

import multiprocessing
import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from functional_ds import comm
from functional_ds.comm import setup
from functional_ds.comm.backends.primitives import Communicator
from functional_ds.testing import assert_same
from tests.comm import cases

# -- programs that give the same on simulated ranks -------------------------------------------------------------------


def place() -> tuple[int, int, tuple[int, ...]]:
    here = comm.world()
    return here.rank, here.size, here.ranks


def along_a_mesh() -> Any:
    mesh, x = comm.mesh(dp=2, tp=2), torch.tensor([comm.world().rank])
    return mesh.coordinates, {axis: comm.all_gather(x, mesh[axis]) for axis in ("dp", "tp")}, mesh["tp"].ranks


def own_channels() -> Any:
    """Each rank uses two channels in an order of its own."""
    group = comm.mesh(pair=2, half=2)["half"]
    one, two = group.channel("one"), group.channel("two")
    started = {}
    for channel in (one, two) if group.rank else (two, one):
        started[channel.name] = comm.start(comm.all_gather, torch.tensor([comm.world().rank]), channel)
    return {name: pending.wait() for name, pending in sorted(started.items())}


def waits_in_any_order() -> Any:
    """Ranks wait for their all_reduces in orders of their own, some before and some after they start the next."""
    rank = comm.world().rank
    started: list[Any] = []
    results: dict[int, Any] = {}
    for i in range(4):
        started.append(comm.start(comm.all_reduce, torch.full((6,), 10.0**i + rank)))
        if i >= rank:
            results[i - rank] = started[i - rank].wait()
    for i in reversed(range(4)):
        results[i] = started[i].wait()
    return [results[i] for i in range(4)], [started[i].wait() is results[i] for i in range(4)]


def mixed_trees() -> Any:
    """Trees of several dtypes, behind calls that some ranks have waited for and others have not."""
    results = []
    for _ in range(5):
        ahead = comm.start(comm.all_reduce, torch.ones(100_000))
        if comm.world().rank % 2:
            ahead.wait()
        one = torch.full((9,), comm.world().rank + 1)
        results.append(comm.all_reduce([one, one.float() / 3, one.double() / 7, one.to(torch.complex64) / 9]))
    return results


def drops_some() -> Any:
    """Nobody waits for these, small and large."""
    for size in (3, 300_000):
        comm.start(comm.all_gather, torch.ones(size))
        comm.start(comm.all_reduce, torch.ones(size))
        comm.start(comm.reduce_scatter, torch.ones(4 * size))
        comm.start(comm.broadcast, torch.ones(size))
    return comm.all_reduce(torch.tensor([comm.world().rank]))


def messages_around() -> Any:
    """Small and large, to the next rank from the one before; some are looked at, some waited for late, some dropped."""
    here, found = comm.world(), []
    after, before = (here.rank + 1) % here.size, (here.rank - 1) % here.size
    for turn in range(24):
        size = 300_000 if turn % 5 == 4 else 3  # large ones have another way
        sent = comm.start(comm.send, torch.full((size,), float(10 * turn + here.rank)), after)
        coming = comm.start(comm.recv, torch.empty(size), before)
        if turn % 3 == here.rank % 3:
            sent.poll(0.001)
            coming.poll(0.001)
        if turn % 4 == 3:
            del coming
        else:
            found.append(coming)
        if turn % 2:
            found.append(sent)
    return [pending.wait()[0].item() for pending in reversed(found)]


def lazy_views() -> Any:
    """Conjugates and negatives that are not written out yet, and lone elements with any stride."""
    x = torch.tensor([1 + 2j, 3 - 1j]) * (comm.world().rank + 1)
    lone = torch.arange(8.0)[::2][comm.world().rank :][:1]
    return (
        comm.all_reduce(x.conj()),
        comm.all_gather(x.conj().imag),
        comm.all_gather(lone),
        comm.reduce_scatter(torch.arange(16.0).view(4, 4)[:, :1]),
    )


def gradients() -> Any:
    x = torch.arange(4.0).requires_grad_()
    loss = (comm.all_gather(comm.reduce_scatter(x * (comm.world().rank + 1))) ** 2).sum()
    loss.backward()
    return x.grad


def in_inference_mode() -> Any:
    """Whether results are tensors of the mode, at once, later, and after it; with and without threads."""
    rank, found, after = comm.world().rank, [], []
    with torch.inference_mode():
        for size in (4, 400_000):
            x = torch.ones(size) * (rank + 1)
            for call in (
                comm.all_reduce,
                comm.all_gather,
                comm.reduce_scatter,
                comm.broadcast,
                partial(comm.all_gather, dim=1),
                partial(comm.all_gather, uneven=True),
                partial(comm.scatter, src=0),
                partial(comm.permute, perm=[(0, 1), (2, 2)]),
            ):
                bound = isinstance(call, partial)
                f, options, value = (call.func, call.keywords, x.view(4, -1)) if bound else (call, {}, x)
                found.append(f(value, **options))
                found.append(comm.start(f, value, **options).wait())
                after.append(comm.start(f, value, **options))
            sent = comm.start(comm.send, x, (rank + 1) % 4)
            found.append(comm.start(comm.recv, x, (rank - 1) % 4).wait())
            sent.wait()
    found.extend(pending.wait() for pending in after)
    for result in found:
        result.add_(0)  # refused for a tensor of the mode
    return [result.sum() for result in found]


def alone_on_an_axis() -> Any:
    """Every row of the table over a group of one."""
    drawn = [case for case in cases.draw(30, 1, seed=1) if not case.special]
    return cases.run(drawn, group=comm.mesh(all=4, one=1)["one"])


SAME = {
    f.__name__: f
    for f in (
        place,
        along_a_mesh,
        own_channels,
        waits_in_any_order,
        mixed_trees,
        drops_some,
        messages_around,
        lazy_views,
        gradients,
        in_inference_mode,
        alone_on_an_axis,
    )
}

# -- programs for processes alone -------------------------------------------------------------------------------------


def joins_twice() -> bool:
    first, second = comm.init_distributed(), comm.init_distributed()
    return first == second == comm.world() and first.size == int(os.environ["WORLD_SIZE"])


def takes_a_device_mesh() -> Any:
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    mesh, x = comm.mesh(grid), torch.tensor([comm.world().rank])
    return mesh.axes, mesh.coordinates, {axis: comm.all_gather(x, mesh[axis]) for axis in ("dp", "tp")}


def needs_names() -> str:
    try:
        comm.mesh(init_device_mesh("cpu", (4,)))
    except ValueError as error:
        return str(error)
    return "no error"


def polls() -> list[bool]:
    """Rank 0 is asked for; the others' poll is False until it has come."""
    gate = comm.world().channel("gate")
    if comm.world().rank == 0:
        comm.barrier(gate)
        return [comm.start(comm.all_gather, torch.ones(1)).wait().sum().item() == 4]
    pending = comm.start(comm.all_gather, torch.ones(1))
    early = [pending.poll(), pending.poll(0.01)]
    comm.barrier(gate)
    return [*early, pending.poll(60), pending.wait().sum().item() == 4, pending.poll()]


def counts_bytes() -> list[tuple[str, int, int]]:
    """What the ledger says and what the transport was given, for each row but the barrier, at even and odd sizes."""
    sent, here = [0], comm.world().rank
    original = Communicator.send

    def send(comm: Communicator, tensor: torch.Tensor, peer: int) -> Any:
        sent[0] += tensor.numel() * tensor.element_size()
        return original(comm, tensor, peer)

    Communicator.send = send
    rows = []
    try:
        for call in (
            comm.all_reduce,
            comm.all_gather,
            lambda x: comm.reduce_scatter(x.repeat(4)),
            lambda x: comm.broadcast(x, 2),
            lambda x: comm.reduce(x, 1),
            lambda x: comm.gather(x, 1),
            lambda x: comm.scatter(x.repeat(4), 3),
            lambda x: comm.all_to_all(x.repeat(4)),
            lambda x: comm.all_to_all(x.repeat(4), input_splits=[len(x)] * 4, output_splits=[len(x)] * 4),
            lambda x: comm.permute(x, [(0, 1), (1, 0), (2, 2)]),
            lambda x: comm.batch_p2p([comm.Send(x, (here + 1) % 4), comm.Recv(x, (here - 1) % 4)]),
            comm.reduce_from,
            comm.gather_from,
        ):
            for size in (1, 3, 8, 9):
                for dtype in (torch.float32, torch.int8, torch.complex128):
                    sent[0] = 0
                    with comm.ledger() as book:
                        call(torch.ones(size, dtype=dtype))
                    rows.append((book.rows[0].collective, book.bytes, sent[0]))
    finally:
        Communicator.send = original
    return rows


ALONE: dict[str, Callable[[], Any]] = {
    f.__name__: f for f in (joins_twice, takes_a_device_mesh, needs_names, polls, counts_bytes)
}


def everything() -> dict[str, Any]:
    return {name: program() for name, program in {**SAME, **ALONE}.items()}


@pytest.fixture(scope="module")
def four() -> list[dict[str, Any]]:
    """What each of four processes got in every program: starting them costs seconds, so it is done once."""
    return comm.spawn(everything, world_size=4)


@pytest.mark.parametrize("name", SAME)
def test_processes_do_as_simulated_ranks(name: str, four: list[dict[str, Any]]) -> None:
    """spawn(program) = simulate(program), results in rank order."""
    for real, model in zip(four, comm.simulate(SAME[name], world_size=4), strict=True):
        assert_same(real[name], model)


def test_results_come_in_rank_order(four: list[dict[str, Any]]) -> None:
    assert [result["place"] for result in four] == [(r, 4, (0, 1, 2, 3)) for r in range(4)]


def test_waits_have_their_own_results(four: list[dict[str, Any]]) -> None:
    """The i-th all_reduce is 4 · 10^i + 0 + 1 + 2 + 3, whoever waited when."""
    for result in four:
        values, same = result["waits_in_any_order"]
        assert [value.tolist() for value in values] == [[4 * 10.0**i + 6] * 6 for i in range(4)]
        assert same == [True] * 4


def test_joining_twice_gives_the_same_world(four: list[dict[str, Any]]) -> None:
    assert [result["joins_twice"] for result in four] == [True] * 4


def test_a_device_mesh_is_taken_as_it_is(four: list[dict[str, Any]]) -> None:
    """The same groups as those of mesh(dp=2, tp=2)."""
    for result in four:
        axes, coordinates, gathered = result["takes_a_device_mesh"]
        own_coordinates, own_gathered, _ = result["along_a_mesh"]
        assert (axes, coordinates) == ({"dp": 2, "tp": 2}, own_coordinates)
        assert_same(gathered, own_gathered)


def test_a_device_mesh_needs_names(four: list[dict[str, Any]]) -> None:
    expected = "device_mesh has no mesh_dim_names; a mesh here needs a name for each axis"
    assert [result["needs_names"] for result in four] == [expected] * 4


def test_a_poll_is_true_once_a_wait_is_short(four: list[dict[str, Any]]) -> None:
    assert [result["polls"] for result in four] == [[True]] + [[False, False, True, True, True]] * 3


def test_the_ledger_counts_what_the_transport_gets(four: list[dict[str, Any]]) -> None:
    """For one leaf, the ledger's bytes are those handed to Gloo, rank by rank."""
    for result in four:
        silent = {"barrier", "copy_to", "scatter_to"}
        named = {"transfer": "send", "all_to_all_rows": "all_to_all"}
        assert {name for name, _, _ in result["counts_bytes"]} == {
            named.get(row.name, row.name) for row in comm.table.TABLE
        } - silent
        for name, booked, sent in result["counts_bytes"]:
            assert booked == sent, name


# -- failures ---------------------------------------------------------------------------------------------------------


class OurError(Exception):
    """Loses its notes when pickled."""

    def __reduce__(self) -> Any:
        return OurError, self.args


class PickyError(Exception):
    """Pickles, and cannot be unpickled."""

    def __init__(self, *, code: int) -> None:
        super().__init__(f"code {code}")


def fails(how: str) -> None:
    """Rank 1 fails while rank 0 waits for it."""
    comm.barrier()
    if comm.world().rank == 1:
        if how == "exit":
            os._exit(3)
        raise OurError("no") if how == "ours" else PickyError(code=7)
    comm.all_reduce(torch.ones(3))


def leaves_early() -> None:
    if comm.world().rank == 0:
        comm.all_reduce(torch.ones(3))


@pytest.mark.parametrize(
    ("how", "error", "message"),
    [
        ("ours", OurError, "no"),
        ("picky", comm.errors.RankFailedError, "PickyError: code 7"),
        ("exit", comm.errors.RankFailedError, "rank 1 of 2 ended without a result (exit code 3)"),
    ],
)
def test_a_failing_rank_ends_all(how: str, error: type[Exception], message: str) -> None:
    """The error is the failing rank's, not that of the rank that lost its peer; a note has its rank and traceback."""
    with pytest.raises(error) as caught:
        comm.spawn(fails, how, world_size=2)
    assert type(caught.value) is error
    assert str(caught.value) == message
    if how != "exit":
        (note,) = caught.value.__notes__
        assert note.startswith("raised on rank 1 of 2:\nTraceback (most recent call last):")
        assert "in fails" in note
    assert not multiprocessing.active_children()


def test_a_rank_that_leaves_early_does_not_hang_the_others() -> None:
    with pytest.raises(RuntimeError) as caught:
        comm.spawn(leaves_early, world_size=2)
    assert caught.value.__notes__[0].startswith("raised on rank 0 of 2:")
    assert not multiprocessing.active_children()


def gives_a_function() -> Any:
    return lambda: None


def test_a_result_must_be_picklable() -> None:
    with pytest.raises((AttributeError, pickle.PicklingError, TypeError), match="gives_a_function") as caught:
        comm.spawn(gives_a_function, world_size=1)
    assert caught.value.__notes__[0].startswith("raised on rank 0 of 1:")


def test_a_world_has_a_rank() -> None:
    with pytest.raises(ValueError, match=r"world_size=0: a world has at least one rank"):
        comm.spawn(place, world_size=0)


# -- surroundings -----------------------------------------------------------------------------------------------------


def test_outside_torchrun_there_is_a_world_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """init_distributed does nothing there, however often."""
    monkeypatch.delenv("RANK", raising=False)
    assert comm.init_distributed() == comm.init_distributed() == comm.world()
    assert (comm.world().rank, comm.world().size) == (0, 1)
    assert not dist.is_initialized()


@pytest.mark.parametrize("backend", [None, "nccl", "cpu:gloo,cuda:nccl"])
def test_more_ranks_than_gpus_are_refused(backend: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before anything is initialised: two ranks would share a GPU, and NCCL would fail much later."""
    for name, value in {"RANK": "2", "WORLD_SIZE": "3", "LOCAL_RANK": "2", "LOCAL_WORLD_SIZE": "3"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: pytest.fail(f"took device {device}"))
    with pytest.raises(ValueError, match=r"3 ranks on this host and 2 GPUs.*start at most 2 ranks here.*backend='gloo'"):
        comm.init_distributed(backend)
    assert not dist.is_initialized()


@pytest.mark.parametrize(("gpus", "number"), [(1, 0), (4, 3)])
def test_a_process_may_see_its_own_gpu_alone(gpus: int, number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As under SLURM: there it is number 0, whatever the process's rank. NCCL connects it at once."""
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "3", "LOCAL_WORLD_SIZE": "4"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    joined: dict[str, Any] = {}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="GPU-7"))
    monkeypatch.setattr(dist, "init_process_group", lambda backend, **options: joined.update(options))
    comm.init_distributed()
    assert joined["device_id"] == torch.device("cuda", number)


def test_ranks_that_share_a_gpu_are_named() -> None:
    """Where each process sees one GPU, only the processes together can tell."""
    store = dist.HashStore()  # type: ignore[attr-defined]
    for rank, gpu in enumerate("abca"):
        store.set(f"functional_ds/gpu/{rank}", gpu)
    for rank in range(4):
        with pytest.raises(ValueError, match=r"ranks \[0, 3\] have the same GPU: NCCL needs a GPU for each rank"):
            setup._check_own_gpu(store, rank, 4)
    setup._check_own_gpu(store, 2, 3)


SCRIPT = """
import torch
from functional_ds import comm

group = comm.init_distributed()
assert comm.init_distributed() == group == comm.world()
total = comm.all_reduce(torch.tensor(group.rank + 1)).item()
rows = comm.all_gather(torch.tensor([comm.mesh(dp=2)["dp"].rank])).tolist()
with open(f"OUT/{group.rank}", "w") as file:
    file.write(f"{group.rank} of {group.size}: {total} {rows}")
torch.distributed.destroy_process_group()
"""


def test_a_script_runs_under_torchrun(tmp_path: Path) -> None:
    """init_distributed joins the world that torchrun made."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.replace("OUT", str(tmp_path)))
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(torchrun, capture_output=True, text=True, env=environment, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert [(tmp_path / str(r)).read_text() for r in range(2)] == [f"{r} of 2: 3 [0, 1]" for r in range(2)]
