"""Configs are read from files, dicts and base64 text; what is unknown, twice there or of another type is refused."""

import base64
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import functional_ds as fds
from functional_ds.deepspeed import ConfigError, ConfigPlan
from functional_ds.deepspeed.config.ds_plan import auto_values
from functional_ds.deepspeed.config.keys.config_key import Fate

CONFIG: dict[str, Any] = {"train_batch_size": 8, "zero_optimization": {"stage": 1}}


def plan_of(world_size: int = 2, /, **config: Any) -> ConfigPlan:
    return fds.from_ds_config({"train_batch_size": 8, **config}, world_size)


def refused(world_size: int = 2, /, **config: Any) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        plan_of(world_size, **config)
    return caught.value


def test_a_file_a_dict_and_base64_are_one(tmp_path: Path) -> None:
    path = tmp_path / "ds_config.json"
    path.write_text(json.dumps(CONFIG))
    text = base64.urlsafe_b64encode(json.dumps(CONFIG).encode()).decode()
    plans = [fds.from_ds_config(config, 2) for config in (CONFIG, path, str(path), text)]
    assert {str(plan.to_ds_config()) for plan in plans} == {str(plans[0].to_ds_config())}


def test_what_is_neither_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="neither a file nor base64"):
        fds.from_ds_config("no_such_file.json", 1)
    with pytest.raises(ConfigError, match="neither a path, nor a dict"):
        fds.from_ds_config([CONFIG], 1)  # type: ignore[arg-type]
    (tmp_path / "list.json").write_text("[1]")
    with pytest.raises(ConfigError, match="block of keys"):
        fds.from_ds_config(tmp_path / "list.json", 1)
    with pytest.raises(ConfigError, match="world_size"):
        fds.from_ds_config(CONFIG, 0)


def test_files_may_have_comments(tmp_path: Path) -> None:
    pytest.importorskip("hjson")
    path = tmp_path / "ds_config.json"
    path.write_text('{\n  // all ranks\n  "train_batch_size": 8,\n}')
    assert fds.from_ds_config(path, 2).batch.train_batch_size == 8


@pytest.mark.parametrize("text", ['{"train_batch_size": 1, "train_batch_size": 2}', '{"fp16": {"enabled": 1, "enabled": 0}}'])
def test_keys_that_occur_twice_are_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "ds_config.json").write_text(text)
    with pytest.raises(ConfigError, match="twice"):
        fds.from_ds_config(tmp_path / "ds_config.json", 1)


def test_two_spellings_side_by_side_are_refused() -> None:
    zero = {"stage": 3, "prefetch_bucket_size": 1, "stage3_prefetch_bucket_size": 1}
    assert "says the same as `zero_optimization.prefetch_bucket_size`" in str(refused(zero_optimization=zero))
    assert "says the same as `bf16`" in str(refused(bf16={"enabled": True}, bfloat16={"enabled": True}))
    assert plan_of(bfloat16={"enabled": True}).value("bf16.enabled") is True


@pytest.mark.parametrize("name", ["max_live_parameters", "stage3_max_live_parameters"])
def test_both_spellings_are_one_key(name: str) -> None:
    plan = plan_of(zero_optimization={"stage": 3, name: 7.0})
    assert (
        plan.value("zero_optimization.max_live_parameters") == plan.value("zero_optimization.stage3_max_live_parameters") == 7
    )


def test_numbers_and_booleans_may_be_strings() -> None:
    plan = plan_of(
        train_batch_size="8", fp16={"enabled": "true", "loss_scale": "128"}, zero_optimization={"reduce_bucket_size": "5e8"}
    )
    assert plan.batch.train_batch_size == 8
    assert plan.value("fp16.loss_scale") == 128.0
    assert plan.value("zero_optimization.reduce_bucket_size") == 500_000_000
    assert plan.value("steps_per_print") is None
    assert plan_of(steps_per_print=float("inf")).value("steps_per_print") == float("inf")


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"gradient_clipping": "one"}, "gradient_clipping: 'one': 'one' is not a number"),
        ({"gradient_clipping": -1}, "must be in"),
        ({"gradient_clipping": None}, "leave the key out for DeepSpeed's default, 1.0"),
        ({"fp16": {"min_loss_scale": 1e-5}}, "whole number"),
        ({"fp16": {"enabled": 2}}, "neither true nor false"),
        ({"fp16": True}, "must be a block of keys"),
        ({"zero_optimization": {"stage": 4}}, "not one of 0, 1, 2, 3"),
        ({"communication_data_type": "int8"}, "not one of 'fp32', 'fp16', 'bf16'"),
        ({"optimizer": {"type": "Adam", "params": {"betas": 0.9}}}, "pair of numbers"),
        ({"gradient_cliping": 1.0}, "the nearest is `gradient_clipping`"),
        ({"zero_optimization": {"stage": 3, "stage3_param_persitance_threshold": 1}}, "stage3_param_persistence_threshold"),
        ({"monitor_config": {}}, "does nothing with it"),
    ],
)
def test_values_and_names_that_make_no_sense_are_refused(config: dict[str, Any], says: str) -> None:
    assert says in str(refused(**config))


