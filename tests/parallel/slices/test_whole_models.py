"""Checkpoints and files of models that tensor and expert parallelism cut: from mesh to mesh, and to Hugging Face and back."""

import math
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import functional_ds as fds
from functional_ds import comm
from functional_ds import transforms as T
from functional_ds.testing import assert_same
from tests.transforms.parallel import mixture
from tests.transforms.rules import assert_close

transformers = pytest.importorskip("transformers")
modules = pytest.importorskip("tests.transforms.parallel.test_tensor_modules")


@attrs.frozen
class Mesh:
    """Experts over ep of the data-parallel ranks, their inner width over tp."""

    edp: int
    ep: int
    tp: int
    stage: int = 3

    @property
    def ranks(self) -> int:
        return self.edp * self.ep * self.tp

    def step(self) -> tuple[fds.Step, comm.Group]:
        mesh = comm.mesh(dp=self.edp * self.ep, tp=self.tp).split("dp", edp=self.edp, ep=self.ep)
        dp = mesh["edp", "ep"]
        strategy = [
            T.ema(0.5),
            T.zero(self.stage, dp),
            T.experts(mixture.PATTERN, mesh["ep"], edp=mesh["edp"]),
            T.tensor_parallel({"up": 2, "bias": 1, "down": 1}, mesh["tp"]),
        ]
        loss = lambda p, b: mixture.loss(p, b, mesh["ep"], mesh["tp"])  # noqa: E731
        return fds.compose(*strategy)(fds.train_step(loss, fds.adamw(1e-2, eps=1e-4))), dp


def goes(mesh: Mesh, folder: Path, start: bool) -> tuple[Any, Any]:
    """Two updates, from the start or from the folder: the params before and after."""
    step, dp = mesh.step()
    state = step.init(mixture.params())
    state = state if start else fds.load(folder, like=state)
    before = step.params(state)
    for _ in range(2):
        state, _ = step(state, tuple(x.tensor_split(dp.size)[dp.rank] for x in mixture.batch(8)))
    if start:
        fds.save(state, folder)
        fds.export(state, folder / "files", overwrite=True)
    return before, step.params(state)


@pytest.mark.law(50)
@pytest.mark.parametrize(
    ("before", "after"),
    [(Mesh(1, 4, 2), Mesh(2, 2, 1, 1)), (Mesh(2, 1, 2, 0), Mesh(1, 2, 4)), (Mesh(2, 2, 1, 2), Mesh(3, 1, 1, 3))],
    ids=str,
)
def test_experts_go_on_on_another_mesh(tmp_path: Path, before: Mesh, after: Mesh) -> None:
    """Bit for bit what was saved; then as on one device."""
    alone = T.ema(0.5)(fds.train_step(mixture.loss, fds.adamw(1e-2, eps=1e-4)))
    state = alone.init(mixture.params())
    for _ in range(4):
        state, _ = alone(state, mixture.batch(8))
    saved = comm.simulate(goes, before, tmp_path, True, world_size=before.ranks)[0][1]
    assert_same(load_file(tmp_path / "files" / "model.safetensors"), dict(fds.tree.named(saved)))
    for loaded, moved in comm.simulate(goes, after, tmp_path, False, world_size=after.ranks):
        assert_same(loaded, saved)
        if math.gcd(8, after.edp * after.ep) == after.edp * after.ep:
            assert_close(moved, alone.params(state), 1e-4)


@pytest.mark.law(50)
@pytest.mark.parametrize("kind", ["llama kv1", "gpt2", "phi3"])
def test_hugging_face_models_to_other_slices_and_back(tmp_path: Path, kind: str) -> None:
    """With key-value heads that ranks share, packed projections, a vocabulary in slices."""
    apply, params = modules.functional_of(kind)

    def save() -> dict[str, Tensor]:
        run = modules.Run(kind, tp=4 if kind == "llama kv1" else 2, vocab=kind != "gpt2")
        mesh = comm.mesh(dp=1, tp=run.tp)
        step, params = run.step(mesh)
        state, _ = step(step.init(params), modules.tokens())
        fds.save(state, tmp_path / "run")
        fds.export(state, tmp_path / "files", module=apply)
        return dict(step.params(state))

    def load() -> tuple[Any, Any]:
        mesh = comm.mesh(dp=2, tp=2)
        step, params = modules.Run(kind, zero=3).step(mesh)
        resumed = step.params(fds.load(tmp_path / "run", like=step.init(params)))
        bare = fds.tree.map(lambda x: torch.empty_like(x, device="meta"), dict(params))
        return resumed, step.params(step.init(fds.load_params(tmp_path / "files", like=bare, module=apply)))

    saved = comm.simulate(save, world_size=4 if kind == "llama kv1" else 2)[0]
    assert saved.keys() == params.keys()
    for resumed, imported in comm.simulate(load, world_size=4):
        assert_same(dict(resumed), saved)
        assert_same(dict(imported), saved)
    modules.model_of(kind).config.save_pretrained(tmp_path / "files")
    again = type(modules.model_of(kind)).from_pretrained(tmp_path / "files")
    assert_same({name: leaf.detach() for name, leaf in again.named_parameters()}, saved)
