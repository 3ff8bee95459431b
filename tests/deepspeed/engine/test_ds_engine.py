"""The engine's surface: losses and boundaries, counts, rates, the user's module, evaluations."""

import tempfile
from collections.abc import Callable
from contextlib import nullcontext
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import functional_ds as fds
from functional_ds import comm

ds = fds.deepspeed
SGD = {"type": "SGD", "params": {"lr": 0.5}}


def config(stage: int = 1, **more: Any) -> dict[str, Any]:
    base = {"train_micro_batch_size_per_gpu": 4, "gradient_clipping": 0.0, "optimizer": SGD}
    return {
        **base,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0} if stage == 3 else {"stage": stage},
        **more,
    }


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))


def rows(seed: int = 0) -> Tensor:
    return torch.randn(4, 3, generator=torch.Generator().manual_seed(seed + 100 * comm.world().rank))


def engine_of(*args: Any, module: nn.Module | None = None, **more: Any) -> Any:
    return ds.initialize(model=module or model(), config=config(*args, **more))[0]


def values(engine: Any) -> list[Tensor]:
    return [x.clone() for x in engine.functional_step.params(engine.state).values()]


def plain(*losses: Callable[[nn.Module], Tensor], ranks: int = 1) -> list[Tensor]:
    """One update of SGD, by torch, with the sum of these losses."""
    module = model()
    for loss in losses:
        loss(module).backward()  # type: ignore[no-untyped-call]
    return [(p - 0.5 * p.grad).detach() for p in module.parameters() if p.grad is not None]


def close(found: list[Tensor], expected: list[Tensor]) -> None:
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def square(module: Any, x: Tensor) -> Tensor:
    return module(x).square().mean()  # type: ignore[no-any-return]


# -- losses --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", range(4))
def test_several_losses_of_one_step_are_summed(stage: int) -> None:
    engine = engine_of(stage)
    for _ in range(2):
        engine.backward(square(engine, rows()))
        engine.backward(0.1 * square(engine, rows(1)))
        engine.step()
        if engine.global_steps == 1:
            close(values(engine), plain(lambda m: square(m, rows()), lambda m: 0.1 * square(m, rows(1))))


@pytest.mark.parametrize("stage", [0, 3])
def test_losses_of_forwards_before_any_backward_are_summed(stage: int) -> None:
    engine = engine_of(stage)
    one, other = square(engine, rows()), square(engine, rows(1))
    engine.backward(one)
    engine.backward(other)
    engine.step()
    close(values(engine), plain(lambda m: square(m, rows()), lambda m: square(m, rows(1))))


def test_a_graph_may_be_differentiated_twice() -> None:
    engine = engine_of(1)
    found = engine(rows())
    engine.backward(found.square().mean(), retain_graph=True)
    engine.backward(found.abs().mean())
    engine.step()
    close(values(engine), plain(lambda m: square(m, rows()), lambda m: m(rows()).abs().mean()))


def test_backward_returns_the_loss_by_micro_batches() -> None:
    engine = engine_of(1, gradient_accumulation_steps=4)
    loss = square(engine, rows())
    assert torch.equal(engine.backward(loss), loss / 4)
    loss = square(engine, rows())
    assert torch.equal(engine.backward(loss, scale_wrt_gas=False), loss)
    with pytest.raises(TypeError, match="float"):
        engine.backward(1.0)


def test_an_unscaled_loss_counts_as_it_is() -> None:
    engine = engine_of(2, gradient_accumulation_steps=2)
    for i in range(2):
        engine.backward(square(engine, rows(i)), scale_wrt_gas=False)
        engine.step()
    close(values(engine), plain(lambda m: square(m, rows()), lambda m: square(m, rows(1))))


@pytest.mark.parametrize("stage", range(4))
def test_loss_backward_of_torch(stage: int) -> None:
    def program() -> list[Tensor]:
        engine = engine_of(stage, gradient_accumulation_steps=2)
        for i in range(2):
            square(engine, rows(i)).backward()  # type: ignore[no-untyped-call]
            engine.step()
        return values(engine)

    def expected() -> list[Tensor]:
        engine = engine_of(stage, gradient_accumulation_steps=2)
        for i in range(2):
            engine.backward(square(engine, rows(i)))
            engine.step()
        return values(engine)

    for found, wanted in zip(comm.simulate(program, world_size=2), comm.simulate(expected, world_size=2), strict=True):
        close(found, wanted)


