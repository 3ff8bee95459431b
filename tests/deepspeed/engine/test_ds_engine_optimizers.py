"""Rates that programs write, param groups, schedulers, and optimizers of torch."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import functional_ds as fds

ds = fds.deepspeed
BASE: dict[str, Any] = {"train_micro_batch_size_per_gpu": 4, "gradient_clipping": 0.0}
ADAMW = {"type": "AdamW", "params": {"lr": 0.1, "weight_decay": 0.1}}
WARMUP = {"type": "WarmupLR", "params": {"warmup_num_steps": 4, "warmup_type": "linear", "warmup_max_lr": 0.2}}


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))


def rows(seed: int) -> Tensor:
    return torch.randn(4, 3, generator=torch.Generator().manual_seed(seed))


def grouped(module: nn.Module) -> list[dict[str, Any]]:
    named = dict(module.named_parameters())
    return [
        {"params": [p for n, p in named.items() if "weight" in n]},
        {"params": [p for n, p in named.items() if "bias" in n], "weight_decay": 0.0, "lr": 0.02},
    ]


def drive(engine: Any, steps: int, write: Any = None) -> list[Tensor]:
    for i in range(steps):
        if write is not None:
            write(engine.optimizer.param_groups, i)
        engine.backward(engine(rows(i)).square().mean())
        engine.step()
    return [x.clone() for x in engine.functional_step.params(engine.state).values()]


def by_torch(module: nn.Module, optimizer: Any, steps: int, write: Any = None, scheduler: Any = None) -> list[Tensor]:
    for i in range(steps):
        if write is not None:
            write(optimizer.param_groups, i)
        optimizer.zero_grad()
        module(rows(i)).square().mean().backward()
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
    return [p.detach() for p in module.parameters()]


def close(found: list[Tensor], expected: list[Tensor]) -> None:
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def halve(groups: list[dict[str, Any]], i: int) -> None:
    for number, group in enumerate(groups):
        group["lr"] = 0.1 / (1 + i + number)
        group["weight_decay"] = 0.1 * number


@pytest.mark.parametrize("stage", range(4))
def test_what_is_written_into_groups_holds(stage: int) -> None:
    zero = {"zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0} if stage == 3 else {"stage": stage}}
    module = model()
    engine, optimizer, *_ = ds.initialize(
        model=module, config={**BASE, **zero, "optimizer": ADAMW}, model_parameters=grouped(module)
    )
    assert optimizer is engine.optimizer
    assert [group["lr"] for group in optimizer.param_groups] == [0.1, 0.02]
    assert engine.get_lr() == [0.1, 0.02]
    other = model()
    plain = torch.optim.AdamW(grouped(other), lr=0.1, weight_decay=0.1)
    close(drive(engine, 3), by_torch(other, plain, 3))
    close(drive(engine, 3, halve), by_torch(other, plain, 3, halve))


CLIENTS: dict[str, Any] = {
    "AdamW": lambda g: torch.optim.AdamW(g, lr=0.1, weight_decay=0.1),
    "Adam": lambda g: torch.optim.Adam(g, lr=0.1, weight_decay=0.1, betas=(0.8, 0.9)),
    "SGD": lambda g: torch.optim.SGD(g, lr=0.1, momentum=0.9, nesterov=True),
    "Adagrad": lambda g: torch.optim.Adagrad(g, lr=0.1),
}


@pytest.mark.parametrize("name", CLIENTS)
def test_optimizers_of_torch(name: str) -> None:
    module, other = model(), model()
    client, plain = CLIENTS[name](grouped(module)), CLIENTS[name](grouped(other))
    schedulers = [torch.optim.lr_scheduler.StepLR(each, 2, 0.5) for each in (client, plain)]
    config = {**BASE, "zero_optimization": {"stage": 2}, "optimizer": ADAMW}
    engine, optimizer, _, scheduler = ds.initialize(model=module, optimizer=client, lr_scheduler=schedulers[0], config=config)
    assert scheduler is schedulers[0]
    assert engine.lr_scheduler is scheduler
    assert optimizer is not None
    close(drive(engine, 5), by_torch(other, plain, 5, scheduler=schedulers[1]))
    assert engine.get_lr() == [group["lr"] for group in plain.param_groups]
    assert optimizer.param_groups is client.param_groups


def test_functions_that_make_optimizers_and_schedulers() -> None:
    module, other = model(), model()
    plain = torch.optim.SGD(other.parameters(), lr=0.1)
    engine, *_ = ds.initialize(
        model=module,
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
        model_parameters=module.parameters(),
        lr_scheduler=lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda k: 1 / (1 + k)),
        config={**BASE, "zero_optimization": {"stage": 1}},
    )
    close(
        drive(engine, 3), by_torch(other, plain, 3, scheduler=torch.optim.lr_scheduler.LambdaLR(plain, lambda k: 1 / (1 + k)))
    )


def test_a_scheduler_of_torch_over_a_configs_optimizer() -> None:
    module, other = model(), model()
    plain = torch.optim.AdamW(other.parameters(), lr=0.1, weight_decay=0.1)
    engine, *_ = ds.initialize(
        model=module,
        lr_scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5),
        config={**BASE, "zero_optimization": {"stage": 1}, "optimizer": ADAMW},
    )
    close(drive(engine, 3), by_torch(other, plain, 3, scheduler=torch.optim.lr_scheduler.StepLR(plain, 1, 0.5)))


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")  # torch looks for optimizer.step(), the engine's here
def test_a_scheduler_of_ones_own_is_moved_by_hand() -> None:
    module, other = model(), model()
    plain = torch.optim.AdamW(other.parameters(), lr=0.1, weight_decay=0.1)
    engine, optimizer, *_ = ds.initialize(model=module, config={**BASE, "optimizer": ADAMW})
    assert optimizer is not None
    mine, theirs = (torch.optim.lr_scheduler.StepLR(each, 1, 0.5) for each in (optimizer.optimizer, plain))
    for update in range(3):
        drive(engine, 1)
        by_torch(other, plain, 1)
        mine.step()
        theirs.step()
        assert engine.get_lr() == theirs.get_last_lr(), update
    torch.testing.assert_close([*module.parameters()], [*other.parameters()])


@pytest.mark.parametrize("passed", [False, True])
def test_a_scheduler_of_another_optimizer_is_refused(passed: bool) -> None:
    """Its rates would be nobody's."""
    module = model()
    foreign = torch.optim.SGD(module.parameters(), lr=0.1)
    with pytest.raises(ValueError, match=r"lr_scheduler: StepLR sets the rates of another SGD than the engine's"):
        ds.initialize(
            model=module,
            optimizer=torch.optim.AdamW(module.parameters()) if passed else None,
            lr_scheduler=torch.optim.lr_scheduler.StepLR(foreign, 1, 0.5),
            config={**BASE, "optimizer": ADAMW},
        )


