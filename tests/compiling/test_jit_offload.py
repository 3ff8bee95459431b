"""Law 58 for offload: files are read and written by nodes of the graph, and a step that fails changes nothing."""

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import functional_ds as fds
from functional_ds import comm
from functional_ds import transforms as T
from functional_ds.compiling import JitStep
from functional_ds.compiling.graphs.graph_nodes import PHASE
from tests.compiling.test_jit import WIDTH, Run, assert_same, own_batch, run, squared
from tests.planting import Bug, planted

PLACES: dict[str, dict[str, Any]] = {
    "optimizer": {"optimizer": "disk"},
    "a part of it": {"optimizer": "disk", "ratio": 0.5},
    "params, too": {"optimizer": "disk", "params": "disk"},
    "params on the host": {"optimizer": "disk", "params": "cpu"},
}
ENDS: dict[str, tuple[Callable[[], Any], ...]] = {
    "fp32": (lambda: T.clip(1.0),),
    "fp16, overflowing": (lambda: T.accumulate(2),),
}


STEPS = [("optimizer", 0), ("optimizer", 1), ("a part of it", 2), ("params, too", 3), ("params on the host", 3)]


def two() -> nn.Module:
    torch.manual_seed(0)
    layers = ((nn.Linear(WIDTH, 96), nn.Tanh(), nn.Linear(96, WIDTH)) for _ in range(2))
    return nn.Sequential(*(nn.Sequential(*layer) for layer in layers))


def offloading(**places: Any) -> tuple[JitStep, fds.State]:
    apply, params = fds.functional(two())
    step = fds.jit(fds.compose(T.offload(**places), T.zero(3))(fds.train_step(squared(apply), fds.adamw(0.1))))
    return step, step.init(params)


def both(folder: Path, places: str, stage: int, ends: str, backend: str = "fx") -> tuple[Run, Run]:
    def strategy() -> list[Any]:
        half = [T.mixed_precision("fp16")] if ends.startswith("fp16") else []
        disk = T.offload(**PLACES[places], path=folder, buffer_bytes=1)  # pieces of 64 elements
        return [*half, disk, T.zero(stage), *(end() for end in ENDS[ends])]

    return run(True, strategy(), two, backend=backend), run(False, strategy(), two)


@pytest.mark.law(58)
@pytest.mark.parametrize("ends", ENDS)
@pytest.mark.parametrize(("places", "stage"), STEPS)
def test_a_step_with_files(places: str, stage: int, ends: str, tmp_path: Path) -> None:
    for found, expected in comm.simulate(both, tmp_path, places, stage, ends, world_size=2):
        assert found[2] == []
        assert_same(found, expected)


def units_in_memory() -> tuple[float, int]:
    """How many of six blocks a graph has in memory when its backward pass begins, and how often it reads one."""
    torch.manual_seed(0)
    apply, params = fds.functional(nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(6))))
    disk = T.offload(optimizer="disk", params="disk", path=Path(), buffer_bytes=1 << 16)
    step = fds.jit(fds.compose(disk, T.zero(3))(fds.train_step(squared(apply), fds.sgd(0.1))))
    state = step.init(params)
    state, _ = step(state, own_batch(0))
    graph = step.graph(state, own_batch(1))
    backward = next(node for node in graph.module.graph.nodes if node.meta.get(PHASE) == "backward")
    return graph.live()[backward].units, sum(gather.units for gather in graph.gathers())


