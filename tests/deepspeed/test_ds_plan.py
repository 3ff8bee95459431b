"""Plans: the transforms, optimizers and schedules that configs become, and that they train as DeepSpeed would."""

import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import functional_ds as fds
from functional_ds import comm
from functional_ds.deepspeed import ConfigError
from functional_ds.deepspeed.config.ds_optimizers import OPTIMIZERS
from functional_ds.deepspeed.config.keys.config_key import Fate
from functional_ds.deepspeed.config.keys.config_table import KEYS
from functional_ds.deepspeed.config.schedules.ds_schedules import SCHEDULERS
from functional_ds.deepspeed.config.transform_parts import LossScaleError
from functional_ds.testing import assert_same
from tests.deepspeed.real import real
from tests.deepspeed.test_ds_reader import plan_of, refused


def loss_fn(params: Any, x: Tensor) -> Tensor:
    return (x @ params["w"] + params["b"]).square().mean()


def made(world_size: int = 1, /, **config: Any) -> str:
    """The transforms of a plan, without the check of ranks, which is the last."""
    step = plan_of(world_size, **config).transform(fds.train_step(loss_fn, fds.sgd(0.1)))
    return str(step).partition(" -> ")[2].removesuffix(f" -> for_ranks({world_size})")


FP32 = "mixed_precision('params=f32,compute=f32,output=f32,reduce=f32', loss_scale=StaticScale(value=1.0))"
BF16 = "mixed_precision('params=f32,compute=bf16,output=f32,reduce=bf16'"


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({}, "zero(0, world) -> clip(1.0)"),
        ({"gradient_clipping": 0}, "zero(0, world)"),
        ({"gradient_clipping": 0.5, "gradient_accumulation_steps": 4}, "zero(0, world) -> accumulate(4) -> clip(0.5)"),
        ({"zero_optimization": {"stage": 1}}, f"{FP32} -> zero(1, world) -> clip(1.0)"),
        ({"zero_optimization": {"stage": 2, "compute_grad_norm": False}, "gradient_clipping": 0}, "zero(2, world)"),
        (
            {"zero_optimization": {"stage": 2, "reduce_scatter": False}, "gradient_clipping": 0},
            f"{FP32} -> zero(2, world, aggregate=all_reduce)",
        ),
        ({"bf16": {"enabled": True}, "gradient_clipping": 0}, f"{BF16}, loss_scale=StaticScale(value=1.0)) -> zero(0, world)"),
        (
            {
                "bf16": {"enabled": True, "check_grad_overflow": False},
                "zero_optimization": {"stage": 2},
                "gradient_clipping": 0,
            },
            f"{BF16}) -> zero(2, world)",
        ),
        (
            {
                "bf16": {"enabled": True, "check_grad_overflow": False},
                "zero_optimization": {"stage": 3},
                "gradient_clipping": 0,
            },
            f"{BF16}, loss_scale=StaticScale(value=1.0)) -> zero(3, world, persistence_threshold=100000)",
        ),
        (
            {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}, "gradient_clipping": 0},
            f"{FP32} -> offload(optimizer='cpu') -> zero(2, world)",
        ),
        (
            {"zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}}, "gradient_clipping": 0},
            f"{FP32} -> offload(optimizer='cpu', params='cpu') -> zero(3, world)",
        ),
        (
            {"communication_data_type": "bf16", "gradient_clipping": 0},
            "mixed_precision('params=f32,compute=f32,output=f32,reduce=bf16') -> zero(0, world)",
        ),
        ({"gradient_predivide_factor": 2.0, "gradient_clipping": 0}, "zero(0, world, gradient_predivide_factor=2.0)"),
        (
            {"torch_autocast": {"enabled": True, "dtype": "torch.bfloat16"}, "gradient_clipping": 0},
            f"{BF16}, autocast=True) -> zero(0, world)",
        ),
        (
            {
                "bf16": {"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True},
                "zero_optimization": {"stage": 1},
                "gradient_clipping": 0,
            },
            "mixed_precision('params=bf16,compute=bf16,output=f32,reduce=bf16', loss_scale=StaticScale(value=1.0), "
            "states=torch.bfloat16) -> zero(1, world)",
        ),
    ],
)
def test_transforms(config: dict[str, Any], expected: str) -> None:
    """Among them what DeepSpeed checks: finite gradients in stage 3 always, else by key, and in fp32 in stages 1 and 2."""
    assert made(**config) == expected


