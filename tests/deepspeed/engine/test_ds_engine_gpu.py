"""Engines on a simulated GPU: no races, no early frees, and no wait of the host in the loop."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import functional_ds as fds
from functional_ds import comm
from functional_ds.testing import simulated_cuda

WARMUP = {"type": "WarmupLR", "params": {"warmup_num_steps": 4, "warmup_type": "linear"}}


def losses(device: str, stage: int, gpu: Any = None) -> list[Tensor]:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).to(device)
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.1}},
        "scheduler": WARMUP,
        "zero_optimization": {"stage": stage},
    }
    engine, *_ = fds.deepspeed.initialize(model=module, config=config)
    assert engine.device.type == torch.device(device).type
    rows = [torch.randn(4, 3, generator=torch.Generator().manual_seed(i)).to(device) for i in range(6)]
    found = []
    for i, x in enumerate(rows):
        if i == 4 and gpu is not None:
            gpu.clear()  # the first steps allocate and look through graphs
        loss = engine(x).square().mean()
        found.append(engine.backward(loss))
        engine.step()
    if gpu is not None:
        gpu.check(host_syncs=True)
    assert engine.get_lr() == pytest.approx([engine.plan.schedule.rate(3)])
    return [each.detach().cpu() for each in found]


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_a_loop_never_waits(stage: int) -> None:
    def on_a_gpu() -> list[Tensor]:
        with simulated_cuda() as gpu:
            return losses("cuda", stage, gpu)

    for found, expected in zip(
        comm.simulate(on_a_gpu, world_size=2), comm.simulate(losses, "cpu", stage, world_size=2), strict=True
    ):
        torch.testing.assert_close(found, expected)
