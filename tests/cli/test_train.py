"""``train`` is ``run_job`` of a job file."""

import importlib.util
from pathlib import Path
from typing import Any

import pytest

import functional_ds as fds
from tests.cli.running import answer, refusal, run

MODELS = """
from torch import nn


def bigram(width):
    return nn.Sequential(nn.Embedding(256, width), nn.Linear(width, 256))
"""
JOB = """
steps = 3
ranks = 2
simulate = true
strategy = [{zero = 2}]
data = {rows = 4, context = 8, files = ["text.txt"]}
logs = {every = 1}
model = {"models_of_train:bigram" = {width = 4}}
optimizer = {adamw = {lr = 3e-2}}
"""


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A job's file."""
    monkeypatch.delenv("RANK", raising=False)
    (tmp_path / "models_of_train.py").write_text(MODELS)
    (tmp_path / "text.txt").write_text("to be or not to be, that is the question. " * 20)
    (tmp_path / "job.toml").write_text(JOB)
    return tmp_path / "job.toml"


def test_it_is_run_job(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = answer(capsys, "train", job, "--set", "data.rows=8", "--set", "optimizer.adamw.lr=0.1")
    wanted = fds.run_job(fds.load_job(job, {"data.rows": 8, "optimizer.adamw.lr": 0.1})).to_dict()
    assert found == {"job": str(job), **wanted, "losses": {str(k): v for k, v in wanted["losses"].items()}, "validation": {}}
    assert len(found["losses"]) == 3


def test_it_says_what_is_logged(job: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    code, out, _ = run(capsys, "train", job)
    lines = out.splitlines()
    assert code == 0
    assert ["step      2   loss" in line for line in lines] == [False, True, False, False]
    assert lines[-1].startswith("3 steps, loss 5.")
    monkeypatch.setenv("RANK", "1")
    assert answer_of_another_rank(capsys, job) == ""


def answer_of_another_rank(capsys: pytest.CaptureFixture[str], job: Path) -> str:
    """What a rank that is not the first prints with --json."""
    code, out, _ = run(capsys, "train", "--json", job)
    assert code == 0
    return out


def test_an_interrupt_is_130(job: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: Any, **__: Any) -> fds.jobs.JobResult:
        return fds.jobs.JobResult(1, {1: 5.0}, {}, interrupted=True)

    monkeypatch.setattr(fds.jobs, "run_job", interrupted)
    assert run(capsys, "train", job)[:2] == (130, "interrupted after 1 steps, loss 5.0000 -> 5.0000\n")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ("stepz=3", "stepz"),
        ("steps=many", "steps"),
        ("steps", "'steps' should be path=value"),
        ("strategy.zero.stage=7", "stage"),
        ('data.files=["none.txt"]', "none.txt does not exist"),
        ('model={"models_of_train:trigram": {}}', "has no 'trigram'; the nearest is 'bigram'"),
    ],
)
def test_what_is_wrong_is_one_line(change: str, says: str, job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert says in refusal(capsys, "train", job, "--set", change)


def test_what_is_wrong_in_a_file_has_its_line(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job.write_text(JOB.replace("steps = 3", "stepz = 3"))
    assert f"{job}, line 2: stepz" in refusal(capsys, "train", job)


def test_without_jobs(job: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    name, there = "functional_ds.jobs", importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda each, *rest: None if each == name else there(each, *rest))
    assert f"this installation has no {name}" in refusal(capsys, "train", job)