def test_all_refused_keys_are_named_at_once() -> None:
    error = refused(
        amp={"enabled": True}, fp16={"enabled": "maybe"}, zero_optimization={"stage": 1}, elasticity={"enabled": False}
    )
    assert [row.key for row in error.explanation.refused] == ["amp", "fp16.enabled"]
    assert error.explanation["elasticity"].fate is Fate.IGNORED
    assert error.explanation["zero_optimization.stage"].fate is Fate.BECAME


def test_known_dead_names_can_warn() -> None:
    with pytest.warns(UserWarning, match="comms_config"):
        plan = fds.from_ds_config({**CONFIG, "comms_config": {}}, 2, warn=True)
    assert plan.explain()["comms_config"].fate is Fate.IGNORED
    with pytest.raises(ConfigError, match="no_such_key"):
        fds.from_ds_config({**CONFIG, "no_such_key": 1}, 2, warn=True)


def test_auto_is_replaced_by_path() -> None:
    config = {
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": "auto"}},
        "fp16": {"enabled": "auto"},
    }
    with pytest.raises(ConfigError, match=r"auto=\{'optimizer.params.lr': ...\}"):
        fds.from_ds_config(config, 2, auto={"train_batch_size": 4})
    plan = fds.from_ds_config(config, 2, auto={"train_batch_size": 4, "optimizer.params.lr": 0.25})
    assert "lr=0.25" in str(plan.optimizer)
    assert "DeepSpeed reads auto as its default" in plan.explain()["fp16.enabled"].reason
    assert fds.from_ds_config(config, 2, auto={"train_batch_size": 4, "optimizer.params.lr": 1, "fp16.enabled": True}).value(
        "fp16.enabled"
    )
    with pytest.raises(ConfigError, match="auto: 'train_batch'"):
        fds.from_ds_config(config, 2, auto={"train_batch": 4})


def test_auto_sizes_follow_from_the_model() -> None:
    class Model:
        hidden_size = 10

    zero = {
        "stage": 3,
        "reduce_bucket_size": "auto",
        "stage3_prefetch_bucket_size": "auto",
        "stage3_param_persistence_threshold": "auto",
    }
    plan = fds.from_ds_config({"train_batch_size": 1, "zero_optimization": zero}, 1, model=Model())
    names = ("reduce_bucket_size", "prefetch_bucket_size", "param_persistence_threshold")
    assert [plan.value(f"zero_optimization.{name}") for name in names] == [100, 90, 100]


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ({"hidden_sizes": [8, 32, 16]}, 32),
        ({"hidden_sizes": None, "d_model": 4}, 4),
        ({"hidden_size": 6, "text_config": SimpleNamespace(hidden_size=9)}, 6),
        ({"text_config": SimpleNamespace(hidden_sizes=[9, 7])}, 9),
        ({}, None),
    ],
)
def test_the_hidden_size_is_the_one_that_transformers_finds(sizes: dict[str, Any], expected: int | None) -> None:
    config = SimpleNamespace(**sizes)
    for model in (config, SimpleNamespace(config=config)):
        found = auto_values({}, model)
        assert found.get("zero_optimization.param_persistence_threshold") == (None if expected is None else 10 * expected)


@pytest.mark.parametrize(
    "scheduler",
    [
        {"type": "StepLR", "params": None},
        {"type": "OneCycleLR", "params": None},
        {"type": "StepLR", "params": {"step_size": 0}},
        {"type": "CosineAnnealingLR", "params": {"T_max": 0}},
        {"type": "ExponentialLR", "params": {"gamma": "x{}"}},
        {"type": "LRScheduler", "params": {}},
    ],
)
def test_schedulers_of_torchs_that_cannot_move_are_refused(scheduler: dict[str, Any]) -> None:
    config = {"train_batch_size": 1, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}, "scheduler": scheduler}
    with pytest.raises(ConfigError, match=scheduler["type"]):
        fds.from_ds_config(config, 1)


def test_a_file_that_is_no_text_is_named(tmp_path: Path) -> None:
    file = tmp_path / "ds.json"
    file.write_bytes(b"\xff\xfe{}")
    with pytest.raises(ConfigError, match=r"ds.json cannot be read as text"):
        fds.from_ds_config(file, 1)


def test_old_forms_of_zero() -> None:
    assert plan_of(zero_optimization=True, allgather_size=500000000).value("zero_optimization.stage") == 1
    assert plan_of(zero_optimization=False).value("zero_optimization.stage") == 0
    plan = plan_of(zero_optimization={"stage": 2, "cpu_offload": True, "offload_param": None})
    assert plan.to_ds_config()["zero_optimization"] == {"stage": 2, "offload_optimizer": {"device": "cpu"}}
