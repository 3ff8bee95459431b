"""Figures of tables of pages show what these say; after an edit, run docs/figures/make.py with the figures' names."""

import html
import importlib.util
import io
import re
from pathlib import Path
from typing import Any

import pytest

FIGURES = Path(__file__).resolve().parents[1] / "docs/figures"
pytest.importorskip("matplotlib")
_SPEC = importlib.util.spec_from_file_location("docs_figures_pages", FIGURES / "pages.py")
assert _SPEC is not None
assert _SPEC.loader is not None
pages: Any = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(pages)


def words(svg: str) -> list[str]:
    return sorted(re.findall(r"<text[^>]*>([^<]*)</text>", svg))


@pytest.mark.parametrize("name", ["gallery_bytes", "gallery_mup"])
def test_the_gallerys_figures_are_those_of_its_tables(name: str) -> None:
    import matplotlib as mpl

    drawn = io.StringIO()
    with mpl.rc_context({"svg.fonttype": "none"}):
        getattr(pages, name)().savefig(drawn, format="svg")
    kept = (FIGURES / f"{name.replace('_', '-')}.svg").read_text(encoding="utf-8")
    assert words(kept) == words(drawn.getvalue())


def test_points_are_the_tables_numbers() -> None:
    rows = [row for program in ("compression", "diloco") for row in pages.printed(program)[1:]]
    texts = [text.get_text() for axes in pages.gallery_bytes().axes for text in axes.texts]
    points = [
        line.get_xydata()[0].tolist() for axes in pages.gallery_bytes().axes for line in axes.lines if line.get_marker() == "o"
    ]
    assert texts == [f"{name}: {loss}" for name, loss, _ in rows]
    assert points == [[int(sent.replace(",", "")) / 1e6, float(loss)] for _, loss, sent in rows]


def test_the_best_learning_rates_are_those_with_a_star() -> None:
    head, *rows = pages.printed("mup")
    stars = [line for axes in pages.gallery_mup().axes for line in axes.lines if line.get_marker() == "*"]
    best = [next(row for row in rows if row[column].endswith("*")) for column in range(1, len(head))]
    expected = [[int(row[0].removeprefix("2^")), float(row[column][:-1])] for column, row in enumerate(best, start=1)]
    assert [star.get_xydata()[0].tolist() for star in stars] == expected


def test_the_cheat_sheet_is_its_page() -> None:
    kept = (FIGURES / "cheat-sheet.svg").read_text(encoding="utf-8")
    assert kept == pages.cheat_sheet(), "run `python docs/figures/make.py cheat-sheet`"
    sheet = (
        (FIGURES.parent / "cheat-sheet.md").read_text(encoding="utf-8").partition("**Make a step**")[2].partition("\n## ")[0]
    )
    assert [code for code in re.findall(r"`([^`]+)`", sheet) if f">{html.escape(code)}<" not in kept] == []
