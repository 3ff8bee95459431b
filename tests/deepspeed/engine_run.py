"""Trains a small module with DeepSpeed's own engine, on one rank; run in a process of its own, which prints what came out.

python tests/deepspeed/engine_run.py < configs.json
"""

import json
import os
import sys
import warnings
from typing import Any

import torch
from torch import nn

__all__ = ["UPDATES", "batches", "model"]

UPDATES, ROWS = 6, 4


def model() -> nn.Module:
    """Two layers with fixed values."""
    found = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
    with torch.no_grad():
        for index, p in enumerate(found.parameters()):
            p.copy_(torch.linspace(-1.0, 1.0, p.numel()).view(p.shape) * (1 + index))
    return found


def batches(bad: int | None, rank: int = 0) -> list[torch.Tensor]:
    """A rank's rows of each update; in one of these nothing may be finite."""
    found = [torch.linspace(-1.0, 2.0 + rank, ROWS * 3).view(ROWS, 3).roll(i, 0) * (1 + i) for i in range(UPDATES)]
    if bad is not None:
        found[bad] = torch.full((ROWS, 3), float("nan"))
    return found


def trained(config: dict[str, Any], bad: int | None, rank: int) -> dict[str, Any]:
    """The rate before each update, whether it was left out, and the values at the end."""
    import deepspeed

    engine, *_ = deepspeed.initialize(model=model(), config=config)
    dtype = next(engine.module.parameters()).dtype
    rates, skipped = [], []
    for batch in batches(bad, rank):
        rates.append(engine.get_lr()[0])
        for micro in batch.to(dtype).chunk(engine.gradient_accumulation_steps()):
            loss = engine(micro).float().square().mean()
            engine.backward(loss)
            engine.step()
        skipped.append(engine.skipped_steps)
    with deepspeed.zero.GatheredParameters(list(engine.module.parameters())):
        values = [value for p in engine.module.parameters() for value in p.detach().float().flatten().tolist()]
    return {"rates": rates, "skipped": skipped, "values": values}


def main() -> None:
    """Reads [[config, bad], ...] and prints what came out of each as the last line."""
    warnings.simplefilter("ignore")
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    rank, ranks, path = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks))
    torch.distributed.init_process_group("gloo", store=torch.distributed.FileStore(path, ranks), rank=rank, world_size=ranks)
    deepspeed.init_distributed(dist_backend="gloo")
    found = [trained(config, bad, rank) for config, bad in json.loads(sys.stdin.read())]
    print(json.dumps(found))


if __name__ == "__main__":
    main()
