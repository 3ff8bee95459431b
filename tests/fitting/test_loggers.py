"""Loggers: what is in their files, and that a resumed run does not say twice what it did once."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from functional_ds.fitting import CsvLog, TensorBoard
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


def test_something_else_is_refused() -> None:
    with pytest.raises(TypeError, match="has no begin, log, close"):
        checked([print])
