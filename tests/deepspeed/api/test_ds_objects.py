"""DeepSpeed's schedulers, optimizers, loaders, loggers, accelerators and arguments are here what they are there."""

import argparse
import copy
import inspect
import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from functional_ds import comm
from functional_ds.deepspeed.accelerator import CPUAccelerator, get_accelerator
from functional_ds.deepspeed.config.ds_optimizers import rule_of
from functional_ds.deepspeed.config_arguments import add_config_arguments
from functional_ds.deepspeed.ops.adagrad import DeepSpeedCPUAdagrad
from functional_ds.deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam
from functional_ds.deepspeed.ops.lamb import FusedLamb
from functional_ds.deepspeed.ops.lion import DeepSpeedCPULion, FusedLion
from functional_ds.deepspeed.ops.named_optimizer import NamedOptimizer
from functional_ds.deepspeed.runtime import lr_schedules
from functional_ds.deepspeed.runtime.utils import (
    clip_grad_norm_,
    get_global_norm_of_tensors,
    memory_status,
    partition_balanced,
    partition_uniform,
    see_memory_usage,
)
from functional_ds.deepspeed.utils import RepeatingLoader, groups, log_dist, logger, set_log_level_from_string
from tests.deepspeed.real import real

# -- schedulers --------------------------------------------------------------------------------------------------------

SCHEDULES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("WarmupLR", {"warmup_num_steps": 4}),
    ("WarmupLR", {"warmup_num_steps": 3, "warmup_type": "linear", "warmup_min_lr": [0.1, 0.2], "warmup_max_lr": [0.5, 0.7]}),
    ("WarmupDecayLR", {"total_num_steps": 10, "warmup_num_steps": 3}),
    ("WarmupCosineLR", {"total_num_steps": 9, "warmup_num_steps": 3, "warmup_min_ratio": 0.1}),
    ("LRRangeTest", {"lr_range_test_step_size": 3, "lr_range_test_staircase": True}),
    ("LRRangeTest", {"lr_range_test_min_lr": [0.1, 0.3], "lr_range_test_step_size": 3, "lr_range_test_step_rate": 2.0}),
    (
        "OneCycle",
        {
            "cycle_min_lr": 0.1,
            "cycle_max_lr": 1.0,
            "cycle_first_step_size": 3,
            "cycle_second_step_size": 4,
            "decay_step_size": 2,
            "decay_lr_rate": 0.5,
            "decay_mom_rate": 0.1,
        },
    ),
    (
        "OneCycle",
        {
            "cycle_min_lr": [0.1, 0.2],
            "cycle_max_lr": [1.0, 2.0],
            "cycle_first_step_size": 4,
            "cycle_first_stair_count": 2,
            "cycle_second_stair_count": 3,
            "cycle_min_mom": 0.7,
        },
    ),
    ("OneCycle", {"cycle_min_lr": 0.1, "cycle_max_lr": 1.0, "cycle_first_step_size": 3, "cycle_momentum": False}),
)


def rates(module: Any, name: str, arguments: dict[str, Any]) -> list[list[float]]:
    """The rates and betas of two param groups over some steps, with a jump back."""
    held = torch.optim.AdamW([{"params": [torch.zeros(1)]}, {"params": [torch.zeros(1)], "lr": 0.02}], lr=0.01)
    schedule, found = getattr(module, name)(held, **arguments), []
    for step in range(14):
        found.append([number for group in held.param_groups for number in (group["lr"], *group["betas"])])
        schedule.step()
        if step == 4:
            schedule.load_state_dict({"last_batch_iteration": 2})
    return [*found, list(schedule.get_last_lr()), [schedule.state_dict()["last_batch_iteration"]]]


@pytest.mark.parametrize(("name", "arguments"), SCHEDULES)
def test_schedulers_set_deepspeeds_rates(name: str, arguments: dict[str, Any]) -> None:
    theirs = rates(real("deepspeed.runtime.lr_schedules"), name, arguments)
    for ours, other in zip(rates(lr_schedules, name, arguments), theirs, strict=True):
        assert ours == pytest.approx(other, rel=1e-14)


def test_schedulers_refuse() -> None:
    held = torch.optim.SGD([torch.zeros(1)], lr=0.1)
    with pytest.raises(ValueError, match="2 numbers for 1 param groups"):
        lr_schedules.WarmupLR(held, warmup_min_lr=[0.1, 0.2])
    with pytest.raises(TypeError, match="an optimizer with param_groups"):
        lr_schedules.WarmupLR(object())
    with pytest.raises(ValueError, match="a whole number above 0"):
        lr_schedules.WarmupLR(held, warmup_num_steps=0)


# -- optimizers --------------------------------------------------------------------------------------------------------

Make = Callable[[list[dict[str, Any]]], torch.optim.Optimizer]

