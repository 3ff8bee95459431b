"""What programs ask of an engine's optimizer, scheduler, params and errors is answered as DeepSpeed answers it."""

import argparse
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import functional_ds as fds
from functional_ds.deepspeed import UsageError
from functional_ds.deepspeed import config_objects as blocks
from functional_ds.deepspeed.engine import optimizer_kinds as kinds
from functional_ds.deepspeed.op_builders import COMPATIBLE
from functional_ds.deepspeed.ops.adam import FusedAdam
from functional_ds.deepspeed.runtime import lr_schedules
from functional_ds.deepspeed.runtime.utils import move_to_device
from functional_ds.deepspeed.utils.torch_versions import required_torch_version
from tests.deepspeed.real import real

ds = fds.deepspeed
ADAM = {"optimizer": {"type": "Adam", "params": {"lr": 0.1}}}
SGD = {"optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
BF16, FP16 = {"bf16": {"enabled": True}}, {"fp16": {"enabled": True}}
SUMS = {"data_types": {"grad_accum_dtype": "fp32"}}


def made(model: nn.Module | None = None, *, stage: int = 0, client: Any = None, lr_scheduler: Any = None, **config: Any) -> Any:
    module = nn.Linear(2, 1) if model is None else model
    whole = {"train_batch_size": 1, "zero_optimization": {"stage": stage}, **config}
    return ds.initialize(model=module, optimizer=client, lr_scheduler=lr_scheduler, config=whole)


# -- optimizers --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("stage", "config", "kind", "path"),
    [
        (0, ADAM, FusedAdam, "ops.adam.FusedAdam"),
        (0, {**SGD, **BF16}, kinds.FP16_UnfusedOptimizer, "runtime.fp16.unfused_optimizer.FP16_UnfusedOptimizer"),
        (0, {**ADAM, **BF16}, kinds.FP16_Optimizer, "runtime.fp16.fused_optimizer.FP16_Optimizer"),
        (1, ADAM, kinds.DeepSpeedZeroOptimizer, "runtime.zero.stage_1_and_2.DeepSpeedZeroOptimizer"),
        (2, {**SGD, **FP16}, kinds.DeepSpeedZeroOptimizer, "runtime.zero.stage_1_and_2.DeepSpeedZeroOptimizer"),
        (1, {**ADAM, **BF16, **SUMS}, kinds.BF16_Optimizer, "runtime.bf16_optimizer.BF16_Optimizer"),
        (3, ADAM, kinds.DeepSpeedZeroOptimizer_Stage3, "runtime.zero.stage3.DeepSpeedZeroOptimizer_Stage3"),
    ],
)
def test_an_optimizer_is_an_instance_of_what_deepspeed_makes_of_the_config(
    stage: int, config: dict[str, Any], kind: type, path: str
) -> None:
    engine, optimizer, _, _ = made(stage=stage, **config)
    assert isinstance(optimizer, kind)
    assert isinstance(optimizer, torch.optim.Optimizer)
    assert engine.optimizer is optimizer
    others = {getattr(kinds, name) for name in kinds.__all__} - {*kind.__mro__}
    assert not any(isinstance(optimizer, other) for other in others)
    module, _, name = path.rpartition(".")
    bases = {each.__name__ for each in getattr(real(f"deepspeed.{module}"), name).__mro__} & {*kinds.__all__}
    assert {each.__name__ for each in kind.__mro__} & {*kinds.__all__} == bases


def test_in_stage_0_in_fp32_it_is_the_optimizer_that_was_passed() -> None:
    model = nn.Linear(2, 1)
    client = torch.optim.AdamW(model.parameters(), lr=0.1)
    _, optimizer, _, _ = made(model, client=client)
    assert optimizer == client
    assert hash(optimizer) == hash(client)
    assert isinstance(optimizer, torch.optim.AdamW)
    assert not isinstance(optimizer, torch.optim.SGD)
    model = nn.Linear(2, 1)
    client = torch.optim.AdamW(model.parameters(), lr=0.1)
    _, optimizer, _, _ = made(model, client=client, stage=1)
    assert optimizer != client
    assert not isinstance(optimizer, torch.optim.AdamW)
    model = nn.Linear(2, 1)
    _, optimizer, _, _ = made(model, client=lambda _: torch.optim.SGD(model.parameters(), lr=0.1))
    assert isinstance(optimizer, torch.optim.SGD)


