"""Any loop of an engine's calls is plain PyTorch's update by the sum of its losses."""

from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import functional_ds as fds
from functional_ds import comm

RATE = 0.5


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))


def rows(rank: int, number: int) -> Tensor:
    return torch.randn(4, 3, generator=torch.Generator().manual_seed(100 * rank + number))


def loss_of(module: Any, x: Tensor, weight: int) -> Tensor:
    return module(x).square().mean() * weight  # type: ignore[no-any-return]


@st.composite
def loops(draw: st.DrawFn) -> dict[str, Any]:
    """Per micro-batch the losses: whether torch's or the engine's backward, and whether an evaluation comes between."""
    micros, updates = draw(st.integers(1, 3)), 2
    loss = st.tuples(st.booleans(), st.booleans())
    return {
        "stage": draw(st.integers(0, 3)),
        "ranks": draw(st.integers(1, 3)),
        "micros": micros,
        "boundary": draw(st.sampled_from(["counted", "set", "step"])),
        "losses": draw(st.lists(st.lists(loss, min_size=1, max_size=2), min_size=micros * updates, max_size=micros * updates)),
    }


def by_engine(loop: dict[str, Any]) -> list[Tensor]:
    zero = {"stage": loop["stage"], **({"stage3_param_persistence_threshold": 0} if loop["stage"] == 3 else {})}
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": loop["micros"],
        "gradient_clipping": 0.0,
        "optimizer": {"type": "SGD", "params": {"lr": RATE}},
        "zero_optimization": zero,
        "managed_gradient_accumulation": loop["boundary"] != "step",
    }
    engine, *_ = fds.deepspeed.initialize(model=model(), config=config)
    rank, number = comm.world().rank, 0
    for i, losses in enumerate(loop["losses"]):
        last = (i + 1) % loop["micros"] == 0
        for directly, evaluates in losses:
            loss = loss_of(engine, rows(rank, number), 1 + number)
            number += 1
            if evaluates:
                with torch.no_grad():
                    engine(rows(rank, 99))
            if loop["boundary"] == "set":
                engine.set_gradient_accumulation_boundary(last)
            if directly:
                loss.backward()  # type: ignore[no-untyped-call]
            else:
                engine.backward(loss)
        if last or loop["boundary"] != "step":
            engine.step()
    assert engine.global_steps == len(loop["losses"]) // loop["micros"]
    return [*engine.functional_step.params(engine.state).values()]


def by_torch(loop: dict[str, Any]) -> list[Tensor]:
    module, number = model(), 0
    optimizer = torch.optim.SGD(module.parameters(), RATE)
    for i, losses in enumerate(loop["losses"]):
        for _ in losses:
            for rank in range(loop["ranks"]):
                (loss_of(module, rows(rank, number), 1 + number) / (loop["micros"] * loop["ranks"])).backward()  # type: ignore[no-untyped-call]
            number += 1
        if (i + 1) % loop["micros"] == 0:
            optimizer.step()
            optimizer.zero_grad()
    return [p.detach() for p in module.parameters()]


@given(loops())
def test_any_loop_is_plain_pytorchs_update(loop: dict[str, Any]) -> None:
    expected = by_torch(loop)
    for found in comm.simulate(by_engine, loop, world_size=loop["ranks"]):
        for a, b in zip(found, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