def test_fp16_has_deepspeeds_loss_scale() -> None:
    fp16 = {"enabled": True, "initial_scale_power": 12, "loss_scale_window": 7, "hysteresis": 3}
    text = made(fp16=fp16, zero_optimization={"stage": 2})
    assert "DynamicScale(initial=4096.0, window=7, factor=2.0, hysteresis=3" in text
    assert "settle=1" in text
    assert text.endswith("clip(1.0) -> stop_at_minimum")
    stage_0 = made(fp16=fp16)
    assert "hysteresis=1" in stage_0
    assert "stop_at_minimum" not in stage_0
    assert "StaticScale(value=64.0)" in made(fp16={"enabled": True, "loss_scale": 64})


def test_prescaled_gradients_and_hpz() -> None:
    def program() -> list[str]:
        hpz = {"stage": 3, "zero_hpz_partition_size": 2, "zero_quantized_weights": True, "param_persistence_threshold": 0}
        return [made(2, prescale_gradients=True, gradient_clipping=0), made(2, zero_optimization=hpz, gradient_clipping=0)]

    first, second = comm.simulate(program, world_size=2)[0]
    assert first == "zero(0, world, gradient_predivide_factor=2.0)"
    assert "intra_node=2" in second
    assert "hpz=True" in second
    assert "all_gather=" in second


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_offloaded_params_are_for_stage_3(stage: int) -> None:
    """Below it DeepSpeed accepts the block and reads it nowhere."""
    for key, value in (("offload_param", {"device": "cpu"}), ("cpu_offload_param", True)):
        plan = plan_of(zero_optimization={"stage": stage, key: value})
        assert "offload" not in str(plan.transform)
        row = plan.explain()[f"zero_optimization.{key}" + ".device" * (key == "offload_param")]
        assert row.fate is Fate.IGNORED
        assert row.reason.startswith("It is for stage 3")


@pytest.mark.parametrize("half", ["bf16", "fp16"])
@pytest.mark.parametrize("low", [False, True])
def test_half_precision_params_may_run_in_autocast(half: str, low: bool) -> None:
    more = {f"{half}_master_weights_and_grads": low}
    told = made(
        **{half: {"enabled": True, **more}, "torch_autocast": {"enabled": True, "dtype": half}}, zero_optimization={"stage": 1}
    )
    alone = made(**{half: {"enabled": True, **more}}, zero_optimization={"stage": 1})
    assert told.replace(", autocast=True", "") == alone
    assert told != alone


def test_nvme_becomes_a_disk(tmp_path: Path) -> None:
    offload = {"device": "nvme", "nvme_path": str(tmp_path)}
    zero = {"stage": 3, "offload_optimizer": offload, "offload_param": offload}
    assert f"offload(optimizer='disk', params='disk', path={str(tmp_path)!r})" in made(zero_optimization=zero)
    offload["nvme_path"] = str(tmp_path / "missing")
    plan = plan_of(zero_optimization={"stage": 1, "offload_optimizer": offload})  # another machine may have it
    with pytest.raises(ConfigError, match="missing"):
        plan.transform  # noqa: B018