def test_loss_backward_wants_its_scale() -> None:
    fp16 = {"enabled": True, "initial_scale_power": 3}
    engine = engine_of(1, fp16=fp16)
    square(engine, rows()).backward()  # type: ignore[no-untyped-call]
    with pytest.raises(RuntimeError, match="scale"):
        engine.step()
    engine = engine_of(1, fp16=fp16)
    engine.scale(square(engine, rows())).backward()
    engine.step()
    assert engine.was_step_applied()
    assert engine.optimizer.cur_scale == 8.0
    assert (engine.loss_scale(), engine.dynamic_loss_scale()) == (0.0, True)  # of the config, as there
    assert engine_of(1, fp16={"enabled": True, "loss_scale": 64}).loss_scale() == 64.0


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("direct", [True, False])
def test_a_penalty_on_the_modules_own_parameters_is_refused(stage: int, direct: bool) -> None:
    def penalised(engine: Any) -> None:
        loss = square(engine, rows()) + sum(p.square().sum() for p in engine.module.parameters())
        loss.backward() if direct else engine.backward(loss)
        engine.step()

    with pytest.raises(RuntimeError, match=r"gave the parameter '0.weight'" if direct else "not one of the step's params"):
        penalised(engine_of(stage))


def test_a_loss_that_is_none_of_the_engines_is_refused() -> None:
    engine = engine_of(1)
    with pytest.raises(RuntimeError, match=r"engine\.module"):
        engine.backward(square(engine.module, rows()))
    with pytest.raises(RuntimeError, match="no gradients"):
        engine.step()
    loss = square(engine, rows()) + sum(p.square().sum() for p in engine.parameters())
    with pytest.raises(RuntimeError, match="not one of the step's params"):
        engine.backward(loss)
    engine.backward(square(engine, rows()))  # it goes on
    engine.step()


# -- boundaries ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", range(4))
def test_boundaries_may_be_set_by_the_caller(stage: int) -> None:
    """As accelerate does; and a single ``step`` after all passes."""
    expected = plain(*(lambda m, i=i: square(m, rows(i)) / 3 for i in range(2)))  # type: ignore[misc]
    one, other = engine_of(stage, gradient_accumulation_steps=3), engine_of(stage, gradient_accumulation_steps=3)
    for engine in (one, other):
        for i in range(2):
            loss = square(engine, rows(i))
            engine.set_gradient_accumulation_boundary(i == 1)
            engine.backward(loss)
            if engine is one or i == 1:
                engine.step()
        assert engine.global_steps == 1
        close(values(engine), expected)


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_step_is_the_boundary_where_nobody_counts(stage: int) -> None:
    def program() -> list[Tensor]:
        engine = engine_of(stage, gradient_accumulation_steps=2, managed_gradient_accumulation=False)
        assert not engine.is_gradient_accumulation_boundary()
        for i in range(3):
            engine.backward(square(engine, rows(i)))
        engine.step()
        assert engine.global_samples == 3 * 4 * 2
        with pytest.raises(RuntimeError, match="managed"):
            engine.set_gradient_accumulation_boundary(True)
        return values(engine)

    one, other = comm.simulate(program, world_size=2)
    close(one, other)


def test_no_sync_sums_on_each_rank() -> None:
    def program() -> tuple[list[Tensor], int]:
        engine = engine_of(1, gradient_accumulation_steps=2)
        with comm.ledger() as book, engine.no_sync():
            engine.backward(square(engine, rows()))
            sent = book.bytes
            with pytest.raises(RuntimeError, match="no_sync"):
                engine.step()
            with pytest.raises(RuntimeError, match="no_sync"), engine.no_sync():
                pass
        engine.micro_steps  # noqa: B018
        engine.set_gradient_accumulation_boundary(True)
        engine.backward(square(engine, rows(1)))
        engine.step()
        return values(engine), sent

    (one, sent), (other, _) = comm.simulate(program, world_size=2)
    close(one, other)
    assert sent == 0
    with pytest.raises(RuntimeError, match="stage 2"), engine_of(2).no_sync():
        pass


def test_counts_are_deepspeeds() -> None:
    engine = engine_of(2, gradient_accumulation_steps=2, bf16={"enabled": True})
    seen = []
    for i in range(6):
        x = rows(i) * (float("nan") if i == 2 else 1.0)
        engine.backward(square(engine, x))
        engine.step()
        seen.append((engine.global_steps, engine.skipped_steps, engine.was_step_applied(), engine.optimizer.overflow))
    assert seen == [
        (0, 0, False, False),
        (1, 0, True, False),
        (1, 0, False, False),
        (2, 1, False, True),
        (2, 1, False, True),
        (3, 1, True, False),
    ]
    assert engine.global_samples == 24
    assert engine.micro_steps == 6


