"""A recorded run is the loop over its batches, and its columns are the loop's metrics."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import functional_ds as fds
from functional_ds import comm, testing
from functional_ds import transforms as T
from tests.planting import Bug, planted


def loss(params: Any, x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    y = x @ params["w"]
    return y.square().mean(), {"mean": y.mean()}


def compared(stage: int, steps: int) -> tuple[testing.Difference, bool]:
    """The state that is recorded and that of a loop, and whether the columns are the metrics."""
    step = T.zero(stage)(fds.train_step(loss, fds.adamw(0.1)))
    params = {"w": torch.tensor([0.5, 1.0, 2.0])}
    batches = [torch.full((2, 3), float(index + comm.world().rank)) for index in range(steps)]
    run = fds.record(step, step.init(params), iter(batches))
    state, columns = step.init(params), []
    for batch in batches:
        state, metrics = step(state, batch)
        columns.append({name: value.item() for name, value in metrics.items()})
    return testing.difference(run.state, state), run.columns == {name: [row[name] for row in columns] for name in columns[0]}


@pytest.mark.law
@given(st.integers(0, 3), st.integers(1, 4))
def test_it_is_the_loop(stage: int, steps: int) -> None:
    for different, columns in comm.simulate(compared, stage, steps, world_size=2):
        assert not different, different
        assert columns


def test_processes() -> None:
    assert all(columns and not different for different, columns in comm.spawn(compared, 3, 2, world_size=2))


def recorded(steps: int) -> Any:
    step = fds.train_step(loss, fds.sgd(0.1))
    return fds.record(step, step.init({"w": torch.ones(3)}), [torch.ones(2, 3)] * steps)


def test_it_prints_and_draws(tmp_path: Path) -> None:
    run = recorded(12)
    lines = str(run).splitlines()
    assert lines[0].split() == ["step", *run.columns]
    assert lines[1] == "..."
    assert [line.split()[0] for line in lines[2:]] == [str(number) for number in range(3, 13)]
    assert run._repr_html_().count("<polyline") == len(run.columns)
    run.plot(tmp_path / "run.svg")
    assert (tmp_path / "run.svg").read_text().count("<svg") == 1
    assert fds.profiling.Recording(run.state, {"x": [math.nan, math.inf, 1.0]})._repr_html_().count(",") == 1  # one point


def test_progress(capsys: pytest.CaptureFixture[str]) -> None:
    """One bar, of rank 0, and the same columns."""

    def program() -> Any:
        step = fds.train_step(loss, fds.sgd(0.1))
        return fds.record(step, step.init({"w": torch.ones(3)}), [torch.ones(2, 3)] * 5, progress=True).columns

    assert comm.simulate(program, world_size=2) == [recorded(5).columns] * 2
    assert capsys.readouterr().err.count("5/5") == 1


@pytest.mark.parametrize(
    ("several", "says"), [(True, r"metric 'more' has the shape \[3\]"), (False, r"step 2 has the metrics .* and step 1 ")]
)
def test_other_metrics(several: bool, says: str) -> None:
    def update(inner: Any, step: fds.Step, state: fds.State, grads: fds.Weighted) -> Any:
        state, metrics = inner(step, state, grads)
        return state, metrics | ({"more": torch.ones(3)} if several else {f"at {int(state.step)}": torch.ones(())})

    step = fds.wrap("more", update=update)(fds.train_step(loss, fds.sgd(0.1)))
    with pytest.raises(ValueError, match=says):
        fds.record(step, step.init({"w": torch.ones(3)}), [torch.ones(2, 3)] * 2)


def test_no_batch() -> None:
    with pytest.raises(ValueError, match="batches: there is none"):
        recorded(0)


BUGS = [
    Bug("every step begins at the first state", "profiling.record:record", "state, metrics = step(state, batch)",
        "last, metrics = step(state, batch, donate=False)"),
    Bug("a column has the last step's number", "profiling.record:record", "metrics[name].item()", "history[-1][name].item()"),
]  # fmt: skip


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_a_bug_is_seen(bug: Bug) -> None:
    with planted(bug):
        different, columns = compared(0, 3)
        assert different or not columns
