"""Slices in other tools' files: what every mesh exports, and what each rank reads of whole leaves."""

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor, nn

import functional_ds as fds
from functional_ds import comm
from functional_ds.interchange.safetensors_writer import SafetensorsWriter
from functional_ds.sharding import sources
from functional_ds.sharding.leaf_slice import LeafSlice
from functional_ds.sharding.sources import sliced
from functional_ds.state_dict.describe import describe
from tests.checkpointing.meshes import (
    Dim,
    Plan,
    Setting,
    begun,
    cut_over,
    expected,
    filled,
    meshes,
    of_leaves,
    plans,
    whole_params,
)
from tests.checkpointing.states import places_of
from tests.interchange.zero_layout import Layout, values_of

ONE = Setting(1, 1, 1, 1, None)


@pytest.mark.law(50)
@given(plan=plans(), setting=meshes(), policy=st.sampled_from(("none", "bf16")))
def test_a_file_does_not_depend_on_the_mesh(
    tmp_path_factory: pytest.TempPathFactory, plan: Plan, setting: Setting, policy: str
) -> None:
    """export_N = export_1, to the byte; each element is sent once at most."""
    folder = tmp_path_factory.mktemp("export")
    params = whole_params(plan, torch.float32)

    def program(setting: Setting) -> int:
        state = filled(begun(plan, setting, params, policy=policy))
        with comm.ledger() as book:
            fds.export(state, folder / f"{setting.world_size}.safetensors", overwrite=True)
        return sum(row.elements for row in book.rows if row.collective == "send")

    comm.simulate(program, ONE, world_size=1)
    whole = (folder / "1.safetensors").read_bytes()
    sent = comm.simulate(program, setting, world_size=setting.world_size)
    assert sum(sent) <= sum(leaf.numel() for leaf in params.values())
    assert (folder / f"{setting.world_size}.safetensors").read_bytes() == whole
    role = "params" if policy == "none" else "masters"
    for path, value in load_file(folder / "1.safetensors").items():
        assert torch.equal(value.view(-1), expected(f"{role}/{path}", torch.arange(value.numel()), value.dtype))


@pytest.mark.law(50)
@given(plan=plans(), setting=meshes())
def test_a_file_goes_straight_into_slices(tmp_path_factory: pytest.TempPathFactory, plan: Plan, setting: Setting) -> None:
    folder = tmp_path_factory.mktemp("import")
    params = whole_params(plan, torch.float32)
    fds.export(filled(begun(plan, ONE, params)), folder)
    bare = {path: torch.empty_like(leaf, device="meta") for path, leaf in params.items()}

    def program() -> None:
        for shard in of_leaves(begun(plan, setting, fds.load_params(folder, like=bare))):
            if shard.name.startswith("params/"):
                places = places_of(shard.region)[shard.offset : shard.offset + shard.view.numel()]
                assert torch.equal(shard.view, expected(shard.name, places, shard.view.dtype))

    comm.simulate(program, world_size=setting.world_size)


class Logged:
    """A source that can read stretches of a leaf, and what was read of it."""

    def __init__(self, values: dict[str, Tensor]) -> None:
        self.values, self.read_elements = values, 0

    def read(self, path: str, start: int, stop: int) -> Tensor:
        self.read_elements += stop - start
        return self.values[path].reshape(-1)[start:stop]


@pytest.mark.law(50)
@given(plan=plans(), setting=meshes(), sparse=st.booleans())
def test_a_rank_reads_its_own_ranges(plan: Plan, setting: Setting, sparse: bool) -> None:
    """No more than what it stores where a gap is worth another read, and never more than the leaf."""
    params = {
        path: torch.arange(float(leaf.numel())).view(leaf.shape) for path, leaf in whole_params(plan, torch.float32).items()
    }

    def program() -> tuple[int, int]:
        source = Logged(params)
        state = begun(plan, setting, fds.from_source(params, source))
        shards = [shard for shard in of_leaves(state) if shard.name.startswith("params/")]
        for shard in shards:
            places = places_of(shard.region)[shard.offset : shard.offset + shard.view.numel()]
            assert torch.equal(shard.view, places.float())
        return source.read_elements, sum(shard.view.numel() for shard in shards)

    before, sources._GAP = sources._GAP, 0 if sparse else sources._GAP
    try:
        found = comm.simulate(program, world_size=setting.world_size)
    finally:
        sources._GAP = before
    for read, stored in found:
        if setting.stage in (None, 0, 3):  # in stages 1 and 2 ranks read their shards, and gather
            assert read >= stored
        assert read <= sum(leaf.numel() for leaf in params.values())
        assert not sparse or read <= stored