def test_what_a_wrapper_says_of_its_scale() -> None:
    _, optimizer, _, _ = made(**SGD, **BF16)
    assert optimizer.low_precision_dtype == torch.bfloat16
    assert (optimizer.loss_scale_config.dynamic_loss_scale, optimizer.loss_scale_config.cur_scale) == (False, 1.0)
    _, optimizer, _, _ = made(**SGD, fp16={"enabled": True, "initial_scale_power": 4})
    assert optimizer.low_precision_dtype == torch.float16
    assert (optimizer.dynamic_loss_scale, optimizer.loss_scale_config.cur_scale) == (True, 16.0)
    with pytest.raises(TypeError, match=r"ZeROOptimizer\(\.\.\.\): deepspeed\.initialize makes it"):
        kinds.ZeROOptimizer()


# -- schedulers --------------------------------------------------------------------------------------------------------

SCHEDULES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("WarmupLR", {"warmup_num_steps": 4, "warmup_type": "linear"}),
    ("WarmupDecayLR", {"total_num_steps": 10, "warmup_num_steps": 3}),
    ("WarmupCosineLR", {"total_num_steps": 10, "warmup_num_steps": 4, "cos_min_ratio": 0.2}),
    ("OneCycle", {"cycle_min_lr": 0.1, "cycle_max_lr": 0.2, "cycle_first_step_size": 3, "cycle_momentum": False}),
    ("LRRangeTest", {"lr_range_test_step_size": 3}),
)


@pytest.mark.parametrize(("name", "params"), SCHEDULES)
def test_a_scheduler_has_deepspeeds_attributes_as_an_object_and_of_a_config(name: str, params: dict[str, Any]) -> None:
    other_optimizer = torch.optim.SGD([torch.zeros(1)], lr=0.1)
    other = getattr(real("deepspeed.runtime.lr_schedules"), name)(other_optimizer, **params)
    alone = getattr(lr_schedules, name)(torch.optim.SGD([torch.zeros(1)], lr=0.1), **params)
    *_, of_config = made(**SGD, scheduler={"type": name, "params": params})
    own = {pair.partition("=")[0] for pair in getattr(lr_schedules, name).shown.split()}
    for scheduler in (alone, of_config):
        assert isinstance(scheduler, getattr(lr_schedules, name))
        assert {each: getattr(scheduler, each) for each in own} == {each: getattr(other, each) for each in own}
    for update in range(6):
        if name == "WarmupCosineLR":
            other.step(update)
            alone.step(update)
            assert alone.get_lr_ratio() == pytest.approx(other.get_lr_ratio())
            of_config.step()
            assert of_config.get_lr_ratio() == pytest.approx(other.get_lr_ratio())


def test_a_scheduler_of_torchs_that_a_config_names() -> None:
    *_, scheduler = made(**SGD, scheduler={"type": "StepLR", "params": {"step_size": 2, "gamma": 0.5}})
    assert isinstance(scheduler, torch.optim.lr_scheduler.StepLR)
    assert (scheduler.step_size, scheduler.gamma) == (2, 0.5)
    with pytest.raises(AttributeError, match="warmup_num_steps"):
        scheduler.warmup_num_steps  # noqa: B018