@pytest.mark.parametrize(
    ("config", "key"),
    [
        ({"fp16": {"enabled": True}, "bf16": {"enabled": True}}, "bf16.enabled"),
        (
            {"zero_optimization": {"stage": 0, "offload_optimizer": {"device": "cpu"}}},
            "zero_optimization.offload_optimizer.device",
        ),
        (
            {"zero_optimization": {"stage": 1, "offload_optimizer": {"device": "nvme"}}},
            "zero_optimization.offload_optimizer.nvme_path",
        ),
        ({"zero_optimization": {"stage": 2, "zero_quantized_weights": True}}, "zero_optimization.zero_quantized_weights"),
        ({"zero_optimization": {"stage": 3, "zero_hpz_partition_size": 3}}, "zero_optimization.zero_hpz_partition_size"),
        ({"zero_optimization": {"stage": 1, "compute_grad_norm": False}}, "zero_optimization.compute_grad_norm"),
        ({"zero_optimization": {"stage": 2, "zenflow": {"topk_ratio": 0.1}}}, "zero_optimization.zenflow"),
        ({"zero_optimization": {"stage": 3}, "gradient_allreduce_op": "sum"}, "gradient_allreduce_op"),
        ({"tensor_parallel": {"autotp_size": 4}}, "tensor_parallel.autotp_size"),
        ({"data_types": {"param_dtype": "bf16"}}, "data_types.param_dtype"),
        ({"fp16": {"enabled": True, "initial_scale_power": 2, "min_loss_scale": 8}}, "fp16.min_loss_scale"),
        ({"bf16": {"enabled": True, "bf16_optimizer_states": True}}, "bf16.bf16_optimizer_states"),
        ({"torch_autocast": {"enabled": True, "dtype": "fp16"}}, "torch_autocast.dtype"),
        ({"torch_autocast": {"enabled": True, "dtype": "fp16"}, "bf16": {"enabled": True}}, "torch_autocast.dtype"),
        (
            {"torch_autocast": {"enabled": True, "dtype": "bf16"}, "data_types": {"param_dtype": "bf16"}},
            "data_types.param_dtype",
        ),
        ({"optimizer": {"type": "RMSprop", "params": {"lr": 1}}}, "optimizer.type"),
        ({"optimizer": {"type": "sgd"}}, "optimizer.type"),
        ({"optimizer": {"type": "OneBitLamb"}}, "optimizer.type"),
        ({"optimizer": {"type": "Adam", "params": {"max_grad_norm": 1.0}}}, "optimizer.params.max_grad_norm"),
        ({"optimizer": {"type": "Adam", "params": {"momentum": 1.0}}}, "optimizer.params.momentum"),
        ({"optimizer": {"type": "Adam", "params": {"betas": [1.5, 0.9]}}}, "optimizer.params"),
        ({"optimizer": {"type": "OneBitAdam"}, "gradient_clipping": 1.0}, "gradient_clipping"),
        ({"optimizer": {"type": "OneBitAdam"}, "zero_optimization": {"stage": 1}}, "zero_optimization.stage"),
        ({"scheduler": {"type": "WarmupLR"}}, "scheduler.type"),
        ({"optimizer": {"type": "Adam"}, "scheduler": {"type": "WarmupDecayLR"}}, "scheduler.type"),
        ({"optimizer": {"type": "Adam"}, "scheduler": {"type": "WarmUpLR"}}, "scheduler.type"),
        ({"optimizer": {"type": "Adam"}, "scheduler": {"type": "ReduceLROnPlateau"}}, "scheduler.type"),
        ({"optimizer": {"type": "Adam"}, "scheduler": {"type": "StepLR", "params": {"step": 1}}}, "scheduler.type"),
        (
            {"optimizer": {"type": "Adam"}, "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": [1, 2]}}},
            "scheduler.params.warmup_max_lr",
        ),
        (
            {
                "optimizer": {"type": "OneBitAdam"},
                "scheduler": {"type": "OneCycle", "params": {"cycle_min_lr": 0, "cycle_max_lr": 1}},
            },
            "scheduler.params.cycle_momentum",
        ),
    ],
)
def test_what_has_no_counterpart_is_refused(config: dict[str, Any], key: str) -> None:
    error = refused(**config)
    assert [row.key for row in error.explanation.refused] == [key], str(error)


# -- optimizers --------------------------------------------------------------------------------------------------------


def moved(optimizer: Any, updates: int = 4) -> Tensor:
    """A parameter after some updates."""
    step = fds.train_step(lambda params, x: (params["w"] * x).sin().sum(), optimizer)
    state = step.init({"w": torch.linspace(-1.0, 2.0, 5)})
    for i in range(updates):
        state, _ = step(state, torch.linspace(0.5, 3.0, 5) * (1 + i))
    return step.params(state)["w"]  # type: ignore[no-any-return]


