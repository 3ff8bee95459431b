"""Schedules, loss scales and the sizes of batches are DeepSpeed's own, number by number."""

from math import prod
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from functional_ds import transforms as T
from functional_ds.deepspeed.config.ds_plan import from_ds_config
from functional_ds.deepspeed.config.explain import ConfigError
from functional_ds.deepspeed.config.schedules.ds_schedules import SCHEDULERS
from tests.deepspeed.real import real

LR = 0.5
_WARM = {"warmup_num_steps": 4}
SCHEDULES: list[tuple[str, dict[str, Any]]] = [
    ("WarmupLR", {**_WARM}),
    ("WarmupLR", {**_WARM, "warmup_type": "linear", "warmup_min_lr": 0.1, "warmup_max_lr": 0.3}),
    ("WarmupLR", {"warmup_num_steps": 1, "warmup_type": "sudden"}),
    ("WarmupDecayLR", {**_WARM, "total_num_steps": 9}),
    ("WarmupDecayLR", {**_WARM, "total_num_steps": 9, "warmup_type": "linear", "warmup_min_lr": 0.01, "warmup_max_lr": 0.2}),
    ("WarmupDecayLR", {**_WARM, "total_num_steps": 3}),
    ("WarmupCosineLR", {**_WARM, "total_num_steps": 9}),
    (
        "WarmupCosineLR",
        {**_WARM, "total_num_steps": 11, "warmup_type": "linear", "warmup_min_ratio": 0.2, "cos_min_ratio": 0.1},
    ),
    ("OneCycle", {"cycle_min_lr": 0.1, "cycle_max_lr": 0.4, "cycle_first_step_size": 4}),
    (
        "OneCycle",
        {
            "cycle_min_lr": 0.1,
            "cycle_max_lr": 0.4,
            "cycle_first_step_size": 6,
            "cycle_second_step_size": 3,
            "cycle_first_stair_count": 2,
            "cycle_second_stair_count": 3,
            "decay_step_size": 2,
            "decay_lr_rate": 0.5,
        },
    ),
    ("OneCycle", {"cycle_min_lr": 0.1, "cycle_max_lr": 0.4, "cycle_first_step_size": 3, "cycle_second_step_size": 0}),
    ("LRRangeTest", {"lr_range_test_step_size": 3}),
    ("LRRangeTest", {"lr_range_test_min_lr": 0.2, "lr_range_test_step_size": 3, "lr_range_test_staircase": True}),
]