# -- evaluations ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", [0, 3])
def test_an_evaluation_amid_accumulation_leaves_nothing(stage: int) -> None:
    def program(evaluates: bool) -> list[Tensor]:
        torch.manual_seed(0)
        module = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
        engine = engine_of(stage, module=module, gradient_accumulation_steps=2)
        for i in range(4):
            loss = square(engine, rows(i))
            if evaluates:
                engine.eval()
                with torch.no_grad():
                    assert not engine(rows(9)).requires_grad
                engine.train()
            engine.backward(loss)
            engine.step()
        return [*values(engine), *engine.functional_step.module_buffers(engine.state).values()]

    for one, other in zip(program(True), program(False), strict=True):
        assert torch.equal(one, other)


def test_modes_are_the_modules() -> None:
    module = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.9), nn.Linear(4, 1))
    engine = engine_of(1, module=module)
    engine.eval()
    with torch.no_grad():
        assert torch.equal(engine(rows()), engine(rows()))
        module[1].train()
        assert not torch.equal(engine(rows()), engine(rows()))
    assert not engine.training
    assert engine.train() is engine
    assert engine.module is module


# -- the user's module ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", range(3))
@pytest.mark.parametrize("half", [False, True])
def test_the_module_has_the_states_values(stage: int, half: bool) -> None:
    def program() -> None:
        torch.manual_seed(comm.world().rank)  # each rank's own: rank 0's count
        module = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
        engine = engine_of(stage, module=module, **({"bf16": {"enabled": True}} if half else {}))
        for i in range(3):
            engine.backward(square(engine, rows(i)))
            engine.step()
            for name, value in engine.functional_step.params(engine.state).items():
                assert torch.equal(module.get_parameter(name), value.to(module.get_parameter(name).dtype))
            stored = {x.untyped_storage().data_ptr() for x in fds.tree.leaves(engine.state.params)}
            assert {p.untyped_storage().data_ptr() for p in module.parameters()} == stored
            for name, value in engine.functional_step.module_buffers(engine.state).items():
                assert module.get_buffer(name) is value
        assert engine.module_state_dict().keys() == module.state_dict().keys()
        assert [name for name, _ in engine.named_parameters()] == [f"module.{name}" for name, _ in module.named_parameters()]
        module.answer = 42
        assert engine.answer == 42
        with pytest.raises(AttributeError, match="nothing"):
            engine.nothing  # noqa: B018

    comm.simulate(program, world_size=2)


@pytest.mark.parametrize("gathers", [False, True])
@pytest.mark.parametrize("stage", range(4))
def test_a_value_that_is_assigned_is_the_parameters(stage: int, gathers: bool) -> None:
    """``p.data = x`` is ``p.data.copy_(x)``, before a forward pass, and between a backward pass and its update."""
    if stage == 3 and not gathers:
        pytest.skip("refused by name")

    def program() -> list[list[Tensor]]:
        found = []
        for assigns in (False, True):
            engine = engine_of(stage)
            for when in range(3):
                own = engine.module[0].weight
                block = ds.zero.GatheredParameters(own, modifier_rank=0) if gathers else nullcontext()
                if when != 1:
                    engine.backward(engine(rows()).square().mean())
                with block:
                    value = torch.full_like(own, 0.1 * (1 + when))
                    if assigns:
                        own.data = value
                    else:
                        own.data.copy_(value)
                if when != 1:
                    engine.step()
            found.append([x.clone() for x in engine.functional_step.params(engine.state).values()])
            if stage < 3:
                assert all(torch.equal(own, x) for own, x in zip(engine.module.parameters(), found[-1], strict=True))
        return found

    for expected, got in comm.simulate(program, world_size=2):
        assert all(map(torch.equal, got, expected))


def test_the_module_has_a_loaded_states_values() -> None:
    def program(folder: str) -> None:
        engine = engine_of(2)
        for i in range(2):
            engine.backward(square(engine, rows(i)))
            engine.step()
        engine.save_checkpoint(folder)
        other = engine_of(2)
        other.load_checkpoint(folder)
        assert all(torch.equal(p, x) for p, x in zip(other.module.parameters(), values(engine), strict=True))

    with tempfile.TemporaryDirectory() as folder:
        comm.simulate(program, folder, world_size=2)


