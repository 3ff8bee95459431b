"""Whatever a rank hangs in or dies of, the others end within the time-out, with its name."""

import re
import signal
import sys
import threading
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch

import functional_ds as fds
from functional_ds import comm
from functional_ds.comm.record.ledger import Ledger
from functional_ds.fitting import EXIT_CODE, heartbeat, watchdog
from functional_ds.fitting.heartbeat import activity
from tests.fitting import programs
from tests.fitting.ranks import Ranks

SIGNALS = {"stopped": (1, signal.SIGSTOP), "leader stopped": (0, signal.SIGSTOP), "killed": (1, signal.SIGKILL)}
SIGNALS |= {"leader killed": (0, signal.SIGKILL), "killed alone": (1, signal.SIGKILL)}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Ranks]]:
    """All faults at once: the ranks mostly wait."""
    folder = tmp_path_factory.mktemp("ranks")
    ranks: dict[str, Ranks] = {}
    try:
        for fault in ("none", "sleep", "collective", *SIGNALS):
            kind = {"killed alone": "signal alone"}.get(fault, "signal" if fault in SIGNALS else fault)
            ranks[fault] = Ranks.start(programs.steps, str(folder / fault), kind, world_size=2, folder=folder / fault)
        for name, program in {"raise": programs.raise_and_stay, "fit": programs.fitted}.items():
            ranks[name] = Ranks.start(program, str(folder / name), world_size=2, folder=folder / name)
        for fault, (rank, number) in SIGNALS.items():
            ranks[fault].wait_for(f"there-{rank}")
            ranks[fault].send(rank, number)
            if fault != "killed alone":  # there the other one stays out of collectives
                (folder / fault / "signalled").touch()
        yield ranks
    finally:
        for started in ranks.values():
            started.end()


def test_ranks_that_finish_are_let_go(found: dict[str, Ranks]) -> None:
    assert [found["none"].code(rank) for rank in (0, 1)] == [0, 0]
    assert [found["none"].said(rank) for rank in (0, 1)] == ["", ""]


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("fault", "says"),
    [
        ("sleep", ["rank 1 hangs", "* rank 1", "step 5: in the step at programs.py:", "all_reduce(op='sum') of [float32[3]]"]),
        ("collective", ["rank 0, 1 hangs", "* rank 0", "* rank 1", "recv(src=0", "all_reduce(op='sum')", "programs.py:"]),
        ("raise", ["rank 1 raised ValueError: seven", "step 5: in the step, all_reduce(op='sum')"]),
        ("fit", ["rank 1 hangs", "step 4: drawing a batch at programs.py:", "step 4: in the step"]),
    ],
)
def test_both_end_and_name_it(found: dict[str, Ranks], fault: str, says: list[str]) -> None:
    """In code of one's own, in collectives that never meet, after an error, within ``fit``."""
    for rank in (0,) if fault == "raise" else (0, 1):
        assert found[fault].code(rank) in (EXIT_CODE, 1)  # 1: its collective failed before, as the other one had ended
        assert re.search(f"rank {rank} (is ended by its watchdog|failed because of others)", found[fault].said(rank))
        for expected in says:
            assert expected in found[fault].said(rank)


def test_a_rank_that_is_stopped_ends_the_other(found: dict[str, Ranks]) -> None:
    assert found["stopped"].code(0) == EXIT_CODE
    assert "rank 1 died, is stopped, or cannot be reached: silent for" in found["stopped"].said(0)
    assert found["leader stopped"].code(1) == EXIT_CODE
    assert "the store that rank 0 or its parent holds at 127.0.0.1:" in found["leader stopped"].said(1)
    assert "has not answered for" in found["leader stopped"].said(1)
    assert "step 5: in the step, all_reduce(" in found["leader stopped"].said(1)


def test_a_rank_that_is_killed_is_named(found: dict[str, Ranks]) -> None:
    """Where a collective fails the error says over whom; where none is under way the watchdog ends the process."""
    assert found["killed"].code(0) == 1
    assert "RankFailedError: rank 0 failed because of others: rank 1 died" in found["killed"].said(0)
    assert "* rank 1" in found["killed"].said(0)
    assert found["killed alone"].code(0) == EXIT_CODE
    assert "rank 1 died, is stopped, or cannot be reached" in found["killed alone"].said(0)
    assert found["leader killed"].code(1) in (1, EXIT_CODE)
    assert "the store that rank 0 or its parent holds" in found["leader killed"].said(1)


def test_a_simulation_needs_no_watchdog() -> None:
    def program() -> int:
        with watchdog(timedelta(microseconds=1)) as watch:
            watch.at(1, "adding")
            return int(comm.all_reduce(torch.tensor(1)))

    assert comm.simulate(program, world_size=3) == [3, 3, 3]


def test_a_timeout_is_positive() -> None:
    with pytest.raises(ValueError, match="must be positive"), watchdog(timedelta(0)):
        pass
    with watchdog(None) as watch:
        watch.at(1, "nothing")


def test_activity_names_the_phase_and_the_site() -> None:
    """What a heartbeat says of a step is read off the stack of the thread that makes it."""
    found: list[dict[str, str]] = []

    def loss(params: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        found.append(activity(threading.get_ident()))
        return (params["w"] * x).sum()

    step = fds.train_step(loss, fds.sgd(0.1))
    step(step.init({"w": torch.ones(2)}), torch.ones(2))
    assert found[-1]["phase"]
    assert found[-1]["site"].startswith("test_watchdog.py:")


def test_activity_while_a_ledger_books_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """The ledger's frame has a call, tensors and a group's name: reading it must not fail, or a run that is well would end."""
    found: list[dict[str, str]] = []
    record = Ledger.record

    def looked(ledger: Ledger, *args: Any, **options: Any) -> Any:
        def traced(frame: Any, event: str, arg: Any) -> None:
            found.append({})
            heartbeat._note_call(frame, found[-1])  # as ``activity`` does for frames of comm

        sys.settrace(lambda frame, event, arg: traced if frame.f_code is record.__code__ else None)
        try:
            return record(ledger, *args, **options)
        finally:
            sys.settrace(None)

    monkeypatch.setattr(Ledger, "record", looked)
    with comm.ledger():
        comm.all_reduce(torch.ones(2))
    assert found
    assert all(each == {"call": "record"} for each in found)
