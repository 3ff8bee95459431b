"""Laws 23, 24, 27: accumulation, scaling, clipping; schedules and mixed precision beside them."""

import warnings
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import functional_ds as fds
from functional_ds import comm, transforms
from tests.transforms.models import CASES, own_rows, run

STAGES = (0, 1, 2, 3)


def gradient(*strategy: fds.Transform, scale: float = 1.0, limit: float | None = None, rows: int = 16) -> dict[str, Any]:
    """The mean gradient that the optimizer is given, as one flat tensor over the ranks' shards, and the metrics."""
    params, loss = CASES["weighted"].make()
    seen: dict[str, Any] = {}

    def scaled(p: Any, batch: Any) -> fds.Weighted:
        value = loss(p, batch)
        return fds.Weighted(value.sum * scale, value.weight * scale)

    def update(inner: Any, step: fds.Step, state: fds.State, grads: fds.Weighted) -> Any:
        seen["norm"] = step.norm(state, grads.sum) / grads.weight
        seen["finite"] = step.finite(state, grads.sum)
        seen["mean"] = [grad / grads.weight for grad in grads.sum]
        return inner(step, state, grads)

    # the first transform that wraps update is the one nearest to the optimizer: it sees what the others made of it
    chain = [fds.wrap("note", update=update), *([] if limit is None else [transforms.clip(limit)]), *strategy]
    step = fds.compose(*chain)(fds.train_step(scaled, fds.sgd(0.0)))
    _, metrics = step(step.init(params), own_rows(CASES["weighted"].batch(rows), comm.world()))
    return {**seen, **metrics}


@pytest.mark.law(23)
@given(j=st.sampled_from((1, 2)), k=st.sampled_from((1, 2, 4)), stage=st.sampled_from(STAGES), n=st.sampled_from((1, 2)))
def test_accumulation_is_the_whole_batch(j: int, k: int, stage: int, n: int) -> None:
    """accumulate(k) on a batch = the step on the whole batch; accumulate(j) ∘ accumulate(k) = accumulate(jk), bitwise."""
    strategy = (transforms.zero(stage),)
    whole = comm.simulate(lambda: gradient(*strategy), world_size=n)
    nested = comm.simulate(lambda: gradient(*strategy, transforms.accumulate(j), transforms.accumulate(k)), world_size=n)
    flat = comm.simulate(lambda: gradient(*strategy, transforms.accumulate(j * k)), world_size=n)
    for a, b, c in zip(whole, nested, flat, strict=True):
        assert all(torch.equal(x, y) for x, y in zip(b["mean"], c["mean"], strict=True))
        torch.testing.assert_close(b["mean"], a["mean"], rtol=1e-5, atol=1e-6)


@pytest.mark.law(24)
@given(power=st.integers(-10, 10), stage=st.sampled_from(STAGES), n=st.sampled_from((1, 2)))
def test_scaling_by_a_power_of_two_changes_no_bit(power: int, stage: int, n: int) -> None:
    """Loss scaling by 2^p changes no gradient bit: a loss and its weight scaled alike give the same mean gradient."""
    plain = comm.simulate(lambda: gradient(transforms.zero(stage)), world_size=n)
    scaled = comm.simulate(lambda: gradient(transforms.zero(stage), scale=2.0**power), world_size=n)
    for a, b in zip(plain, scaled, strict=True):
        assert all(torch.equal(x, y) for x, y in zip(a["mean"], b["mean"], strict=True))
        assert torch.equal(a["loss"], b["loss"])


@pytest.mark.law(27)
@given(limit=st.floats(0.01, 20.0), stage=st.sampled_from(STAGES), n=st.sampled_from((1, 2, 3)))
def test_the_norm_counts_everything_once_and_clipping_commutes(limit: float, stage: int, n: int) -> None:
    """‖g‖² = AR Σ ‖owned shards‖²; clipping commutes with sharding; clip ∘ clip = clip but for torch's 1e-6 beside the norm."""
    alone = gradient(limit=limit, rows=12)
    norm = torch.sqrt(sum((g**2).sum() for g in gradient(rows=12)["mean"]))  # type: ignore[call-overload]
    torch.testing.assert_close(alone["grad_norm"], norm, rtol=1e-5, atol=0)
    torch.testing.assert_close(alone["norm"], torch.minimum(norm, torch.tensor(limit)), rtol=1e-5, atol=0)
    once = comm.simulate(lambda: gradient(transforms.zero(stage), limit=limit, rows=12), world_size=n)
    twice = comm.simulate(lambda: gradient(transforms.zero(stage), transforms.clip(limit), limit=limit, rows=12), world_size=n)
    for a, b in zip(once, twice, strict=True):
        torch.testing.assert_close(a["grad_norm"], norm, rtol=1e-5, atol=0)
        torch.testing.assert_close(a["norm"], alone["norm"], rtol=1e-5, atol=0)
        torch.testing.assert_close(a["mean"], b["mean"], rtol=1e-6 + 1e-6 / limit, atol=0)
        assert a["finite"]


