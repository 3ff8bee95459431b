"""Scripts about rates: param groups with their own, among them 0, and runs that go on from a checkpoint."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["RATES", "groups_of", "network", "rows_of"]

Script = Callable[[Any, int, int, int, str], list[float]]
ADAMW = {"type": "AdamW", "params": {"lr": 0.02, "torch_adam": True}}  # torch's decay of 0.01
SCHEDULERS: dict[str, Any] = {
    "none": None,
    "warmup": ("WarmupLR", {"warmup_num_steps": 3}),
    "warmup from a rate": ("WarmupLR", {"warmup_num_steps": 3, "warmup_min_lr": 0.005, "warmup_type": "linear"}),
    "decay": ("WarmupDecayLR", {"warmup_num_steps": 2, "total_num_steps": 5}),
    "cosine": ("WarmupCosineLR", {"warmup_num_steps": 2, "total_num_steps": 5}),
}


def network(seed: int = 0) -> nn.Module:
    """Three parts for three groups."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.LayerNorm(6), nn.Linear(6, 2))


def groups_of(model: Any) -> list[dict[str, Any]]:
    """With the rates 0, 0.007 and the optimizer's."""
    return [
        {"params": [*model[0].parameters()], "lr": 0.0, "weight_decay": 0.2},
        {"params": [*model[2].parameters()], "lr": 0.007, "weight_decay": 0.1},
        {"params": [*model[3].parameters()]},
    ]


def rows_of(rank: int, update: int) -> Tensor:
    """A micro-batch."""
    return torch.randn(4, 4, generator=torch.Generator().manual_seed(10 * rank + update))


def _config(stage: int, **more: Any) -> dict[str, Any]:
    base = {"train_micro_batch_size_per_gpu": 4, "gradient_clipping": 0.0, "zero_allow_untested_optimizer": True}
    return {**base, "zero_optimization": {"stage": stage}, **more}


def _driven(engine: Any, rank: int, updates: range) -> list[float]:
    found = []
    for update in updates:
        loss = engine(rows_of(rank, update)).square().mean()
        engine.backward(loss)
        engine.step()
        found += [loss.item(), *map(float, engine.get_lr())]
    return found


def groups(deepspeed: Any, rank: int, stage: int, ranks: int, folder: str) -> list[float]:
    """Each scheduler of a config over groups with their own rates, and a function that makes torch's OneCycleLR."""
    del ranks, folder
    found = []
    for block in SCHEDULERS.values():
        more = {} if block is None else {"scheduler": {"type": block[0], "params": block[1]}}
        model = network()
        config = _config(stage, optimizer=ADAMW, **more)
        engine, *_ = deepspeed.initialize(model=model, model_parameters=groups_of(model), config=config)
        found += _driven(engine, rank, range(6))
    model = network()
    engine, *_ = deepspeed.initialize(
        model=model,
        model_parameters=model.parameters(),
        lr_scheduler=lambda optimizer: torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.05, total_steps=9),
        config=_config(stage, optimizer=ADAMW),
    )
    return [*found, *_driven(engine, rank, range(6))]


def resumed(deepspeed: Any, rank: int, stage: int, ranks: int, folder: str) -> list[float]:
    """New engines that go on with torch's schedulers, with and without the scheduler's state, and with written numbers."""
    schedules = torch.optim.lr_scheduler
    kinds: list[Callable[[Any], Any]] = [
        lambda optimizer: schedules.StepLR(optimizer, 2, 0.5),
        lambda optimizer: schedules.ExponentialLR(optimizer, 0.7),
    ]
    found: list[float] = []
    for number, kind in enumerate(kinds):

        def fresh(seed: int, kind: Callable[[Any], Any] = kind) -> Any:
            model = network(seed)
            optimizer = torch.optim.AdamW(groups_of(model)[1:], lr=0.02)
            model[0].requires_grad_(False)
            return deepspeed.initialize(model=model, optimizer=optimizer, lr_scheduler=kind(optimizer), config=_config(stage))[
                0
            ]

        place = f"{folder}/rates-{deepspeed.__name__}-{stage}-{ranks}-{number}"
        engine = fresh(0)
        _driven(engine, rank, range(3))
        engine.save_checkpoint(place)
        found += _driven(engine, rank, range(3, 6))
        for options in ({}, {"load_lr_scheduler_states": False}, {"load_optimizer_states": False}):
            engine = fresh(0 if stage == 3 else 1)
            engine.load_checkpoint(place, **options)
            found += _driven(engine, rank, range(3, 6))
    return found


RATES: dict[str, tuple[Script, int]] = {
    **{f"groups, stage {stage}": (groups, stage) for stage in (0, 2, 3)},
    **{f"resumed, stage {stage}": (resumed, stage) for stage in (0, 1, 3)},
}
