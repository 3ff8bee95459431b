"""Stages from functions: what they compute, what they share, and what is refused."""

import functools
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import functional_ds as fds
from functional_ds import pipelining as pp
from functional_ds import transforms as T
from functional_ds.testing import assert_same

BATCH = (torch.linspace(-1, 1, 12).view(4, 3), torch.ones(4, 3))


def _loss(y: Tensor, batch: Any) -> Tensor:
    return (y - batch[1]).square().mean()


def _layer(params: Any, x: Tensor) -> Tensor:
    return torch.tanh(x @ params["w"])


def _params(count: int) -> list[dict[str, Tensor]]:
    return [{"w": torch.eye(3) * (index + 1) / 2} for index in range(count)]


@pytest.mark.law(36)
@given(count=st.integers(1, 5))
def test_stages_are_their_composition(count: int) -> None:
    """stages(params, batch) = loss(f_n(... f_0(inputs))), and so are the params after a step."""
    stages = pp.stages([_layer] * count, _params(count), loss=_loss)

    def whole(params: Any, batch: Any) -> Tensor:
        return _loss(functools.reduce(lambda x, own: _layer(own, x), params, batch[0]), batch)

    ends = []
    for loss in (stages, whole):
        step = fds.train_step(loss, fds.adamw(0.1))
        state, metrics = step(step.init(_params(count)), BATCH)
        ends.append((metrics["loss"], step.params(state)))
    assert_same(*ends)


def test_shared_leaves_get_the_sum() -> None:
    """The gradient of a leaf that stages share is the sum of theirs; whole subtrees, patterns and functions pick leaves."""
    params = {"table": torch.eye(3), "body": {"a": torch.ones(3), "b": torch.full((3,), 2.0)}, "unused": torch.ones(2)}
    stages = pp.stages(
        [
            pp.Piece(lambda table, x: x @ table, uses="table"),
            pp.Piece(lambda p, x: x * p["body.a"] * p["body.b"], uses="body.*"),
            pp.Piece(lambda p, x: x @ p["t"].T * p["b"], uses=lambda p: {"t": p["table"], "b": p["body"]["b"]}),
        ],
        params,
        loss=_loss,
    )
    assert [stage.paths for stage in stages] == [("table", "unused"), ("body.a", "body.b"), ("body.b", "table")]
    leaves = fds.tree.map(lambda leaf: leaf.clone().requires_grad_(), params)
    stages(leaves, BATCH).backward()
    table, body = leaves["table"].detach().clone().requires_grad_(), leaves["body"]
    other = table.detach().clone().requires_grad_()
    _loss(BATCH[0] @ table * body["a"].detach() * body["b"].detach() @ other.T * body["b"].detach(), BATCH).backward()
    torch.testing.assert_close(leaves["table"].grad, table.grad + other.grad)


def test_kept_values_go_over_stages_in_between() -> None:
    """What a stage keeps arrives, by way of stages that do not know of it, with its gradient."""
    stages = pp.stages(
        [
            pp.Piece(lambda p, x: (x * p["w"], {"early": x + p["w"], "count": torch.tensor(2)}), keeps=("early", "count")),
            lambda p, x: torch.tanh(x * p["w"]),
            pp.Piece(lambda p, x, early: x * p["w"] + early, takes="early"),
            pp.Piece(lambda p, x, count: x * p["w"] * count, takes=["count"]),
        ],
        [{"w": torch.tensor(float(index + 1))} for index in range(4)],
        loss=_loss,
    )
    held = {path: torch.tensor(0.5, requires_grad=True) for stage in stages for path in stage.paths}
    first = stages.run(0, held, None, BATCH, None)
    assert fds.tree.structure(first) == fds.tree.structure((0, {"early": 0, "count": 0}))
    assert set(stages.run(2, held, stages.run(1, held, first, BATCH, None), BATCH, None)[1]) == {"count"}
    loss = stages(held, BATCH)
    expected = _loss((torch.tanh(BATCH[0] * 0.5 * 0.5) * 0.5 + BATCH[0] + 0.5) * 0.5 * 2, BATCH)
    torch.testing.assert_close(loss.detach(), expected)
    assert all(grad.abs() > 0 for grad in torch.autograd.grad(loss, list(held.values())))


def test_keys_and_batches_reach_who_asks() -> None:
    """Functions with parameters called batch and key get them; a key that is None means evaluation."""

    def noisy(p: Any, x: Tensor, key: fds.Key | None) -> Tensor:
        return x * p["w"] if key is None else key.dropout(x * p["w"], 0.5, "noise")

    def last(p: Any, x: Tensor, *, batch: Any) -> tuple[fds.Weighted, dict[str, Tensor]]:
        return fds.Weighted(((x * p["w"] - batch[1]) ** 2).sum(), 12.0), {"mean": x.mean()}

    stages = pp.stages([noisy, last], [{"w": torch.ones(())}] * 2)
    step = T.accumulate(2)(fds.train_step(stages, fds.sgd(0.1), seed=3))
    state = step.init([{"w": torch.ones(())}, {"w": torch.ones(())}])
    assert step.evaluate(state, BATCH) == _loss(BATCH[0], BATCH)
    _, metrics = step(state, BATCH)
    expected = fds.Key.of(3).dropout(BATCH[0], 0.5, "noise")
    torch.testing.assert_close(metrics["mean"], expected.mean())