def moved_by_torch(kind: Any, updates: int = 4, **options: Any) -> Tensor:
    w = torch.nn.Parameter(torch.linspace(-1.0, 2.0, 5))
    optimizer = kind([w], **options)
    for i in range(updates):
        optimizer.zero_grad()
        (w * torch.linspace(0.5, 3.0, 5) * (1 + i)).sin().sum().backward()
        optimizer.step()
    return w.detach()


@pytest.mark.parametrize(
    ("name", "params", "kind", "options"),
    [
        ("Adam", {"weight_decay": 0.1}, torch.optim.AdamW, {"weight_decay": 0.1}),
        ("adamw", {}, torch.optim.AdamW, {"weight_decay": 0.0}),
        ("AdamW", {"torch_adam": True}, torch.optim.AdamW, {}),
        ("AdamW", {"adam_w_mode": False, "weight_decay": 0.1}, torch.optim.AdamW, {"weight_decay": 0.1}),
        ("Adam", {"adam_w_mode": False, "weight_decay": 0.1}, torch.optim.Adam, {"weight_decay": 0.1}),
        ("Adam", {"adam_w_mode": False, "torch_adam": True}, torch.optim.Adam, {}),
        (
            "Adagrad",
            {"lr": 0.1, "initial_accumulator_value": 0.5},
            torch.optim.Adagrad,
            {"lr": 0.1, "initial_accumulator_value": 0.5},
        ),
        ("SGD", {"momentum": 0.9, "nesterov": True}, torch.optim.SGD, {"momentum": 0.9, "nesterov": True}),
    ],
)
def test_optimizers_are_torchs_with_deepspeeds_defaults(
    name: str, params: dict[str, Any], kind: Any, options: dict[str, Any]
) -> None:
    plan = plan_of(optimizer={"type": name, "params": params})
    torch.testing.assert_close(moved(plan.optimizer), moved_by_torch(kind, **options), rtol=1e-6, atol=1e-7)


def test_deepspeed_names_its_optimizers_alike() -> None:
    found = real("deepspeed.runtime.config").DEEPSPEED_OPTIMIZERS
    for name in found:
        if name.startswith("mu") and name != "muon":
            assert "mup" in str(refused(optimizer={"type": name}))
        else:
            assert plan_of(optimizer={"type": name.upper()}).optimizer is not None


class _Reference(torch.optim.Optimizer):
    """DeepSpeed's kernels of Adam without bias correction and of LAMB, as formulas."""

    def __init__(self, params: Any, lamb: bool, corrected: bool) -> None:
        super().__init__(params, {})
        self.lamb, self.corrected, self.count = lamb, corrected, 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.count += 1
        (p,) = self.param_groups[0]["params"]
        m = self.state[p].setdefault("m", torch.zeros_like(p)).mul_(0.9).add_(0.1 * p.grad)
        v = self.state[p].setdefault("v", torch.zeros_like(p)).mul_(0.999).add_(0.001 * p.grad**2)
        change, rate = m / (v.sqrt() + 1e-8) + 0.1 * p, 1e-3
        if self.lamb:
            rate *= min(max((p.norm() / change.norm()).item(), 0.01), 10.0)
        if self.corrected:
            rate *= math.sqrt(1 - 0.999**self.count) / (1 - 0.9**self.count)
        p.sub_(rate * change)


