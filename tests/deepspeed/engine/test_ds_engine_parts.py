"""Norms, this rank's parts of stage-3 parameters, leaf modules as units."""

import math
from typing import Any

import pytest
import torch
from torch import nn

import functional_ds as fds
from functional_ds import comm
from tests.deepspeed.engine.surface_scripts import SURFACE, Routed, WithExperts
from tests.deepspeed.engine.test_ds_engine import close, config, engine_of, model, rows, square, values

ds = fds.deepspeed

# What DeepSpeed 0.19.8 gives for the gradients of an update, on one rank and on two.
NORMS = {1: (0.5421714, 0.5431150), 2: (0.4719263, 0.4729411)}
# In bf16 after an update: in stage 0, where DeepSpeed's Adam has made an update of zeros before it, and in others.
AFTER: dict[int, tuple[float, float]] = {1: (0.3344594, 0.3124225), 2: (0.2508876, 0.1906242)}


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("stage", range(4))
def test_norms_without_clipping(stage: int, ranks: int) -> None:
    script, _ = SURFACE[f"norms, stage {stage}"]
    for found in comm.simulate(lambda: script(ds, comm.world().rank, stage, ranks, ""), world_size=ranks):
        single, half = NORMS[ranks]
        expected = [single, math.inf] if stage else [-1.0, -1.0]
        assert found[:2] + found[3:] == pytest.approx([*expected, half, math.inf, AFTER[ranks][stage > 0]], rel=1e-5)


@pytest.mark.parametrize(
    ("more", "times"),
    [({"zero_optimization": {"stage": 1, "compute_grad_norm": False}}, None), ({"gradient_allreduce_op": "sum"}, 2.0)],
)
def test_norms_that_nobody_wants_and_norms_of_sums(more: dict[str, Any], times: float | None) -> None:
    def norm(**given: Any) -> float | None:
        engine = engine_of(1, **given)
        assert engine.get_global_grad_norm() is None
        engine.backward(square(engine, rows()))
        engine.step()
        found: float | None = engine.get_global_grad_norm()
        return found

    plain, found = comm.simulate(norm, world_size=2)[0], comm.simulate(lambda: norm(**more), world_size=2)[0]
    assert plain is not None
    assert found == (None if times is None else pytest.approx(plain * times))


def test_a_norm_costs_one_number() -> None:
    def sent(norm: bool) -> int:
        zero = {"stage": 2, "compute_grad_norm": norm}
        engine = engine_of(2, bf16={"enabled": True}, zero_optimization=zero)
        engine.backward(square(engine, rows()).float())
        with comm.ledger() as book:
            engine.step()
        return sum(row.bytes for row in book.rows)

    assert comm.simulate(sent, True, world_size=2)[0] == comm.simulate(sent, False, world_size=2)[0] + 4


@pytest.mark.sample(2)
@pytest.mark.parametrize("threshold", [0, 10, 1000])
@pytest.mark.parametrize("half", [False, True])
def test_parts_of_all_ranks_are_the_parameter(threshold: int, half: bool) -> None:
    def program() -> None:
        utils, stage = ds.utils, {"stage": 3, "stage3_param_persistence_threshold": threshold}
        adam = {"type": "AdamW", "params": {"lr": 0.1}}
        engine = ds.initialize(
            model=nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)),
            config={**config(3, optimizer=adam, bf16={"enabled": half}), "zero_optimization": stage},
        )[0]

        def joined(part: torch.Tensor | None) -> torch.Tensor:
            return torch.cat(comm.all_gather_object(part))

        params = list(engine.module.parameters())
        engine.backward(square(engine, rows()))
        for p in params:
            gradient = utils.safe_get_full_grad(p)
            torch.testing.assert_close(joined(utils.safe_get_local_grad(p)), gradient.flatten())
            utils.safe_set_local_grad(p, torch.full_like(utils.safe_get_local_grad(p), 0.5))
            torch.testing.assert_close(utils.safe_get_full_grad(p), torch.full_like(gradient, 0.5))
        engine.step()
        for number, p in enumerate(params):
            for get, full in (
                (utils.safe_get_local_fp32_param, utils.safe_get_full_fp32_param),
                (
                    lambda p: utils.safe_get_local_optimizer_state(p, "exp_avg"),
                    lambda p: utils.safe_get_full_optimizer_state(p, "exp_avg"),
                ),
            ):
                torch.testing.assert_close(joined(get(p)), full(p).flatten(), rtol=0, atol=0)
            part = utils.safe_get_local_fp32_param(p)
            utils.safe_set_local_fp32_param(p, torch.full_like(part, number + 0.5))
            utils.safe_set_local_optimizer_state(p, torch.full_like(part, 2.0), "exp_avg")
            assert (utils.safe_get_full_fp32_param(p) == number + 0.5).all()
            assert (utils.safe_get_full_optimizer_state(p, "exp_avg") == 2).all()
            with ds.zero.GatheredParameters(p):
                assert (p == number + 0.5).all()  # on every rank, also where params stay whole
            assert utils.safe_get_local_optimizer_state(p, "nothing") is None
        with pytest.raises(ValueError, match="and the value 99"):
            utils.safe_set_local_fp32_param(params[0], torch.ones(99))
        with pytest.raises(KeyError, match="keeps no 'nothing'"):
            utils.safe_set_local_optimizer_state(params[0], torch.ones(1), "nothing")
        with pytest.raises(RuntimeError, match="not summed"):
            utils.safe_set_local_grad(params[0], torch.ones(1))

    comm.simulate(program, world_size=2)


