"""Trains a row of layers as a pipeline of two ranks with DeepSpeed's own engine; prints the losses of each update.

python tests/deepspeed/api/pipeline_run.py RANK STORE
"""

import json
import os
import sys
import warnings
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["CONFIG", "layers", "loss_of", "micros", "values"]

UPDATES, WORDS = 3, 7
CONFIG: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 4,
    "gradient_clipping": 0.5,
    "zero_allow_untested_optimizer": True,
    "zero_optimization": {"stage": 1},
    "optimizer": {"type": "AdamW", "params": {"lr": 0.05, "torch_adam": True, "weight_decay": 0.01}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 2, "warmup_max_lr": 0.05}},
}


def double(x: Tensor) -> Tensor:
    """A layer without params."""
    return x * 2


def as_head(module: nn.Module, x: Tensor) -> Tensor:
    """The embedding as the head."""
    weight: Any = module.weight
    return x @ weight.T


def layers(pipe: Any) -> list[Any]:
    """A row with a tied layer; ``pipe`` is ``deepspeed.pipe``, or ours."""
    return [
        pipe.TiedLayerSpec("embed", nn.Embedding, WORDS, 4),
        pipe.LayerSpec(nn.Linear, 4, 4),
        nn.Tanh(),
        double,
        pipe.LayerSpec(nn.Linear, 4, 4),
        pipe.TiedLayerSpec("embed", nn.Embedding, WORDS, 4, forward_fn=as_head),
    ]


def loss_of(y: Tensor, labels: Tensor) -> Tensor:
    """Of the last layer's result."""
    return nn.functional.cross_entropy(y.flatten(0, 1), labels.flatten())


def values(module: nn.Module) -> nn.Module:
    """The module with fixed params, by their names."""
    with torch.no_grad():
        for name, p in module.named_parameters():
            p.copy_(torch.linspace(-1, 1, p.numel()).view(p.shape).roll(len(name), 0))
    return module


def micros(update: int) -> list[tuple[Tensor, Tensor]]:
    """The micro-batches of an update."""
    words = torch.arange(4 * 2 * 5).view(4, 2, 5).mul(update + 3) % WORDS
    return [(rows, rows.roll(1, 1)) for rows in words]


def main() -> None:
    """Prints the losses as the last line."""
    warnings.simplefilter("ignore")
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    rank, path = int(sys.argv[1]), sys.argv[2]
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2")
    torch.distributed.init_process_group("gloo", store=torch.distributed.FileStore(path, 2), rank=rank, world_size=2)
    deepspeed.init_distributed(dist_backend="gloo")
    module = deepspeed.pipe.PipelineModule(layers(deepspeed.pipe), num_stages=2, loss_fn=loss_of, partition_method="uniform")
    engine, *_ = deepspeed.initialize(model=values(module), config=CONFIG)
    found = []
    for update in range(UPDATES):
        found.append(engine.train_batch(iter(micros(update))).item())
    print(json.dumps(found))


if __name__ == "__main__":
    main()