def test_options_on_the_command_line_are_deepspeeds() -> None:
    theirs = real("deepspeed.runtime.lr_schedules")
    parsers = [module.add_tuning_arguments(argparse.ArgumentParser()) for module in (lr_schedules, theirs)]
    words = ["--warmup_num_steps", "7", "--cycle_min_lr", "0.5", "--lr_range_test_staircase"]
    for name in (None, "nothing", *lr_schedules.VALID_LR_SCHEDULES):
        given = words if name is None else [*words, "--lr_schedule", name]
        ours, other = (parser.parse_args(given) for parser in parsers)
        assert vars(ours) == vars(other)
        block, wrong = lr_schedules.get_config_from_args(ours)
        assert (block, wrong) == theirs.get_config_from_args(other)
        if block is not None:
            assert lr_schedules.get_lr_from_config(block)[0] == theirs.get_lr_from_config(block)[0]
        found: dict[str, Any] = {}
        expected: dict[str, Any] = {}
        lr_schedules.override_params(ours, found)
        theirs.override_params(other, expected)
        assert found == expected
    assert lr_schedules.get_lr_from_config({"params": {}}) == theirs.get_lr_from_config({"params": {}})


# -- errors ------------------------------------------------------------------------------------------------------------


def no_sync_in_stage_2() -> None:
    with made(**ADAM, stage=2)[0].no_sync():
        pass


def a_scheduler_of_another_optimizer() -> None:
    other = torch.optim.SGD([torch.zeros(1)], lr=0.1)
    made(**ADAM, lr_scheduler=torch.optim.lr_scheduler.StepLR(other, 1))


@pytest.mark.parametrize(
    ("call", "kind"),
    [
        (lambda: ds.initialize(model=None, config={}), ValueError),
        (lambda: ds.initialize(model=nn.Linear(1, 1)), ValueError),
        (lambda: ds.initialize(model=nn.Linear(1, 1), config={"gradient_accumulation_steps": 2}), ValueError),
        (lambda: made()[0].backward(torch.zeros(())), RuntimeError),
        (lambda: made()[0].step({}), RuntimeError),
        (lambda: made(**ADAM)[0].backward("loss"), TypeError),
        (no_sync_in_stage_2, RuntimeError),
        (a_scheduler_of_another_optimizer, ValueError),
        (lambda: made(client=torch.optim.LBFGS([nn.Parameter(torch.zeros(1))])), ValueError),
        (required_torch_version, ValueError),
        (lambda: ds.ops.op_builder.FusedAdamBuilder().load(), RuntimeError),
    ],
)
def test_what_deepspeed_asserts_is_an_assertion_error_too(call: Callable[[], Any], kind: type[Exception]) -> None:
    with pytest.raises(AssertionError) as raised:
        call()
    assert isinstance(raised.value, kind)
    assert isinstance(raised.value, UsageError | ds.ConfigError)


@pytest.mark.parametrize("half", [BF16, {}])
def test_stage_0_sums_in_the_params_dtype(half: dict[str, Any]) -> None:
    """As DeepSpeed, which raises a NotImplementedError for other mixes there and takes all in other stages."""
    mixed = {"data_types": {"grad_accum_dtype": "fp32" if half else "bf16"}}
    with pytest.raises(NotImplementedError, match=r"data_types\.grad_accum_dtype"):
        made(**ADAM, **half, **mixed)
    made(**ADAM, **half, **mixed, stage=2)
    made(**ADAM, **half, data_types={"grad_accum_dtype": "bf16" if half else "fp32"})


# -- params ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("limits", "persist"),
    [
        ({}, [True] * 4),
        ({"stage3_param_persistence_threshold": 3}, [False, True, True, True]),
        ({"stage3_model_persistence_threshold": 10}, [True, True, False, True]),
        ({"offload_param": {"device": "cpu"}}, [False] * 4),
    ],
)
def test_params_of_stage_3_say_whether_they_stay_gathered(limits: dict[str, Any], persist: list[bool]) -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))  # 6, 3, 3 and 1 elements
    made(model, **ADAM, zero_optimization={"stage": 3, **limits})
    found = {name: p.ds_persist for name, p in model.named_parameters()}
    assert [*found.values()] == persist


