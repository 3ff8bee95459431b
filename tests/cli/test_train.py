"""``train`` hands a job file over to ``functional_ds.jobs``, where that is installed."""

import importlib.util
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from tests.cli.running import answer, refusal, run

NAME = "functional_ds.jobs"


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What a stand-in for the jobs is asked."""
    calls: list[Any] = []
    jobs: Any = ModuleType(NAME)
    jobs.__spec__ = ModuleSpec(NAME, None)

    def load_job(path: str, changes: dict[str, Any]) -> str:
        calls.append((path, changes))
        if path == "wrong.toml":
            raise ValueError("wrong.toml, line 3: `stepz`: there is no such entry;\n the nearest is `steps`")
        return path

    def run_job(job: str, *, say: Any) -> Any:
        calls.append((job, say))
        return SimpleNamespace(interrupted=job == "long.toml", to_dict=lambda: {"done": 3, "losses": {"3": 1.5}})

    jobs.load_job, jobs.run_job = load_job, run_job
    monkeypatch.setitem(sys.modules, NAME, jobs)
    monkeypatch.delenv("RANK", raising=False)
    return calls


def test_a_job_is_run(asked: list[Any], capsys: pytest.CaptureFixture[str]) -> None:
    found = answer(capsys, "train", "job.toml", "--set", "data.context=64", "--set", "model=tiny.py:Net")
    assert found == {"job": "job.toml", "done": 3, "losses": {"3": 1.5}}
    assert asked == [("job.toml", {"data.context": 64, "model": "tiny.py:Net"}), ("job.toml", None)]
    assert run(capsys, "train", "long.toml")[0] == 130
    assert asked[-1] == ("long.toml", print)


def test_other_ranks_are_silent(asked: list[Any], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    assert run(capsys, "train", "job.toml")[:2] == (0, "")


def test_what_is_wrong_is_one_line(
    asked: list[Any], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "line 3: `stepz`" in refusal(capsys, "train", "wrong.toml")
    assert "'steps' should be path=value" in refusal(capsys, "train", "job.toml", "--set", "steps")
    there = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == NAME else there(name, *rest))
    assert f"this installation has no {NAME}" in refusal(capsys, "train", "job.toml")
