"""Rates of param groups are plain PyTorch's: 0 stands still, schedulers move each from its own, and a resumed run has them."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import functional_ds as fds
from functional_ds.deepspeed.runtime import lr_schedules
from tests.deepspeed.rate_scripts import ADAMW, SCHEDULERS, groups_of, network, rows_of

ds = fds.deepspeed
BASE: dict[str, Any] = {"train_micro_batch_size_per_gpu": 4, "gradient_clipping": 0.0}
CONFIG = {**BASE, "optimizer": ADAMW}


def drive(engine: Any, updates: range) -> list[list[float]]:
    rates = []
    for update in updates:
        engine.backward(engine(rows_of(0, update)).square().mean())
        engine.step()
        rates.append(engine.get_lr())
    return rates


def by_torch(module: nn.Module, optimizer: Any, scheduler: Any, updates: range) -> list[list[float]]:
    rates = []
    for update in updates:
        optimizer.zero_grad()
        module(rows_of(0, update)).square().mean().backward()
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
        rates.append([group["lr"] for group in optimizer.param_groups])
    return rates


def same(engine: Any, module: nn.Module) -> None:
    for a, b in zip(engine.functional_step.params(engine.state).values(), module.parameters(), strict=True):
        torch.testing.assert_close(a, b.detach(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", [*SCHEDULERS, "torch's"])
def test_each_group_moves_from_its_own_rate(name: str) -> None:
    block = ("CosineAnnealingLR", {"T_max": 4, "eta_min": 0.001}) if name == "torch's" else SCHEDULERS[name]
    more = {} if block is None else {"scheduler": {"type": block[0], "params": block[1]}}
    module, plain = network(), network()
    engine, *_ = ds.initialize(model=module, model_parameters=groups_of(module), config={**CONFIG, **more})
    optimizer = torch.optim.AdamW(groups_of(plain), lr=0.02, weight_decay=0.01)
    scheduler = None
    if block is not None:
        kind = getattr(torch.optim.lr_scheduler if name == "torch's" else lr_schedules, block[0])
        scheduler = kind(optimizer, **block[1])
    expected = by_torch(plain, optimizer, scheduler, range(6))
    for found, rates in zip(drive(engine, range(6)), expected, strict=True):
        assert found == pytest.approx(rates, rel=1e-6)
    same(engine, plain)
    if block is None:
        assert torch.equal(plain[0].weight, network()[0].weight)  # type: ignore[index]


def test_an_optimizer_of_rate_0_stands_still() -> None:
    module = network()
    config = {**CONFIG, "optimizer": {"type": "AdamW", "params": {"lr": 0.0}}}
    engine, *_ = ds.initialize(model=module, config=config)
    drive(engine, range(3))
    same(engine, network())


def test_a_resumed_run_has_the_rates_of_the_run(tmp_path: Path) -> None:
    def fresh(module: nn.Module) -> tuple[Any, Any]:
        optimizer = torch.optim.AdamW(groups_of(module)[1:], lr=0.02)
        module[0].requires_grad_(False)  # type: ignore[index]
        return optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)

    def engine_of(seed: int) -> Any:
        module = network(seed)
        optimizer, scheduler = fresh(module)
        return ds.initialize(model=module, optimizer=optimizer, lr_scheduler=scheduler, config=BASE)[0]

    plain = network()
    expected = by_torch(plain, *fresh(plain), range(7))
    first = engine_of(0)
    first.optimizer.param_groups[0]["name"] = "of mine"
    drive(first, range(3))
    first.save_checkpoint(tmp_path)
    again = engine_of(1)
    again.load_checkpoint(tmp_path)
    assert again.get_lr() == expected[2]
    assert again.optimizer.param_groups[0]["name"] == "of mine"
    assert drive(again, range(3, 7)) == expected[3:]
    same(again, plain)

    module = network()
    fresh(module)
    other, *_ = ds.initialize(model=module, model_parameters=[p for p in module.parameters() if p.requires_grad], config=CONFIG)
    with pytest.raises(ValueError, match="has 2 param groups, and the engine 1"):
        other.load_checkpoint(tmp_path)
    other.load_checkpoint(tmp_path, load_optimizer_states=False)


def test_a_scheduler_that_is_not_loaded_stays(tmp_path: Path) -> None:
    config = {**CONFIG, "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 8, "warmup_type": "linear"}}}
    first, *_ = ds.initialize(model=network(), config=config)
    drive(first, range(5))
    first.save_checkpoint(tmp_path)
    again, *_ = ds.initialize(model=network(), config=config)
    unbroken = drive(ds.initialize(model=network(), config=config)[0], range(5))
    drive(again, range(1))
    again.load_checkpoint(tmp_path, load_lr_scheduler_states=False)
    assert again.get_lr() == first.get_lr()  # the groups' rates are loaded, for one update, as in DeepSpeed
    assert drive(again, range(5, 8)) == unbroken[1:4]


def test_a_function_may_make_a_scheduler_that_cycles_betas() -> None:
    def make(optimizer: Any) -> Any:
        return torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.05, total_steps=9)

    module, plain = network(), network()
    engine, *_ = ds.initialize(model=module, lr_scheduler=make, config=CONFIG)
    optimizer = torch.optim.AdamW(plain.parameters(), lr=0.02, weight_decay=0.01)
    expected = by_torch(plain, optimizer, make(optimizer), range(5))
    assert drive(engine, range(5)) == expected
    same(engine, plain)


def test_only_what_the_optimizer_keeps_is_set() -> None:
    module = network()
    module[2].requires_grad_(False)  # type: ignore[index]
    engine, *_ = ds.initialize(
        model=module, model_parameters=[p for p in module.parameters() if p.requires_grad], config=CONFIG
    )
    engine.backward(engine(rows_of(0, 0)).square().mean())
    assert ds.utils.safe_get_full_grad(module[2].weight) is None  # type: ignore[index]
    engine.step()
    with pytest.raises(KeyError, match="keeps no 'exp_avgg'"):
        ds.utils.safe_set_full_optimizer_state(module[0].weight, torch.zeros(6, 4), "exp_avgg")  # type: ignore[index]
    ds.utils.safe_set_full_optimizer_state(module[0].weight, torch.ones(6, 4), "exp_avg")  # type: ignore[index]
    found = ds.utils.safe_get_full_optimizer_state(module[0].weight, "exp_avg")  # type: ignore[index]
    assert torch.equal(found, torch.ones(6, 4))
