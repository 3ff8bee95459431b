"""A plan trains as DeepSpeed's own engine does with the same config: rates, left-out steps and values."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import functional_ds as fds
from functional_ds import comm
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
    **{
        f"stage {stage}, bf16 in autocast": (
            {**_stage(stage), "torch_autocast": {"enabled": True, "dtype": "bfloat16"}, "bf16": {"enabled": True}},
            None,
        )
        for stage in (1, 2, 3)
    },
    "params offloaded below stage 3": ({"zero_optimization": {"stage": 1, "offload_param": {"device": "cpu"}}}, None),
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


# The same on two ranks.
PAIRS: dict[str, tuple[dict[str, Any], int | None]] = {
    **{f"stage {stage}": (_stage(stage), None) for stage in range(4)},
    "stage 2, not finite": (_stage(2), 3),
    "stage 3, not finite": (_stage(3), 3),
    "prescaled": ({**_stage(1), "prescale_gradients": True}, None),
    "predivided": ({**_stage(0), "gradient_predivide_factor": 4.0}, None),
    "sums": ({**_stage(1), "gradient_allreduce_op": "sum", "gradient_clipping": 0.0, "optimizer": _SGD}, None),
    "all-reduced": ({"zero_optimization": {"stage": 2, "reduce_scatter": False}}, None),
}


def by_deepspeed(runs: dict[str, tuple[dict[str, Any], int | None]], ranks: int, path: Path) -> dict[str, Any]:
    """What comes out of each run, on rank 0; all runs are in the same processes."""
    real()
    text = json.dumps([[{**_BASE, "train_batch_size": 4 * ranks, **config}, bad] for config, bad in runs.values()])
    program = str(Path(__file__).with_name("engine_run.py"))
    words = [[sys.executable, program, str(rank), str(ranks), str(path / "store")] for rank in range(ranks)]
    others = [
        subprocess.Popen(word, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, text=True)
        for word in words[1:]
    ]
    try:
        for other in others:
            assert other.stdin is not None
            other.stdin.write(text)
            other.stdin.close()
        done = subprocess.run(words[0], input=text, capture_output=True, text=True, timeout=240, check=False)
    finally:
        for other in others:
            other.kill()
            other.wait()
    assert done.returncode == 0, done.stderr[-4000:]
    return dict(zip(runs, json.loads(done.stdout.splitlines()[-1]), strict=True))


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return by_deepspeed(RUNS, 1, tmp_path_factory.mktemp("alone"))


@pytest.fixture(scope="module")
def paired(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return by_deepspeed(PAIRS, 2, tmp_path_factory.mktemp("paired"))


def by_plan(config: dict[str, Any], bad: int | None) -> dict[str, Any]:
    """The same from a plan, on each rank of the world."""
    world = comm.world()
    plan = fds.from_ds_config({**_BASE, "train_batch_size": 4 * world.size, **config}, world.size)
    apply, params = fds.functional(model())
    step = plan.transform(fds.train_step(lambda params, x: apply(params, x).float().square().mean(), plan.optimizer))
    state, rates, skipped = step.init(params), [], [0]
    assert plan.schedule is not None
    for batch in batches(bad, world.rank):
        rates.append(plan.schedule.rate(int(state.step)))
        state, metrics = step(state, batch)
        skipped.append(int(metrics.get("skipped", torch.zeros(()))) + skipped[-1])
    values = torch.cat([leaf.float().flatten() for leaf in step.params(state).values()])
    return {"rates": rates, "skipped": skipped[1:], "values": values.tolist()}


def agree(found: dict[str, Any], expected: dict[str, Any], tolerance: float) -> None:
    assert found["rates"] == pytest.approx(expected["rates"], rel=1e-12)
    assert found["skipped"] == expected["skipped"]
    values = torch.tensor(found["values"]), torch.tensor(expected["values"])
    torch.testing.assert_close(*values, equal_nan=True, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("name", RUNS)
def test_a_plan_trains_as_deepspeed_does(name: str, alone: dict[str, Any]) -> None:
    config, bad = RUNS[name]
    half = "bf16" in config or "torch_autocast" in config
    agree(by_plan(config, bad), alone[name], 2e-2 if half else 1e-5)


@pytest.mark.parametrize("name", PAIRS)
def test_a_plan_trains_as_deepspeed_does_on_two_ranks(name: str, paired: dict[str, Any]) -> None:
    for found in comm.simulate(by_plan, *PAIRS[name], world_size=2):
        agree(found, paired[name], 1e-5)
