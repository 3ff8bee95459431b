"""Law 50: ``load_M ∘ save_N = id``, bitwise, between any tensor- and expert-parallel sizes, stages, pipelines, optimizers."""

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import functional_ds as fds
from functional_ds import comm, transforms
from functional_ds.checkpointing.dcp import CheckpointReader
from functional_ds.checkpointing.manifest import MANIFEST, Manifest
from functional_ds.sharding.leaf_region import LeafRegion
from functional_ds.sharding.leaf_slice import LeafSlice
from functional_ds.sharding.sources import sliced
from functional_ds.testing import assert_same
from tests.checkpointing.meshes import RULES, Plan, Setting, begun, filled, meshes, of_leaves, plans, wanted, whole_params
from tests.transforms.rules import assert_close


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    memory = Path("/dev/shm")
    if memory.is_dir() and os.access(memory, os.W_OK):
        with tempfile.TemporaryDirectory(dir=memory) as name:
            yield Path(name)
    else:
        yield tmp_path_factory.mktemp("checkpoints")


@pytest.mark.law(50)
@given(
    plan=plans(),
    before=meshes(),
    after=meshes(),
    rule=st.sampled_from(sorted(RULES)),
    policy=st.sampled_from(("none", "bf16")),
    dtype=st.sampled_from((torch.float32, torch.complex64)),
)
def test_a_checkpoint_of_one_mesh_opens_on_any_other(
    folder: Path, plan: Plan, before: Setting, after: Setting, rule: str, policy: str, dtype: torch.dtype
) -> None:
    """Each element is where it lies in the whole leaf, in each of a leaf's tensors, and is in the files once."""
    policy = "none" if dtype.is_complex else policy

    def save() -> None:
        fds.save(filled(begun(plan, before, whole_params(plan, dtype), rule=rule, policy=policy)), folder, tag="mesh")

    def load() -> None:
        like = begun(plan, after, whole_params(plan, dtype), rule=rule, policy=policy)
        for shard in of_leaves(fds.load(folder, like=like, tag="mesh")):
            assert torch.equal(shard.view, wanted(shard)), shard.name

    comm.simulate(save, world_size=before.world_size)
    manifest = CheckpointReader(folder, "mesh").manifest
    for path, leaf in whole_params(plan, dtype).items():
        assert manifest.tensors[f"params/{path}"].shape == tuple(leaf.shape)
    assert sum(f.size for f in manifest.files) == sum(t.numel * t.dtype.itemsize for t in manifest.tensors.values())
    comm.simulate(load, world_size=after.world_size)


# -- a run that goes on on another mesh ----------------------------------------------------------------------------------


def parallel(stage: int | None, mesh: Any) -> tuple[fds.Step, fds.State]:
    """A step on slices along ``tp``, in shards along ``dp``; without a mesh, that of one device."""

    def loss(p: Any, x: Tensor) -> Tensor:
        if mesh is None:
            return (torch.tanh(x @ p["columns"]) @ p["rows"]).square().mean() + p["other"].sum()
        hidden = torch.tanh(comm.copy_to(x, mesh["tp"]) @ p["columns"])
        return comm.reduce_from(hidden @ p["rows"], mesh["tp"]).square().mean() + p["other"].sum()

    cut = [] if mesh is None else [transforms.tensor_parallel({"columns": 1, "rows": 0}, mesh["tp"])]
    shards = [] if stage is None else [transforms.zero(stage, mesh["dp"])]
    step = fds.compose(*shards, *cut)(fds.train_step(loss, fds.adamw(0.1)))
    params = {"columns": torch.arange(8.0).view(2, 4) / 9, "rows": torch.arange(4.0).view(4, 1), "other": torch.ones(3)}
    return step, step.init(params)


def moved(step: fds.Step, state: fds.State, mesh: Any, updates: int) -> fds.State:
    for count in range(int(state.step), int(state.step) + updates):
        batch = torch.arange(12.0).view(6, 2) / 6 - count
        state, _ = step(state, batch if mesh is None else batch.tensor_split(mesh["dp"].size)[mesh["dp"].rank])
    return state