# -- config classes ----------------------------------------------------------------------------------------------------

ZERO: tuple[dict[str, Any], ...] = (
    {},
    {"stage": 3, "stage3_prefetch_bucket_size": 12345, "offload_param": {"device": "cpu"}},
    {"stage": 2, "cpu_offload": True, "offload_param": None, "reduce_bucket_size": 1},
    {"stage3_gather_fp16_weights_on_model_save": True, "offload_optimizer": {}, "overlap_comm": True},
)


@pytest.mark.parametrize("given", ZERO)
def test_config_classes_have_deepspeeds_values(given: dict[str, Any]) -> None:
    other = real("deepspeed.runtime.zero.config").DeepSpeedZeroConfig(**given)
    ours = blocks.DeepSpeedZeroConfig(**given)
    names = ("stage", "prefetch_bucket_size", "reduce_bucket_size", "overlap_comm", "gather_16bit_weights_on_model_save")
    assert {name: getattr(ours, name) for name in names} == {name: getattr(other, name) for name in names}
    for name in ("offload_param", "offload_optimizer"):
        held, expected = getattr(ours, name), getattr(other, name)
        assert type(held).__name__ == type(expected).__name__
        assert held is None or (held.device, held.pin_memory) == (expected.device, expected.pin_memory)
    assert repr(ours).startswith("DeepSpeedZeroConfig(")


def test_config_classes_refuse_what_deepspeed_refuses() -> None:
    with pytest.raises(ValueError, match=r"reduce_bucket_size: 0 must be in 1"):
        blocks.DeepSpeedZeroConfig(reduce_bucket_size=0)
    with pytest.raises(ValueError, match="nearest"):
        blocks.DeepSpeedFP16Config(nothing=1)
    with pytest.raises(AttributeError, match="has no key 'nothing'"):
        blocks.DeepSpeedZeroConfig().nothing  # noqa: B018
    with pytest.raises(AttributeError, match="no top-level key 'nothing'"):
        ds.DeepSpeedConfig({"train_batch_size": 1}).nothing  # noqa: B018
    assert blocks.get_bfloat16_config({"bfloat16": {"enabled": True}}).enabled
    assert blocks.get_float16_config({}).enabled is False
    assert blocks.DeepSpeedZeroOffloadOptimizerConfig(pipeline_read=True).pipeline
    assert (
        ds.DeepSpeedConfig({"train_batch_size": 6}, mpu=argparse.Namespace(get_data_parallel_world_size=lambda: 3)).world_size
        == 3
    )


def test_small_names() -> None:
    torch_names = real("deepspeed.utils.torch")
    for bounds in (
        {"min_version": 2.1},
        {"max_version": "1.13"},
        {"min_version": "9"},
        {"min_version": 1, "max_version": "99.0"},
    ):
        assert required_torch_version(**bounds) == torch_names.required_torch_version(**bounds)
    assert COMPATIBLE["cpu_adam"]
    assert not ds.ops.op_builder.AsyncIOBuilder().is_compatible()
    x = torch.zeros(2)
    moved = move_to_device({"a": [x], "b": (x,)}, "cpu", lambda each: True)
    assert moved["a"][0] is x
    assert isinstance(moved["b"], tuple)


@pytest.mark.parametrize("stage", [0, 3])
def test_a_compiled_model_is_trained_as_the_plain_one(stage: int) -> None:
    """With names that begin with ``_orig_mod.``, as in DeepSpeed."""
    ends = []
    for compiled in (False, True):
        torch.manual_seed(0)
        model: Any = nn.Linear(2, 1)
        engine = made(torch.compile(model, backend="eager") if compiled else model, stage=stage, **SGD)[0]
        engine.backward(engine(torch.ones(1, 2)).sum())
        engine.step()
        ends.append(engine.module_state_dict())
    assert {name: x.tolist() for name, x in ends[1].items()} == {f"_orig_mod.{name}": x.tolist() for name, x in ends[0].items()}