@pytest.mark.parametrize(("name", "corrected"), [("Adam", False), ("Lamb", True), ("Lamb", False)])
def test_kernels_of_deepspeeds_own(name: str, corrected: bool) -> None:
    plan = plan_of(optimizer={"type": name, "params": {"bias_correction": corrected, "weight_decay": 0.1}})
    expected = moved_by_torch(_Reference, lamb=name == "Lamb", corrected=corrected)
    torch.testing.assert_close(moved(plan.optimizer), expected, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("name", ["Lion", "Muon", "OneBitAdam", "ZeroOneAdam", "Lamb"])
def test_other_optimizers_move_under_zero_or_local_gradients(name: str) -> None:
    plan = plan_of(1, optimizer={"type": name, "params": {"lr": 0.1}}, train_batch_size=4)
    step = plan.transform(fds.train_step(loss_fn, plan.optimizer))
    state, _ = step(step.init({"w": torch.eye(3), "b": torch.zeros(3)}), torch.ones(4, 3))
    assert not step.params(state)["w"].equal(torch.eye(3))
    assert ("local_gradients" in str(step)) == (name in ("OneBitAdam", "ZeroOneAdam"))


@pytest.mark.parametrize("scheduler", [None, {"type": "CosineAnnealingLR", "params": {"T_max": 10}}])
def test_a_rate_of_zero_is_muons_rate(scheduler: dict[str, Any] | None) -> None:
    optimizer = {"type": "Muon", "params": {"lr": 0.5, "muon_lr": 0.0}}
    plan = plan_of(1, optimizer=optimizer, **({} if scheduler is None else {"scheduler": scheduler}))
    step = plan.transform(fds.train_step(lambda params, x: (x @ params["w"] + params["b"]).square().mean(), plan.optimizer))
    state, _ = step(step.init({"w": torch.eye(3), "b": torch.ones(3)}), torch.ones(8, 3))
    assert step.params(state)["w"].equal(torch.eye(3))
    assert step.params(state)["b"].tolist() == pytest.approx([0.5] * 3)


def test_one_schedule_for_two_rates_is_of_their_multiples() -> None:
    """Where a scheduler's rates are no multiples of a group's own, one factor would be wrong for one of the two."""
    for name, params in (("CosineAnnealingLR", {"T_max": 4, "eta_min": 0.1}), ("WarmupLR", {})):
        with pytest.raises(ConfigError, match=r"muon_lr=0.02 and adam_lr=0.5 differ"):
            plan_of(
                1,
                optimizer={"type": "Muon", "params": {"muon_lr": 0.02, "adam_lr": 0.5}},
                scheduler={"type": name, "params": params},
            )


def test_the_optimizers_rate_follows_the_scheduler_from_zero() -> None:
    """DeepSpeed's rates are absolute, also over an optimizer whose own rate is 0."""
    params = {"warmup_max_lr": 0.5, "warmup_num_steps": 2, "warmup_type": "linear"}
    for lr in (0.0, 0.125):
        plan = plan_of(
            1,
            optimizer={"type": "SGD", "params": {"lr": lr}},
            scheduler={"type": "WarmupLR", "params": params},
            gradient_clipping=0,
        )
        step = plan.transform(fds.train_step(lambda params, x: params["w"] * x.mean(), plan.optimizer))
        state = step.init({"w": torch.zeros(())})
        for expected in (0.0, 0.0, -0.25, -0.75):
            state, _ = step(state, torch.ones(8))
            assert step.params(state)["w"].item() == expected
    plan = fds.from_ds_config({"train_batch_size": 8, "scheduler": {"type": "WarmupLR"}}, 1, lr=0.25)
    assert plan.optimizer is None
    assert plan.schedule is not None
    assert plan.schedule.rate(2000) == 0.25


# -- whole runs --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_plan_trains_on_two_ranks_as_torch_on_one(stage: int) -> None:
    """With accumulation, clipping and a schedule."""
    config = {
        "train_batch_size": 8,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 0.5,
        "zero_optimization": {"stage": stage},
        "optimizer": {"type": "Adam", "params": {"lr": 0.1, "weight_decay": 0.01}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 2, "warmup_type": "linear"}},
    }
    data = torch.linspace(-0.5, 1.0, 8 * 3).view(8, 3)

    def program() -> Any:
        plan = fds.from_ds_config(config, 2)
        step = plan.transform(fds.train_step(loss_fn, plan.optimizer))
        state, rows = step.init({"w": torch.ones(3, 2), "b": torch.zeros(2)}), plan.batch.rows
        for _ in range(4):
            state, _ = step(state, data[comm.world().rank * rows :][:rows])
        return step.params(state)

    params = {"w": torch.nn.Parameter(torch.ones(3, 2)), "b": torch.nn.Parameter(torch.zeros(2))}
    optimizer = torch.optim.AdamW(params.values(), lr=0.1, weight_decay=0.01)
    for rate in (0.0, 0.0, 0.05, 0.1):
        optimizer.param_groups[0]["lr"] = rate
        optimizer.zero_grad()
        loss_fn(params, data).backward()
        torch.nn.utils.clip_grad_norm_(params.values(), 0.5)
        optimizer.step()
    expected = {name: p.detach() for name, p in params.items()}
    for found in comm.simulate(program, world_size=2):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def test_another_number_of_ranks_is_refused() -> None:
    """The batch's sizes would be others. A group of the world may be those ranks."""

    def program() -> str:
        pairs = comm.mesh(tp=2, dp=2)
        plan = fds.from_ds_config({"train_batch_size": 8, "zero_optimization": {"stage": 1}}, 2, group=pairs["dp"])
        plan.transform(fds.train_step(loss_fn, fds.sgd(0.1))).init({"w": torch.ones(3, 2), "b": torch.zeros(2)})
        with pytest.raises(ValueError, match="for 2 data-parallel ranks, and there are 4"):
            plan_of(2).transform(fds.train_step(loss_fn, fds.sgd(0.1))).init({"w": torch.ones(3, 2)})
        return str(plan.transform)

    assert len(comm.simulate(program, world_size=4)) == 4


