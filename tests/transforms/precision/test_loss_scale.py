"""Laws 24 and 26 for loss scales by themselves, and the dynamic one's rules."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import functional_ds as fds
from functional_ds import transforms

POWERS = st.integers(-20, 20).map(lambda power: 2.0**power)


@st.composite
def dynamic(draw: st.DrawFn) -> transforms.DynamicScale:
    """A dynamic scale with few steps between its changes."""
    low = draw(st.integers(-4, 4))
    return transforms.DynamicScale(
        2.0 ** (low + draw(st.integers(0, 6))),
        window=draw(st.integers(1, 4)),
        factor=draw(st.sampled_from((2.0, 4.0))),
        hysteresis=draw(st.integers(1, 3)),
        consecutive=draw(st.booleans()),
        minimum=2.0**low,
        maximum=2.0 ** (low + 6 + draw(st.integers(0, 4))),
        settle=draw(st.integers(0, 2)),
    )


SCALES = st.one_of(st.builds(transforms.NoScale), st.builds(transforms.StaticScale, POWERS), dynamic())


@pytest.mark.law(26)
@given(scale=SCALES, finite=st.lists(st.booleans(), max_size=5))
def test_flattening_loses_nothing(scale: Any, finite: list[bool]) -> None:
    """unflatten ∘ flatten = id, static fields included, on fresh and on used records."""
    for good in finite:
        scale = scale.adjust(torch.tensor(good))
    leaves, spec = fds.tree.flatten(scale)
    again = fds.tree.unflatten(spec, leaves)
    assert again == scale
    assert repr(again) == repr(scale)
    assert fds.tree.structure(again) == spec
    assert all(isinstance(leaf, torch.Tensor) for leaf in leaves)


@pytest.mark.law(24)
@given(scale=SCALES, total=st.floats(-1e6, 1e6, width=32, allow_subnormal=False), weight=st.integers(1, 1 << 20))
def test_unscaling_is_exact(scale: Any, total: float, weight: int) -> None:
    """unscale(Weighted(scale(x), w)).mean() = x / w, bitwise, for powers of two."""
    loss = fds.Weighted(torch.tensor(total), torch.tensor(float(weight)))
    scaled = scale.unscale(fds.Weighted(scale.scale(loss.sum), loss.weight))
    if total == 0 or abs(total) > 1e-20:  # smaller ones may underflow
        assert torch.equal(scaled.mean(), loss.mean())
    assert torch.equal(scaled.sum, loss.sum * scale.now)


def by_iterations(scale: transforms.DynamicScale, finite: list[bool]) -> list[float]:
    """The rules in other words: by the number of the iteration and that of the last overflow, in plain numbers."""
    value, last, left, found = scale.initial, -1, scale.hysteresis, []
    for i, good in enumerate(finite):
        if not good:
            if left > 1:
                left -= 1
            else:
                value = max(value / scale.factor, scale.minimum)
            last = i
        else:
            run = i - last - scale.settle
            whole_window = run > 0 and run % scale.window == 0
            if scale.consecutive or whole_window:
                left = scale.hysteresis
            if whole_window:
                value = min(value * scale.factor, scale.maximum)
        found.append(value)
    return found


@given(scale=dynamic(), finite=st.lists(st.booleans(), max_size=30))
def test_the_dynamic_rules(scale: transforms.DynamicScale, finite: list[bool]) -> None:
    """The record's adjustments are those of the rules counted by iterations; old records stay as they were."""
    records = [scale]
    for good in finite:
        records.append(records[-1].adjust(torch.tensor(good)))
    values = [record.value.item() for record in records]
    assert values == [scale.initial, *by_iterations(scale, finite)]
    for record in records:
        assert scale.minimum <= record.value <= scale.maximum
        assert fds.tree.structure(record) == fds.tree.structure(scale)
        assert (record.value.dtype, record.run.dtype, record.patience.dtype) == (torch.float32, torch.int32, torch.int32)


@pytest.mark.parametrize("consecutive", [False, True])
def test_hysteresis(consecutive: bool) -> None:
    """Two overflows with a good step between them: that step restores patience only where they must be consecutive."""
    scale = transforms.DynamicScale(16.0, window=10, hysteresis=2, consecutive=consecutive)
    found = []
    for finite in (False, True, False, False):
        scale = scale.adjust(torch.tensor(finite))
        found.append(scale.value.item())
    assert found == ([16.0, 16.0, 16.0, 8.0] if consecutive else [16.0, 16.0, 8.0, 4.0])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: transforms.StaticScale(0.0), "StaticScale: value=0.0 must be positive"),
        (lambda: transforms.StaticScale(float("inf")), "StaticScale: value=inf must be finite"),
        (lambda: transforms.DynamicScale(window=0), "window=0 must be positive"),
        (lambda: transforms.DynamicScale(window=1.5), "window=1.5 counts steps"),  # type: ignore[arg-type]
        (lambda: transforms.DynamicScale(hysteresis=0), "hysteresis=0 must be positive"),
        (lambda: transforms.DynamicScale(settle=-1), "settle=-1 must not be negative"),
        (lambda: transforms.DynamicScale(factor=1.0), "factor=1.0 must be more than 1"),
        (lambda: transforms.DynamicScale(0.5), r"initial=0.5 must be in 1.0\.\."),
        (lambda: transforms.DynamicScale(maximum=float("inf")), "maximum=inf must be finite"),
        (lambda: transforms.DynamicScale(minimum=-1.0), "minimum=-1.0 must be positive"),
    ],
)
def test_bad_input(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize(
    "scale",
    [
        3.0,
        1000,
        transforms.StaticScale(1000),
        transforms.DynamicScale(48.0),
        transforms.DynamicScale(1000),
        transforms.DynamicScale(factor=1.5),
        transforms.DynamicScale(factor=3),
        transforms.DynamicScale(minimum=3.0),
        transforms.DynamicScale(maximum=2**20 - 1),
    ],
)
def test_warns_of_scales_that_round(scale: Any) -> None:
    with pytest.warns(UserWarning, match="not a power of two"):
        transforms.mixed_precision("fp16", scale)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        transforms.mixed_precision("fp16", 2.0**-3)
        transforms.mixed_precision("fp16", transforms.DynamicScale(1024, factor=4, minimum=1, maximum=2**20))


def test_refuses_what_is_no_scale() -> None:
    with pytest.raises(TypeError, match="'dynamic' is not a loss scale"):
        transforms.mixed_precision("fp16", "dynamic")  # type: ignore[arg-type]
