"""What DeepSpeed's own unit tests assert of names, attributes and calls, where it once was otherwise here."""

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from functional_ds import comm
from functional_ds import deepspeed as ds
from functional_ds.deepspeed.api_names import HERE, REFUSED, REST, module_at, why_missing
from functional_ds.deepspeed.ops.adagrad import DeepSpeedCPUAdagrad
from functional_ds.deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam
from functional_ds.deepspeed.ops.lamb import FusedLamb
from functional_ds.deepspeed.ops.lion import DeepSpeedCPULion, FusedLion
from functional_ds.deepspeed.runtime.lr_schedules import OneCycle
from functional_ds.deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from tests.deepspeed.api.own_tests_page import DIFFERENCES, PAGE, ROWS, OwnTests, written

ADAM = {"type": "Adam", "params": {"lr": 0.1}}
Config = dict[str, Any]


def engine_of(model: nn.Module | None = None, **config: Any) -> ds.DeepSpeedEngine:
    whole = {"train_micro_batch_size_per_gpu": 1, "optimizer": ADAM, **config}
    return ds.initialize(model=nn.Linear(2, 1) if model is None else model, config=whole)[0]


# -- optimizers and schedulers -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "params", "offloads", "kind", "decays"),
    [
        ("Adam", {}, False, FusedAdam, True),
        ("Adam", {"adam_w_mode": False}, True, DeepSpeedCPUAdam, False),
        ("AdamW", {"adam_w_mode": False}, False, FusedAdam, True),
        ("Adam", {"torch_adam": True, "adam_w_mode": False}, True, torch.optim.Adam, False),
        ("AdamW", {"torch_adam": True}, False, torch.optim.AdamW, True),
        ("Adagrad", {}, False, torch.optim.Adagrad, None),
        ("Adagrad", {}, True, DeepSpeedCPUAdagrad, None),
        ("Lamb", {}, False, FusedLamb, None),
        ("Lion", {}, False, FusedLion, None),
        ("Lion", {}, True, DeepSpeedCPULion, None),
        ("SGD", {}, False, torch.optim.SGD, None),
    ],
)
def test_the_optimizer_inside_is_of_deepspeeds_class(
    name: str, params: Config, offloads: bool, kind: type, decays: bool | None
) -> None:
    optimizer = {"type": name, "params": {"lr": 0.1, **params}}
    engine = engine_of(optimizer=optimizer, zero_optimization={"stage": 2, "cpu_offload": offloads})
    assert engine.optimizer is not None
    inner: Any = engine.optimizer.optimizer
    assert isinstance(inner, kind)
    assert getattr(inner, "adam_w_mode", None) == decays
    inner.param_groups[0]["lr"] = 0.5
    assert engine.get_lr() == [0.5]