def test_sums_instead_of_means() -> None:
    def program() -> float:
        plan = plan_of(2, gradient_allreduce_op="sum", gradient_clipping=0)
        step = plan.transform(fds.train_step(lambda params, x: params["w"] * x.mean(), fds.sgd(1.0)))
        state, _ = step(step.init({"w": torch.zeros(())}), torch.full((4,), 1.0 + comm.world().rank))
        return step.params(state)["w"].item()  # type: ignore[no-any-return]

    assert comm.simulate(program, world_size=2) == [-3.0, -3.0]


def test_an_overflow_at_the_lowest_scale_raises_on_all_ranks_and_changes_nothing() -> None:
    """As DeepSpeed's ZeRO does."""

    def program() -> list[float]:
        fp16 = {"enabled": True, "initial_scale_power": 2, "min_loss_scale": 2, "hysteresis": 1}
        plan = plan_of(2, fp16=fp16, zero_optimization={"stage": 1})
        step = plan.transform(fds.train_step(lambda params, x: (params["w"] * x).sum(), fds.sgd(1.0)))
        state = step.init({"w": torch.ones(2)})
        batch = torch.full((4, 2), 6e4 if comm.world().rank else 1.0)
        state, metrics = step(state, batch)
        assert metrics["skipped"] == 1
        before = step.params(state)["w"].clone()
        with pytest.raises(LossScaleError, match="minimum, 2"):
            step(state, batch)
        assert_same(step.params(state)["w"], before)
        return before.tolist()  # type: ignore[no-any-return]

    assert comm.simulate(program, world_size=2) == [[1.0, 1.0]] * 2


@pytest.mark.sample(3)
@pytest.mark.parametrize("kind", ["AdamW", "Adam", "Lamb", "Lion"])
@pytest.mark.parametrize("stage", [0, 3])
def test_betas_of_a_plan_cycle_as_the_engines(kind: str, stage: int) -> None:
    """Law: the step is the engine's loop, whose scheduler moves on the host; an update that is left out does not count."""
    cycle = {
        "cycle_min_lr": 0.01,
        "cycle_max_lr": 0.1,
        "cycle_first_step_size": 2,
        "decay_step_size": 1,
        "cycle_min_mom": "0.5",
    }
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": {"type": kind, "params": {"lr": 0.05}},
        "scheduler": {"type": "OneCycle", "params": {**cycle, "decay_mom_rate": 0.01}},
        "zero_optimization": {"stage": stage},
    }

    def rows(update: int) -> Tensor:
        found = torch.randn(4, 3, generator=torch.Generator().manual_seed(update + 10 * comm.world().rank))
        return found * math.inf if update == 3 and stage else found

    def program() -> None:
        module = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1))
        apply, params = fds.functional(module)
        plan = fds.from_ds_config(config, 2)
        step = plan.transform(fds.train_step(lambda params, x: apply(params, x).square().mean(), plan.optimizer))
        state = step.init({name: p.detach().clone() for name, p in params.items()})
        engine, *_ = fds.deepspeed.initialize(model=module, config=config)
        moments = set()
        for update in range(8):
            moments.add(engine.get_mom()[0][0])
            engine.backward(engine(rows(update)).square().mean())
            engine.step()
            state, _ = step(state, rows(update))
        assert len(moments) > 4
        assert engine.skipped_steps == (1 if stage else 0)
        expected = engine.functional_step.params(engine.state)
        for name, value in step.params(state).items():
            torch.testing.assert_close(value, expected[name], rtol=1e-6, atol=1e-7)

    torch.manual_seed(0)
    comm.simulate(program, world_size=2)


