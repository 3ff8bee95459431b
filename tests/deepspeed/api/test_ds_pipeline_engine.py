"""``PipelineEngine`` trains as the module on one device, and as DeepSpeed's own engine."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from functional_ds import comm
from functional_ds.deepspeed import pipe
from functional_ds.deepspeed.config.explain import ConfigError
from functional_ds.deepspeed.engine.initialize import initialize
from functional_ds.deepspeed.ops.adam import FusedAdam
from functional_ds.deepspeed.pipe.pipeline_engine import PipelineEngine, pipeline_engine
from functional_ds.deepspeed.runtime.lr_schedules import WarmupLR
from tests.deepspeed.api.pipeline_run import CONFIG, UPDATES, layers, loss_of, micros, values
from tests.deepspeed.real import real


def made(stages: int, method: str = "uniform", **more: Any) -> PipelineEngine:
    """An engine in this world; data-parallel ranks share the micro-batches."""
    module = pipe.PipelineModule(layers(pipe), num_stages=stages, loss_fn=loss_of, partition_method=method)
    shared = comm.world().size // stages
    return pipeline_engine(values(module), {**CONFIG, "gradient_accumulation_steps": 4 // shared, **more})  # type: ignore[arg-type]


def mine(engine: PipelineEngine, update: int) -> Any:
    """This rank's micro-batches of an update."""
    data = engine._parts.data
    return iter(micros(update)[data.rank :: data.size])


def losses(stages: int, **more: Any) -> list[float]:
    engine = made(stages, **more)
    return [engine.train_batch(mine(engine, update)).item() for update in range(UPDATES)]


@pytest.fixture(scope="module")
def alone() -> list[float]:
    """On one device, in plain PyTorch."""
    module = values(pipe.PipelineModule(layers(pipe), num_stages=1))
    optimizer, found = torch.optim.AdamW(module.parameters(), lr=0.05, weight_decay=0.01), []
    schedule = WarmupLR(optimizer, warmup_num_steps=2, warmup_max_lr=0.05)
    for update in range(UPDATES):
        optimizer.zero_grad()
        total = torch.stack([loss_of(module(x), labels) for x, labels in micros(update)]).mean()
        total.backward()
        torch.nn.utils.clip_grad_norm_(module.parameters(), 0.5)
        optimizer.step()
        schedule.step()
        found.append(total.item())
    return found


@pytest.mark.parametrize(("ranks", "stages", "zero"), [(1, 1, 1), (2, 2, 0), (2, 2, 1), (4, 2, 1), (4, 2, 3)])
def test_an_engine_trains_as_its_module(alone: list[float], ranks: int, stages: int, zero: int) -> None:
    for found in comm.simulate(lambda: losses(stages, zero_optimization={"stage": zero}), world_size=ranks):
        assert found == pytest.approx(alone, rel=1e-5)


def test_an_engine_trains_as_deepspeeds(tmp_path: Path) -> None:
    real()
    program = str(Path(__file__).with_name("pipeline_run.py"))
    words = [[sys.executable, program, str(rank), str(tmp_path / "store")] for rank in range(2)]
    processes = [subprocess.Popen(each, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) for each in words]
    theirs = [json.loads(process.communicate(timeout=240)[0].splitlines()[-1]) for process in processes]
    for ours, expected in zip(comm.simulate(lambda: losses(2), world_size=2), theirs, strict=True):
        assert ours == pytest.approx(expected, rel=1e-5)


def test_a_checkpoint_goes_on_with_other_stages(tmp_path: Path) -> None:
    def first() -> list[float]:
        engine = made(2)
        assert engine.load_checkpoint(str(tmp_path)) == (None, None)
        engine.train_batch(mine(engine, 0))
        engine.save_checkpoint(str(tmp_path), client_state={"epoch": 1})
        return [engine.train_batch(mine(engine, 1)).item(), *engine.get_lr()]

    def second() -> tuple[Any, ...]:
        engine = made(1)
        path, client = engine.load_checkpoint(str(tmp_path))
        counts = engine.global_steps, engine.global_samples
        return [engine.train_batch(mine(engine, 1)).item(), *engine.get_lr()], Path(path or "").name, client, counts

    expected = comm.simulate(first, world_size=2)[0]
    ((found, name, client, counts),) = comm.simulate(second, world_size=1)
    assert found == pytest.approx(expected, rel=1e-6)
    assert (name, client, counts) == ("global_step1", {"epoch": 1}, (1, 8))


