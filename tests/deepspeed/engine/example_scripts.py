"""Scripts in the style of DeepSpeedExamples, which take ``deepspeed`` as an argument: DeepSpeed's own or ours.

python tests/deepspeed/engine/example_scripts.py RANK RANKS FOLDER [NAME ...] runs them with DeepSpeed and prints their numbers.
"""

import argparse
import json
import os
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[3]))
from tests.deepspeed.engine.surface_scripts import SURFACE
from tests.deepspeed.rate_scripts import RATES

__all__ = ["SCRIPTS", "Net"]


# -- cifar: a classifier over the loader that initialize makes, with a config in a dict ------------------------------------


class Net(nn.Module):
    """Two convolutions and two linears."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.pool, self.conv2 = nn.Conv2d(3, 4, 3), nn.MaxPool2d(2, 2), nn.Conv2d(4, 4, 3)
        self.fc1, self.fc2 = nn.Linear(4, 8), nn.Linear(8, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.pool(F.relu(self.conv1(x)))
        x = F.relu(self.conv2(x))
        return self.fc2(F.relu(self.fc1(x.flatten(1))))  # type: ignore[no-any-return]


def cifar(deepspeed: Any, rank: int, stage: int, ranks: int, folder: str) -> list[float]:
    """DeepSpeedExamples/training/cifar: AdamW, WarmupLR, clipping, accumulation; at the end a checkpoint."""
    del rank
    args = argparse.Namespace(local_rank=-1, log_interval=2)
    torch.manual_seed(0)
    net = Net()
    parameters = [p for p in net.parameters() if p.requires_grad]
    images, labels = torch.randn(32 * ranks, 3, 8, 8), torch.arange(32 * ranks) % 10
    config = {
        "train_batch_size": 8 * ranks,
        "gradient_accumulation_steps": 2,
        "steps_per_print": 2000,
        "optimizer": {
            "type": "AdamW",
            "params": {"lr": 0.01, "betas": [0.8, 0.999], "eps": 1e-8, "weight_decay": 3e-7, "torch_adam": True},
        },
        "scheduler": {"type": "WarmupLR", "params": {"warmup_min_lr": 0, "warmup_max_lr": 0.01, "warmup_num_steps": 4}},
        "gradient_clipping": 1.0,
        "prescale_gradients": False,
        "wall_clock_breakdown": False,
        "zero_optimization": {"stage": stage, "overlap_comm": False},
    }
    engine, optimizer, loader, scheduler = deepspeed.initialize(
        args=args,
        model=net,
        model_parameters=parameters,
        training_data=torch.utils.data.TensorDataset(images, labels),
        config=config,
    )
    criterion, found = nn.CrossEntropyLoss(), []
    for epoch in range(2):
        running = 0.0
        for i, data in enumerate(loader):
            inputs, targets = data[0], data[1]
            loss = criterion(engine(inputs), targets)
            engine.backward(loss)
            engine.step()
            running += loss.item()
            if i % args.log_interval == args.log_interval - 1:
                found += [running / args.log_interval, optimizer.param_groups[0]["lr"]]
                running = 0.0
        found += [epoch, engine.global_steps, engine.global_samples, scheduler.get_last_lr()[0]]
    with torch.no_grad():
        found.append(criterion(engine(images), labels).item())
    engine.save_checkpoint(f"{folder}/cifar-{stage}")
    return found


# -- gan: two engines, several backward passes in a step -------------------------------------------------------------------


def gan(deepspeed: Any, rank: int, stage: int, ranks: int, folder: str) -> list[float]:
    """DeepSpeedExamples/training/gan, with two changes that DeepSpeed 0.19.8 needs for torch's results.

    The generator's loss goes through the discriminator, whose params are frozen meanwhile: DeepSpeed adds their gradients
    to its next update. The discriminator has one backward pass, as DeepSpeed does not sum two in these stages.
    """
    del ranks, folder
    torch.manual_seed(0)
    net_g = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 6), nn.Tanh())
    net_d = nn.Sequential(nn.Linear(6, 8), nn.LeakyReLU(0.2), nn.Linear(8, 1), nn.Sigmoid())
    adam = {"type": "Adam", "params": {"lr": 0.01, "betas": [0.5, 0.999], "torch_adam": True, "adam_w_mode": False}}
    config = {"train_micro_batch_size_per_gpu": 4, "optimizer": adam, "zero_optimization": {"stage": stage}}
    of_d, _, _, _ = deepspeed.initialize(model=net_d, model_parameters=net_d.parameters(), config=config)
    of_g, _, _, _ = deepspeed.initialize(model=net_g, model_parameters=net_g.parameters(), config=config)
    criterion, found = nn.BCELoss(), []
    draw = torch.Generator().manual_seed(7 + rank)
    for _ in range(4):
        real, noise = torch.randn(4, 6, generator=draw), torch.randn(4, 4, generator=draw)
        ones, zeros = torch.ones(4), torch.zeros(4)
        net_d.zero_grad()
        loss_real = criterion(of_d(real).view(-1), ones)
        fake = of_g(noise)
        loss_fake = criterion(of_d(fake.detach()).view(-1), zeros)
        of_d.backward(loss_real + loss_fake)
        of_d.step()
        for p in net_d.parameters():
            p.requires_grad_(False)
        net_g.zero_grad()
        loss_g = criterion(of_d(fake).view(-1), ones)
        of_g.backward(loss_g)
        of_g.step()
        for p in net_d.parameters():
            p.requires_grad_(True)
        found += [loss_real.item(), loss_fake.item(), loss_g.item()]
    return found


# -- a loop as transformers' Trainer and accelerate run it -----------------------------------------------------------------


def trainer(deepspeed: Any, rank: int, stage: int, ranks: int, folder: str) -> list[float]:
    """Boundaries set by accelerate, an epoch that ends amid an accumulation, a scheduler of torch over a torch optimizer."""
    del ranks, folder
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    tiny = LlamaConfig(
        vocab_size=32, hidden_size=8, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1
    )
    model = LlamaForCausalLM(tiny)
    named = [*model.named_parameters()]
    groups = [
        {"params": [p for n, p in named if "norm" not in n], "weight_decay": 0.1},
        {"params": [p for n, p in named if "norm" in n], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=0.02)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda k: 1 / (1 + 0.3 * k))
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 3,
        "gradient_clipping": 0.5,
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
    }
    engine, wrapped, _, _ = deepspeed.initialize(model=model, optimizer=optimizer, lr_scheduler=scheduler, config=config)
    draw, found, micros = torch.Generator().manual_seed(3 + rank), [], 5
    for _ in range(2):
        engine.train()
        for i in range(micros):
            tokens = torch.randint(0, 32, (2, 6), generator=draw)
            sync = i % 3 == 2 or i == micros - 1
            loss = engine(input_ids=tokens, labels=tokens).loss
            engine.set_gradient_accumulation_boundary(is_boundary=sync)
            engine.backward(loss)
            engine.step()
            found.append(loss.item())
            if sync:
                found += [float(engine.get_global_grad_norm() or 0.0) if stage else 0.0, *engine.get_lr()]
        engine.eval()
        with torch.no_grad():
            found.append(engine(input_ids=tokens, labels=tokens).loss.item())
    del wrapped
    return [*found, engine.global_steps]


SCRIPTS: dict[str, tuple[Callable[[Any, int, int, int, str], list[float]], int]] = {
    **{f"cifar, stage {stage}": (cifar, stage) for stage in range(4)},
    **{f"gan, stage {stage}": (gan, stage) for stage in (1, 2)},
    **{f"trainer, stage {stage}": (trainer, stage) for stage in (0, 1, 2, 3)},
    **SURFACE,
    **RATES,
}


def main() -> None:
    """With DeepSpeed itself: this rank's numbers of each script, as the last line."""
    warnings.simplefilter("ignore")
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    rank, ranks, folder = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    path = f"{folder}/store"
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks))
    torch.distributed.init_process_group("gloo", store=torch.distributed.FileStore(path, ranks), rank=rank, world_size=ranks)
    deepspeed.init_distributed(dist_backend="gloo")
    found: dict[str, Any] = {}
    for name, (script, stage) in SCRIPTS.items():
        if sys.argv[4:] and not name.startswith(tuple(sys.argv[4:])):
            continue
        try:
            found[name] = script(deepspeed, rank, stage, ranks, folder)
        except Exception as error:  # what DeepSpeed cannot do on this machine is no failure of ours
            found[name] = repr(error)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