class Product(nn.Module):
    """Its gradient is its input."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.w * x).sum()


@pytest.mark.parametrize("stage", [0, 2])
def test_a_loss_scale_says_how_it_moves(stage: int) -> None:
    fp16 = {"enabled": True, "initial_scale_power": 8, "loss_scale_window": 2, "hysteresis": 1, "min_loss_scale": 64}
    engine = engine_of(Product(), fp16=fp16, zero_optimization={"stage": stage})
    assert engine.optimizer is not None
    steps = [(float("inf"), 128), (float("nan"), 64), *[(float("inf"), 64)] * (stage == 0), (0.1, 64), (0.1, 64), (0.1, 128)]
    for count, (x, scale) in enumerate(steps):  # in other stages one below the least is an error
        engine.backward(engine(torch.full((1,), x, dtype=torch.float16)))
        engine.step()
        now = engine.optimizer.loss_scaler
        assert (now.cur_iter, now.dynamic_loss_scale, now.scale_window, now.min_loss_scale) == (count + 1, True, 2, 64)
        assert (now.cur_scale, engine.optimizer.loss_scale_config.loss_scale) == (scale, scale), count


def test_one_cycles_momentum_before_the_first_step() -> None:
    held = torch.optim.Adam([torch.zeros(1)])
    schedule = OneCycle(held, 0.1, 1.0, cycle_first_step_size=2, cycle_min_mom=0.8, cycle_max_mom=0.9)
    found = []
    for _ in range(3):
        found.append(schedule.get_mom())
        schedule.step()
    assert found == [[(0.9, 0.99)], [pytest.approx((0.85, 0.99))], [pytest.approx((0.8, 0.99))]]


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_zero_grad_of_the_optimizer(stage: int) -> None:
    engine = engine_of(Product(), zero_optimization={"stage": stage}, gradient_accumulation_steps=2)
    for zeroes in (True, False):
        engine.backward(engine(torch.ones(1)))
        assert engine.optimizer is not None
        if zeroes:
            engine.optimizer.zero_grad()
        engine.step()
    norm = engine.get_global_grad_norm()
    assert norm is not None
    assert norm == pytest.approx(1.0 if stage == 1 else 0.5)


def test_a_pipelines_scheduler_is_the_configs(tmp_path: Path) -> None:
    def on_rank() -> tuple[list[float], list[float], list[float], int]:
        def made() -> Any:
            torch.manual_seed(0)
            model = ds.PipelineModule([nn.Linear(2, 2), nn.Linear(2, 1)], num_stages=2, loss_fn=nn.functional.mse_loss)
            schedule = {"type": "WarmupLR", "params": {"warmup_num_steps": 4, "warmup_type": "linear", "warmup_max_lr": 0.1}}
            return engine_of(model, scheduler=schedule)

        engine = made()
        rates = []
        for _ in range(4):
            rates += engine.get_lr()
            engine.train_batch(iter([(torch.ones(1, 2), torch.zeros(1, 1))]))
        assert isinstance(engine.lr_scheduler, ds.runtime.lr_schedules.WarmupLR)
        engine.save_checkpoint(tmp_path)
        other = made()
        other.load_checkpoint(tmp_path)
        return rates, engine.lr_scheduler.get_lr(), other.get_lr(), other.lr_scheduler.last_batch_iteration

    assert comm.simulate(on_rank, world_size=2) == [([0.0, 0.0, 0.025, 0.05], *[[pytest.approx(0.075)]] * 2, 3)] * 2


# -- checkpoints ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["FAIL", "WARN", "IGNORE"])
def test_tags_that_differ_between_ranks(mode: str, tmp_path: Path) -> None:
    def on_rank() -> str:
        engine = engine_of(checkpoint={"tag_validation": mode})
        try:
            engine.save_checkpoint(tmp_path, tag=f"of rank {comm.get_rank()}")
        except AssertionError as error:
            return str(error)
        return str(engine.load_checkpoint(tmp_path)[0])

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = comm.simulate(on_rank, world_size=2)
    said = [each for each in caught if "the ranks' tags differ: of rank 0, of rank 1" in str(each.message)]
    assert bool(said) == (mode == "WARN")
    for text in found:
        assert text.startswith("save_checkpoint: the ranks' tags differ") if mode == "FAIL" else text.endswith("of rank 0")


@pytest.mark.parametrize("stage", [1, 3])
def test_whole_params_of_a_checkpoint_have_both_names_of_a_tied_one(stage: int, tmp_path: Path) -> None:
    def tied() -> nn.Module:
        model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
        model[1].weight = model[0].weight
        return model

    engine = engine_of(tied(), zero_optimization={"stage": stage})
    engine.empty_partition_cache()
    engine.save_checkpoint(tmp_path)
    found = get_fp32_state_dict_from_zero_checkpoint(str(tmp_path))
    tied().load_state_dict(found, strict=True)
    assert torch.equal(found["0.weight"], found["1.weight"])


def test_a_module_of_stage_3_goes_on_in_another_engine() -> None:
    def on_rank() -> list[float]:
        model = nn.Linear(2, 1)
        nn.init.constant_(model.weight, 3.0)
        for _ in range(2):
            engine = engine_of(model, zero_optimization={"stage": 3})
        with ds.zero.GatheredParameters(model.weight):
            assert engine(torch.ones(1, 2)).shape == (1, 1)
            return model.weight.flatten().tolist()

    assert comm.simulate(on_rank, world_size=2) == [[3.0, 3.0]] * 2


# -- zero.Init -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", [1, 3])
def test_blocks_of_zero_init_within_each_other_and_around_initialize(stage: int) -> None:
    def on_rank() -> tuple[list[float], bool, bool]:
        with ds.zero.Init(), ds.zero.Init():
            model = nn.Linear(2, 1)
            with ds.zero.GatheredParameters(model.weight, modifier_rank=1), torch.no_grad():
                model.weight.fill_(comm.get_rank() + 2.0)
            held: Any = model.weight
            assert held.ds_status is ds.zero.ZeroParamStatus.NOT_AVAILABLE
            assert (held.ds_shape, held.ds_numel, held.ds_id) == ((1, 2), 2, model.bias.ds_id - 1)  # type: ignore[operator]
            engine = engine_of(model, zero_optimization={"stage": stage})
            later = nn.Linear(2, 1)
        with ds.zero.GatheredParameters(model.weight):
            found = model.weight.flatten().tolist()
        assert engine(torch.ones(1, 2)).shape == (1, 1)
        return found, hasattr(model.weight, "ds_id"), hasattr(later.weight, "ds_id")

    assert comm.simulate(on_rank, world_size=2) == [([3.0, 3.0], stage == 3, True)] * 2


# -- names ---------------------------------------------------------------------------------------------------------------


def test_initialize_refuses_a_process_that_has_not_joined() -> None:
    with pytest.raises(AssertionError, match="this process is in no world yet"):
        ds.initialize(model=nn.Linear(1, 1), config={"train_batch_size": 1}, dist_init_required=False)


def test_ranks_as_text() -> None:
    grid = ds.pipe.ProcessTopology(["pipe", "data", "model"], [2, 2, 2])
    assert grid.get_rank_repr(5) == "model_01"
    assert grid.get_rank_repr(5, omit_axes=["model"], inner_sep="+", outer_sep=" ") == "pipe+01 data+00"


def test_a_configs_monitors() -> None:
    config = ds.DeepSpeedConfig({"train_batch_size": 1, "csv_monitor": {"enabled": True, "job_name": "mine"}})
    held = config.monitor_config
    assert (held.csv_monitor.enabled, held.csv_monitor.job_name, held.wandb.enabled) == (True, "mine", False)


@pytest.mark.parametrize("path", [path for path in HERE if path != "utils.zero_to_fp32"])
def test_each_module_says_why_a_name_is_missing(path: str) -> None:
    module = ds
    for name in filter(None, path.split(".")):
        module = getattr(module, name)
    with pytest.raises(AttributeError, match=r"NoSuchThing is not in functional_ds\.deepspeed: "):
        module.NoSuchThing  # noqa: B018


# -- the table -----------------------------------------------------------------------------------------------------------


def test_the_pages_table_is_current() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert written(page) == page, "python -m tests.deepspeed.api.own_tests_page --write"
    said = PAGE.with_name("deepspeed.md").read_text(encoding="utf-8")
    counts = f"{sum(row.tried for row in ROWS):,} cases of DeepSpeed's own unit tests {sum(row.equal for row in ROWS)} hold"
    assert counts in " ".join(said.split())


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.file)
def test_what_a_row_says_is_refused_is_refused(row: OwnTests) -> None:
    assert {*row.differs} <= {*DIFFERENCES}
    for name in row.refused:
        if name.startswith(":"):
            block, _, key = name[1:].rpartition(".")
            value = {"enabled": True} if not block else 1
            with pytest.raises(ds.ConfigError, match=name[1:]):
                ds.from_ds_config({"train_batch_size": 1, **({block: {key: value}} if block else {key: value})}, 1)
        else:
            parent, _, last = name.rpartition(".")
            held = module_at(parent)
            assert held is None or not hasattr(held, last), name
            why = why_missing(name)
            assert why in {*REFUSED.values(), *REST.values()} or why.startswith("did you mean"), name
