"""A script in the manner of DeepSpeedExamples' CIFAR-10, as a user of DeepSpeed writes it; prints the losses of an epoch."""

import argparse
import os

import deepspeed
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer
from torch import nn


class Net(nn.Module):
    def __init__(self, args):
        super().__init__()
        self.conv1 = nn.Conv2d(3, 6, 5)
        self.pool = nn.MaxPool2d(2, 2)
        self.fc1 = nn.Linear(216, 16)
        self.moe = args.moe
        if self.moe:
            self.moe_layer = deepspeed.moe.layer.MoE(
                hidden_size=16,
                expert=nn.Linear(16, 16),
                num_experts=2,
                ep_size=args.ep_world_size,
                use_residual=True,
                k=1,
                min_capacity=0,
                noisy_gate_policy=None,
            )
        self.fc3 = nn.Linear(16, 10)

    def forward(self, x):
        x = self.pool(torch.relu(self.conv1(x))).view(-1, 216)
        x = torch.relu(self.fc1(x))
        if self.moe:
            x, _, _ = self.moe_layer(x)
        return self.fc3(x)


def main():
    parser = argparse.ArgumentParser(description="CIFAR")
    parser.add_argument("--local_rank", type=int, default=-1)
    parser.add_argument("--moe", default=False, action="store_true")
    parser.add_argument("--ep-world-size", default=1, type=int)
    parser.add_argument("--stage", default=0, type=int)
    args = deepspeed.add_config_arguments(parser).parse_args()

    deepspeed.init_distributed()
    get_accelerator().set_device(int(os.environ["LOCAL_RANK"]))
    torch.manual_seed(0)
    draw = torch.Generator().manual_seed(1)
    images, labels = torch.randn(32, 3, 16, 16, generator=draw), torch.randint(10, (32,), generator=draw)
    if torch.distributed.get_rank() != 0:
        torch.distributed.barrier()
    trainset = torch.utils.data.TensorDataset(images, labels)
    if torch.distributed.get_rank() == 0:
        torch.distributed.barrier()
    net = Net(args)
    parameters = filter(lambda p: p.requires_grad, net.parameters())
    if args.moe:
        parameters = split_params_into_different_moe_groups_for_optimizer({"params": list(parameters), "name": "parameters"})
    config = {
        "train_batch_size": 16,
        "steps_per_print": 2000,
        "optimizer": {"type": "Adam", "params": {"lr": 0.001, "betas": [0.8, 0.999], "eps": 1e-8, "weight_decay": 3e-7}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_min_lr": 0, "warmup_max_lr": 0.001, "warmup_num_steps": 10}},
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": args.stage, "overlap_comm": True, "reduce_bucket_size": 50000000},
    }
    engine, optimizer, loader, _ = deepspeed.initialize(
        args=args, model=net, model_parameters=parameters, training_data=trainset, config=config
    )
    device = get_accelerator().device_name(engine.local_rank)
    for inputs, targets in loader:
        loss = nn.functional.cross_entropy(engine(inputs.to(device)), targets.to(device))
        engine.backward(loss)
        engine.step()
        print(f"loss: {loss.item():.6f} lr {optimizer.param_groups[0]['lr']:.6f}")


if __name__ == "__main__":
    main()
