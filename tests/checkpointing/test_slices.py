"""Law 50: ``load_M ∘ save_N = id``, bitwise, between any tensor- and expert-parallel sizes, stages, pipelines, optimizers."""

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import functional_ds as fds
from functional_ds import comm
from functional_ds.checkpointing.dcp import CheckpointReader
from tests.checkpointing.meshes import RULES, Plan, Setting, begun, filled, meshes, of_leaves, plans, wanted, whole_params


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