OPTIMIZERS: tuple[tuple[Make, Make | None], ...] = (
    (lambda g: FusedAdam(g, lr=0.1, weight_decay=0.1), lambda g: torch.optim.AdamW(g, lr=0.1, weight_decay=0.1)),
    (
        lambda g: DeepSpeedCPUAdam(g, lr=0.1, weight_decay=0.1, adamw_mode=False),
        lambda g: torch.optim.Adam(g, lr=0.1, weight_decay=0.1),
    ),
    (lambda g: DeepSpeedCPUAdagrad(g, lr=0.1, weight_decay=0.1), lambda g: torch.optim.Adagrad(g, lr=0.1, weight_decay=0.1)),
    (lambda g: FusedLamb(g, lr=0.1), None),
    (lambda g: FusedLion(g, lr=0.1), lambda g: DeepSpeedCPULion(g, lr=0.1)),
)


def trained(make: Make, *, reload: bool = False) -> torch.Tensor:
    """Params after five updates, whose states were saved and loaded in between."""
    generator = torch.Generator().manual_seed(0)
    params = [nn.Parameter(torch.randn(shape, generator=generator)) for shape in ((3, 2), (4,))]

    def made() -> torch.optim.Optimizer:
        return make([{"params": params[:1]}, {"params": params[1:], "lr": 0.03}])

    optimizer = made()
    for step in range(5):
        if reload and step == 3:
            saved = copy.deepcopy(optimizer.state_dict())
            optimizer = made()
            optimizer.load_state_dict(saved)
        optimizer.zero_grad()
        ((params[0] ** 2).sum() * (step + 1) + params[1].sum() ** 2).backward()
        optimizer.step()
        optimizer.param_groups[0]["lr"] *= 0.5
    return torch.cat([p.detach().flatten() for p in params])


@pytest.mark.parametrize("place", range(len(OPTIMIZERS)))
def test_optimizers_are_torchs(place: int) -> None:
    ours, other = OPTIMIZERS[place]
    torch.testing.assert_close(trained(ours, reload=True), trained(other or ours), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("adam", FusedAdam),
        ("adam", DeepSpeedCPUAdam),
        ("lamb", FusedLamb),
        ("lion", FusedLion),
        ("lion", DeepSpeedCPULion),
        ("adagrad", DeepSpeedCPUAdagrad),
    ],
)
def test_optimizers_have_deepspeeds_arguments(path: str, kind: type[NamedOptimizer]) -> None:
    theirs = inspect.signature(getattr(real(f"deepspeed.ops.{path}"), kind.__name__)).parameters
    ours = inspect.signature(kind).parameters
    assert [(p.name, p.default) for p in ours.values()] == [(p.name, p.default) for p in theirs.values()]


def test_an_optimizers_rule_is_the_configs() -> None:
    made = DeepSpeedCPUAdam([torch.zeros(1)], lr=0.1, betas=(0.8, 0.9), adamw_mode=False)
    rule = rule_of("Adam")
    assert rule is not None
    expected = rule.build(rule.arguments({"lr": 0.1, "betas": (0.8, 0.9), "adam_w_mode": False}))
    assert str(made.rule_for(made.param_groups[0])) == str(expected)
    assert "lr=1.0" in str(made.rule_for(made.param_groups[0], lr=1.0))


@pytest.mark.parametrize(
    "make",
    [
        lambda p: FusedAdam(p, amsgrad=True),
        lambda p: FusedLamb(p, max_grad_norm=1.0),
        lambda p: DeepSpeedCPUAdam(p, fp32_optimizer_states=False),
    ],
)
def test_optimizers_refuse(make: Callable[[Any], Any]) -> None:
    with pytest.raises(ValueError, match=r"\(.*=\.\.\.\): "):
        make([torch.zeros(1)])


# -- the rest ----------------------------------------------------------------------------------------------------------


def test_cuts_into_parts_are_deepspeeds() -> None:
    theirs = real("deepspeed.runtime.utils")
    draw = torch.Generator().manual_seed(0)
    for _ in range(60):
        count, parts = (int(torch.randint(1, 9, (), generator=draw)) for _ in range(2))
        weights = torch.randint(0, 4, (count,), generator=draw).tolist()
        assert partition_uniform(count, parts) == theirs.partition_uniform(count, parts)
        assert partition_balanced(weights, parts) == list(map(int, theirs.partition_balanced(weights, parts)))


def test_norms_and_clipping() -> None:
    p = nn.Parameter(torch.ones(4))
    p.grad = torch.full((4,), 3.0)
    assert clip_grad_norm_([p], 1.0) == 6.0
    assert p.grad.norm() == pytest.approx(1.0)
    assert clip_grad_norm_(p, 0.25, "inf").item() == pytest.approx(0.5)
    assert get_global_norm_of_tensors([torch.tensor([float("inf")])]) == -1.0
    p.grad[0] = float("nan")
    assert clip_grad_norm_([p], 1.0).isnan()
    assert p.grad.isnan().all()


