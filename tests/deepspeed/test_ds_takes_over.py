"""A run that DeepSpeed has begun goes on here: values, buffers, counts, groups' numbers, the scheduler, ``client_state``."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import functional_ds as fds
from functional_ds import comm
from functional_ds.deepspeed.utils.zero_to_fp32 import load_state_dict_from_zero_checkpoint
from tests.deepspeed import take_over_run as run
from tests.deepspeed.real import real
from tests.interchange.zero_layout import Layout, values_of

ds = fds.deepspeed
SHAPES = {name: [*p.shape] for name, p in run.network(0).named_parameters()}
BUFFERS = {"1.running_mean": torch.arange(4.0), "1.running_var": torch.ones(4) * 3, "1.num_batches_tracked": torch.tensor(9)}
NUMBERS = {"lr": 0.03, "initial_lr": 0.3, "weight_decay": 0.2, "betas": (0.5, 0.6), "eps": 1e-6, "fused": None, "step": 4}
COUNTS = {"global_steps": 5, "global_samples": 40, "skipped_steps": 2}


def written(path: Path, stage: int = 1, scheduler: Any = None) -> Path:
    entries = {**COUNTS, "lr_scheduler": scheduler, "epoch": 7, "seen": [1, 2]}
    groups = [list(SHAPES)]
    return Layout(stage, 2, groups, values_of(SHAPES), buffers=BUFFERS, numbers=NUMBERS, entries=entries).write(path)


def engine_of(make: Any = None, **more: Any) -> Any:
    module = run.network(0)
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.1)
    scheduler = None if make is None else make(optimizer)
    return ds.initialize(model=module, optimizer=optimizer, lr_scheduler=scheduler, config={**run.config(1), **more})[0]


def step_lr(optimizer: Any) -> Any:
    return torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)


def of_step_lr(epochs: int) -> dict[str, Any]:
    other = step_lr(torch.optim.SGD([torch.zeros(1)], lr=0.3))
    for _ in range(epochs):
        other.optimizer.step()
        other.step()
    return dict(other.state_dict())


def values(engine: Any) -> dict[str, Tensor]:
    step, state = engine.functional_step, engine.state
    return {name: x.clone() for name, x in (*step.params(state).items(), *step.module_buffers(state).items())}


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_what_is_saved_beside_the_values_is_taken_over(tmp_path: Path, stage: int) -> None:
    written(tmp_path, stage, of_step_lr(3))
    engine = engine_of(step_lr)
    assert engine.load_checkpoint(tmp_path)[1] == {"epoch": 7, "seen": [1, 2]}
    (group,) = engine.optimizer.param_groups
    assert (group["lr"], group["initial_lr"], group["weight_decay"], group["betas"]) == (0.03, 0.3, 0.2, (0.5, 0.6))
    assert "step" not in group
    assert engine.lr_scheduler.last_epoch == 3
    assert {name: getattr(engine, name) for name in COUNTS} == COUNTS
    expected = {**{name: each["master"] for name, each in values_of(SHAPES).items()}, **BUFFERS}
    assert all(torch.equal(value, expected[name]) for name, value in values(engine).items())


@pytest.mark.parametrize("stage", [0, 2])
@pytest.mark.parametrize("options", [{"load_module_only": True}, {"load_optimizer_states": False}])
def test_a_module_is_its_params_and_buffers(tmp_path: Path, options: dict[str, bool], stage: int) -> None:
    written(tmp_path, stage, of_step_lr(3))
    engine = engine_of(step_lr)
    engine.load_checkpoint(tmp_path, **options)
    expected = {**{name: each["master"] for name, each in values_of(SHAPES).items()}, **BUFFERS}
    assert all(torch.equal(value, expected[name]) for name, value in values(engine).items())
    assert engine.optimizer.param_groups[0]["weight_decay"] == 0.01
    only = "load_module_only" in options
    assert (engine.global_steps, engine.lr_scheduler.last_epoch) == ((0, 0) if only else (5, 3))

    run.drive(engine, range(2))
    engine.save_checkpoint(tmp_path / "ours")
    held, again = values(engine), engine_of(step_lr)
    again.load_checkpoint(tmp_path / "ours", **options)
    assert all(torch.equal(value, held[name]) for name, value in values(again).items())


def test_a_scheduler_without_its_state_is_refused(tmp_path: Path) -> None:
    for number, (held, message) in enumerate(
        [(None, "has no state of a scheduler"), ({"last_batch_iteration": 4}, "has the state of a scheduler with last_batch")]
    ):
        written(tmp_path / str(number), scheduler=held)
        engine = engine_of(step_lr)
        before = values(engine)
        with pytest.raises(ValueError, match=message):
            engine.load_checkpoint(tmp_path / str(number))
        assert all(torch.equal(value, before[name]) for name, value in values(engine).items())
        assert engine.global_steps == 0
        engine.load_checkpoint(tmp_path / str(number), load_lr_scheduler_states=False)
        assert engine.lr_scheduler.last_epoch == 0


@pytest.mark.parametrize("stage", [0, 1])
def test_whole_params_come_with_buffers(tmp_path: Path, stage: int) -> None:
    written(tmp_path / "theirs", stage)
    found = load_state_dict_from_zero_checkpoint(run.network(1), str(tmp_path / "theirs")).state_dict()
    assert all(torch.equal(found[name], value) for name, value in BUFFERS.items())

    def on_rank() -> dict[str, Tensor]:
        engine = engine_of(bf16={"enabled": True})
        run.drive(engine, range(2))
        engine.save_checkpoint(tmp_path / "ours")
        return values(engine)

    expected = comm.simulate(on_rank, world_size=2)[0]
    model = load_state_dict_from_zero_checkpoint(run.network(1), str(tmp_path / "ours"))
    assert all(torch.equal(value, expected[name].to(value.dtype)) for name, value in model.state_dict().items())


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_run_of_deepspeeds_goes_on_as_there(tmp_path: Path, ranks: int) -> None:
    """Losses, rates and running statistics of three further updates are those of DeepSpeed's engine that loads the same."""
    real()
    words = [sys.executable, str(Path(run.__file__)), str(ranks), str(tmp_path)]
    pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL, "text": True}
    processes = [subprocess.Popen([*words, str(rank)], **pipes) for rank in range(ranks)]
    theirs = [json.loads(process.communicate(timeout=240)[0].splitlines()[-1]) for process in processes]

    def on_rank() -> dict[str, list[float]]:
        return {name: run.resumed(ds, place, *how) for name, place, how in run.cases(tmp_path)}

    for ours, expected in zip(comm.simulate(on_rank, world_size=ranks), theirs, strict=True):
        for name, found in ours.items():
            assert found == pytest.approx(expected[name], rel=1e-5, abs=1e-7), name
