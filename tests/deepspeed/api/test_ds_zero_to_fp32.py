"""Whole fp32 params out of DeepSpeed's checkpoints and out of an engine's."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from functional_ds import comm
from functional_ds.deepspeed.utils.zero_to_fp32 import (
    convert_zero_checkpoint_to_fp32_state_dict,
    get_fp32_state_dict_from_zero_checkpoint,
    load_state_dict_from_zero_checkpoint,
)
from functional_ds.state_dict.errors import NoCheckpointError
from tests.deepspeed.api.pipeline_run import micros
from tests.deepspeed.api.test_ds_pipeline_engine import made
from tests.interchange.full_disk import full_disk
from tests.interchange.zero_layout import Layout, values_of

SHAPES = {"0.weight": [3, 2], "0.bias": [3]}


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_deepspeeds_checkpoints(tmp_path: Path, stage: int) -> None:
    expected = values_of(SHAPES)
    Layout(stage, 2, [list(SHAPES)], expected).write(tmp_path)
    found = get_fp32_state_dict_from_zero_checkpoint(str(tmp_path))
    assert {name: value.tolist() for name, value in found.items()} == {
        name: expected[name]["master"].tolist() for name in SHAPES
    }
    model = load_state_dict_from_zero_checkpoint(nn.Sequential(nn.Linear(2, 3)), str(tmp_path))
    assert torch.equal(model[0].weight, expected["0.weight"]["master"])


@pytest.mark.parametrize("bf16", [False, True])
def test_an_engines_checkpoints(tmp_path: Path, bf16: bool) -> None:
    def on_rank() -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        engine = made(2, bf16={"enabled": bf16}, zero_optimization={"stage": 1})
        engine.train_batch(iter(micros(0)))
        engine.save_checkpoint(str(tmp_path))
        held: Any = get_fp32_state_dict_from_zero_checkpoint(str(tmp_path))  # on each rank, by itself
        return dict(engine.module_state_dict()), dict(held)

    for expected, found in comm.simulate(on_rank, world_size=2):
        assert expected.keys() == found.keys()
        for name, value in expected.items():
            assert found[name].dtype == torch.float32
            assert torch.equal(found[name].to(value.dtype), value)
            assert not bf16 or not torch.equal(found[name].bfloat16().float(), found[name])  # masters, and no rounded copies
    convert_zero_checkpoint_to_fp32_state_dict(str(tmp_path), tmp_path / "out")
    convert_zero_checkpoint_to_fp32_state_dict(str(tmp_path), tmp_path / "safe", safe_serialization=True, tag="global_step1")
    for written in (torch.load(tmp_path / "out/pytorch_model.bin"), load_file(tmp_path / "safe/model.safetensors")):
        assert all(torch.equal(written[name], value) for name, value in found.items())


def test_a_write_that_fails_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Layout(2, 2, [list(SHAPES)], values_of(SHAPES)).write(tmp_path)
    target = tmp_path / "out" / "pytorch_model.bin"
    target.parent.mkdir()
    target.write_bytes(b"the model before")
    monkeypatch.setattr(torch, "save", full_disk)
    with pytest.raises(OSError, match="No space left"):
        convert_zero_checkpoint_to_fp32_state_dict(str(tmp_path), target.parent)
    assert target.read_bytes() == b"the model before"
    assert [each.name for each in target.parent.iterdir()] == [target.name]


def test_what_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(NoCheckpointError, match="pass the tag"):
        get_fp32_state_dict_from_zero_checkpoint(str(tmp_path))
    with pytest.raises(NoCheckpointError):
        get_fp32_state_dict_from_zero_checkpoint(str(tmp_path), tag="global_step7")
    with pytest.raises(ValueError, match="does not say which params were frozen"):
        get_fp32_state_dict_from_zero_checkpoint(str(tmp_path), "global_step7", exclude_frozen_parameters=True)