def test_a_scheduler_of_a_pipelines_config_is_refused() -> None:
    layers = ds.PipelineModule([nn.Linear(2, 2)], num_stages=1, loss_fn=nn.functional.mse_loss)
    with pytest.raises(ValueError, match=r"lr_scheduler: with a PipelineModule also pass the optimizer"):
        ds.initialize(
            model=layers,
            lr_scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5),
            config={**BASE, "optimizer": ADAMW},
        )


def test_the_configs_schedule_shows_its_rates() -> None:
    engine, optimizer, _, scheduler = ds.initialize(
        model=model(), config={**BASE, "zero_optimization": {"stage": 1}, "optimizer": ADAMW, "scheduler": WARMUP}
    )
    expected = [0.0, 0.0, 0.05, 0.1, 0.15, 0.2]
    found = []
    for i in range(5):
        found.append(engine.get_lr()[0])
        assert scheduler.get_last_lr() == engine.get_lr() == [optimizer.param_groups[0]["lr"]]
        drive(engine, 1)
        assert scheduler.last_batch_iteration == i
    assert found == pytest.approx(expected[:5])
    optimizer.param_groups[0]["lr"] = 0.0  # for one update, as in DeepSpeed: then the scheduler sets the next
    before = drive_nothing(engine)
    after = drive(engine, 1)
    close([x * 1.0 for x in after], before)
    assert engine.get_lr()[0] == pytest.approx(0.2)
    scheduler.step()
    assert scheduler.last_batch_iteration == 6


def drive_nothing(engine: Any) -> list[Tensor]:
    return [x.clone() for x in engine.functional_step.params(engine.state).values()]