def test_parts_are_of_stage_3_alone() -> None:
    engine = engine_of(2)
    with pytest.raises(ValueError, match="call safe_get_full_fp32_param"):
        ds.utils.safe_get_local_fp32_param(engine.module[0].weight)


def test_leaf_modules_are_units() -> None:
    zero = {"stage": 3, "stage3_param_persistence_threshold": 0}
    base = {"train_micro_batch_size_per_gpu": 4, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}

    def units(stage: int = 3, **more: Any) -> list[str]:
        model = WithExperts()
        if not more:
            ds.utils.set_z3_leaf_modules(model, [Routed, nn.ModuleList])
        engine = ds.initialize(model=model, config={**base, "zero_optimization": {**zero, **more, "stage": stage}})[0]
        engine.backward(engine(torch.ones(4, 4), 0).square().mean())
        engine.step()
        return sorted(unit.name for unit in engine.state.slots["zero"].layout.units)

    assert units() == ["leaf routed", "rest"]
    assert units(2) == ["rest", "routed.experts.0", "routed.experts.1"]
    for name, value in (("classes", ["Routed"]), ("names", "routed"), ("name_suffixes", ["outed"])):
        assert units(leaf_module={name: value}) == ["leaf routed", "rest"]
    with pytest.raises(fds.deepspeed.ConfigError, match="no 'clases'"):
        units(leaf_module={"clases": ["Routed"]})


def test_leaf_modules_that_there_are_not() -> None:
    model, utils = WithExperts(), ds.utils
    with pytest.raises(ValueError, match="no module of Conv2d"):
        utils.set_z3_leaf_modules(model, ["Conv2d"])
    with pytest.raises(ValueError, match="named nothing"):
        utils.set_z3_leaf_modules_by_name(model, ["nothing"])
    with pytest.raises(TypeError, match="classes or of their names"):
        utils.set_z3_leaf_modules(model, [3])
    assert utils.set_z3_leaf_modules_by_suffix(model, ["outed", "x"], raise_if_not_found=False) == ([model.routed], ["x"])
    utils.unset_z3_leaf_modules(model, [Routed])
    assert utils.get_z3_leaf_modules(model) == []


@pytest.mark.parametrize("stage", [0, 3])
def test_betas_cycle(stage: int) -> None:
    params = {"cycle_min_lr": 0.01, "cycle_max_lr": 0.1, "cycle_first_step_size": 2, "decay_step_size": 1}
    params |= {"decay_mom_rate": 0.05}
    module = model()
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.05, weight_decay=0.0)
    schedule = ds.runtime.lr_schedules.OneCycle(optimizer, **params)  # held against DeepSpeed's beside its module
    adam = {"type": "AdamW", "params": {"lr": 0.05}}
    engine = engine_of(stage, optimizer=adam, scheduler={"type": "OneCycle", "params": params})
    for update in range(7):
        assert engine.get_mom() == [group["betas"] for group in optimizer.param_groups]
        optimizer.zero_grad()
        square(module, rows(update)).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        schedule.step()
        engine.backward(square(engine, rows(update)))
        engine.step()
    assert len({pair[0] for pair in (engine.get_mom()[0], (0.8, 0.99))}) == 2
    close(values(engine), [p.detach() for p in module.parameters()])


@pytest.mark.parametrize("params", [{"cycle_min_lr": 0.1}, {"cycle_min_lr": 0.1, "cycle_max_lr": 0.2, "cycle_mum": 1}])
def test_a_cycle_that_the_plan_refuses(params: dict[str, Any]) -> None:
    adam = {"type": "AdamW", "params": {"lr": 0.05}}
    with pytest.raises(ds.ConfigError, match=r"cycle_max_lr|cycle_mum"):
        engine_of(1, optimizer=adam, scheduler={"type": "OneCycle", "params": params})