def test_a_checkpoint_of_another_kind_of_run_is_refused(tmp_path: Path) -> None:
    """And gives its params alone where these are asked for."""

    def built(groups: bool, scheduler: bool) -> Any:
        torch.manual_seed(0)
        module = pipe.PipelineModule([pipe.LayerSpec(nn.Linear, 4, 4)] * 2, num_stages=2, loss_fn=nn.functional.mse_loss)
        optimizer = torch.optim.AdamW(groups_of(module) if groups else module.parameters(), lr=0.1)
        made = torch.optim.lr_scheduler.StepLR(optimizer, 2) if scheduler else None
        sizes = {"train_batch_size": 3, "train_micro_batch_size_per_gpu": 3}
        return initialize(model=module, optimizer=optimizer, lr_scheduler=made, config=sizes)[0]

    def on_rank() -> None:
        batch = torch.ones(3, 4), torch.zeros(3, 4)
        first = built(groups=True, scheduler=False)
        first.train_batch(iter([batch]))
        first.save_checkpoint(str(tmp_path))
        saved = first.module_state_dict()
        for groups, scheduler, message in (
            (False, False, "has 2 param groups, and the engine 1"),
            (True, True, "has no state of a scheduler, and the engine has a StepLR"),
        ):
            engine = built(groups, scheduler)
            before = engine.module_state_dict()
            with pytest.raises(ValueError, match=message):
                engine.load_checkpoint(str(tmp_path))
            assert all(torch.equal(value, before[name]) for name, value in engine.module_state_dict().items())
            engine.load_checkpoint(str(tmp_path), load_module_only=True)
            assert all(torch.equal(value, saved[name]) for name, value in engine.module_state_dict().items())
            assert engine.global_steps == 0

    comm.simulate(on_rank, world_size=2)


def groups_of(module: Any) -> list[dict[str, Any]]:
    params = [*module.parameters()]
    weights = {"params": [p for p in params if p.ndim == 2], "lr": 0.005, "weight_decay": 0.3}
    return [weights, {"params": [p for p in params if p.ndim == 1], "weight_decay": 0.0}]


