"""Batch norms under mixed precision keep fp32 weights beside their fp32 statistics, as their kernels want."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import functional_ds as fds
from functional_ds import comm, transforms


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.Flatten(), nn.Linear(12, 4), nn.BatchNorm1d(4))


def rows(index: int) -> Tensor:
    return torch.randn(8, 2, 4, 4, generator=torch.Generator().manual_seed(index))


def plain(dtype: torch.dtype) -> list[float]:
    """PyTorch's modules in half precision, with fp32 batch norms and fp32 masters of all params."""
    net, losses = network().to(dtype), []
    for module in net:
        if isinstance(module, (nn.BatchNorm1d, nn.BatchNorm2d)):
            module.float()
    masters = {name: p.detach().float() for name, p in network().named_parameters()}
    for index in range(3):
        net.zero_grad()
        loss = net(rows(index).to(dtype)).float().square().mean()
        loss.backward()
        with torch.no_grad():
            for name, p in net.named_parameters():
                masters[name] -= 0.1 * p.grad.float()
                p.copy_(masters[name])
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("policy", ["bf16", "fp16"])
@pytest.mark.parametrize("stage", [None, 1, 3])
def test_batch_norms_stay_wide(policy: str, stage: int | None) -> None:
    def program() -> Any:
        apply, params = fds.functional(network())
        strategy = [transforms.mixed_precision(policy, 1.0), *([] if stage is None else [transforms.zero(stage)])]
        step = fds.train_step(lambda p, x: apply(p, x).float().square().mean(), fds.sgd(0.1))
        step = fds.compose(*strategy)(step)
        state, losses = step.init(params), []
        for index in range(3):
            state, metrics = step(state, rows(index))
            losses.append(metrics["loss"].item())
        assert {b.dtype for b in step.module_buffers(state).values()} == {torch.float32, torch.int64}
        return losses

    dtype = torch.bfloat16 if policy == "bf16" else torch.float16
    assert comm.simulate(program, world_size=1)[0] == pytest.approx(plain(dtype), rel=1e-3)


def test_what_is_wide_and_what_is_not() -> None:
    def stored(policy: str, net: nn.Module) -> dict[str, torch.dtype]:
        _, params = fds.functional(net)
        step = transforms.mixed_precision(policy)(fds.train_step(lambda p, x: x.sum(), fds.sgd(0.1)))
        return {name: leaf.dtype for name, leaf in step.init(params).params.items()}

    assert stored("bf16", network())["1.weight"] == torch.float32
    assert stored("bf16", network())["0.weight"] == torch.bfloat16
    assert stored("bf16,1.*=bf16", network())["1.weight"] == torch.bfloat16
    without = nn.Sequential(nn.BatchNorm1d(3, track_running_stats=False), nn.LayerNorm(3))
    assert set(stored("bf16", without).values()) == {torch.bfloat16}
