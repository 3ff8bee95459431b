"""The picture of a graph has a lane for what computes, one for each channel, and memory."""

import sys
from pathlib import Path

import pytest

from tests.compiling.test_graph_cost import CPU, run

pytest.importorskip("matplotlib")


def test_lanes_phases_and_memory(tmp_path: Path) -> None:
    figure = run("stage 3").graph.draw(CPU, tmp_path / "step.svg")
    lanes, held, units = figure.axes
    assert [label.get_text() for label in lanes.get_yticklabels()] == ["compute", "world", "world/reduce"]
    assert {"forward", "backward"} <= {text.get_text() for text in lanes.texts}
    assert "memory beside" in held.get_ylabel()
    assert units.get_xlabel() == "predicted time (µs)"
    named = [text.get_text() for text in figure.legends[0].get_texts()]
    assert {"forward", "backward", "update", "gathers", "reductions", "on the critical path"} <= {*named}
    assert (tmp_path / "step.svg").read_text().startswith("<?xml")


def test_a_step_without_units() -> None:
    figure = run("stage 0").graph.draw(CPU, title="mine")
    assert len(figure.axes) == 2
    assert figure.get_suptitle() == "mine"


def test_without_matplotlib(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match="draw needs matplotlib"):
        run("stage 0").graph.draw(CPU)