def test_a_stage_3_modules_values_are_gathered() -> None:
    def program() -> None:
        engine = engine_of(3)
        engine.backward(square(engine, rows()))
        engine.step()
        own = dict(zip(engine.functional_step.params(engine.state), engine.module.parameters(), strict=True))
        assert all(p.numel() == 0 and p.ds_status is ds.zero.ZeroParamStatus.NOT_AVAILABLE for p in own.values())
        with ds.zero.GatheredParameters(engine.module.parameters()):
            for name, value in engine.functional_step.params(engine.state).items():
                assert torch.equal(own[name], value)
                assert own[name].ds_shape == value.shape
        with ds.zero.GatheredParameters(own["0.bias"], modifier_rank=1):
            own["0.bias"].data.fill_(float(comm.world().rank))
        assert engine.functional_step.params(engine.state)["0.bias"].tolist() == [1.0] * 4
        assert own["0.bias"].numel() == 0
        whole = engine.whole_state_dict()
        assert all(torch.equal(whole[name], x) for name, x in engine.functional_step.params(engine.state).items())

    comm.simulate(program, world_size=2)


@pytest.mark.parametrize("stage", range(4))
def test_whole_values_by_parameter(stage: int) -> None:
    def program() -> None:
        adam = {"type": "AdamW", "params": {"lr": 0.1}}
        engine = engine_of(stage, optimizer=adam, bf16={"enabled": True})
        engine.backward(square(engine, rows()))
        engine.step()
        weight, name = engine.module[0].weight, "0.weight"
        found = ds.utils.safe_get_full_fp32_param(weight)
        assert torch.equal(found, engine.functional_step.params(engine.state)[name])
        assert found.dtype == torch.float32
        moment = ds.utils.safe_get_full_optimizer_state(weight, "exp_avg")
        assert moment.shape == found.shape
        assert moment.any()
        ds.utils.safe_set_full_fp32_param(weight, torch.full_like(found, 0.1))
        ds.utils.safe_set_full_optimizer_state(weight, torch.zeros_like(found), "exp_avg")
        assert torch.equal(engine.functional_step.params(engine.state)[name], torch.full_like(found, 0.1))
        assert not ds.utils.safe_get_full_optimizer_state(weight, "exp_avg").any()
        assert ds.utils.safe_get_full_optimizer_state(weight, "nothing") is None
        engine.backward(square(engine, rows()))
        engine.step()

    comm.simulate(program, world_size=2)


@pytest.mark.parametrize("stage", range(4))
def test_whole_gradients_by_parameter(stage: int) -> None:
    def program() -> None:
        engine = engine_of(stage, gradient_accumulation_steps=2)
        weight = engine.module[0].weight
        assert ds.utils.safe_get_full_grad(weight) is None
        for i in range(2):
            engine.backward(square(engine, rows(i)))
            if i == 0:
                assert (ds.utils.safe_get_full_grad(weight) is None) == (stage < 2)
                engine.step()
        module, found = model(), ds.utils.safe_get_full_grad(weight)
        for rank in range(2):
            for i in range(2):
                x = torch.randn(4, 3, generator=torch.Generator().manual_seed(i + 100 * rank))
                (square(module, x) / 4).backward()  # type: ignore[no-untyped-call]
        torch.testing.assert_close(found, module[0].weight.grad)  # type: ignore[index, union-attr]
        before = values(engine)[0]
        ds.utils.safe_set_full_grad(weight, torch.ones_like(found))
        engine.step()
        torch.testing.assert_close(values(engine)[0], before - 0.5)
        with pytest.raises(RuntimeError, match="not summed"):
            ds.utils.safe_set_full_grad(weight, torch.ones_like(found))

    comm.simulate(program, world_size=2)


def test_losses_of_two_engines_in_one() -> None:
    """One loss through both: each engine takes the gradients of its own params, by its backward or by torch's."""
    expected = plain(lambda m: m[1:](m[0](rows())).square().mean())
    for stage, direct in ((1, False), (3, False), (1, True), (3, True)):
        module = model()
        first, second = engine_of(stage, module=module[0]), engine_of(stage, module=module[1:])  # type: ignore[index]
        loss = second(first(rows())).square().mean()
        if direct:
            loss.backward()
        else:
            first.backward(loss, retain_graph=True)
            second.backward(loss)
        first.step()
        second.step()
        close([*values(first), *values(second)], expected)


def test_checkpoints_inside() -> None:
    class Checkpointed(nn.Module):
        def __init__(self, reentrant: bool | None) -> None:
            super().__init__()
            self.inner, self.reentrant = model(), reentrant

        def forward(self, x: Tensor) -> Tensor:
            if self.reentrant is None:
                return self.inner(x)  # type: ignore[no-any-return]
            x = x.clone().requires_grad_()
            return torch.utils.checkpoint.checkpoint(self.inner, x, use_reentrant=self.reentrant)  # type: ignore[no-any-return]

    for stage in (1, 3):
        found = []
        for reentrant in (None, False):
            engine = engine_of(stage, module=Checkpointed(reentrant))
            engine.backward(square(engine, rows()))
            engine.step()
            found.append(values(engine))
        close(found[1], found[0])
        engine = engine_of(stage, module=Checkpointed(True))
        with pytest.raises(RuntimeError, match="use_reentrant=False"):
            engine.backward(square(engine, rows()))


