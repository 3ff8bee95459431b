"""Scripts in the style of DeepSpeedExamples give DeepSpeed's own numbers, on one and two ranks."""

import json
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import functional_ds as fds
from functional_ds import comm
from tests.deepspeed.engine.example_scripts import SCRIPTS, Net
from tests.deepspeed.real import real

TOLERANCE = 1e-5


def ours(name: str, ranks: int, folder: Path) -> list[list[float]]:
    script, stage = SCRIPTS[name]

    def program() -> list[float]:
        return script(fds.deepspeed, comm.world().rank, stage, ranks, str(folder))

    return comm.simulate(program, world_size=ranks)


def deepspeeds(ranks: int, path: Path) -> list[dict[str, Any]]:
    """What each rank prints."""
    real()
    program = str(Path(__file__).with_name("example_scripts.py"))
    words = [[sys.executable, program, str(rank), str(ranks), str(path)] for rank in range(ranks)]
    start = partial(subprocess.Popen, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    processes = [start(word) for word in words]
    try:
        return [json.loads(each.communicate(timeout=240)[0].splitlines()[-1]) for each in processes]
    finally:
        for each in processes:
            each.kill()
            each.wait()


@pytest.mark.parametrize("ranks", [1, 2])
def test_scripts_give_deepspeeds_numbers(ranks: int, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    expected = deepspeeds(ranks, tmp_path)
    for name in SCRIPTS:
        for found, theirs in zip(ours(name, ranks, tmp_path / "ours"), expected, strict=True):
            assert found == pytest.approx(theirs[name], rel=TOLERANCE, abs=TOLERANCE), name
    for stage in (1, 2, 3):
        loaded = evaluated(tmp_path / f"cifar-{stage}", ranks)
        assert loaded == pytest.approx(expected[0][f"cifar, stage {stage}"][-1], rel=TOLERANCE)


def evaluated(folder: Path, ranks: int) -> float:
    """The loss of the classifier with a checkpoint's params, on one rank in stage 0."""
    adamw = {"type": "AdamW", "params": {"lr": 0.01}}
    engine, *_ = fds.deepspeed.initialize(model=Net(), config={"train_batch_size": 8, "optimizer": adamw})
    path, client_state = engine.load_checkpoint(folder)
    assert path == str(folder / "global_step8")
    assert client_state == {}
    torch.manual_seed(0)
    Net()
    images, labels = torch.randn(32 * ranks, 3, 8, 8), torch.arange(32 * ranks) % 10
    with torch.no_grad():
        return nn.functional.cross_entropy(engine(images), labels).item()


@pytest.mark.parametrize(("kind", "one", "other"), [("cifar", 0, 3), ("gan", 1, 2), ("trainer", 1, 3)])
def test_scripts_do_not_depend_on_the_stage(kind: str, one: int, other: int, tmp_path: Path) -> None:
    if kind == "trainer":
        pytest.importorskip("transformers")
    for a, b in zip(*(ours(f"{kind}, stage {stage}", 2, tmp_path) for stage in (one, other)), strict=True):
        assert a == pytest.approx(b, rel=TOLERANCE, abs=TOLERANCE)
