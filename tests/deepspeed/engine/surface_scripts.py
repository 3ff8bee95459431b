"""More scripts, of the rest of an engine's surface: norms, parts of parameters, leaf modules, momentum that cycles."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["SURFACE"]

Script = Callable[[Any, int, int, int, str], list[float]]


def _engine(deepspeed: Any, stage: int, ranks: int, **more: Any) -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))
    if "bf16" in more:
        model.bfloat16().float()  # DeepSpeed's masters start from rounded values, ours from the model's
    config = {
        "train_batch_size": 4 * ranks,
        "gradient_clipping": 0.0,
        "zero_allow_untested_optimizer": True,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.05, "torch_adam": True, "weight_decay": 0.01}},
        "zero_optimization": {"stage": stage},
        **more,
    }
    return deepspeed.initialize(model=model, config=config)[0]


def _rows(rank: int, update: int) -> Tensor:
    return torch.randn(4, 4, generator=torch.Generator().manual_seed(10 * rank + update))


def norms(deepspeed: Any, rank: int, stage: int, ranks: int, folder: str) -> list[float]:
    """Of gradients that nothing clips; -1 where there is none."""
    found = []
    for more in ({}, {"bf16": {"enabled": True}}):
        engine = _engine(deepspeed, stage, ranks, **more)
        dtype = next(engine.module.parameters()).dtype
        if more and not stage and deepspeed.__name__ != "deepspeed":  # DeepSpeed's initialize makes such an update
            engine.backward(engine(_rows(rank, 0).to(dtype)).sum() * 0)
            engine.step()
        for update in range(3):
            x = _rows(rank, update).to(dtype)
            if update == 1:
                x = x * float("inf")
            engine.backward(engine(x).float().square().mean())
            engine.step()
            norm = engine.get_global_grad_norm()
            found.append(-1.0 if norm is None else float(norm))
    del folder
    return found


def parts(deepspeed: Any, rank: int, stage: int, ranks: int, folder: str) -> list[float]:
    """Of stage-3 parameters: sums of all ranks' parts, and what becomes of values that are set."""
    del folder
    utils, found = deepspeed.utils, []
    engine = _engine(deepspeed, stage, ranks)
    params = list(engine.module.parameters())
    for update in range(3):
        engine.backward(engine(_rows(rank, update)).square().mean())
        for p in params:
            gradient = utils.safe_get_local_grad(p)
            found.append(_total(deepspeed, gradient.float().square().sum()))
            utils.safe_set_local_grad(p, gradient * 2)
        if update == 2:
            utils.safe_update_full_grad_vectorized(params, lambda gradient, _: gradient * 0.5 + 0.01)
        engine.step()
        for p in params:
            master, moment = utils.safe_get_local_fp32_param(p), utils.safe_get_local_optimizer_state(p, "exp_avg")
            found += [_total(deepspeed, master.square().sum()), _total(deepspeed, moment.square().sum())]
            if update == 2:  # in DeepSpeed a forward pass sees the new master after the next update alone
                utils.safe_set_local_fp32_param(p, master * 0.5)
                utils.safe_set_local_optimizer_state(p, moment * 0.5, "exp_avg")
    found += [_total(deepspeed, utils.safe_get_local_optimizer_state(p, "exp_avg").square().sum()) for p in params]
    return [*found, _total(deepspeed, sum(utils.safe_get_local_fp32_param(p).square().sum() for p in params))]


def _total(deepspeed: Any, value: Any) -> float:
    held = value.clone().view(1)
    deepspeed.comm.all_reduce(held)
    return float(held.item())


class Routed(nn.Module):
    """Two experts that take turns."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])

    def forward(self, x: Tensor, turn: int) -> Tensor:
        return x + self.experts[turn % 2](x) + 0 * self.experts[1 - turn % 2](x)  # type: ignore[no-any-return]


class WithExperts(nn.Module):
    """A block of experts between two linears."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.routed, self.last = nn.Linear(4, 4), Routed(), nn.Linear(4, 1)

    def forward(self, x: Tensor, turn: int) -> Tensor:
        return self.last(self.routed(self.first(x), turn))  # type: ignore[no-any-return]


def leaves(deepspeed: Any, rank: int, stage: int, ranks: int, folder: str) -> list[float]:
    """A block of experts as a leaf module."""
    del folder
    utils, found = deepspeed.utils, []
    torch.manual_seed(0)
    model = WithExperts()
    marked = utils.set_z3_leaf_modules(model, [Routed])
    found += [len(marked), len(utils.get_z3_leaf_modules(model)), utils.z3_leaf_module(model.routed)]
    config = {
        "train_batch_size": 4 * ranks,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.05, "torch_adam": True}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
    }
    engine, *_ = deepspeed.initialize(model=model, config=config)
    found += [utils.z3_leaf_parameter(p) for p in model.parameters()]
    for update in range(3):
        loss = engine(_rows(rank, update), update).square().mean()
        engine.backward(loss)
        engine.step()
        found.append(loss.item())
    return [float(x) for x in found]


def cycle(deepspeed: Any, rank: int, stage: int, ranks: int, folder: str) -> list[float]:
    """OneCycle with its default: the betas cycle, too."""
    del folder
    params = {
        "cycle_min_lr": 0.01,
        "cycle_max_lr": 0.1,
        "cycle_first_step_size": 2,
        "cycle_min_mom": "0.5",
        "cycle_max_mom": 0.9,
    }
    more = {"decay_step_size": 1, "decay_lr_rate": 1.0, "decay_mom_rate": 0.01}
    if deepspeed.__name__ == "deepspeed":
        params["cycle_min_mom"] = 0.5  # numbers in strings are ours alone
    engine, found = _engine(deepspeed, stage, ranks, scheduler={"type": "OneCycle", "params": {**params, **more}}), []
    for update in range(7):
        loss = engine(_rows(rank, update)).square().mean()
        engine.backward(loss)
        engine.step()
        found += [loss.item(), *engine.get_lr(), *engine.get_mom()[0]]
    return found


SURFACE: dict[str, tuple[Script, int]] = {
    **{f"norms, stage {stage}": (norms, stage) for stage in range(4)},
    "parts, stage 3": (parts, 3),
    "leaves, stage 3": (leaves, 3),
    **{f"cycle, stage {stage}": (cycle, stage) for stage in (0, 2, 3)},
}
