"""Bugs of joining and of agreeing on a failed write, each planted alone: a test must see it."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.comm.worlds import test_joining
from tests.fitting import test_fit
from tests.planting import Bug, planted

RENDEZVOUS = "comm.worlds.rendezvous"


def one_time(folder: Path, patch: pytest.MonkeyPatch) -> None:
    test_joining.test_all_parts_share_one_time(patch)


def own_error(folder: Path, patch: pytest.MonkeyPatch) -> None:
    test_joining.test_a_rank_that_cannot_connect_says_why()


def all_came(folder: Path, patch: pytest.MonkeyPatch) -> None:
    test_joining.test_ranks_that_cannot_reach_each_other()


def full_disk(folder: Path, patch: pytest.MonkeyPatch) -> None:
    test_fit.test_a_disk_that_is_full_for_one_rank_ends_all(1, folder, patch)


@pytest.mark.parametrize(
    ("law", "bug"),
    [
        (
            one_time,
            Bug(
                "connections have the whole time again",
                "comm.worlds.rendezvous:connect",
                "float(store.get(_REMAINING))",
                "timeout.total_seconds()",
            ),
        ),
        (
            own_error,
            Bug(
                "an error of this rank is taken for lateness",
                "comm.worlds.rendezvous:connect",
                "'' if isinstance(error, TimeoutError) else _first_line(error)",
                "''",
            ),
        ),
        (
            all_came,
            Bug(
                "ranks that have given up are missing",
                "comm.worlds.rendezvous:_others",
                "store.set(_FAILED.format(rank), early)",
                "pass",
            ),
        ),
        (
            full_disk,
            Bug(
                "a rank alone raises its writer's error",
                "fitting.run:TrainingRun._end_step",
                "failed",
                "self.checkpoints.failed",
            ),
        ),
    ],
    ids=lambda value: value.name if isinstance(value, Bug) else None,
)
def test_a_bug_is_seen(
    law: Callable[[Path, pytest.MonkeyPatch], None], bug: Bug, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The test holds without the bug, and fails with it."""
    with monkeypatch.context() as patch:
        law(tmp_path / "sound", patch)
    with planted(bug), monkeypatch.context() as patch, pytest.raises((AssertionError, RuntimeError)):
        law(tmp_path / "broken", patch)
