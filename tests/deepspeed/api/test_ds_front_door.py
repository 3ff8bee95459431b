"""``initialize`` takes pipelines, and experts that lie over ranks."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from functional_ds import comm, deepspeed
from functional_ds.deepspeed import pipe
from functional_ds.deepspeed.runtime.lr_schedules import WarmupLR
from tests.deepspeed.api.pipeline_run import CONFIG, UPDATES, layers, loss_of, micros, values


@pytest.mark.parametrize("own", [False, True])
def test_a_pipeline_module_becomes_a_pipeline_engine(own: bool) -> None:
    def on_rank() -> list[float]:
        module = values(pipe.PipelineModule(layers(pipe), num_stages=2, loss_fn=loss_of, partition_method="uniform"))
        config, objects = dict(CONFIG), dict[str, Any]()
        if own:
            del config["optimizer"], config["scheduler"]
            held = torch.optim.AdamW(module.parameters(), lr=0.05, weight_decay=0.01)
            objects = {"optimizer": held, "lr_scheduler": WarmupLR(held, warmup_num_steps=2, warmup_max_lr=0.05)}
        engine, *_ = deepspeed.initialize(model=module, config=config, **objects)
        return [engine.train_batch(iter(micros(update))).item() for update in range(UPDATES)]

    for found in comm.simulate(on_rank, world_size=2):
        assert found == pytest.approx([4.064828872680664, 4.276607990264893, 3.517458915710449], rel=1e-5)  # DeepSpeed's own


def experts(ep_size: int, stage: int) -> list[Tensor]:
    """Losses of a layer of experts on two ranks."""
    torch.manual_seed(0)
    layer = deepspeed.moe.MoE(
        4, nn.Linear(4, 4), num_experts=2, ep_size=ep_size, min_capacity=0, use_rts=False, drop_tokens=False
    )
    with torch.no_grad():
        rank = comm.get_rank()
        for place, each in enumerate(layer.deepspeed_moe.experts.deepspeed_experts):
            for p in each.parameters():
                p.mul_(1 + (rank if ep_size == 2 else place))
    config = {
        "train_batch_size": 8,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.05}},
        "zero_optimization": {"stage": stage},
    }
    engine, *_ = deepspeed.initialize(model=layer, config=config)
    draw, found = torch.Generator().manual_seed(comm.get_rank()), []
    for _ in range(3):
        out, balance, _ = engine(torch.randn(4, 4, generator=draw))
        loss = out.square().mean() + balance
        engine.backward(loss)
        engine.step()
        found.append(loss.detach())
    return found


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_experts_over_ranks_train_as_on_each(stage: int) -> None:
    over, each = (comm.simulate(experts, ep_size, stage, world_size=2) for ep_size in (2, 1))
    for ours, expected in zip(over, each, strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-6)
