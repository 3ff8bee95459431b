"""Each file of the gallery holds to its law, prints its table, and is on its page as its docstring says."""

import importlib
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

import functional_ds
from functional_ds import comm, pipelining, transforms

TOP = Path(__file__).resolve().parents[2]
FOLDER = TOP / "examples/research"
NAMES = sorted(path.stem for path in FOLDER.glob("*.py") if path.stem != "shared")
PAGE = (TOP / "docs/gallery.md").read_text(encoding="utf-8")


@pytest.fixture
def loaded(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A file of the gallery, as a program beside ``shared.py`` imports it."""
    monkeypatch.syspath_prepend(str(FOLDER))
    for name in ("shared", request.param):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return importlib.import_module(request.param)


@pytest.mark.parametrize("loaded", NAMES, indirect=True)
def test_a_law_holds_and_a_table_is_printed(loaded: ModuleType) -> None:
    loaded.law()
    lines = loaded.main(**loaded.TINY).splitlines()
    assert len(lines) > 1
    assert not re.search(r"\b(nan|inf)\b", "\n".join(lines))


@pytest.mark.parametrize("name", NAMES)
def test_the_page_says_what_its_docstring_says(name: str) -> None:
    """The heading, the law, and the commands that print the table; the figures are of a run."""
    source = (FOLDER / f"{name}.py").read_text(encoding="utf-8")
    words = source.split('"""')[1]
    title, _, law = words.partition(":")[0].strip(), *words.partition("Law: ")[1:]
    assert f"## {title}\n" in PAGE
    assert " ".join(law.split()) in " ".join(PAGE.split())
    assert f"examples/research/{name}.py" in PAGE
    for paper in re.findall(r"arXiv:\d+\.\d+", words):
        assert paper in PAGE


@pytest.mark.parametrize("name", NAMES)
def test_the_overview_has_each_file_with_its_lines(name: str) -> None:
    """Where a file grows, the row is to be renewed."""
    source = (FOLDER / f"{name}.py").read_text(encoding="utf-8")
    title, lines = source.split('"""')[1].partition(":")[0], sum(bool(line.strip()) for line in source.splitlines())
    assert f"| [{title}](#{title.lower().replace(' ', '-')}) | `{name}.py` | {lines} | " in PAGE


def test_the_table_of_methods_names_what_is_there() -> None:
    """Each name of the column "written with" is the library's."""
    heads = {"fds": functional_ds, "T": transforms, "comm": comm, "pp": pipelining, "step": functional_ds.Step}
    table = PAGE.partition("<!-- methods -->")[2].partition("<!-- /methods -->")[0].strip().splitlines()[2:]
    assert len(table) == 24
    for row in table:
        names = row.strip("|").split("|")[3]
        for name in re.findall(r"`([\w.]+)`", names):
            head, *rest = name.split(".")
            value: object = heads[head]
            for part in rest:
                value = getattr(value, part)
