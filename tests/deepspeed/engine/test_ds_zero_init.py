"""``zero.Init``: models that exist on no rank as a whole."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import functional_ds as fds
from functional_ds import comm
from tests.sharding.test_sources import Peak

ds = fds.deepspeed
WIDTH, DEPTH = 48, 4


def config(stage: int) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.1}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
    }


def built() -> nn.Module:
    return nn.Sequential(*[nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)) for _ in range(DEPTH)])


def trained(engine: Any) -> list[Tensor]:
    for update in range(2):
        x = torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(update + comm.world().rank))
        engine.backward(engine(x).square().mean())
        engine.step()
    return list(engine.functional_step.params(engine.state).values())


@pytest.mark.sample(2)
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("stage", [0, 1, 3])
def test_a_run_is_that_of_the_whole_model(stage: int, ranks: int) -> None:
    def program(block: bool) -> list[Tensor]:
        torch.manual_seed(0)
        with ds.zero.Init(config_dict_or_path=config(stage), enabled=block):
            model = built()
        model[0][0].weight.wanted = "kept"  # type: ignore[index, union-attr]
        before = list(model.parameters())
        engine = ds.initialize(model=model, model_parameters=before, config=config(stage))[0]
        assert all(p is q for p, q in zip(before, engine.module.parameters(), strict=True))
        assert before[0].wanted == "kept"
        assert type(before[0]) is nn.Parameter
        with ds.zero.GatheredParameters(before):
            assert before[0].shape == (WIDTH, WIDTH)
        found = trained(engine)
        torch.testing.assert_close(ds.utils.safe_get_full_fp32_param(before[0]), found[0], rtol=0, atol=0)
        return found

    for found, expected in zip(*(comm.simulate(program, block, world_size=ranks) for block in (True, False)), strict=True):
        for a, b in zip(found, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=0)


def test_no_rank_has_the_whole_model() -> None:
    width, depth, ranks = 128, 8, 4
    layer, state_of_generator = 4 * width * width, torch.get_rng_state().nbytes

    def most(block: bool) -> int:
        with Peak() as peak:
            with ds.zero.Init(enabled=block):
                model = nn.Sequential(*[nn.Linear(width, width, bias=False) for _ in range(depth)])
            ds.initialize(model=model, config={**config(3), "optimizer": {"type": "SGD", "params": {"lr": 0.1}}})
        return peak.most

    assert comm.simulate(most, False, world_size=ranks)[0] > depth * layer
    bound = depth * layer // ranks + 3 * layer + depth * state_of_generator
    assert max(comm.simulate(most, True, world_size=ranks)) < bound < 0.75 * depth * layer


def test_rank_0s_values_count() -> None:
    def program() -> list[Tensor]:
        torch.manual_seed(comm.world().rank)
        with ds.zero.Init():
            model = built()
        draw = torch.rand(1)
        engine = ds.initialize(model=model, config=config(3))[0]
        return [draw, *engine.functional_step.params(engine.state).values()]

    torch.manual_seed(0)
    expected = list(built().parameters())
    both = comm.simulate(program, world_size=2)
    for _, *found in both:
        for a, b in zip(found, expected, strict=True):
            torch.testing.assert_close(a, b.detach(), rtol=0, atol=0)
    assert both[0][0] != both[1][0]  # ranks go on with generators of their own


def test_values_are_set_before_initialize() -> None:
    def program(gathers: bool) -> list[Tensor]:
        torch.manual_seed(0)
        with ds.zero.Init():
            model = nn.Linear(3, 2)
        if gathers:
            with ds.zero.GatheredParameters(model.bias, modifier_rank=0):
                if comm.world().rank == 0:
                    nn.init.constant_(model.bias, 3.0)
        elif comm.world().rank == 0:
            nn.init.constant_(model.bias, 3.0)
        model.load_state_dict({"weight": torch.full((2, 3), 2.0), "bias": model.bias.detach()})
        engine = ds.initialize(model=model, config=config(3))[0]
        return list(engine.functional_step.params(engine.state).values())

    for weight, bias in comm.simulate(program, True, world_size=2):
        assert (weight == 2).all()
        assert (bias == 3).all()
    with pytest.raises(ValueError, match="have built different values"):
        comm.simulate(program, False, world_size=2)
