"""Checkpoints, weights, loaders, whole batches and logs of an engine; real processes."""

import argparse
import json
import logging
import random
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import functional_ds as fds
from functional_ds import comm
from tests.deepspeed.engine.test_ds_engine_law import CONFIGS, by_engine, by_step

ds = fds.deepspeed
WARMUP = {"type": "WarmupLR", "params": {"warmup_num_steps": 4, "warmup_type": "linear"}}


def config(stage: int = 1, **more: Any) -> dict[str, Any]:
    base = {"train_micro_batch_size_per_gpu": 4, "optimizer": {"type": "AdamW", "params": {"lr": 0.1}}, "scheduler": WARMUP}
    return {**base, "zero_optimization": {"stage": stage}, **more}


def engine_of(*args: Any, **more: Any) -> Any:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    return ds.initialize(model=module, config=config(*args, **more))[0]


def drive(engine: Any, begin: int, end: int) -> None:
    for i in range(begin, end):
        x = torch.randn(4, 3, generator=torch.Generator().manual_seed(i + 100 * comm.world().rank))
        engine.backward(engine(x).square().mean() * (float("inf") if i == 1 else 1))
        engine.step()


def values(engine: Any) -> list[Tensor]:
    step, state = engine.functional_step, engine.state
    return [x.clone() for x in (*step.params(state).values(), *step.module_buffers(state).values())]


def equal(found: list[Tensor], expected: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("stage", [0, 3])
def test_a_resumed_run_is_the_run(stage: int, tmp_path: Path) -> None:
    def program() -> None:
        engine = engine_of(stage, bf16={"enabled": True})
        assert engine.load_checkpoint(tmp_path) == (None, None)
        drive(engine, 0, 3)
        held = {"epoch": 2, "args": argparse.Namespace(seed=1), "rng": random.Random(0).getstate(), "x": torch.ones(2)}
        assert engine.save_checkpoint(tmp_path, client_state=held)
        drive(engine, 3, 5)
        engine.save_checkpoint(str(tmp_path), tag="later", save_latest=False)
        expected, rate = values(engine), engine.get_lr()

        other = engine_of(stage, bf16={"enabled": True})
        path, client = other.load_checkpoint(tmp_path)
        assert path == str(tmp_path / "global_step3")
        assert (tmp_path / "latest").read_text() == "global_step3"
        assert client["epoch"] == 2
        assert client["args"].seed == 1
        assert client["rng"] == held["rng"]
        assert client["x"].sum() == 2
        assert (other.global_steps, other.skipped_steps, other.global_samples) == (3, 1, 24)
        drive(other, 3, 5)
        assert equal(values(other), expected)
        assert other.get_lr() == rate
        assert other.module[0].weight.numel() == (0 if stage == 3 else 12)

        engine.load_checkpoint(tmp_path, tag="later")
        assert equal(values(engine), expected)
        assert engine.global_steps == 5

    comm.simulate(program, world_size=2)


def test_another_number_of_ranks_and_stage(tmp_path: Path) -> None:
    def save() -> list[Tensor]:
        engine = engine_of(3)
        drive(engine, 0, 3)
        engine.save_checkpoint(tmp_path)
        return values(engine)

    expected = comm.simulate(save, world_size=2)[0]
    engine = engine_of(1)
    engine.load_checkpoint(tmp_path)
    assert equal(values(engine), expected)
    assert engine.global_steps == 3
    moments = ds.utils.safe_get_full_optimizer_state
    assert moments(engine.module[0].weight, "exp_avg").any()

    weights = engine_of(2)
    weights.load_checkpoint(tmp_path, load_module_only=True)
    assert equal(values(weights), expected)
    assert weights.global_steps == 0
    assert not moments(weights.module[0].weight, "exp_avg").any()
    with pytest.raises(fds.checkpointing.NoCheckpointError):
        engine.load_checkpoint(tmp_path, tag="none")
    for tag in ("..", "/etc", ""):
        with pytest.raises(ValueError, match="tag"):
            engine.save_checkpoint(tmp_path, tag=tag)
    with pytest.raises(ValueError, match="folder"):
        engine.save_checkpoint("")


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.safetensors"])
def test_weights_in_one_file(stage: int, name: str, tmp_path: Path) -> None:
    def program() -> None:
        engine = engine_of(stage, bf16={"enabled": True})
        drive(engine, 0, 1)
        assert engine.save_16bit_model(tmp_path, name)
        found: dict[str, Tensor]
        if name.endswith("bin"):
            found = torch.load(tmp_path / name)
        else:
            load = pytest.importorskip("safetensors.torch").load_file
            found = load(tmp_path / name)
        assert found.keys() == engine.module.state_dict().keys()
        whole = engine.functional_step.params(engine.state)
        assert found["0.weight"].dtype == torch.bfloat16
        assert all(torch.equal(found[path], x.to(found[path].dtype)) for path, x in whole.items())
        nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)).load_state_dict(found)
        consolidated = engine._zero3_consolidated_16bit_state_dict()
        assert (consolidated is None) == (comm.world().rank > 0)

    comm.simulate(program, world_size=2)


