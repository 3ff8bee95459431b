"""Each bug of slices is planted alone, and a law of checkpoints, exports or sources must break."""

import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import functional_ds as fds
import functional_ds.checkpointing.dcp  # loaded late otherwise, and bugs are planted in what is there
from functional_ds import checkpointing, comm
from functional_ds.checkpointing.dcp import CheckpointReader
from functional_ds.sharding.leaf_slice import LeafSlice
from functional_ds.sharding.sources import sliced
from functional_ds.state_dict.describe import describe
from tests.checkpointing.meshes import Dim, Plan, Setting, begun, expected, filled, of_leaves, wanted, whole_params
from tests.checkpointing.states import places_of
from tests.planting import Bug, planted

# Rows that experts cut and columns in blocks; heads that ranks share; columns alone; a bias in blocks; a leaf that is whole.
PLAN: Plan = {
    "blocks.0.w": (Dim(4, "ep", (4,)), Dim(3), Dim(12, "tp", (4, 8))),
    "blocks.1.w": (Dim(6, "tp", (), 2), Dim(5)),
    "blocks.2.w": (Dim(3), Dim(20, "tp", (20,))),
    "blocks.3.w": (Dim(12, "tp", (8, 4)),),
    "blocks.4.w": (Dim(3), Dim(2)),
}
WIDE, NARROW = Setting(dp=2, tp=4, ep=1, pp=1, stage=3), Setting(dp=1, tp=2, ep=2, pp=1, stage=1)
ONE = Setting(1, 1, 1, 1, None)
PARAMS = whole_params(PLAN, torch.float32)


def save(folder: str, setting: Setting) -> None:
    fds.save(filled(begun(PLAN, setting, PARAMS)), folder, tag="t")


def load(folder: str, setting: Setting) -> None:
    for shard in of_leaves(fds.load(folder, like=begun(PLAN, setting, PARAMS))):
        assert torch.equal(shard.view, wanted(shard)), shard.name


def checkpoints_open_on_other_meshes() -> None:
    """Law 50 between three meshes, and each element once in the files."""
    for before, after in ((WIDE, NARROW), (NARROW, WIDE), (WIDE, ONE), (ONE, NARROW)):
        with tempfile.TemporaryDirectory() as folder:
            comm.simulate(save, folder, before, world_size=before.world_size)
            manifest = CheckpointReader(folder, "t").manifest
            assert all(manifest.tensors[f"params/{path}"].shape == leaf.shape for path, leaf in PARAMS.items())
            assert sum(f.size for f in manifest.files) == sum(t.numel * t.dtype.itemsize for t in manifest.tensors.values())
            checkpointing.verify(folder)
            comm.simulate(load, folder, after, world_size=after.world_size)