def test_a_loss_input_runs_the_last_stage() -> None:
    """stages(params, LossInput(batch, x)) = the last stage of x; a cast leaves x alone; it is refused as a batch."""
    stages = pp.stages([_layer, _layer], _params(2), loss=_loss)
    held = stages.by_path(_params(2))
    x = stages.run(0, held, None, BATCH, None)
    given = pp.LossInput(BATCH, x)
    assert_same(stages(held, given), stages(held, BATCH))
    cast = fds.tree.map(lambda leaf: leaf.double(), given)
    assert cast.x is x
    assert cast.batch[0].dtype == torch.float64
    for use in (lambda: given[0], lambda: given.ids, lambda: list(given)):
        with pytest.raises(ValueError, match=r"train_step\(stages, optimizer\)"):
            use()


def test_check_names_the_stage() -> None:
    """A stage that cannot take what the one before gives is named, with shapes and reason; good ones give their shapes."""
    params = [{"w": torch.ones(3, 4)}, {"w": torch.ones(4, 2)}, {"w": torch.ones(3, 3)}]
    good = pp.stages([_layer, _layer], params[:2], loss=lambda y, batch: y.sum())
    handed = good.check(params[:2], BATCH)
    assert [(x.shape, x.device.type) for x in handed] == [((4, 4), "meta")]
    bad = pp.stages([_layer, _layer, _layer], params, loss=lambda y, batch: y.sum())
    with pytest.raises(ValueError, match=r"stage 2 \(_layer\) cannot take what stage 1 gives, float32\[4, 2\]: RuntimeError"):
        bad.check(params, BATCH)
    with pytest.raises(ValueError, match=r"stage 0 .* only tensors are sent"):
        pp.stages([lambda p, x: (x, "text"), _layer], params[:2], loss=_loss).check(params[:2], BATCH)
    with pytest.raises(ValueError, match=r"stage 1 .* the loss must be a scalar"):
        pp.stages([_layer, _layer], params[:2]).check(params[:2], BATCH)


def test_check_uses_values_where_it_has_to() -> None:
    """A stage that loops over its data is run on the data."""

    def branching(p: Any, x: Tensor) -> Tensor:
        return x * p["w"] if x.sum() > 100 else x[:, :2]

    stages = pp.stages([branching, lambda p, x: x * p["w"]], [{"w": torch.ones(())}] * 2, loss=lambda y, batch: y.sum())
    assert stages.check([{"w": torch.ones(())}] * 2, BATCH)[0].shape == (4, 2)


@pytest.mark.parametrize(
    ("functions", "params", "match"),
    [
        ([], [], "functions is empty"),
        ([_layer], {"w": torch.ones(1)}, "uses="),
        ([_layer, _layer], [{"w": torch.ones(1)}], "1 entries for 2 functions"),
        ([pp.Piece(_layer, uses="v")], {"w": torch.ones(1)}, "'v' names nothing; the paths are w"),
        ([pp.Piece(_layer, takes=("a",))], [{"w": torch.ones(1)}], "takes 'a', which no stage before it keeps"),
        ([pp.Piece(_layer, keeps=("a",))], [{"w": torch.ones(1)}], r"no later stage takes \['a'\]"),
        ([pp.Piece(_layer, uses=lambda p: "no path")], {"w": torch.ones(1)}, "pick leaves"),
    ],
)
def test_bad_stages_are_refused(functions: Any, params: Any, match: str) -> None:
    """What does not fit together is named before anything runs."""
    with pytest.raises(ValueError, match=match):
        pp.stages(functions, params, loss=_loss)
    with pytest.raises(TypeError, match="neither a function"):
        pp.stages([3], [{}])  # type: ignore[list-item]


def test_what_is_kept_is_checked() -> None:
    """A function that keeps other names than it says is refused."""
    stages = pp.stages(
        [pp.Piece(lambda p, x: (x, {"b": x}), keeps=("a",)), pp.Piece(lambda p, x, a: x, takes=("a",))],
        [{"w": torch.ones(1)}] * 2,
        loss=_loss,
    )
    with pytest.raises(ValueError, match=r"stage that keeps \['a'\]"):
        stages([{"w": torch.ones(1)}] * 2, BATCH)


def test_stages_are_readable() -> None:
    """The text has each stage's name, leaves and parameters."""
    two = pp.stages([_layer, pp.Piece(_layer, name="second")], _params(2), loss=_loss)
    assert [repr(two), repr(two[1])] == ["<Stages: 2 stages, 18 parameters>", "<Stage 'second': 1 leaves>"]
    assert str(two) == "2 stages\n0: _layer: 1 leaves, 9 parameters\n1: second: 1 leaves, 9 parameters"
