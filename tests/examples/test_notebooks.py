"""Each notebook runs from top to bottom, shows what it has stored, and is named on the docs' page of simulations."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

TOP = Path(__file__).resolve().parents[2]
NOTEBOOKS = sorted((TOP / "examples/notebooks").glob("*.ipynb"))


def shown(outputs: list[list[dict[str, Any]]]) -> list[str]:
    """The text of each cell's outputs; numbers with a point are left to the machine, but for their first two digits."""
    text = [
        "".join(line for one in cell for line in one.get("text", one.get("data", {}).get("text/plain", []))) for cell in outputs
    ]
    return [re.sub(r"(\d\.\d)\d*", r"\1", each) for each in text]


def run(path: Path) -> list[list[dict[str, Any]]]:
    words = [sys.executable, "tests/examples/run_notebook.py", str(path)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=240, cwd=TOP, check=False)
    assert done.returncode == 0, done.stderr
    found: list[list[dict[str, Any]]] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_shows_what_it_has_stored(path: Path) -> None:
    notebook = json.loads(path.read_text(encoding="utf-8"))
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
    assert len({cell["id"] for cell in notebook["cells"]}) == len(notebook["cells"])
    stored = [cell["outputs"] for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert stored[-1]
    assert shown(run(path)) == shown(stored)


def test_a_cell_that_fails_is_seen(tmp_path: Path) -> None:
    cells = [{"cell_type": "code", "source": ["x = 1"]}, {"cell_type": "code", "source": ["assert x == 2"]}]
    (tmp_path / "a.ipynb").write_text(json.dumps({"cells": cells}))
    with pytest.raises(AssertionError, match="AssertionError"):
        run(tmp_path / "a.ipynb")


def test_they_are_on_their_page() -> None:
    page = (TOP / "docs/simulator.md").read_text(encoding="utf-8")
    assert len(NOTEBOOKS) == 5
    for path in NOTEBOOKS:
        first = json.loads(path.read_text(encoding="utf-8"))["cells"][0]["source"][0]
        assert f"[{first.removeprefix('# ').strip()}](../examples/notebooks/{path.name})" in page