def test_an_update_that_fails_changes_nothing() -> None:
    scale = {"enabled": True, "initial_scale_power": 0, "min_loss_scale": 1, "hysteresis": 1}
    engine = engine_of(1, fp16=scale)
    before = values(engine)
    engine.backward(square(engine, rows()) * float("inf"))
    with pytest.raises(fds.UpdateError, match="minimum"):
        engine.step()
    assert all(map(torch.equal, values(engine), before))
    assert torch.equal(engine.module[0].weight, before[0].half())
    engine.backward(square(engine, rows()))
    engine.step()
    assert engine.was_step_applied()


def test_an_error_in_forward_leaves_the_engine_whole() -> None:
    engine = engine_of(3)
    with pytest.raises(RuntimeError):
        engine(torch.ones(4, 7))
    engine.backward(square(engine, rows()))
    engine.step()
    close(values(engine), plain(lambda m: square(m, rows())))


def test_frozen_params_stay() -> None:
    module = model()
    module[0].weight.requires_grad_(False)
    before = module[0].weight.detach().clone(), module[0].bias.detach().clone()
    engine, *_ = ds.initialize(model=module, config=config(), model_parameters=[module[2].weight, module[2].bias])
    engine.backward(square(engine, rows()))
    engine.step()
    assert torch.equal(module[0].weight, before[0])
    assert torch.equal(module[0].bias, before[1])
    assert "0.weight" not in engine.module_state_dict(exclude_frozen_parameters=True)


@pytest.mark.parametrize("stage", range(4))
def test_params_may_be_frozen_later(stage: int) -> None:
    def program() -> None:
        engine = engine_of(stage, optimizer={"type": "AdamW", "params": {"lr": 0.1, "weight_decay": 0.1}})
        weight, seen = engine.module[0].weight, []
        for i in range(4):
            weight.requires_grad_(i % 2 == 0)
            engine.backward(square(engine, rows(i)))
            engine.step()
            seen.append(values(engine))
        moved = [[not torch.equal(a, b) for a, b in zip(*pair, strict=True)] for pair in pairwise(seen)]
        assert moved == [[False, True, True, True], [True] * 4, [False, True, True, True]]

    comm.simulate(program, world_size=2)


def test_params_that_were_frozen_stay_so() -> None:
    module = model()
    module[0].weight.requires_grad_(False)  # type: ignore[index, union-attr]
    engine = engine_of(1, module=module)
    module[0].weight.requires_grad_(True)  # type: ignore[index, union-attr]
    with pytest.raises(RuntimeError, match="frozen at initialize"):
        engine(rows())


def test_two_networks() -> None:
    """DeepSpeedExamples' GAN: a step of each, several backwards, a forward pass through the other."""

    def by_torch(steps: int) -> list[Tensor]:
        torch.manual_seed(0)
        g, d = (
            nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 3)),
            nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)),
        )
        of_g, of_d = torch.optim.SGD(g.parameters(), 0.5), torch.optim.SGD(d.parameters(), 0.5)
        for i in range(steps):
            of_d.zero_grad()
            F.softplus(-d(rows(i))).mean().backward()
            fake = g(rows(i + 50)[:, :2])
            F.softplus(d(fake.detach())).mean().backward()
            of_d.step()
            of_g.zero_grad()
            F.softplus(-d(fake)).mean().backward()
            of_g.step()
        return [*g.parameters(), *d.parameters(), *(x.float() for x in d.buffers())]

    def by_engines(stage: int, steps: int) -> list[Tensor]:
        torch.manual_seed(0)
        g, d = (
            nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 3)),
            nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)),
        )
        of_g, of_d = engine_of(stage, module=g), engine_of(stage, module=d)
        for i in range(steps):
            of_d.zero_grad()
            of_d.backward(F.softplus(-of_d(rows(i))).mean())
            fake = of_g(rows(i + 50)[:, :2])
            of_d.backward(F.softplus(of_d(fake.detach())).mean())
            of_d.step()
            of_g.zero_grad()
            of_g.backward(F.softplus(-of_d(fake)).mean())
            of_g.step()
        of_d.zero_grad()
        return [*values(of_g), *values(of_d), *(x.float() for x in of_d.module.buffers())]

    expected = [x.detach() for x in by_torch(4)]
    for stage in range(4):
        close(by_engines(stage, 4), expected)