def test_groups_with_rates_of_their_own_under_one_absolute_schedule() -> None:
    """DeepSpeed's WarmupLR sets one rate for all groups."""
    module, other = model(), model()
    engine, *_ = ds.initialize(
        model=module,
        config={**BASE, "zero_optimization": {"stage": 1}, "optimizer": ADAMW, "scheduler": WARMUP},
        model_parameters=grouped(module),
    )
    plain = torch.optim.AdamW(grouped(other), lr=0.1, weight_decay=0.1)

    def write(groups: list[dict[str, Any]], i: int) -> None:
        for group in groups:
            group["lr"] = [0.0, 0.0, 0.05, 0.1][i]

    close(drive(engine, 4), by_torch(other, plain, 4, write))
    assert engine.get_lr() == pytest.approx([0.15, 0.15])


def test_a_left_out_update_moves_no_scheduler() -> None:
    engine, *_ = ds.initialize(
        model=model(), config={**BASE, "zero_optimization": {"stage": 2}, "optimizer": ADAMW, "scheduler": WARMUP}
    )
    for i in range(4):
        engine.backward(engine(rows(i) * (float("inf") if i == 2 else 1)).square().mean())
        engine.step()
    assert engine.get_lr() == pytest.approx([0.1])
    assert engine.skipped_steps == 1


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda m: torch.optim.RMSprop(m.parameters()), "RMSprop has no pure form"),
        (lambda m: torch.optim.AdamW(m.parameters(), amsgrad=True), r"AdamW\(amsgrad=True\)"),
        (lambda m: torch.optim.SGD(model().parameters(), lr=0.1), "not one of the model's"),
    ],
)
def test_refused_optimizers(make: Any, match: str) -> None:
    module = model()
    with pytest.raises(ValueError, match=match):
        ds.initialize(model=module, optimizer=make(module), config=BASE)


def test_refused_calls() -> None:
    module = model()
    engine, optimizer, *_ = ds.initialize(model=module, config={**BASE, "optimizer": ADAMW})
    assert optimizer is not None
    for call in (
        optimizer.step,
        optimizer.state_dict,
        lambda: optimizer.load_state_dict({}),
        lambda: optimizer.backward(rows(0)),
    ):
        with pytest.raises(RuntimeError, match="engine"):
            call()
    with pytest.raises(ValueError, match="momentum"):
        ds.initialize(
            model=module,
            config={**BASE, "optimizer": ADAMW},
            model_parameters=[{"params": [*module.parameters()], "momentum": 0.9}],
        )
    with pytest.raises(ValueError, match="two param groups"):
        ds.initialize(model=module, config={**BASE, "optimizer": ADAMW}, model_parameters=[*grouped(module), *grouped(module)])
    bare, nothing, *_ = ds.initialize(model=module, config=BASE)
    assert nothing is None
    assert bare(rows(0)).shape == (4, 1)
    with pytest.raises(RuntimeError, match="no optimizer"):
        bare.backward(bare(rows(0)).mean())
    del engine


def test_questions_about_the_config_and_refused_names() -> None:
    more: dict[str, Any] = {"prescale_gradients": True, "gradient_predivide_factor": 2.0, "steps_per_print": 7}
    zero = {"stage": 1, "reduce_bucket_size": 100, "stage3_param_persistence_threshold": 5}
    engine = ds.initialize(
        model=model(), config={**BASE, "optimizer": ADAMW, **more, "bf16": {"enabled": True}, "zero_optimization": zero}
    )[0]
    expected = {
        "postscale_gradients": False,
        "gradient_predivide_factor": 2.0,
        "steps_per_print": 7,
        "zero_reduce_bucket_size": 100,
        "zero_param_persistence_threshold": 5,
        "zero_overlap_comm": False,
        "optimizer_name": "adamw",
        "scheduler_params": None,
        "curriculum_learning_enabled": False,
        "initial_dynamic_scale": 65536,
    }
    assert {name: getattr(engine, name)() for name in expected} == expected
    assert engine.communication_data_type == torch.bfloat16
    with pytest.raises(AttributeError, match=r"engine\.offload_states: offload_optimizer and offload_param"):
        engine.offload_states()
    with pytest.raises(RuntimeError, match=r"torch\.compile, before initialize"):
        engine.compile()
    with pytest.raises(RuntimeError, match=r"no_sync\(\)"):
        engine.enable_backward_allreduce = False
    data = TensorDataset(torch.arange(8.0))
    assert [row.tolist() for (row,) in engine.deepspeed_io(data, 4, route="eval")] == [
        [0.0, 1.0, 2.0, 3.0],
        [4.0, 5.0, 6.0, 7.0],
    ]
    with pytest.raises(ValueError, match="route='test': one of train, eval, predict"):
        engine.deepspeed_io(data, route="test")
