"""Law 36 with a third axis: slices of leaves, along with pipelines and ZeRO, are the single-device step."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import functional_ds as fds
from functional_ds import comm, transforms
from functional_ds import pipelining as pp
from tests.transforms.rules import assert_close

TOLERANCE = 2e-5
DIMS = {"up": 1, r"\.bias$": 0, "down": 0}


def _params() -> list[Any]:
    generator = torch.Generator().manual_seed(1)

    def leaf(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator) / 2

    return [{"scale": leaf(6), "up": leaf(6, 12), "bias": leaf(12), "down": leaf(12, 6)} for _ in range(4)]


def _trained(group: comm.Group | None, schedule: pp.Schedule, *strategy: fds.Transform, part: tuple[int, int] = (0, 1)) -> Any:
    def layer(p: Any, x: Tensor) -> Tensor:
        x = x * p["scale"]
        hidden = torch.tanh((x if group is None else comm.copy_to(x, group)) @ p["up"] + p["bias"])
        out = hidden @ p["down"]
        return x + (out if group is None else comm.reduce_from(out, group))

    params = _params()[: schedule.stages]
    model = pp.stages([layer] * schedule.stages, params, loss=lambda y, batch: (y - batch[1]).square().mean())
    strategy = tuple(each(schedule, model) if getattr(each, "__name__", "") == "piped" else each for each in strategy)
    step = fds.compose(*strategy)(fds.train_step(model, fds.adamw(1e-2, eps=1e-4)))
    state = step.init(params)
    whole = torch.linspace(-1, 1, 48).view(8, 6), torch.linspace(1, -2, 48).view(8, 6)
    batch = tuple(x.tensor_split(part[1])[part[0]] for x in whole)
    found = []
    for _ in range(2):
        state, metrics = step(state, batch)
        found.append({name: value.item() for name, value in metrics.items()})
    return found, step.evaluate(state, batch).item(), step.params(state)


@pytest.mark.law(36)
@settings(max_examples=settings.default.max_examples // 3)
@given(
    schedule=st.sampled_from((None, pp.one_f_one_b(2, 4), pp.zbv(2, 4), pp.interleaved_one_f_one_b(2, 2))),
    zero=st.sampled_from((None, 0, 1, 2, 3)),
    tp=st.sampled_from((1, 2, 3)),
    dp=st.sampled_from((1, 2)),
)
def test_three_axes_are_one_device(schedule: pp.Schedule | None, zero: int | None, tp: int, dp: int) -> None:
    """Pipeline × ZeRO-k × tensor parallel, on any mesh: losses, norms, params."""
    dp = dp if zero is not None else 1
    stages = schedule or pp.gpipe(1, 1)

    def program() -> Any:
        mesh = comm.mesh(dp=dp, pp=1 if schedule is None else schedule.ranks, tp=tp)

        def piped(schedule: pp.Schedule, model: pp.Stages) -> fds.Transform:
            return transforms.pipeline(schedule, model, mesh["pp"])

        return _trained(
            mesh["tp"],
            stages,
            *([] if zero is None else [transforms.zero(zero, mesh["dp"])]),
            *([] if schedule is None else [piped]),
            transforms.tensor_parallel(DIMS, mesh["tp"]),
            transforms.clip(0.1),
            part=(mesh["dp"].rank, dp),
        )

    expected = _trained(None, stages, transforms.clip(0.1))
    for found in comm.simulate(program, world_size=dp * tp * stages.ranks):
        for ours, theirs in zip(found[0], expected[0], strict=True):
            assert ours == pytest.approx(theirs, rel=TOLERANCE, abs=TOLERANCE)
        assert found[1] == pytest.approx(expected[1], rel=TOLERANCE)
        assert_close(found[2], expected[2], TOLERANCE)


@pytest.mark.parametrize("zero", [1, 3])
def test_slices_of_leaves_that_are_read_later(zero: int) -> None:
    """Deferred leaves give the slices, and the shards of slices, of the same leaves with values."""

    def program() -> Any:
        mesh = comm.mesh(dp=2, tp=2)
        strategy = transforms.zero(zero, mesh["dp"]), transforms.tensor_parallel(DIMS, mesh["tp"])
        step = fds.compose(*strategy)(fds.train_step(lambda p, x: p[0]["up"].sum(), fds.sgd(0.1)))
        whole = _params()
        deferred = fds.from_source(whole, dict(fds.tree.named(whole)).__getitem__)
        return step.params(step.init(deferred)), whole

    for found, whole in comm.simulate(program, world_size=4):
        assert_close(found, whole, 0.0)


@pytest.mark.parametrize("zero", [None, 1])
def test_optimizers_that_look_at_whole_leaves_refuse_slices(zero: int | None) -> None:
    """Alone or in shards; what is routed elsewhere is no matter."""

    def begin(rule: Any) -> None:
        mesh = comm.mesh(dp=2, tp=2)
        chain = [*([] if zero is None else [transforms.zero(zero, mesh["dp"])]), transforms.tensor_parallel(DIMS, mesh["tp"])]
        fds.compose(*chain)(fds.train_step(lambda p, x: p[0]["up"].sum(), rule)).init(_params())

    for name, rule in (("lamb", fds.lamb(0.1)), ("muon", fds.muon(0.1, fds.adamw(0.1)))):
        with pytest.raises(
            ValueError, match=rf"{name}: '0.\w+' is the slice (.|\n)* over 2 ranks, but {name} looks at whole leaves"
        ):
            comm.simulate(lambda rule=rule: begin(rule), world_size=4)
        comm.simulate(lambda rule=rule: begin(fds.param_groups(dict.fromkeys(DIMS, fds.adamw(0.1)), rule)), world_size=4)


def test_what_does_not_divide_or_match() -> None:
    step = fds.train_step(lambda p, x: p[0]["up"].sum(), fds.sgd(0.1))

    def init(dims: dict[str, int]) -> Any:
        return comm.simulate(lambda: transforms.tensor_parallel(dims)(step).init(_params()), world_size=5)

    with pytest.raises(ValueError, match=r"'0.up' of shape \[6, 12\] does not divide along dim 1 by the 5 ranks"):
        init({"up": 1})
    with pytest.raises(ValueError, match=r"'upp' matches no path; the nearest is '\d\.up'"):
        init({"upp": 1})
    with pytest.raises(ValueError, match="along dim 2"):
        init({"up": 2})
    with pytest.raises(ValueError, match="matches 'u' and another expression"):
        transforms.tensor_parallel({"up": 0, "u": 1})(step).init(_params())
    with pytest.raises(TypeError, match="is no group"):
        transforms.tensor_parallel({"up": 0}, 3)  # type: ignore[arg-type]