@pytest.mark.law(58)
@pytest.mark.parametrize("ranks", [1, 2])
def test_params_are_read_again_for_the_backward_pass(ranks: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On one rank, too, where nothing is gathered."""
    monkeypatch.chdir(tmp_path)
    for units, read in comm.simulate(units_in_memory, world_size=ranks):
        assert units < 5
        assert read > 6


@pytest.mark.law(58)
def test_compiled_regions(tmp_path: Path) -> None:
    for found, expected in comm.simulate(both, tmp_path, "optimizer", 3, "fp32", "aot_eager", world_size=2):
        assert found[2] == []
        assert_same(found, expected)


@pytest.mark.law(58)
def test_on_real_processes(tmp_path: Path) -> None:
    for found, expected in comm.spawn(both, tmp_path, "params, too", 3, "fp16, overflowing", world_size=2):
        assert found[2] == []
        assert_same(found, expected)
    gc.collect()
    assert list(tmp_path.iterdir()) == []


def failing(folder: Path) -> tuple[str, bool]:
    """A step whose file of rank 1 has other bytes; then the right ones again."""
    own = folder / str(comm.world().rank)
    own.mkdir()
    (step, state), (eager, other) = (offloading(optimizer="disk", path=own, direct=False) for _ in range(2))
    for i in range(2):
        state, other = step(state, own_batch(i))[0], fds.Step.__call__(eager, other, own_batch(i))[0]
    before = T.offloading.fetched(state.clone())
    handle = state.optimizer.exp_avg[0]
    path, place = handle.extent.file.path, handle.extent.offset
    right = path.read_bytes()
    if comm.world().rank == 1:
        path.write_bytes(right[:place] + bytes([right[place] ^ 1]) + right[place + 1 :])
    message = ""
    try:
        step(state, own_batch(2))
    except T.OffloadError as error:
        message = str(error)
    path.write_bytes(right)
    if not message:
        return "", False
    assert all(map(torch.equal, fds.tree.leaves(T.offloading.fetched(state)), fds.tree.leaves(before)))
    state, other = step(state, own_batch(2))[0], fds.Step.__call__(eager, other, own_batch(2))[0]
    assert all(map(torch.equal, *(fds.tree.leaves(T.offloading.fetched(x)) for x in (state, other))))
    assert step.reasons == []
    return message, path.name in message


@pytest.mark.law(58)
def test_no_rank_goes_on_alone(tmp_path: Path) -> None:
    """A file of one rank goes wrong: all ranks raise, none has changed its state, and all go on once it is right."""
    (other, _), (own, names_it) = comm.simulate(failing, tmp_path, world_size=2)
    assert "1 other ranks" in other
    assert names_it
    assert "are not those that were written" in own


@pytest.mark.law(58)
def test_each_state_has_its_own_files(tmp_path: Path) -> None:
    """Another state of a step has another graph, and files go with the last state and the step."""
    step, state = offloading(optimizer="disk", path=tmp_path)
    other = step.init(step.params(state))
    for i in range(3):
        (state, one), (other, two) = step(state, own_batch(i)), step(other, own_batch(i))
        assert torch.equal(one["loss"], two["loss"])
    folders = {x.optimizer.exp_avg[0].extent.file.path.parent for x in (state, other)}
    assert len(folders) == 2
    assert {x.slots["offload"].storage.disk.folder.path for x in (state, other)} == folders
    assert step.reasons == []
    del state, other, step
    gc.collect()
    assert list(tmp_path.iterdir()) == []


def test_a_prediction_is_refused(tmp_path: Path) -> None:
    step, state = offloading(optimizer="disk", path=tmp_path)
    state, _ = step(state, own_batch(0))
    machine = fds.scaling.Machine("m", 1e9, 1e9, 1e9, link_bandwidth=1e9, device="cpu")
    graph = step.graph(state, own_batch(1))
    assert "host" in str(graph)
    with pytest.raises(ValueError, match="files"):
        graph.cost(machine)


@pytest.mark.law(58)
def test_a_checkpoint_in_between(tmp_path: Path) -> None:
    step, state = offloading(optimizer="cpu", params="cpu")
    for i in range(2):
        state, _ = step(state, own_batch(i))
    fds.save(state, tmp_path)
    again, like = offloading(optimizer="cpu", params="cpu")
    loaded = fds.load(tmp_path, like=like)
    for i in range(2, 5):
        state, loaded = step(state, own_batch(i))[0], again(loaded, own_batch(i))[0]
        assert torch.equal(step.evaluate(state, own_batch(9)), again.evaluate(loaded, own_batch(9)))
    assert all(map(torch.equal, fds.tree.leaves(state), fds.tree.leaves(loaded)))
    assert step.reasons == again.reasons == []


# -- bugs --------------------------------------------------------------------------------------------------------------


BUGS: list[tuple[Callable[[Path], Any], Bug]] = [
    (
        test_no_rank_goes_on_alone,
        Bug(
            "ranks do not hear of a read that failed",
            "transforms.offloading.update:Update._compute",
            "self.changes.transfers.extend(fetching.reads.values())",
            "",
        ),
    ),
    (
        test_no_rank_goes_on_alone,
        Bug("the vote is not looked at", "transforms.offloading.update:_settle", "if error is not None: ...", "if False: ..."),
    ),
    (
        lambda folder: test_a_step_with_files("optimizer", 1, "fp32", folder),
        Bug(
            "a graph reads the first piece again and again",
            "transforms.offloading.traced:TracedOnDisk.read_piece",
            "index",
            "0",
        ),
    ),
]


@pytest.mark.parametrize(("law", "bug"), BUGS, ids=[bug.name for _, bug in BUGS])
def test_a_bug_is_seen(law: Callable[[Path], Any], bug: Bug, tmp_path: Path) -> None:
    with planted(bug), pytest.raises(bug.shows):
        law(tmp_path)