def rates_of_deepspeed(name: str, params: dict[str, Any], updates: int) -> list[float]:
    """What DeepSpeed's engine does: make the scheduler, then move it after each update."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(()))], lr=LR)
    scheduler = getattr(real("deepspeed.runtime.lr_schedules"), name)(optimizer, **params)
    rates = []
    for _ in range(updates):
        rates.append(optimizer.param_groups[0]["lr"])
        scheduler.step()
    return rates


@pytest.mark.parametrize(("name", "params"), SCHEDULES)
def test_rates_are_deepspeeds(name: str, params: dict[str, Any]) -> None:
    """Update by update, as a rate and as a factor."""
    schedule = SCHEDULERS[name].build(params, LR, LR)
    expected = rates_of_deepspeed(name, params, 24)
    assert [schedule.rate(k) for k in range(24)] == pytest.approx(expected, rel=1e-12, abs=1e-15)
    assert [schedule(torch.tensor(k)).item() * LR for k in range(24)] == pytest.approx(expected, rel=1e-6, abs=1e-9)


@pytest.mark.parametrize(
    ("name", "params"),
    [("StepLR", {"step_size": 3, "gamma": "0.5"}), ("CosineAnnealingLR", {"T_max": 5}), ("LinearLR", {"total_iters": 4})],
)
def test_rates_of_torchs_schedulers_are_torchs(name: str, params: dict[str, Any]) -> None:
    config = {
        "train_batch_size": 1,
        "optimizer": {"type": "SGD", "params": {"lr": LR}},
        "scheduler": {"type": name, "params": params},
    }
    plan = from_ds_config(config, 1)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(()))], lr=LR)
    scheduler = getattr(torch.optim.lr_scheduler, name)(
        optimizer, **{k: float(v) if k == "gamma" else v for k, v in params.items()}
    )
    assert plan.schedule is not None
    for k in range(8):
        assert plan.schedule.rate(k) == optimizer.param_groups[0]["lr"]
        optimizer.step()
        scheduler.step()


@given(
    good=st.lists(st.sampled_from([True, True, True, False]), max_size=30),
    window=st.integers(1, 4),
    hysteresis=st.integers(1, 3),
    consecutive=st.booleans(),
)
def test_the_dynamic_scale_is_deepspeeds(good: list[bool], window: int, hysteresis: int, consecutive: bool) -> None:
    """ZeRO's scaler, until it raises: just where a gradient overflows at the minimum."""
    scaler = real("deepspeed.runtime.fp16.loss_scaler").DynamicLossScaler(
        16.0, window, 2.0, hysteresis, consecutive, dtype=None
    )
    scale = T.DynamicScale(
        16.0, window=window, hysteresis=hysteresis, consecutive=consecutive, minimum=2.0, maximum=2.0**60, settle=1
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("deepspeed.runtime.fp16.loss_scaler.dist.get_rank", lambda: 1)
        for finite in good:
            stops = not finite and bool((scale.value <= scale.minimum) & (scale.patience <= 1))
            if stops:
                with pytest.raises(Exception, match="already at minimum"):
                    scaler.update_scale(overflow=True)
                return
            scaler.update_scale(overflow=not finite)
            scale = scale.adjust(torch.tensor(finite))
            assert scale.value.item() == scaler.cur_scale


@given(good=st.lists(st.sampled_from([True, True, True, False]), max_size=30), window=st.integers(1, 4))
def test_the_dynamic_scale_of_stage_0_is_deepspeeds(good: list[bool], window: int) -> None:
    """The optimizer's own rule: no hysteresis, and no end at the minimum."""
    scalers = real("deepspeed.runtime.fp16.loss_scaler")
    numbers = {
        scalers.INITIAL_LOSS_SCALE: 16.0,
        scalers.SCALE_WINDOW: window,
        scalers.MIN_LOSS_SCALE: 2.0,
        scalers.DELAYED_SHIFT: 2,
        scalers.CONSECUTIVE_HYSTERESIS: False,
    }
    config = scalers.LossScaleConfig(torch.float16, True, 1.0, numbers)
    kind = real("deepspeed.runtime.fp16.fused_optimizer").FP16_Optimizer
    theirs = kind.__new__(kind)
    theirs.loss_scale_config, theirs.verbose = config, False
    scale = T.DynamicScale(16.0, window=window, hysteresis=1, minimum=2.0, maximum=2.0**60, settle=1)
    for finite in good:
        theirs._update_scale(skip=not finite)
        scale = scale.adjust(torch.tensor(finite))
        assert scale.value.item() == config.cur_scale


_SIZES = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")


@given(sizes=st.tuples(*[st.none() | st.integers(1, 12)] * 3), world=st.integers(1, 4))
def test_batches_are_deepspeeds(sizes: tuple[int | None, ...], world: int) -> None:
    """The same three sizes, or refused by both."""
    config = {name: size for name, size in zip(_SIZES, sizes, strict=True) if size is not None}
    kind = real("deepspeed.runtime.config").DeepSpeedConfig
    theirs = kind.__new__(kind)
    theirs.world_size = world
    for name in _SIZES:
        setattr(theirs, name, config.get(name))
    try:
        theirs._configure_train_batch_size()
    except AssertionError:
        with pytest.raises(ConfigError, match="train_batch_size"):
            from_ds_config(config, world)
        return
    batch = from_ds_config(config, world).batch
    assert [getattr(batch, name) for name in _SIZES] == [getattr(theirs, name) for name in _SIZES]
    assert batch.train_batch_size == prod([batch.rows, world])