@pytest.mark.parametrize("kind", ["config", "optimizer", "both"])
def test_groups_have_their_own_rates(kind: str, tmp_path: Path) -> None:
    """Of a config's optimizer or one that is passed, with a scheduler of the config or torch's; also after a checkpoint."""

    def build(kinds: Any) -> Any:
        torch.manual_seed(0)
        return [kinds(nn.Linear, 4, 4), kinds(nn.LayerNorm, 4), torch.tanh, kinds(nn.Linear, 4, 2)]

    warmup = {"type": "WarmupLR", "params": {"warmup_num_steps": 4, "warmup_type": "linear"}}
    sizes = {
        "train_batch_size": 6,
        "train_micro_batch_size_per_gpu": 3,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 0.0,
    }
    inputs, labels = torch.randn(6, 4), torch.randn(6, 2)
    pairs = [(inputs[:3], labels[:3]), (inputs[3:], labels[3:])]

    def engine_of(own: nn.Module) -> Any:
        module = pipe.PipelineModule(build(pipe.LayerSpec), num_stages=2, loss_fn=nn.functional.mse_loss)
        for name, value in own.state_dict().items():
            if name in (held := dict(module.named_parameters())) and held[name].numel():
                held[name].data.copy_(value)
        adamw = {"type": "AdamW", "params": {"lr": 0.02, "weight_decay": 0.01}}
        if kind == "config":
            config = {**sizes, "optimizer": adamw, "scheduler": warmup}
            return initialize(model=module, model_parameters=groups_of(module), config=config)[0]
        optimizer = torch.optim.AdamW(groups_of(module), lr=0.02)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5) if kind == "both" else None
        config = {**sizes, **({"scheduler": warmup} if kind == "optimizer" else {})}
        return initialize(model=module, optimizer=optimizer, lr_scheduler=scheduler, config=config)[0]

    plain = nn.Sequential(*(nn.Tanh() if layer is torch.tanh else layer for layer in build(lambda kind, *sizes: kind(*sizes))))
    start = {name: value.clone() for name, value in plain.state_dict().items()}
    optimizer = torch.optim.AdamW(groups_of(plain), lr=0.02)
    scheduler: Any = WarmupLR(optimizer, warmup_num_steps=4, warmup_type="linear")
    if kind == "both":
        optimizer = torch.optim.AdamW(groups_of(plain), lr=0.02)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    expected = []
    for _ in range(5):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(plain(inputs), labels)
        loss.backward()
        optimizer.step()
        scheduler.step()
        expected += [loss.item(), *(group["lr"] for group in optimizer.param_groups)]

    def on_rank() -> list[float]:
        torch.manual_seed(0)
        twin = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Tanh(), nn.Linear(4, 2))
        twin.load_state_dict(start)
        engine, found = engine_of(twin), []
        for update in range(5):
            if update == 3:
                engine.save_checkpoint(str(tmp_path))
                engine = engine_of(twin)
                engine.load_checkpoint(str(tmp_path))
            found += [engine.train_batch(iter(pairs)).item(), *engine.get_lr()]
        return [*found, engine.skipped_steps]

    for found in comm.simulate(on_rank, world_size=2):
        assert found == pytest.approx([*expected, 0], rel=1e-5)


def test_data_schedulers_and_evaluation(tmp_path: Path) -> None:
    def on_rank() -> tuple[Any, ...]:
        module = values(pipe.PipelineModule(layers(pipe), num_stages=2, loss_fn=loss_of, partition_method="uniform"))
        held = FusedAdam(module.parameters(), lr=0.05)
        rows = [row for pair in micros(0) for row in zip(*pair, strict=True)]
        config = {name: block for name, block in CONFIG.items() if name not in ("optimizer", "scheduler")}
        config["csv_monitor"] = {"enabled": True, "output_path": str(tmp_path), "job_name": "job"}
        scheduler = WarmupLR(held, warmup_num_steps=4)
        engine, *_ = initialize(
            model=module,  # type: ignore[arg-type]
            optimizer=held,
            lr_scheduler=scheduler,
            config=config,
            training_data=rows,  # type: ignore[arg-type]
        )
        seen: list[torch.Tensor] = []
        engine.set_batch_fn(lambda batch: seen.append(batch[0]) or tuple(batch))  # type: ignore[func-returns-value]
        before = engine.eval_batch(iter(micros(0))).item()
        seen.clear()
        engine.train_batch()
        assert torch.equal(torch.cat(seen), torch.stack([row[0] for row in rows]))  # in order, as DeepSpeed's
        engine.train_batch()  # the loader starts over
        after = engine.eval_batch(iter(micros(0)), num_micro_batches=2).item()
        weights = engine.module_state_dict()
        stage = engine.is_first_stage(), engine.is_last_stage()
        return before, after, list(weights), engine.get_lr(), engine.global_samples, stage, engine.get_global_grad_norm()

    both = comm.simulate(on_rank, world_size=2)
    logged = {path.stem: path.read_text().split()[1:] for path in (tmp_path / "job").iterdir()}
    assert {name: [row.split(",")[0] for row in told] for name, told in logged.items()} == {
        "Train_Samples_lr": ["8", "16"],
        "Train_Samples_train_loss": ["8", "16"],
        "Train_Samples_eval_loss": ["0", "16"],
    }
    assert both[0][:5] == both[1][:5]
    before, after, names, rates, samples, stage, norm = both[0]
    assert after < before
    assert names == ["tied_modules.embed.weight", "1.weight", "1.bias", "4.weight", "4.bias"]
    assert rates == pytest.approx([0.05 / 2])  # log(2) / log(4)
    assert samples == 16
    assert (stage, both[1][5]) == ((True, False), (False, True))
    assert norm > 0