def test_clipping_goes_by_the_mean_of_the_ranks_norms() -> None:
    """As DeepSpeed's: for experts, whose gradients differ."""

    def on_rank() -> tuple[float, float]:
        p = nn.Parameter(torch.ones(1))
        p.grad = torch.tensor([1.0 + 3 * comm.get_rank()])
        return clip_grad_norm_([p], 1.0).item(), p.grad.item()

    (one, first), (other, second) = comm.simulate(on_rank, world_size=2)
    assert one == other == 2.5
    assert (first, second) == pytest.approx((0.4, 1.6), rel=1e-5)


def test_a_repeating_loader_starts_over_and_says_when_it_cannot() -> None:
    assert [x for x, _ in zip(RepeatingLoader([1, 2]), range(5), strict=False)] == [1, 2, 1, 2, 1]
    with pytest.raises(ValueError, match="list gives no batch"):
        next(RepeatingLoader([]))


@pytest.fixture
def level() -> Iterator[None]:
    before = logger.level
    yield
    logger.setLevel(before)


@pytest.mark.usefixtures("level")
def test_logs_of_some_ranks(capsys: pytest.CaptureFixture[str]) -> None:
    set_log_level_from_string("info")
    comm.simulate(lambda: log_dist("hello", ranks=[1]), world_size=2)
    comm.simulate(lambda: log_dist("never"), world_size=2)
    logger.warning_once("a single time")  # type: ignore[attr-defined]
    logger.warning_once("a single time")  # type: ignore[attr-defined]
    out = capsys.readouterr().out
    assert out.count("[Rank 1] hello") == out.count("hello") == out.count("a single time") == 1
    assert "never" not in out
    with pytest.raises(ValueError, match="one of debug, info"):
        set_log_level_from_string("loud")
    assert logging.getLogger("DeepSpeed") is logger


def test_reports_of_memory(capsys: pytest.CaptureFixture[str]) -> None:
    see_memory_usage("quiet")
    see_memory_usage("loud", force=True)
    memory_status("now")
    out = capsys.readouterr().out
    assert "quiet" not in out
    assert "loud\nMA " in out
    assert "MEMSTATS now" in out


def test_the_accelerator_has_deepspeeds_names(monkeypatch: pytest.MonkeyPatch) -> None:
    here, there = CPUAccelerator(), real("deepspeed.accelerator.cpu_accelerator").CPU_Accelerator()
    for name in ("device_name", "communication_backend_name", "is_bf16_supported", "is_synchronized_device", "is_available"):
        assert getattr(here, name)() == getattr(there, name)(), name
    assert here.total_memory() == there.total_memory()
    assert here.memory_allocated() == pytest.approx(there.memory_allocated(), rel=0.05)
    here.reset_peak_memory_stats()
    assert here.max_memory_allocated() >= here.memory_allocated() * 0.99
    lacking = [name for name in dir(there) if not name.startswith("_") and not hasattr(here, name)]
    refused = {"create_op_builder", "get_op_builder", "build_extension", "pin_empty", "pin_empty_like", "unpin_memory"}
    internal = {
        "max_mem",
        "op_builder_dir",
        "export_envs",
        "get_rss",
        "reset_rss",
        "supports_nvtx_domain",
        "pin_memory_alignment",
    }
    graphs = {"create_graph", "capture_to_graph", "replay_graph", "set_compile_backend", "set_visible_devices_envs"}
    rest = {"prefer_triton_grouped_mm", "register_host_memory", "unregister_host_memory"}
    assert set(lacking) <= refused | internal | graphs | rest, set(lacking) - refused - internal - graphs - rest
    with pytest.raises(AttributeError, match="did you mean 'device_name'"):
        _ = here.devise_name
    with pytest.raises(AttributeError, match="nothing is compiled here"):
        _ = here.create_op_builder
    assert here.LongTensor([1, 2]).dtype == torch.int64
    monkeypatch.setenv("DS_ACCELERATOR", "npu")
    with pytest.raises(ValueError, match="use 'cuda' or 'cpu'"):
        get_accelerator()
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    assert get_accelerator().current_device_name() == "cpu"


def test_arguments_are_deepspeeds() -> None:
    words = ["--deepspeed", "--deepspeed_config", "x.json"]
    ours, theirs = (
        vars(add(argparse.ArgumentParser()).parse_args(words)) for add in (add_config_arguments, real().add_config_arguments)
    )
    assert ours == theirs


def test_groups_of_experts() -> None:
    def on_rank() -> tuple[Any, ...]:
        name = "ep_size_2"
        return (
            groups._get_expert_parallel_group(name).ranks,
            groups._get_expert_data_parallel_group(name).ranks,
            groups._get_data_parallel_world_size(),
            groups._get_sequence_parallel_group(),
        )

    assert comm.simulate(on_rank, world_size=4)[3] == ((2, 3), (1, 3), 4, None)
    with pytest.raises(ValueError, match="does not divide"):
        groups.expert_ranks(3, 0, 4)