def test_the_loader_has_this_ranks_rows() -> None:
    def program() -> list[float]:
        data = torch.utils.data.TensorDataset(torch.arange(24.0))
        module = nn.Linear(1, 1)
        _, _, loader, _ = ds.initialize(model=module, training_data=data, config=config())
        assert loader is not None
        assert len(loader) == 3
        assert len(next(loader)[0]) == 4
        batches = iter(loader)
        assert not torch.equal(next(iter(batches))[0], next(iter(batches))[0])
        return [x for (batch,) in loader for x in batch.tolist()]

    one, other = comm.simulate(program, world_size=2)
    assert sorted(one + other) == [float(x) for x in range(24)]


def test_whole_batches() -> None:
    class Piped(nn.Sequential):
        loss_fn = staticmethod(nn.functional.mse_loss)

    def program() -> tuple[float, float]:
        torch.manual_seed(0)
        data = torch.utils.data.TensorDataset(torch.randn(16, 3), torch.randn(16, 1))
        engine, *_ = ds.initialize(
            model=Piped(nn.Linear(3, 1)), training_data=data, config=config(gradient_accumulation_steps=2, scheduler={})
        )
        losses = [engine.train_batch().item() for _ in range(6)]
        assert losses[-1] < losses[0]
        assert engine.global_steps == 6
        assert engine.micro_steps == 12
        batches = iter([(torch.zeros(4, 3), torch.ones(4, 1))] * 3)
        before = engine.eval_batch(batches).item()
        assert engine.module.training
        return losses[-1], before

    one, other = comm.simulate(program, world_size=2)
    assert one == other
    with pytest.raises(RuntimeError, match="loss_fn"):
        engine_of(1).train_batch(iter([]))


@pytest.mark.parametrize("stage", range(4))
def test_a_load_amid_an_accumulation_begins_it_anew(stage: int, tmp_path: Path) -> None:
    """On two ranks: the micro-batch before the load has no part in the next update, which has as many as any other."""

    def program() -> tuple[list[Tensor], list[Tensor]]:
        found = []
        for before in (0, 1):
            engine = engine_of(stage, gradient_accumulation_steps=2)
            engine.save_checkpoint(tmp_path / str(before))
            drive(engine, 5, 5 + before)
            engine.load_checkpoint(tmp_path / str(before))
            drive(engine, 2, 6)
            assert engine.global_steps == 2
            found.append(values(engine))
        return found[0], found[1]

    for expected, got in comm.simulate(program, world_size=2):
        assert equal(got, expected)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_batch_that_fails_leaves_an_engine_as_it_was(stage: int) -> None:
    class Piped(nn.Sequential):
        loss_fn = staticmethod(nn.functional.mse_loss)

    rows = [(torch.full((4, 3), 1.0 + each), torch.ones(4, 1)) for each in range(3)]

    def program(fails: bool) -> list[float]:
        torch.manual_seed(0)
        sizes = config(gradient_accumulation_steps=3, scheduler={}, zero_optimization={"stage": stage})
        engine, *_ = ds.initialize(model=Piped(nn.Linear(3, 1)), config=sizes)
        if fails:
            with pytest.raises(StopIteration):
                engine.train_batch(iter(rows[:2]))
            with pytest.raises(RuntimeError, match="shape"):
                engine.train_batch(iter([rows[0], (torch.ones(4, 5), torch.ones(4, 1))]))
            with pytest.raises(StopIteration):
                engine.eval_batch(iter(rows[:1]))
            assert engine.module.training
            assert (engine.global_steps, engine.micro_steps) == (0, 0)
        found, boundaries = [engine.train_batch(iter(rows)).item()], []
        for x, y in rows:  # the count of micro-batches is the engine's own again
            engine.backward(engine.module.loss_fn(engine(x), y))
            boundaries.append(engine.is_gradient_accumulation_boundary())
            engine.step()
        assert boundaries == [False, False, True]
        return [*found, engine.train_batch(iter(rows)).item(), engine.eval_batch(iter(rows)).item()]

    assert comm.simulate(lambda: program(True), world_size=2) == comm.simulate(lambda: program(False), world_size=2)


