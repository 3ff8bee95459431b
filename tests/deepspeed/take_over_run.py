"""Has DeepSpeed itself train, save, and go on from what it has saved: ``python take_over_run.py RANKS FOLDER RANK``."""

import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

__all__ = ["cases", "config", "drive", "network", "resumed"]

schedules = torch.optim.lr_scheduler
Make = Callable[[Any], Any] | None
WARMUP = {"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 8, "warmup_type": "linear"}}}
MADE: dict[str, tuple[Make, dict[str, Any]]] = {
    "StepLR": (lambda optimizer: schedules.StepLR(optimizer, 2, 0.5), {}),
    "ExponentialLR": (lambda optimizer: schedules.ExponentialLR(optimizer, 0.7), {}),
    "betas": (lambda optimizer: schedules.OneCycleLR(optimizer, 0.05, total_steps=9), {}),
    "a config's": (None, WARMUP),
    "none": (None, {}),
}


def network(seed: int) -> nn.Module:
    """With running statistics, and no bias before them, whose gradients would be rounding alone."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 4, bias=False), nn.BatchNorm1d(4), nn.Linear(4, 1))


def config(stage: int) -> dict[str, Any]:
    base = {"train_micro_batch_size_per_gpu": 4, "gradient_clipping": 0.0, "zero_allow_untested_optimizer": True}
    return {**base, "zero_force_ds_cpu_optimizer": False, "zero_optimization": {"stage": stage}}


def drive(engine: Any, updates: range) -> list[float]:
    """Each update's loss and its groups' rates; the same rows on all ranks, so that their statistics are equal."""
    found = []
    for update in updates:
        x = torch.randn(4, 3, generator=torch.Generator().manual_seed(update))
        loss = engine(x).square().mean()
        engine.backward(loss)
        engine.step()
        found += [loss.item(), *(float(group["lr"]) for group in engine.optimizer.param_groups)]
    return found


def cases(folder: Path) -> Iterator[tuple[str, Path, tuple[str, int, dict[str, bool]]]]:
    """A name, the checkpoint, and how it is loaded."""
    for kind in MADE:
        for stage in (0, 1, 2, 3):
            place = folder / f"{kind}-{stage}"
            for options in ({}, {"load_lr_scheduler_states": False}):
                yield f"{place.name} {options}", place, (kind, stage, options)


def engine_of(deepspeed: Any, kind: str, stage: int, seed: int) -> Any:
    make, more = MADE[kind]
    module = network(seed)
    weights = [p for p in module.parameters() if p.ndim > 1]
    others = {"params": [p for p in module.parameters() if p.ndim < 2], "lr": 0.007, "weight_decay": 0.2}
    optimizer = torch.optim.AdamW([{"params": weights}, others], lr=0.02)
    scheduler = None if make is None else make(optimizer)
    return deepspeed.initialize(model=module, optimizer=optimizer, lr_scheduler=scheduler, config={**config(stage), **more})[0]


def resumed(deepspeed: Any, place: Path, kind: str, stage: int, options: dict[str, bool]) -> list[float]:
    """A new engine goes on from the checkpoint; its last running statistics, too."""
    engine = engine_of(deepspeed, kind, stage, 0)
    path, client = engine.load_checkpoint(str(place), **options)
    found = drive(engine, range(3, 6))
    statistics = engine.module[1].running_mean.tolist()
    return [*found, *statistics, client["epoch"], engine.global_steps, engine.global_samples, float(path is not None)]


def main() -> None:
    ranks, folder, rank = int(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
    import deepspeed

    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks))
    store = torch.distributed.FileStore(str(folder / "store"), ranks)
    torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
    deepspeed.init_distributed(dist_backend="gloo")
    found = {}
    for name, place, (kind, stage, options) in cases(folder):
        if not options:
            engine = engine_of(deepspeed, kind, stage, 1)
            drive(engine, range(3))
            engine.save_checkpoint(str(place), client_state={"epoch": stage})
        found[name] = resumed(deepspeed, place, kind, stage, options)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
