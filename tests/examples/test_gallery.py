"""Each file of the gallery holds to its law, prints its table, and is on its page as its docstring says."""

import importlib
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

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