def test_betas_that_cannot_cycle_are_refused() -> None:
    cycle = {"type": "OneCycle", "params": {"cycle_min_lr": 0.1, "cycle_max_lr": 0.2}}
    config = {"train_batch_size": 4, "scheduler": cycle}
    with pytest.raises(ConfigError, match="not part of the config"):
        fds.from_ds_config(config, 1, lr=0.1)


# Keys whose reason the plan writes itself, with all that it depends on.
NOTED = ("gradient_clipping", "prescale_gradients", "gradient_accumulation_steps", "train_", "optimizer.type", "scheduler.type")
VALUES = {"int": (0, 1, 7), "float": (0.0, 0.5), "bool": (False, True), "betas": ((0.9, 0.95),)}


def test_reasons_are_of_the_value() -> None:
    """A printed reason has no condition on the value, and no argument without its value."""
    template = re.compile(r"\bif (true|false|0)\b|; 0 (is|does|fetches)|=`|\{value\}|=[,)]|unless `|Whether |None if")
    config_keys = [*KEYS.values(), *(key for rule in (*OPTIMIZERS, *SCHEDULERS.values()) for key in rule.keys)]
    printed = {
        (key.path, value): key.reason(value)
        for key in config_keys
        if key.fate in (Fate.BECAME, Fate.ENGINE) and not key.path.startswith(NOTED)
        for value in key.choices or VALUES.get(key.kind, ("x",))
        if not (value in (False, "none") and key.default == value and key in KEYS.values())  # it is off
    }
    assert {row: reason for row, reason in printed.items() if template.search(reason)} == {}


def test_explain_says_what_became_of_each_value() -> None:
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "tensorboard": {"enabled": False, "job_name": "a"},
        "csv_monitor": {"enabled": True},
        "steps_per_print": 5,
        "zero_optimization": {"stage": 2, "reduce_scatter": False, "cpu_offload": False},
        "fp16": {"enabled": True, "loss_scale": 128, "loss_scale_window": 7},
    }
    explained = fds.from_ds_config(config, 1).explain()
    assert {row.key: (row.fate.value, row.reason) for row in explained.rows if "enabled" not in row.key} == {
        "train_micro_batch_size_per_gpu": ("supported", "Rows: micro-batch 2 · accumulation 1 · ranks 1."),
        "tensorboard.job_name": ("ignored", "`tensorboard.enabled` is false."),
        "steps_per_print": ("engine", "Each 5 updates the log has a line, with rate and momentum."),
        "zero_optimization.stage": ("supported", "`T.zero(2, world, aggregate=all_reduce)`."),
        "zero_optimization.reduce_scatter": ("supported", '`T.zero(aggregate="all_reduce")`.'),
        "zero_optimization.cpu_offload": ("ignored", "It is off, as it is by default."),
        "fp16.loss_scale": ("supported", "`T.StaticScale(128)`."),
        "fp16.loss_scale_window": ("ignored", "The loss scale is constant."),
        "gradient_clipping": ("supported", "`T.clip(1.0)`: DeepSpeed's default is 1.0."),
    }
    assert [explained[f"{block}.enabled"].fate.value for block in ("tensorboard", "csv_monitor")] == ["ignored", "engine"]