@pytest.mark.law(50)
def test_a_leaf_that_is_computed_is_computed_once_for_a_slice() -> None:
    """Modules built without memory: slices of the values of a whole initialisation."""

    def program() -> None:
        torch.manual_seed(3)
        _, whole = fds.functional(nn.Linear(6, 8))
        torch.manual_seed(3)
        _, bare = fds.deferred(lambda: nn.Linear(6, 8))
        cut = LeafSlice.even(0, [4, 4], 2, comm.world().rank)
        for name in ("weight", "bias"):
            piece = sliced(bare[name], cut)
            assert piece.is_meta
            assert torch.equal(sources.values_of(piece), cut.of(whole[name].detach()))

    comm.simulate(program, world_size=2)


def test_no_more_than_a_leaf_is_put_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is written of leaves that are cut along a later dim is one whole leaf at a time, and of others what was sent."""
    written: list[tuple[str, int]] = []
    write = SafetensorsWriter.write

    def noted(self: Any, name: str, values: Tensor, *, offset: int = 0) -> None:
        written.append((name, values.numel()))
        write(self, name, values, offset=offset)

    monkeypatch.setattr(SafetensorsWriter, "write", noted)

    def program() -> None:
        group = comm.world()
        leaf = torch.arange(24.0).view(4, 6)
        own = {
            name: sliced(leaf, LeafSlice.even(dim, leaf.shape[dim], 2, group.rank))
            for name, dim in (("rows", 0), ("columns", 1))
        }
        fds.export(fds.train_step(lambda p, x: NotImplemented, fds.sgd(0.1)).init(own), tmp_path)

    comm.simulate(program, world_size=2)
    assert sorted(written) == [("columns", 24), ("rows", 12), ("rows", 12)]
    assert torch.equal(load_file(tmp_path / "model.safetensors")["columns"], torch.arange(24.0).view(4, 6))


def test_a_slice_is_not_exported_as_a_tree(tmp_path: Path) -> None:
    leaf = sliced(torch.ones(4, 6), LeafSlice.even(1, 6, 2, 1))
    with pytest.raises(ValueError, match=r"'w' is the slice \[:, 3:6\] of a leaf of shape \[4, 6\]"):
        fds.export({"w": leaf}, tmp_path)
    assert cut_over(None, {"w": ()}, {"w": leaf})["w"] is leaf


def test_deepspeeds_leaves_go_into_slices(tmp_path: Path) -> None:
    """Each rank reads what lies in its slices, and in its shards of those."""
    values = values_of({"a": [4, 6], "b": [6], "c": [2, 4, 3]})
    path = Layout(2, 2, [["a", "b", "c"]], values).write(tmp_path)
    plan = {"a": (Dim(4), Dim(6, "tp", (6,))), "b": (Dim(6, "tp", (2, 4)),), "c": (Dim(2, "ep", (2,)), Dim(4), Dim(3))}

    def program() -> None:
        params = {name: torch.zeros(entry["master"].shape) for name, entry in values.items()}
        for shard in describe(
            fds.from_deepspeed(path, like=begun(plan, Setting(2, 2, 2, 1, 2), params), allow_missing="averages")
        ):
            role, _, leaf = shard.name.partition("/")
            if role in ("params", "optimizer.exp_avg"):
                places = places_of(shard.region)[shard.offset : shard.offset + shard.view.numel()]
                kind = "master" if role == "params" else "exp_avg"
                assert torch.equal(shard.view, values[leaf][kind].reshape(-1)[places])

    comm.simulate(program, world_size=8)
