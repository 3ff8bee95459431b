"""A plan trains as DeepSpeed's own engine does with the same config: rates, left-out steps and values."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import functional_ds as fds
from tests.deepspeed.engine_run import batches, model
from tests.deepspeed.real import real

_BASE: dict[str, Any] = {
    "train_batch_size": 4,
    "gradient_accumulation_steps": 2,
    "zero_allow_untested_optimizer": True,
    "optimizer": {"type": "Adam", "params": {"lr": 0.1, "torch_adam": True, "weight_decay": 0.01}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 3, "warmup_type": "linear"}},
}
_SGD = {"type": "SGD", "params": {"lr": 0.05, "momentum": 0.9}}
_CYCLE = {"cycle_min_lr": 0.01, "cycle_max_lr": 0.04, "cycle_first_step_size": 2, "decay_step_size": 1, "decay_lr_rate": 1.0}


def _stage(stage: int) -> dict[str, Any]:
    return {"zero_optimization": {"stage": stage}}


# By name: the config beside the base, and which update has gradients that are not finite.
RUNS: dict[str, tuple[dict[str, Any], int | None]] = {
    **{f"stage {stage}": (_stage(stage), None) for stage in range(4)},
    **{f"stage {stage}, not finite": (_stage(stage), 3) for stage in range(4)},
    **{f"stage {stage}, bf16, not finite": ({**_stage(stage), "bf16": {"enabled": True}}, 3) for stage in range(4)},
    "bf16 unchecked, stage 3": ({**_stage(3), "bf16": {"enabled": True, "check_grad_overflow": False}}, 3),
    "bf16 unchecked, stage 1": ({**_stage(1), "bf16": {"enabled": True, "check_grad_overflow": False}}, 3),
    "fp32 sums, stage 1": ({**_stage(1), "bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}}, 3),
    "no norm, stage 2": ({"zero_optimization": {"stage": 2, "compute_grad_norm": False}, "gradient_clipping": 0.0}, 3),
    **{
        f"stage {stage}, autocast": ({**_stage(stage), "torch_autocast": {"enabled": True, "dtype": "bfloat16"}}, None)
        for stage in (0, 2)
    },
    "unclipped": ({**_stage(1), "gradient_clipping": 0.0}, None),
    "clipped hard": ({**_stage(2), "gradient_clipping": 0.01, "optimizer": _SGD}, None),
    "Adam with L2": (
        {**_stage(1), "optimizer": {"type": "Adam", "params": {"torch_adam": True, "adam_w_mode": False, "weight_decay": 0.1}}},
        None,
    ),
    "torch's weight decay": ({**_stage(1), "optimizer": {"type": "AdamW", "params": {"lr": 0.1, "torch_adam": True}}}, None),
    "Adagrad": ({**_stage(2), "optimizer": {"type": "Adagrad", "params": {"lr": 0.05}}}, None),
    "SGD and a cycle": ({**_stage(1), "optimizer": _SGD, "scheduler": {"type": "OneCycle", "params": _CYCLE}}, None),
    "a cosine": (
        {**_stage(3), "scheduler": {"type": "WarmupCosineLR", "params": {"total_num_steps": 5, "warmup_num_steps": 2}}},
        None,
    ),
    "torch's scheduler": ({**_stage(0), "scheduler": {"type": "StepLR", "params": {"step_size": 2, "gamma": 0.5}}}, None),
}


@pytest.fixture(scope="module")
def theirs() -> dict[str, Any]:
    """What DeepSpeed does, all in one process of its own."""
    real()
    runs = json.dumps([[{**_BASE, **config}, bad] for config, bad in RUNS.values()])
    program = Path(__file__).with_name("engine_run.py")
    done = subprocess.run([sys.executable, program], input=runs, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return dict(zip(RUNS, json.loads(done.stdout.splitlines()[-1]), strict=True))


@pytest.mark.parametrize("name", RUNS)
def test_a_plan_trains_as_deepspeed_does(name: str, theirs: dict[str, Any]) -> None:
    config, bad = RUNS[name]
    plan = fds.from_ds_config({**_BASE, **config}, 1)
    apply, params = fds.functional(model())
    step = plan.transform(fds.train_step(lambda params, x: apply(params, x).float().square().mean(), plan.optimizer))
    state, rates, skipped = step.init(params), [], []
    assert plan.schedule is not None
    for batch in batches(bad):
        rates.append(plan.schedule.rate(int(state.step)))
        state, metrics = step(state, batch)
        skipped.append(int(metrics.get("skipped", torch.zeros(()))) + (skipped[-1] if skipped else 0))
    assert rates == pytest.approx(theirs[name]["rates"], rel=1e-12)
    assert skipped == theirs[name]["skipped"]
    found = torch.cat([leaf.float().flatten() for leaf in step.params(state).values()])
    half = "bf16" in config or "torch_autocast" in config
    tolerance = {"rtol": 2e-2, "atol": 2e-2} if half else {"rtol": 1e-5, "atol": 1e-5}
    torch.testing.assert_close(found, torch.tensor(theirs[name]["values"]), equal_nan=True, **tolerance)
