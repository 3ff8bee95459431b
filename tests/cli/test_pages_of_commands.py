"""The pages about the command line show what the commands print."""

import importlib.util
from pathlib import Path
from typing import Any

import pytest

import functional_ds

pytest.importorskip("typer")

DOCS = Path(__file__).parents[2] / "docs"


def _script() -> Any:
    spec = importlib.util.spec_from_file_location("command_line", DOCS / "command_line.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", ["command-line.md", "fitting.md"])
def test_outputs_are_those_of_the_commands(name: str) -> None:
    """`python docs/command_line.py --write` renews them."""
    script, before = _script(), Path.cwd()
    page = (DOCS / name).read_text(encoding="utf-8")
    assert script.written(page, files=(DOCS / "command-line.md").read_text(encoding="utf-8")) == page
    assert Path.cwd() == before
    assert all((DOCS / "figures" / f"cli-{picture}.svg").is_file() for picture in script.PICTURES)


def test_the_picture_of_a_report_has_todays_version() -> None:
    """`python docs/command_line.py report` draws it anew."""
    assert f"&#160;{functional_ds.__version__}&#160;" in (DOCS / "figures/cli-report.svg").read_text(encoding="utf-8")
