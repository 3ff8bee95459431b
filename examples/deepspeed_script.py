"""A training script written for DeepSpeed: it imports deepspeed and knows nothing of functional_ds. Here it runs unchanged.

cd examples
python -m functional_ds.deepspeed deepspeed_script.py --deepspeed_config ds_config.json
torchrun --nproc-per-node 2 -m functional_ds.deepspeed deepspeed_script.py --deepspeed_config ds_config.json
deepspeed deepspeed_script.py --deepspeed_config ds_config.json        where DeepSpeed is installed
"""

import argparse

import deepspeed
import torch
from torch import nn


class Classifier(nn.Module):
    """Two linear layers; returns the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 4))

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(self.body(x).float(), labels)


def main() -> None:
    parser = deepspeed.add_config_arguments(argparse.ArgumentParser())
    parser.add_argument("--local_rank", type=int, default=-1)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--save", default=None, help="a folder for checkpoints")
    args = parser.parse_args()

    torch.manual_seed(0)
    x = torch.randn(512, 16)
    data = torch.utils.data.TensorDataset(x, x[:, :4].argmax(1))
    model = Classifier()
    engine, _, loader, _ = deepspeed.initialize(args=args, model=model, model_parameters=model.parameters(), training_data=data)
    if args.save:
        engine.load_checkpoint(args.save)  # the newest, if there is one
    for epoch in range(args.epochs):
        for inputs, labels in loader:
            loss = engine(inputs.to(engine.device, dtype=torch.bfloat16), labels.to(engine.device))
            engine.backward(loss)
            engine.step()
        if engine.global_rank == 0:
            print(f"epoch {epoch + 1}: {engine.global_steps} steps, loss {loss.item():.3f}, rate {engine.get_lr()[0]:.1e}")
    if args.save:
        engine.save_checkpoint(args.save)


if __name__ == "__main__":
    main()