def first_half(folder: Path, axes: dict[str, int], stage: int) -> Any:
    mesh = comm.mesh(**axes)
    step, state = parallel(stage, mesh)
    state = moved(step, state, mesh, 2)
    fds.save(state, folder)
    return step.params(state)


def second_half(folder: Path, axes: dict[str, int], stage: int) -> Any:
    mesh = comm.mesh(**axes)
    step, like = parallel(stage, mesh)
    state = fds.load(folder, like=like)
    loaded = step.params(state)
    alone = fds.load(folder, like=like, only="params/rows")
    assert_same(step.params(alone)["rows"], loaded["rows"])
    return loaded, step.params(moved(step, state, mesh, 2))


@pytest.mark.sample(3)
@pytest.mark.law(50)
@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({"dp": 1, "tp": 1}, {"dp": 2, "tp": 4}),
        ({"dp": 2, "tp": 4}, {"tp": 2, "dp": 1}),
        ({"tp": 2, "dp": 1}, {"dp": 3, "tp": 1}),
        ({"dp": 2, "tp": 2}, {"tp": 2, "dp": 2}),
    ],
)
@pytest.mark.parametrize("stages", [(1, 3), (3, 0)])
def test_a_run_goes_on_with_another_number_of_slices(tmp_path: Path, before: Any, after: Any, stages: Any) -> None:
    """The params are those that were saved, bit for bit, and then move as they do on one device."""
    step, state = parallel(None, None)
    expected = step.params(moved(step, state, None, 4))
    saved = comm.simulate(first_half, tmp_path, before, stages[0], world_size=before["dp"] * before["tp"])[0]
    for loaded, found in comm.simulate(second_half, tmp_path, after, stages[1], world_size=after["dp"] * after["tp"]):
        assert_same(loaded, saved)
        assert_close(found, expected, 1e-5)


@pytest.mark.law(50)
def test_real_processes(tmp_path: Path) -> None:
    saved = comm.spawn(first_half, tmp_path, {"dp": 1, "tp": 2}, 1, world_size=2)[0]
    for loaded, _ in comm.spawn(second_half, tmp_path, {"dp": 2, "tp": 1}, 3, world_size=2):
        assert_same(loaded, saved)


# -- what ranks have of their own ------------------------------------------------------------------------------------------


def test_slices_that_differ_between_ranks_are_each_ranks_own(tmp_path: Path) -> None:
    """They go back to as many ranks with the same slices; to others not."""

    def program(axes: dict[str, int], save: bool) -> None:
        mesh = comm.mesh(**axes)
        leaf = sliced(torch.arange(24.0).view(4, 6), LeafSlice.even(1, 6, mesh["tp"].size, mesh["tp"].rank))
        step = fds.train_step(lambda p, x: NotImplemented, fds.sgd(0.1))
        like = step.init({"w": leaf, "all": torch.ones(2)})
        if save:
            state = like.clone()
            state.params["w"].add_(100 * mesh["dp"].rank)
            fds.save(state, tmp_path)
        if axes == {"dp": 2, "tp": 2}:
            expected = leaf + 100 * mesh["dp"].rank
            assert torch.equal(fds.load(tmp_path, like=like).params["w"], expected)
            return
        with pytest.raises(fds.checkpointing.StructureError, match="params/w"):
            fds.load(tmp_path, like=like)
        assert torch.equal(fds.load(tmp_path, like=like, allow_missing="params/w").params["w"], leaf)

    comm.simulate(program, {"dp": 2, "tp": 2}, True, world_size=4)
    fds.checkpointing.verify(tmp_path)
    comm.simulate(program, {"dp": 4, "tp": 1}, False, world_size=4)
    comm.simulate(program, {"dp": 1, "tp": 2}, False, world_size=2)


# -- manifests -------------------------------------------------------------------------------------------------------------


