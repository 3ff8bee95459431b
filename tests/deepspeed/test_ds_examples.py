"""Every example is read, or is refused for reasons that its explanation gives; what is read, DeepSpeed reads alike."""

import json
from typing import Any

import pytest

import functional_ds as fds
from functional_ds.deepspeed import ConfigError
from tests.deepspeed.example_configs import EXAMPLES
from tests.deepspeed.real import real

READ = {name: example for name, example in EXAMPLES.items() if not example.refused}


def keys_of(block: dict[str, Any], above: str = "") -> list[str]:
    return [
        path
        for name, value in block.items()
        for path in (f"{above}{name}", *(keys_of(value, f"{above}{name}.") if isinstance(value, dict) else ()))
    ]


@pytest.mark.parametrize("name", EXAMPLES)
def test_each_example_is_read_or_refused_for_a_reason(name: str) -> None:
    """And each of its keys, or the block above, is explained."""
    example = EXAMPLES[name]
    try:
        explanation = fds.from_ds_config(example.config, example.ranks, auto=example.auto).explain()
    except ConfigError as error:
        explanation = error.explanation
    assert tuple(row.key for row in explanation.refused) == example.refused, str(explanation)
    explained = {row.key for row in explanation.rows}
    for path in keys_of(example.config):
        assert any(f"{each}.".startswith(f"{path}.") or f"{path}.".startswith(f"{each}.") for each in explained), path
    assert all(row.reason for row in explanation.rows)


@pytest.mark.parametrize("name", READ)
def test_what_is_written_out_is_read_as_the_same_plan(name: str) -> None:
    example = READ[name]
    plan = fds.from_ds_config(example.config, example.ranks, auto=example.auto)
    written = json.loads(json.dumps(plan.to_ds_config()))
    again = fds.from_ds_config(written, example.ranks)
    assert again.to_ds_config() == plan.to_ds_config()
    assert (str(again.optimizer), again.schedule, again.batch) == (str(plan.optimizer), plan.schedule, plan.batch)
    assert '"auto"' not in json.dumps(written)


def read_by_deepspeed(config: dict[str, Any], ranks: int) -> dict[str, Any]:
    """What DeepSpeed makes of a config."""
    kind = real("deepspeed.runtime.config").DeepSpeedConfig
    found = kind.__new__(kind)
    found.world_size, found.global_rank, found._param_dict = ranks, 0, config
    real("deepspeed.runtime.config")._reject_removed_config_keys(config)
    found._initialize_params(dict(config))
    found._configure_train_batch_size()
    found._do_error_check()
    return {
        name: value
        for name, value in vars(found).items()
        if name not in ("_param_dict", "optimizer_params", "scheduler_params")
    }


def test_deepspeed_reads_what_is_written_out() -> None:
    """It has the values of the plan; and the keys that were left as they are, it reads from both alike."""
    real("deepspeed.runtime.config")
    for name, example in READ.items():
        if "1-bit" in name or "0/1" in name:  # whose optimizers DeepSpeed has removed
            continue
        plan = fds.from_ds_config(example.config, example.ranks, auto=example.auto)
        found = read_by_deepspeed(plan.to_ds_config(), example.ranks)
        assert found["train_batch_size"] == plan.batch.train_batch_size, name
        assert found["gradient_accumulation_steps"] == plan.batch.gradient_accumulation_steps, name
        assert found["gradient_clipping"] == plan.value("gradient_clipping"), name
        assert found["float16_config"].model_dump() == {
            key: plan.value(f"fp16.{key}") for key in found["float16_config"].model_dump()
        }, name
        assert found["bfloat16_config"].model_dump() == {
            key: plan.value(f"bf16.{key}") for key in found["bfloat16_config"].model_dump()
        }, name
        zero = found["zero_config"]
        for field in (
            "stage",
            "reduce_scatter",
            "prefetch_bucket_size",
            "param_persistence_threshold",
            "zero_hpz_partition_size",
        ):
            assert getattr(zero, field) == plan.value(f"zero_optimization.{field}"), (name, field)
