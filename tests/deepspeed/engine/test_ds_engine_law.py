"""Law 57: a loop of an engine's forward, backward and step is the step, bit for bit."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import functional_ds as fds
from functional_ds import comm

ds = fds.deepspeed
_WARMUP = {"type": "WarmupLR", "params": {"warmup_num_steps": 3, "warmup_type": "linear"}}

CONFIGS: dict[str, dict[str, Any]] = {
    **{f"stage {stage}": {"zero_optimization": {"stage": stage}} for stage in range(4)},
    **{f"stage {stage}, bf16": {"zero_optimization": {"stage": stage}, "bf16": {"enabled": True}} for stage in range(4)},
    "stage 2, fp16": {"zero_optimization": {"stage": 2}, "fp16": {"enabled": True, "initial_scale_power": 4}},
    "stage 3, sharded": {"zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0}},
    "stage 1, schedule": {"zero_optimization": {"stage": 1}, "scheduler": _WARMUP},
    "stage 2, offloaded": {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}},
    **{
        f"stage {stage}, known at the boundary": {
            "zero_optimization": {"stage": stage},
            "managed_gradient_accumulation": False,
        }
        for stage in (1, 2)
    },
    "LAMB": {"optimizer": {"type": "Lamb", "params": {"lr": 0.1}}},
}
UPDATES, MICRO, ROWS = 3, 2, 3


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 1))


def batches(bad: int | None = None) -> list[list[Tensor]]:
    """This rank's micro-batches of each update; those of one update may not be finite."""
    draw = torch.Generator().manual_seed(1 + comm.world().rank)
    found = [[torch.randn(ROWS, 3, generator=draw) for _ in range(MICRO)] for _ in range(UPDATES)]
    if bad is not None:
        found[bad][0][:] = float("inf")
    return found


def config_of(extra: dict[str, Any]) -> dict[str, Any]:
    base = {"gradient_accumulation_steps": MICRO, "optimizer": {"type": "AdamW", "params": {"lr": 0.1, "weight_decay": 0.1}}}
    return {"train_micro_batch_size_per_gpu": ROWS, **base, **extra}


def by_step(extra: dict[str, Any], bad: int | None) -> list[Tensor]:
    plan = fds.from_ds_config(config_of(extra), comm.world().size)
    apply, params = fds.functional(model())
    step = plan.transform(fds.train_step(lambda params, x: apply(params, x).square().mean(), plan.optimizer))
    state, losses = step.init(params), []
    for micros in batches(bad):
        state, metrics = step(state, torch.cat(micros))
        losses.append(metrics["loss"])
    return [*losses, *step.params(state).values(), *step.module_buffers(state).values()]


def by_engine(extra: dict[str, Any], bad: int | None) -> list[Tensor]:
    engine, *_ = ds.initialize(model=model(), config=config_of(extra))
    losses = []
    for micros in batches(bad):
        for i, micro in enumerate(micros):
            engine.backward(engine(micro).square().mean())
            if engine.managed_gradient_accumulation() or i == MICRO - 1:
                engine.step()
        losses.append(engine.metrics["loss"])
    step, state = engine.functional_step, engine.state
    return [*losses, *step.params(state).values(), *step.module_buffers(state).values()]


ALONE = ("stage 0", "stage 3", "stage 1, bf16", "stage 1, schedule")  # on one rank, too


@pytest.mark.sample(6)
@pytest.mark.parametrize(("name", "ranks"), [*((name, 2) for name in CONFIGS), *((name, 1) for name in ALONE)])
def test_an_engine_is_the_step(name: str, ranks: int) -> None:
    bad = 1 if "stage" in name and "stage 0" not in name else None

    def both() -> None:
        for found, expected in zip(by_engine(CONFIGS[name], bad), by_step(CONFIGS[name], bad), strict=True):
            torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)

    comm.simulate(both, world_size=ranks)
