"""Optimizers against torch's own classes and TorchOpt's."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import functional_ds as fds
from functional_ds import comm, transforms


def loss(params: Any, batch: Tensor) -> Tensor:
    return ((batch @ params["w"] + params["b"]) ** 2).mean()


def fresh() -> dict[str, Tensor]:
    return {"w": torch.linspace(-1, 1, 12).view(4, 3), "b": torch.tensor([0.5, -0.5, 0.0])}


def batch() -> Tensor:
    return torch.randn(8, 4, generator=torch.Generator().manual_seed(1))


def trained(optimizer: Any, *strategy: fds.Transform, steps: int = 4) -> dict[str, Tensor]:
    step = fds.compose(*strategy)(fds.train_step(loss, optimizer))
    state = step.init(fresh())
    for _ in range(steps):
        state, _ = step(state, batch().tensor_split(comm.world().size)[comm.world().rank])
    return step.params(state)  # type: ignore[no-any-return]


def by_torch(make: Any, steps: int = 4) -> dict[str, Tensor]:
    params = {name: p.requires_grad_() for name, p in fresh().items()}
    optimizer = make(list(params.values()))
    for _ in range(steps):
        optimizer.zero_grad()
        loss(params, batch()).backward()
        optimizer.step()
    return {name: p.detach() for name, p in params.items()}


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-6)


def test_adamw_is_torchs() -> None:
    ours = fds.adamw(0.1, betas=(0.8, 0.9), eps=1e-6, weight_decay=0.2)
    assert_same(trained(ours), by_torch(lambda p: torch.optim.AdamW(p, 0.1, (0.8, 0.9), 1e-6, 0.2)))


@pytest.mark.parametrize("stage", [0, 2])
def test_moments_can_be_left_uncorrected(stage: int) -> None:
    """As they are, and updates that are left out are not counted."""
    rule = fds.adamw(0.1, bias_correction=False, weight_decay=0.0, decay="w")
    step = fds.compose(transforms.mixed_precision("f32", 1.0), transforms.zero(stage))(
        fds.train_step(lambda params, x: (params["w"] * x).sum(), rule)
    )
    state = step.init({"w": torch.zeros(1)})
    mean = square = expected = 0.0
    for x in (1.0, float("inf"), -0.5, 2.0):
        state, _ = step(state, torch.full((1,), x))
        if x != float("inf"):
            mean, square = 0.9 * mean + 0.1 * x, 0.999 * square + 0.001 * x * x
            expected -= 0.1 * mean / (square**0.5 + 1e-8)
    assert step.params(state)["w"].item() == pytest.approx(expected, rel=1e-5)
    counts = [leaf.item() for path, leaf in fds.tree.named(state.optimizer) if "steps" in path]
    assert counts == [3.0]
    assert "bias_correction=False" in str(fds.adam(0.1, bias_correction=False))


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("nesterov", [False, True])
def test_sgd_is_torchs(momentum: float, nesterov: bool) -> None:
    if nesterov and not momentum:
        with pytest.raises(ValueError, match="nesterov=True needs momentum"):
            fds.sgd(0.1, nesterov=True)
        return
    ours = fds.sgd(0.1, momentum=momentum, nesterov=nesterov, weight_decay=0.1)
    theirs = by_torch(lambda p: torch.optim.SGD(p, 0.1, momentum, weight_decay=0.1, nesterov=nesterov))
    assert_same(trained(ours), theirs)


@pytest.mark.parametrize("stage", [None, 0, 1, 2, 3])
def test_torchopts_pairs_are_accepted(stage: int | None) -> None:
    """An optax-shaped pair runs as it is, alone and in shards, schedules included."""
    torchopt = pytest.importorskip("torchopt")
    half = transforms.schedule(lambda count: 0.5)
    strategy = (half,) if stage is None else (half, transforms.zero(stage))
    expected = by_torch(lambda p: torch.optim.AdamW(p, 0.05, weight_decay=0.0))
    for found in comm.simulate(lambda: trained(torchopt.adam(0.1), *strategy), world_size=1 if stage is None else 2):
        assert_same(found, expected)


def test_refuses_what_is_no_optimizer() -> None:
    with pytest.raises(TypeError, match=r"torch\.optim\.\w+ changes parameters of its own in place; pass fds\.adamw"):
        fds.train_step(loss, torch.optim.AdamW)
    with pytest.raises(ValueError, match="lr=-1"):
        fds.adamw(-1)
    with pytest.raises(ValueError, match="betas"):
        fds.adamw(1, betas=(0.9, 1.0))


@given(strides=st.permutations([0, 1, 2]))
def test_gradients_of_any_layout(strides: list[int]) -> None:
    """The fused kernels walk flat memory: params and gradients of other strides must come out the same."""
    value = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(0))

    def strided_loss(params: Any, batch: Tensor) -> Tensor:
        return (
            params["w"].permute(strides).sum(0)
            * torch.arange(1.0, 1 + value.permute(strides)[0].numel()).view_as(value.permute(strides)[0])
        ).sum()

    def moved(start: Tensor) -> Tensor:
        step = fds.train_step(strided_loss, fds.sgd(0.5))
        state, _ = step(step.init({"w": start}), torch.ones(1))
        return step.params(state)["w"]  # type: ignore[no-any-return]

    other = value.permute(2, 1, 0).contiguous().permute(2, 1, 0)
    assert other.stride() != value.stride()
    assert torch.equal(moved(value), moved(other))
