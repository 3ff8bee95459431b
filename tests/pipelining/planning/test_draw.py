"""Pictures of timelines."""

import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
from matplotlib.colors import to_hex
from matplotlib.image import imread

from functional_ds.pipelining import Kind, Schedule, draw, inference, lower, observed, one_f_one_b, timeline, zb_h1, zbv
from functional_ds.pipelining.planning.draw import _COLOURS


def bars(axes) -> list[tuple[str, float, float, float]]:
    """Colour, rank, start and end of each bar in a picture."""
    found = []
    for collection in axes.collections:
        for path in collection.get_paths():
            (left, low), (right, high) = path.vertices.min(axis=0), path.vertices.max(axis=0)
            found.append((to_hex(collection.get_facecolor()[0]), (low + high) / 2, left, right))
    return sorted(found)


def test_every_action_is_a_bar() -> None:
    """At its time, on its rank's line, in its kind's colour; the memory curves are below."""
    timed = timeline(zb_h1(3, 4))
    gantt, memory = draw(timed).axes
    spans = [(rank, span) for rank in range(3) for span in timed.spans(rank)]
    expected = sorted((_COLOURS[span.action.kind], float(rank), span.start, span.end) for rank, span in spans)
    for found, wanted in zip(bars(gantt), expected, strict=True):
        assert found[0] == wanted[0]
        assert found[1:] == pytest.approx(wanted[1:])
    assert [line.get_ydata().max() for line in memory.get_lines()] == list(timed.peak)


def test_predicted_stands_beside_measured(tmp_path: Path) -> None:
    """Two columns on one scale; the files are pictures."""
    timed = timeline(lower(one_f_one_b(2, 4)))
    run = observed(timed.schedule, [[(2 * a, 2 * b) for a, b in zip(*timed.times(rank), strict=True)] for rank in range(2)])
    figure = draw(timed, tmp_path / "both.svg", beside=run, title="1F1B")
    assert [axes.get_title().split(",")[0] for axes in figure.axes[:2]] == ["predicted: makespan 15", "measured: makespan 30"]
    assert {axes.get_xlim()[1] for axes in figure.axes} == {30}
    assert {axes.get_xlim()[1] for axes in draw(run, tmp_path / "both.svg", beside=timed).axes} == {30}
    assert ElementTree.parse(tmp_path / "both.svg").getroot().tag.endswith("svg")
    draw(timeline(zbv(2, 4)), tmp_path / "one.png")
    assert imread(tmp_path / "one.png").std() > 0.05


def test_the_legend_has_every_ranks_kinds() -> None:
    """Also of those that the first rank does not do."""
    figure = draw(timeline(Schedule.of(["0F0 0B0", "1F0 1I0 1W0"])))
    labels = [label.get_text() for label in figure.legends[0].get_texts()]
    assert labels == ["forward", "backward for inputs", "backward for weights", "backward"]


def test_many_ranks_and_forwards_alone(tmp_path: Path) -> None:
    """Large timelines go without numbers in the bars; inference has one colour."""
    assert not draw(timeline(one_f_one_b(20, 40))).axes[0].texts
    figure = draw(timeline(inference(2, 3)), tmp_path / "forward.png")
    assert {colour for colour, *_ in bars(figure.axes[0])} == {_COLOURS[Kind.F]}


def test_without_matplotlib(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error says what to install, and what does without."""
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r"functional-ds\[train\].*print\(timeline\)"):
        draw(timeline(one_f_one_b(2, 2)))


def test_text() -> None:
    """Each line has one width; what is idle is dots, and what does not fit is its letter."""
    lines = timeline(zbv(2, 3)).text(width=200).splitlines()
    assert lines[1:] == [
        "rank 0 |F0F1F2f0i0w0f1i1w1I0W0f2i2w2I1W1I2W2..|",
        "rank 1 |..F0f0F1f1i0w0F2I0W0f2i1w1I1i2I2W1w2W2|",
    ]
    narrow = timeline(one_f_one_b(4, 30)).text(width=60).splitlines()
    assert {len(line) for line in narrow[1:]} == {60 + len("rank 0 ||")}


def test_a_timeline_prints_itself() -> None:
    """As text, and in notebooks as a chart, of large timelines the first ranks; the repr is one line."""
    timed = timeline(one_f_one_b(2, 3))
    assert str(timed) == timed.text()
    assert timed._repr_html_() == timed.chart()._repr_html_()
    assert timed._repr_html_().count("<rect") == 2 * 2 * 3
    assert list(timeline(one_f_one_b(40, 40)).chart(ranks=3).lanes) == ["rank 0", "rank 1", "rank 2"]
    assert "\n" not in repr(timed)
    assert str(timeline(one_f_one_b(40, 40))).endswith("... and 8 more ranks")