def files_are_those_of_one_device() -> None:
    """An export and an import of slices."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        comm.simulate(lambda: fds.export(filled(begun(PLAN, WIDE, PARAMS)), folder), world_size=WIDE.world_size)
        for path, value in load_file(folder / "model.safetensors").items():
            assert torch.equal(value.view(-1), expected(f"params/{path}", torch.arange(value.numel()), value.dtype))

        def read() -> None:
            for shard in of_leaves(begun(PLAN, NARROW, fds.load_params(folder, like=PARAMS))):
                if shard.name.startswith("params/"):
                    places = places_of(shard.region)[shard.offset : shard.offset + shard.view.numel()]
                    assert torch.equal(shard.view, expected(shard.name, places, shard.view.dtype))

        comm.simulate(read, world_size=NARROW.world_size)


def updates_keep_what_a_leaf_is() -> None:
    """Also by an optimizer that returns new tensors."""

    def update(params: list[Tensor], grads: Any, state: Any, rate: Any) -> Any:
        return [p - 0.1 * g for p, g in zip(params, grads.sum, strict=True)], state

    step = fds.train_step(lambda p, x: p["w"].sum() * x, fds.Optimizer(lambda params: (), update))
    state, _ = step(step.init({"w": sliced(torch.ones(4, 6), LeafSlice.even(1, 6, 2, 1))}), torch.ones(()))
    assert [shard.shape for shard in describe(state) if shard.name == "params/w"] == [(4, 6)]


BUGS: dict[Callable[[], None], list[Bug]] = {
    checkpoints_open_on_other_meshes: [
        Bug(
            "slices are told apart by their offsets alone",
            "checkpointing.shard_plan:assign_writes",
            "holder.shard.region",
            "holders[0].shard.region",
            shows=Exception,
        ),
        Bug(
            "each rank that shares a slice writes it",
            "checkpointing.shard_plan:assign_writes",
            "if len(run.holders) == 1:\n    ...",
            "for run.holders in [(h,) for h in run.holders]:\n    ...",
            shows=Exception,
        ),
        Bug(
            "a rank's leaf is taken for the whole",
            "state_dict.leaf_places:_of_layout",
            "LeafRegion.of(slot.shape, slot.slices)",
            "LeafRegion(slot.shape)",
            shows=Exception,
        ),
        Bug(
            "chunks forget their slice",
            "checkpointing.writer:_stored",
            "attrs.evolve(chunk, slice=number[shard.region])",
            "chunk",
            shows=Exception,
        ),
        Bug(
            "blocks of a packed leaf lie one after the other",
            "sharding.leaf_region:_pieces",
            "start + first - done",
            "ranges[0][0] + first",
            shows=Exception,
        ),
        Bug(
            "the rows before the first whole row are left out",
            "sharding.leaf_region:_blocks",
            "row if last > first else tail",
            "head + 1",
            shows=Exception,
        ),
        Bug(
            "boxes are read without their gaps",
            "checkpointing.dcp:CheckpointReader._finish",
            "part.box.view(into, part.box.place)",
            "into[:part.target.numel()].view(part.target.shape)",
        ),
        Bug(
            "a part is read from where its box begins",
            "checkpointing.dcp:_Read.position",
            "(self.box.place - self.chunk.offset) * self.dtype.itemsize",
            "0",
            shows=Exception,
        ),
        Bug(
            "chunks beyond the first rows are passed over",
            "checkpointing.dcp:_meet",
            "a < d and c < b",
            "a <= c and c < b",
            shows=Exception,
        ),
    ],
    updates_keep_what_a_leaf_is: [
        Bug("an update loses what a leaf is of", "step.train_step:updating.update", "like_marked(value, leaf)", "value"),
    ],
    files_are_those_of_one_device: [
        Bug(
            "what is sent is written where it lay in the slice",
            "interchange.export:_Sink._ready",
            "box.start[0]",
            "box.place",
        ),
        Bug(
            "a leaf is written when its first slice is there",
            "interchange.export:_Sink._ready",
            "self.filled == leaf.numel",
            "self.filled >= region.numel",
            shows=Exception,
        ),
        Bug(
            "ranks ask a source for the slice's elements",
            "sharding.sources:piece",
            "_read(origin, low, high, region)",
            "_read(origin, start, start + high - low, region)",
            shows=Exception,
        ),
        Bug(
            "slices of a read lie at its beginning",
            "sharding.sources:piece",
            "there.view(values, low)",
            "there.view(values, there.place)",
            shows=Exception,
        ),
    ],
}


@cache
def holds(law: Callable[[], None]) -> bool:
    """Checks a law in the library as it is, once."""
    law()
    return True


@pytest.mark.sample(5)
@pytest.mark.parametrize(("law", "bug"), [pytest.param(law, b, id=b.name) for law, bugs in BUGS.items() for b in bugs])
def test_a_bug_breaks_its_law(law: Callable[[], None], bug: Bug) -> None:
    assert holds(law)
    with planted(bug), pytest.raises(bug.shows):
        law()