@pytest.mark.parametrize("stage", STAGES)
def test_one_bad_rank_is_not_finite_for_all(stage: int) -> None:
    def program() -> bool:
        found: list[Tensor] = []

        def update(inner: Any, step: fds.Step, state: fds.State, grads: fds.Weighted) -> Any:
            found.append(step.finite(state, grads.sum))
            return inner(step, state, grads)

        step = fds.compose(transforms.zero(stage), fds.wrap("note", update=update))(
            fds.train_step(lambda p, b: (p["w"] * b).sum(), fds.sgd(0.1))
        )
        step(step.init({"w": torch.ones(4)}), torch.full((4,), float("inf") if comm.world().rank == 1 else 1.0))
        return bool(found[0])

    assert comm.simulate(program, world_size=3) == [False] * 3


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("first", ["precision", "zero"])
def test_mixed_precision_trains_in_both_orders(stage: int, first: str) -> None:
    """bf16 with fp32 masters ends near the fp32 step, and step.params gives the fp32 masters."""
    strategy = [transforms.mixed_precision("bf16"), transforms.zero(stage)]
    strategy = strategy if first == "precision" else strategy[::-1]

    def program() -> tuple[list[float], set[torch.dtype]]:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*put it before zero")  # it works, and costs memory
            losses, _, params = run(CASES["mlp"], tuple(strategy), steps=5)
        return losses, {leaf.dtype for leaf in fds.tree.leaves(params)}

    expected = run(CASES["mlp"], (), steps=5)[0]
    for losses, dtypes in comm.simulate(program, world_size=2):
        assert dtypes == {torch.float32}
        torch.testing.assert_close(losses, expected, rtol=2e-2, atol=2e-2)
        assert losses[-1] < losses[0]


def test_masters_see_what_bf16_does_not() -> None:
    """Updates far smaller than a bf16 step still add up."""

    def loss(p: Any, batch: Tensor) -> Tensor:
        return (p["w"] * batch).sum()

    step = transforms.mixed_precision("bf16")(fds.train_step(loss, fds.sgd(1e-4)))
    state = step.init({"w": torch.ones(4)})
    for _ in range(10):
        state, _ = step(state, torch.ones(4))
    torch.testing.assert_close(step.params(state)["w"], torch.full((4,), 1 - 1e-3))
    assert state.params["w"].dtype == torch.bfloat16


def test_schedules_multiply_the_rate() -> None:
    def moved(*strategy: fds.Transform) -> list[float]:
        step = fds.compose(*strategy)(fds.train_step(lambda p, b: (p["w"] * b).sum(), fds.sgd(1.0)))
        state, found = step.init({"w": torch.zeros(1)}), []
        for _ in range(4):
            state, metrics = step(state, torch.ones(1))
            found.append(metrics["rate"].item())
        assert step.params(state)["w"].item() == pytest.approx(-sum(found))
        return found

    assert moved(transforms.schedule(transforms.warmup_cosine(2, 3))) == pytest.approx([0.5, 1.0, 1.0, 0.0])
    halved = moved(transforms.schedule(lambda count: 0.5), transforms.schedule(transforms.warmup_cosine(2, 3)))
    assert halved == pytest.approx([0.25, 0.5, 0.5, 0.0])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: transforms.mixed_precision("fp8"), "policy='fp8' is unknown"),
        (lambda: transforms.accumulate(0), "k=0"),
        (lambda: transforms.accumulate(2.0), "k=2.0"),  # type: ignore[arg-type]
        (lambda: transforms.clip(0.0), "limit=0.0"),
        (lambda: transforms.warmup_cosine(5, 3), "steps=5"),
    ],
)
def test_bad_input(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_refuses_batches_that_do_not_divide() -> None:
    step = transforms.accumulate(3)(fds.train_step(lambda p, b: (p["w"] * b["x"]).sum(), fds.sgd(1.0)))
    state = step.init({"w": torch.zeros(1)})
    with pytest.raises(ValueError, match=r"the leaf at 'x' has 4 rows, which do not divide into 3 micro-batches"):
        step(state, {"x": torch.ones(4)})
    with pytest.raises(ValueError, match=r"no rows to split"):
        transforms.accumulate(3)(fds.train_step(lambda p, b: p["w"].sum(), fds.sgd(1.0)))(state, {"x": torch.tensor(1.0)})
