"""Runs the command line in this process."""

import json
from typing import Any

import pytest

pytest.importorskip("typer")
pytest.importorskip("rich")

from functional_ds.cli.entry import main

__all__ = ["answer", "refusal", "run"]


def run(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, str, str]:
    """The exit code, and what was printed."""
    capsys.readouterr()
    code = main([str(word) for word in words])
    return (code, *capsys.readouterr())


def answer(capsys: pytest.CaptureFixture[str], *words: object, code: int = 0) -> Any:
    """The JSON that a command prints."""
    found, out, errors = run(capsys, words[0], "--json", *words[1:])
    assert found == code, errors
    return json.loads(out)


def refusal(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    """The error of input that cannot be used: one line, exit code 2, nothing else."""
    code, out, errors = run(capsys, *words)
    assert (code, out) == (2, "")
    assert errors.startswith("functional-ds: error: ")
    assert errors.count("\n") == 1
    return errors