def test_refusals() -> None:
    engine = made(1)
    with pytest.raises(TypeError, match="call train_batch or eval_batch"):
        engine(torch.ones(1))
    with pytest.raises(ValueError, match="pass data_iter, or training_data"):
        engine.train_batch()
    with pytest.raises(ValueError, match="only the mean loss is available"):
        engine.eval_batch(iter([]), return_logits=True)
    with pytest.raises(StopIteration):
        engine.train_batch(iter(micros(0)[:2]))
    with pytest.raises(AttributeError, match="initialize another engine"):
        engine.set_train_batch_size(4)
    with pytest.raises(AttributeError, match=r"engine\.offload_states: offload_optimizer and"):
        engine.offload_states()
    with pytest.raises(ConfigError, match="optimiser"):
        made(1, optimiser={})
    module = pipe.PipelineModule(layers(pipe), num_stages=1, loss_fn=loss_of)
    with pytest.raises(ValueError, match="it names no optimizer"):
        pipeline_engine(module, {"train_batch_size": 8, "gradient_accumulation_steps": 4})


# -- buffers, and the module beside the engine ------------------------------------------------------------------------------


def normed(stages: int) -> Any:
    torch.manual_seed(0)
    made = [nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)]
    return pipe.PipelineModule(made, num_stages=stages, loss_fn=nn.functional.mse_loss, partition_method="uniform")


def pairs(update: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    draw = torch.Generator().manual_seed(update)
    return [(torch.randn(4, 3, generator=draw), torch.randn(4, 1, generator=draw)) for _ in range(2)]


PLAIN = {"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2, "gradient_clipping": 0.0}


@pytest.mark.parametrize("zero", [0, 1, 3])
def test_buffers_are_the_modules(zero: int) -> None:
    """On one device in plain PyTorch; and the engine's module shows its own stage."""
    module, expected = normed(1), []
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    for update in range(2):
        optimizer.zero_grad()
        total = torch.stack([nn.functional.mse_loss(module(x), y) for x, y in pairs(update)]).mean()
        total.backward()
        optimizer.step()
        expected.append(total.item())

    def program() -> None:
        config = {**PLAIN, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}, "zero_optimization": {"stage": zero}}
        engine = pipeline_engine(normed(2), config)
        found = [engine.train_batch(iter(pairs(update))).item() for update in range(2)]
        assert found == pytest.approx(expected, rel=1e-5)
        assert engine.get_global_grad_norm() is None or zero
        whole = engine.module_state_dict()
        assert whole.keys() == module.state_dict().keys()
        for name, value in module.state_dict().items():
            torch.testing.assert_close(whole[name], value, rtol=1e-5, atol=1e-6)
        own = range(*engine.module.parts[engine.stage_id : engine.stage_id + 2])
        for name, p in engine.module.named_parameters():
            mine = int(name.split(".")[0]) in own
            if mine and zero < 3:
                assert torch.equal(p, whole[name])
            else:
                assert p.numel() == 0
        for name, buffer in engine.module.named_buffers():
            assert torch.equal(buffer, whole[name])

    comm.simulate(program, world_size=2)


def test_buffers_of_tied_layers_are_refused() -> None:
    def program() -> None:
        tied = [pipe.TiedLayerSpec("norm", nn.BatchNorm1d, 3), nn.Linear(3, 3), pipe.TiedLayerSpec("norm", nn.BatchNorm1d, 3)]
        module = pipe.PipelineModule(tied, num_stages=2, loss_fn=nn.functional.mse_loss, partition_method="uniform")
        with pytest.raises(ValueError, match="'norm' is in several stages and has the buffer"):
            pipeline_engine(module, {**PLAIN, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}})

    comm.simulate(program, world_size=2)