def saved_slices(folder: Path, n: int = 2) -> Manifest:
    def program() -> None:
        step = fds.train_step(lambda p, x: NotImplemented, fds.sgd(0.1))
        cut = LeafSlice.even(1, 6, n, comm.world().rank)
        fds.save(step.init({"w": sliced(torch.arange(24.0).view(4, 6), cut), "b": torch.ones(2)}), folder, tag="1")

    comm.simulate(program, world_size=n)
    return CheckpointReader(folder, "1").manifest


def test_a_slice_is_one_chunk_of_a_manifest(tmp_path: Path) -> None:
    """Not one for each row; and none where there are no slices."""
    manifest = saved_slices(tmp_path / "two")
    assert [(c.offset, c.numel, c.slice) for c in manifest.tensors["params/w"].chunks] == [(0, 12, 0), (0, 12, 1)]
    assert [str(region) for region in manifest.tensors["params/w"].slices] == ["[:, 0:3]", "[:, 3:6]"]
    assert b'"version":2' in manifest.encode()
    assert Manifest.decode(manifest.encode(), "here") == manifest
    alone = saved_slices(tmp_path / "one", 1)
    assert b'"version":1' in alone.encode()


@pytest.mark.parametrize(
    ("slices", "said"),
    [
        ((((0, 3),), ((2, 5),)), "slices that overlap at"),
        ((((0, 3),), ((0, 3),)), "overlap|nothing"),
        ((((0, 2), (3, 4)), ((4, 6), (2, 3))), None),
        ((((0, 3),), ((3, 7),)), "not ranges of the 6 positions along dim 1"),
        ((((0, 3),), ((6, 3),)), "not ranges of"),
        ((((0, 3),), ((3, 5),)), "outside"),
        ((((0, 3),),), "slice that is not there"),
    ],
)
def test_slices_that_overlap_or_leave_a_gap_are_damage(tmp_path: Path, slices: Any, said: str | None) -> None:
    manifest = saved_slices(tmp_path)
    regions = tuple(LeafRegion((4, 6), ((1, ranges),)) for ranges in slices)
    tensors = {**manifest.tensors, "params/w": attrs.evolve(manifest.tensors["params/w"], slices=regions)}
    (tmp_path / "1" / MANIFEST).write_bytes(attrs.evolve(manifest, tensors=tensors).encode())
    if said is None:
        fds.checkpointing.verify(tmp_path)
    else:
        with pytest.raises(fds.checkpointing.DamagedError, match=said):
            fds.checkpointing.verify(tmp_path)


def test_ranks_without_a_slice_or_with_slices_that_overlap_cannot_save(tmp_path: Path) -> None:
    def program(ranges: tuple[Any, ...]) -> None:
        step = fds.train_step(lambda p, x: NotImplemented, fds.sgd(0.1))
        cut = LeafSlice(0, 6, ranges, comm.world().rank)
        fds.save(step.init({"w": sliced(torch.ones(6, 2), cut)}), tmp_path)

    with pytest.raises(fds.checkpointing.CheckpointError, match=r"the ranks have nothing at \[4:6, :\] of params/w"):
        comm.simulate(program, (((0, 2),), ((2, 4),)), world_size=2)
    with pytest.raises(fds.checkpointing.CheckpointError, match=r"have slices that overlap at \[2:4, :\] of params/w"):
        comm.simulate(program, (((0, 4),), ((2, 6),)), world_size=2)


def test_torchs_own_loader_reads_slices(tmp_path: Path) -> None:
    """A tensor that was saved in slices has its shape there."""
    import torch.distributed.checkpoint as dcp

    saved_slices(tmp_path)
    found = {"params/w": torch.zeros(4, 6), "params/b": torch.zeros(2)}
    with pytest.warns(UserWarning, match="single process"):
        dcp.load(found, storage_reader=CheckpointReader(tmp_path, "1"))
    assert torch.equal(found["params/w"], torch.arange(24.0).view(4, 6))
    assert torch.equal(found["params/b"], torch.ones(2))
