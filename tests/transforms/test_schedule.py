"""Schedules against torch's schedulers where there is one, and DeepSpeed's formulas."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import functional_ds as fds
from functional_ds import transforms

UPDATES = 30
WITHIN = 1e-6  # a few roundings of fp32


def factors(fn: Any, updates: int = UPDATES) -> list[float]:
    """The factor of each update; an int and a tensor give the same."""
    found = [fn(i) for i in range(updates)]
    assert [f.item() for f in found] == [fn(torch.tensor(i)).item() for i in range(updates)]
    return [f.item() for f in found]


def by_torch(make: Callable[[torch.optim.Optimizer], torch.optim.lr_scheduler.LRScheduler], skip: int = 0) -> list[float]:
    """The rates of a scheduler over an optimizer whose rate is 1, from the update after ``skip`` on."""
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], 1.0)
    scheduler, found = make(optimizer), []
    for _ in range(UPDATES + skip):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return [float(rate) for rate in found[skip:]]


floors = st.sampled_from((0.0, 0.1, 1.0))
sizes = st.integers(1, 20)


@given(steps=sizes, floor=st.sampled_from((0.1, 0.5, 1.0)))
def test_a_linear_warm_up_is_torchs(steps: int, floor: float) -> None:
    """LinearLR counts from the start factor on, so its second rate is that of the first update here."""
    expected = by_torch(lambda o: torch.optim.lr_scheduler.LinearLR(o, floor, total_iters=steps), skip=1)
    assert factors(transforms.warmup(steps, floor=floor)) == pytest.approx(expected, abs=WITHIN)


@given(steps=st.integers(2, 20), floor=floors)
def test_a_logarithmic_warm_up_is_deepspeeds(steps: int, floor: float) -> None:
    """WarmupLR: min + (max - min) log(i + 1) / log(steps)."""
    expected = [floor + (1 - floor) * min(1.0, math.log(i + 1) / math.log(steps)) for i in range(UPDATES)]
    assert factors(transforms.warmup(steps, floor=floor, shape="log")) == pytest.approx(expected, abs=WITHIN)


@given(steps=st.integers(0, 10), more=st.integers(0, 15), floor=floors, shape=st.sampled_from(("linear", "log")))
def test_warm_up_and_decay_is_deepspeeds(steps: int, more: int, floor: float, shape: Any) -> None:
    """WarmupDecayLR: after the warm-up (total - i) / max(1, total - steps), at least 0."""
    total, up = steps + more, factors(transforms.warmup(steps, shape=shape))
    down = [max(0.0, (total - i) / max(1, total - steps)) for i in range(UPDATES)]
    expected = [floor + (1 - floor) * (up[i] if i < steps else down[i]) for i in range(UPDATES)]
    assert factors(transforms.warmup_decay(steps, total, floor=floor, shape=shape)) == pytest.approx(expected, abs=WITHIN)


@pytest.mark.parametrize("shape", ["linear", "log"])
def test_the_cosine_follows_a_warmup(shape: Any) -> None:
    cosine, up = (
        factors(transforms.warmup_cosine(3, 9, floor=0.2, shape=shape), 10),
        factors(transforms.warmup(3, shape=shape), 3),
    )
    assert cosine[:3] == up
    assert cosine[3:] == pytest.approx(factors(transforms.warmup_cosine(0, 6, floor=0.2), 7))


@given(total=st.integers(2, 20), floor=floors)
def test_the_cosine_is_torchs(total: int, floor: float) -> None:
    """CosineAnnealingLR up to its end; after it, this one stays."""
    expected = by_torch(lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, total, floor))[: total + 1]
    assert factors(transforms.warmup_cosine(0, total, floor=floor), total + 1) == pytest.approx(expected, abs=WITHIN)


@given(up=sizes, down=st.none() | sizes, floor=floors)
def test_one_cycle_is_torchs(up: int, down: int | None, floor: float) -> None:
    """The first cycle of CyclicLR, whose rate before any update is the floor."""
    total = up + (down or up)

    def make(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
        return torch.optim.lr_scheduler.CyclicLR(optimizer, floor, 1.0, up, down, cycle_momentum=False)

    expected = by_torch(make, skip=1)[: min(total, UPDATES)]
    assert factors(transforms.one_cycle(up, down, floor=floor), len(expected)) == pytest.approx(expected, abs=WITHIN)


@given(up=st.integers(1, 5), floor=floors, decay=st.sampled_from((0.0, 0.5)), every=st.integers(1, 4))
def test_what_follows_the_cycle_is_deepspeeds(up: int, floor: float, decay: float, every: int) -> None:
    """OneCycle: min / (1 + decay · (i - total + 1) / decay_steps) from i = total on."""
    expected = [floor / (1 + decay * (i - 2 * up + 1) / every) for i in range(2 * up, UPDATES)]
    found = factors(transforms.one_cycle(up, floor=floor, decay=decay, decay_steps=every))[2 * up :]
    assert found == pytest.approx(expected, abs=WITHIN)


@given(steps=sizes, rate=st.sampled_from((0.0, 0.5, 3.0)), staircase=st.booleans())
def test_the_range_test_is_deepspeeds(steps: int, rate: float, staircase: bool) -> None:
    """LRRangeTest: min · (1 + rate · interval), interval (i + 1) / steps or its whole part."""
    intervals = [(i + 1) // steps if staircase else (i + 1) / steps for i in range(UPDATES)]
    found = factors(transforms.range_test(steps, rate=rate, staircase=staircase))
    assert found == pytest.approx([1 + rate * interval for interval in intervals], rel=WITHIN)


def test_a_step_follows_them() -> None:
    """The first update has the first factor, in the metrics and in how far params move."""
    step = transforms.schedule(transforms.warmup(4))(fds.train_step(lambda p, x: (p["w"] * x).sum(), fds.sgd(1.0)))
    state, moved = step.init({"w": torch.zeros(())}), []
    for _ in range(5):
        before = step.params(state)["w"].item()
        state, metrics = step(state, torch.ones(1))
        moved.append(before - step.params(state)["w"].item())
        assert metrics["rate"].item() == pytest.approx(moved[-1])
    assert moved == pytest.approx([0.25, 0.5, 0.75, 1.0, 1.0])
    assert "schedule(warmup(4, floor=0.0, shape='linear'))" in str(step)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: transforms.warmup(-1), "steps=-1"),
        (lambda: transforms.warmup(3, floor=2.0), "floor=2.0"),
        (lambda: transforms.warmup_cosine(1, 5, floor=-3.0), "floor=-3.0"),
        (lambda: transforms.warmup_cosine(1, 5, floor=2.0), "floor=2.0"),
        (lambda: transforms.warmup(3, shape="cubic"), "shape='cubic'"),  # type: ignore[arg-type]
        (lambda: transforms.warmup_decay(5, 3), r"steps=5 must be in 0..total=3"),
        (lambda: transforms.one_cycle(0), "up=0"),
        (lambda: transforms.one_cycle(2, decay=-1.0), "decay=-1.0"),
        (lambda: transforms.range_test(0), "steps=0"),
        (lambda: transforms.range_test(1, rate=-1.0), "rate=-1.0"),
    ],
)
def test_bad_input(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()
