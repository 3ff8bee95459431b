"""Loggers: what is in their files, and that a resumed run does not say twice what it did once."""

import sys
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import functional_ds as fds
from functional_ds.fitting import CsvLog, TensorBoard, WandB
from functional_ds.fitting.loggers import checked


def lines(path: Path) -> list[list[str]]:
    return [line.split(",") for line in path.read_text().splitlines()]


@given(cut=st.integers(0, 60), back=st.integers(0, 5))
def test_a_log_that_was_cut_off_goes_on(tmp_path_factory: pytest.TempPathFactory, cut: int, back: int) -> None:
    """Whatever byte the run ended at: after ``begin(k)`` there are whole lines of steps up to k, and then what comes."""
    path = tmp_path_factory.mktemp("log") / "deep" / "log.csv"
    log = CsvLog(path)
    log.begin(0)
    for done in range(1, 6):
        log.log(done, {"loss": done / 2})
    log.close()
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) - cut])
    log.begin(back)
    log.log(back + 1, {"loss": 9.0})
    log.close()
    steps = [int(step) for step, *_ in lines(path)[1:]]
    assert steps == [*range(1, len(steps)), back + 1]
    assert all(line[2] == str(int(line[0]) / 2) for line in lines(path)[1:-1])


def test_tensorboard_hides_what_a_run_took_back(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    board = TensorBoard(tmp_path)
    board.begin(0)
    board.log(0, {"loss": 7.0})
    board.begin(0)
    for done in (1, 2, 3):
        board.log(done, {"loss": float(done)})
    board.begin(1)
    board.log(2, {"loss": 20.0})
    board.close()
    found = EventAccumulator(str(tmp_path))
    found.Reload()
    assert [(event.step, event.value) for event in found.Scalars("loss")] == [(1, 1.0), (2, 20.0)]


def test_a_steps_seconds_are_the_steps_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two seconds each, whatever evaluations and saves take between them; reading the metrics of a slow device is a part."""
    clock = [0.0]
    monkeypatch.setattr("functional_ds.fitting.loggers.time.perf_counter", lambda: clock[0])
    step = fds.train_step(lambda params, batch: (params["w"] * batch).sum(), fds.sgd(0.1))

    class Late:
        """A number that the device has not computed yet."""

        def __float__(self) -> float:
            clock[0] += 0.5
            return 1.0

    def slow(state: fds.State, batch: torch.Tensor) -> Any:
        clock[0] += 1.5
        state, metrics = step(state, batch)
        return state, {**metrics, "late": Late()}

    def evaluation(state: fds.State) -> dict[str, float]:
        clock[0] += 100
        return {"validation": 0.0}

    class Slow(CsvLog):
        def log(self, done: int, numbers: Mapping[str, float]) -> None:
            super().log(done, numbers)
            clock[0] += 50 * ("validation" in numbers)

    fds.fit(
        slow,
        step.init({"w": torch.ones(2)}),
        lambda index: torch.ones(2),
        steps=4,
        evaluation=fds.Evaluation(evaluation, every=1),
        logging=fds.Logging([Slow(tmp_path / "log.csv")], every=1),
        on_non_finite=None,
    )
    seconds = [float(value) for _, name, value in lines(tmp_path / "log.csv") if name == "seconds_per_step"]
    assert seconds == [2.0] * 4


def test_fit_prints_by_default(capsys: pytest.CaptureFixture[str]) -> None:
    """Each tenth step and the last; with ``Logging(())`` nothing."""
    step = fds.train_step(lambda params, x: (params["w"] * x).sum(), fds.sgd(0.1))
    for logging in (fds.Logging(), fds.Logging(())):
        fds.fit(step, step.init({"w": torch.ones(2)}), lambda index: torch.ones(2), steps=12, logging=logging)
    printed = capsys.readouterr().out.splitlines()
    assert [line.partition(",")[0] for line in printed] == ["step 10: loss 0.2", "step 12: loss -0.2"]


def test_something_else_is_refused() -> None:
    with pytest.raises(TypeError, match="has no begin, log, close"):
        checked([print])


def test_wandb_gets_the_step_as_a_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that steps may repeat after a rollback: W&B's own count of calls only grows."""
    calls: list[Any] = []

    class Run:
        def define_metric(self, name: str, **more: Any) -> None:
            calls.append(("define", name, more))

        def log(self, numbers: Mapping[str, float]) -> None:
            calls.append(dict(numbers))

        def finish(self) -> None:
            calls.append("finish")

    module = types.ModuleType("wandb")
    module.init = lambda **options: calls.append(options) or Run()  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "wandb", module)
    log = WandB("gpt", options={"id": "seven"})
    log.begin(0)
    log.log(1, {"loss": 2.0})
    log.begin(0)
    log.log(1, {"loss": 3.0})
    log.close()
    log.close()
    assert calls == [
        {"project": "gpt", "resume": "allow", "id": "seven"},
        ("define", "step", {}),
        ("define", "*", {"step_metric": "step"}),
        {"loss": 2.0, "step": 1},
        {"loss": 3.0, "step": 1},
        "finish",
    ]