def test_logs(tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture) -> None:
    logs = {
        "wall_clock_breakdown": True,
        "steps_per_print": 2,
        "log_level": "info",
        "flops_profiler": {"enabled": True, "profile_step": 1},
        "csv_monitor": {"enabled": True, "output_path": str(tmp_path), "job_name": "job"},
    }
    logger = logging.getLogger("DeepSpeed")
    before = logger.level
    try:
        with caplog.at_level(logging.INFO, "DeepSpeed"):
            logger.addHandler(caplog.handler)
            engine = engine_of(1, **logs)
            drive(engine, 2, 6)
    finally:
        logger.removeHandler(caplog.handler)
        logger.setLevel(before)
    engine(torch.ones(4, 3)).square().mean().backward()
    engine.step()
    engine.destroy()
    shown = capsys.readouterr().out
    assert "MFLOP a step" in shown
    assert "time (ms) | fwd:" in shown
    assert {"fwd", "step"} == engine.get_wall_clock_timers().keys()  # of an update whose backward is torch's
    assert len({text for record in caplog.records if (text := record.getMessage()).startswith("step=")}) == 2
    files = {path.stem: path.read_text().splitlines() for path in (tmp_path / "job").iterdir()}
    assert files["Train_Samples_lr"][:2] == ["step,lr", "4,0.0"]
    assert [line.split(",")[0] for line in files["Train_Samples_train_loss"]] == ["step", "4", "8", "12", "16"]
    assert files["Train_Samples_elapsed_time_ms_step"][-1].startswith("20,")
    assert "Train_Samples_elapsed_time_ms_backward" in files


def test_comet_is_told_every_so_many_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 alone; events of the program's, too."""
    calls: list[Any] = []

    class Experiment:
        def set_name(self, name: str) -> None:
            calls.append(name)

        def log_metric(self, name: str, value: float, *, step: int) -> None:
            calls.append((name, round(value, 4), step))

        def end(self) -> None:
            calls.append("end")

    module = types.ModuleType("comet_ml")
    module.start = lambda **options: calls.append(options) or Experiment()  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "comet_ml", module)
    comet = {"enabled": True, "project": "p", "experiment_name": "e", "samples_log_interval": 8, "mode": "create"}

    def program() -> None:
        engine = engine_of(1, comet=comet)
        assert engine.monitor.enabled
        drive(engine, 2, 6)
        engine.monitor.write_events([("own", torch.tensor(2.0), engine.global_samples)])
        engine.destroy()

    comm.simulate(program, world_size=2)
    keys = ("api_key", "project", "workspace", "experiment_key", "mode", "online")
    assert calls[:2] == [{**dict.fromkeys(keys), "project": "p", "mode": "create"}, "e"]
    rates = [step for name, _, step in calls[2:-1] if name.endswith("lr")]
    assert rates == [rates[0] + 8 * k for k in range(len(rates))]
    assert len(rates) > 1
    assert calls[-2][:2] == ("own", 2.0)
    assert calls[-1] == "end"


def test_measured_steps_are_the_steps() -> None:
    quiet, loud = (
        engine_of(2),
        engine_of(2, flops_profiler={"enabled": True}, comms_logger={"enabled": True}, steps_per_print=2),
    )
    for engine in (quiet, loud):
        drive(engine, 2, 6)
    assert equal(values(quiet), values(loud))


def test_configs_come_by_file_and_arguments(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(config()))
    args = argparse.Namespace(deepspeed_config=str(path), local_rank=0)
    engine, *_ = ds.initialize(args, nn.Linear(3, 1))
    assert engine.train_batch_size() == 4
    assert engine.zero_optimization_stage() == 1
    assert engine.config["train_batch_size"] == 4
    engine.set_train_batch_size(12)
    assert engine.gradient_accumulation_steps() == 3
    with pytest.raises(ValueError, match="multiple"):
        engine.set_train_batch_size(6)
    assert ds.initialize(model=nn.Linear(3, 1), config_params=str(path))[0].optimizer is not None
    with pytest.raises(ValueError, match="given twice"):
        ds.initialize(args, nn.Linear(3, 1), config=config())
    with pytest.raises(ValueError, match="pass it as config="):
        ds.initialize(model=nn.Linear(3, 1))
    with pytest.raises(ValueError, match="pass the model"):
        ds.initialize(config=config())
    with pytest.raises(ds.ConfigError, match="nearest"):
        ds.initialize(model=nn.Linear(3, 1), config=config(gradient_cliping=1.0))


def _on_a_process() -> bool:
    found, expected = by_engine(CONFIGS["stage 2"], None), by_step(CONFIGS["stage 2"], None)
    return equal(found, expected)


def test_engines_in_processes() -> None:
    assert comm.spawn(_on_a_process, world_size=2) == [True, True]
