"""The program: help, exit codes, one-line errors, plain output."""

import importlib.util
import json
import sys
from importlib.metadata import entry_points
from typing import Any

import pytest
from torch import nn

from functional_ds.cli import entry
from functional_ds.cli.app import application
from functional_ds.cli.report_command import environment, warnings_of
from functional_ds.cli.words.pages import OutputTable, emit, plain
from functional_ds.pipelining import PUBLISHED
from tests.cli.running import answer, refusal, run

COMMANDS = ["report", "plan", "tune", "inspect", "convert", "draw", "hosts", "train"]


def test_the_program_is_installed() -> None:
    found = [each for each in entry_points(group="console_scripts") if each.name == "functional-ds"]
    assert [each.value for each in found] == ["functional_ds.cli.entry:main"]


@pytest.mark.parametrize("name", COMMANDS)
def test_help_has_examples(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, name, "--help")
    assert code == 0
    assert f"Examples:\n    functional-ds {name}" in out
    assert "--json" in out
    assert "\x1b" not in out


def test_the_commands_are_these(capsys: pytest.CaptureFixture[str]) -> None:
    assert [command.name for command in application().registered_commands] == COMMANDS
    assert all(name in run(capsys, "--help")[1] for name in COMMANDS)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["nothing"], "No such command 'nothing'"),
        (["plan", "--nothing", "x"], "No such option: --nothing"),
        (["inspect"], "Missing argument"),
        (["draw", "schedule", "--ranks", "x"], "--ranks"),
        (["draw", "pictures"], "'pictures' is not one of 'schedule', 'memory', 'traffic', 'trace'"),
        (["draw", "schedule", "none"], "there is no schedule 'none'; the nearest is 'one_f_one_b', of gpipe, one_f_one_b"),
        (
            ["draw", "schedule", "interleaved", "--ranks", "3", "--microbatches", "0"],
            "--microbatches': Input should be greater than or equal to 1",
        ),
        (["draw", "schedule", "--costs", "1,2"], "three numbers"),
        (["draw", "schedule", "--ranks", "100000"], "a picture has room for 16,384 of both"),
        (["plan", f"{__name__}:net", "--accumulate", "1000000"], "less than or equal to 4096"),
        (["draw", "memory", "-o", "x.txt"], "should end with"),
        (["draw", "trace", "none.json"], "there is no file none.json"),
        (["draw", "traffic"], "name a model"),
        (["train", "none.toml"], ""),
        (["draw", "memory", "--params", "inf"], "--params"),
        (["plan", f"{__name__}:net", "--mesh", "dp=4,tp=" + "9" * 30], "has more than 1,048,576 ranks"),
        (
            ["tune", f"{__name__}:net", "--rows", "4", "--timeout", "nan"],
            "--timeout: nan should be a number of seconds above 0",
        ),
        (["tune", f"{__name__}:net", "--rows", "9" * 30], "--rows"),
        (["plan", f"{__name__}:net", "--micro-batch", "9" * 30], "it must be at most 2147483647"),
        (["plan", f"{__name__}:ends"], "a program that was named has called exit()"),
    ],
)
def test_input_that_cannot_be_used(words: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert says in refusal(capsys, *words)


def net() -> nn.Module:
    return nn.Linear(2, 2)


def ends() -> nn.Module:
    raise SystemExit(0)


def test_sizes_that_no_memory_holds(tmp_path: Any, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "shapes.json").write_text(json.dumps({"w": [10**12, 10**12]}))
    assert "which no memory holds" in refusal(capsys, "plan", tmp_path / "shapes.json")


def test_without_typer(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    there = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == "typer" else there(name, *rest))
    assert "pip install 'functional-ds[cli]'" in refusal(capsys, "report")


def test_a_traceback_on_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FUNCTIONAL_DS_TRACEBACK", "1")
    with pytest.raises(Exception, match="no file"):
        entry.main(["inspect", "none"])


def test_a_terminal_gets_tables(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    table = OutputTable("sizes", ("what", "bytes"), [("[params]", "16")])
    emit([table], {}, as_json=False)
    assert capsys.readouterr().out == plain([table]) + "\n"
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    emit([table, "words"], {}, as_json=False)
    shown = capsys.readouterr().out
    assert "[params]" in shown
    assert "│" in shown


# -- report ------------------------------------------------------------------------------------------------------------


def test_report(capsys: pytest.CaptureFixture[str]) -> None:
    found = answer(capsys, "report")
    keys = {"versions", "devices", "backends", "memory", "limits", "environment", "executable", "warnings"}
    assert found.keys() == keys
    assert found["versions"]["python"] == ".".join(map(str, sys.version_info[:3]))
    out = run(capsys, "report")[1]
    assert all(word in out for word in ("versions", "backends: gloo", "environment", "warnings"))


def test_secrets_are_not_shown() -> None:
    shown, ignored = environment({"NCCL_AUTH_TOKEN": "x1", "RANK": "0", "DS_ACCELERATOR": "cpu", "HF_TOKEN": "x2", "HOME": "/"})
    assert shown == {"NCCL_AUTH_TOKEN": "(set)", "RANK": "0"}
    assert ignored == ["DS_ACCELERATOR"]


def test_warnings() -> None:
    found: dict[str, Any] = {
        "environment": {"set": {"WORLD_SIZE": "2", "RANK": "0", "CUDA_LAUNCH_BLOCKING": "1"}, "ignored": ["DS_X"]},
        "memory": {"shm_total": 64 << 20, "bf16": False},
        "limits": {"open files": 1024},
        "devices": [],
        "versions": {"cuda": "13.0"},
    }
    said = "\n".join(warnings_of(found))
    for word in ("/dev/shm", "ulimit", "OMP_NUM_THREADS", "LAUNCH_BLOCKING", "LOCAL_RANK", "sees no device", "bf16", "DS_X"):
        assert word in said
    fine = {"environment": {"set": {}, "ignored": []}, "memory": {"shm_total": None, "bf16": None}}
    assert warnings_of({**fine, "limits": {"open files": "unlimited"}, "devices": [], "versions": {}}) == []


# -- draw --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PUBLISHED)
def test_schedules(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    found = answer(capsys, "draw", "schedule", name, "--ranks", 2, "--microbatches", 4)
    assert found.keys() == {"what", "name", "ranks", "microbatches", "makespan", "bubble", "peak", "rows"}
    assert len(found["rows"]) == 2


def test_the_bubble_is_the_papers(capsys: pytest.CaptureFixture[str]) -> None:
    found = answer(capsys, "draw", "schedule", "one_f_one_b", "--ranks", 4, "--microbatches", 8)
    assert found["bubble"] == pytest.approx(3 / 11)
    assert "rank 3 |" in run(capsys, "draw", "schedule", "one_f_one_b")[1]


def test_pictures(tmp_path: Any, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    trace = {"traceEvents": [{"ph": "X", "pid": 0, "tid": "phases", "name": "forward", "ts": 0, "dur": 2000}, {"ph": "M"}]}
    (tmp_path / "trace.json").write_text(json.dumps(trace))
    for words in (["memory", "--ranks", "8"], ["trace", tmp_path / "trace.json"]):
        found = answer(capsys, "draw", *words, "-o", tmp_path / "x.svg")
        assert found["out"] == str(tmp_path / "x.svg")
        assert "<svg" in (tmp_path / "x.svg").read_text()
    assert found["slices"] == [{"rank": 0, "name": "forward", "calls": 1, "seconds": 0.002}]


def test_the_table_of_zero_is_the_papers(capsys: pytest.CaptureFixture[str]) -> None:
    found = answer(capsys, "draw", "memory", "--params", "7.5e9", "--ranks", 64)
    assert [round(stage["total"] / 1e9, 1) for stage in found["stages"]] == [120.0, 31.4, 16.6, 1.9]
