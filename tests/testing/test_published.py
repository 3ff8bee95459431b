"""The pages' tables of ``holds`` are those of the tests' data; the library's names in the 24 methods are on pages."""

import ast
import re
from collections.abc import Iterator

import pytest

from functional_ds import comm, testing, tree
from functional_ds.comm.table import composed
from tests.testing.methods import METHODS, gallery
from tests.testing.published import PUBLISHED, TOP, Published, sources
from tests.testing.table import BLOCKS, written

PAGES = {path.name: path.read_text(encoding="utf-8") for path in (TOP / "docs").glob("*.md")}
PROSE = "\n".join(text for name, text in PAGES.items() if name != "gallery.md")
ROOTS = {"fds", "T", "comm", "pp", "compiling", "testing", "step", "state"}


@pytest.mark.parametrize("page", dict.fromkeys(page for page, _ in BLOCKS))
def test_pages_have_the_tables(page: str) -> None:
    """``python -m tests.testing.table --write`` renews them."""
    assert PAGES[page] == written(page, PAGES[page])


def test_all_are_tested() -> None:
    assert len(PUBLISHED) == 24
    assert {name for method in PUBLISHED for name in method.tested} <= METHODS.keys()
    assert all(bool(method.tested) != bool(method.instead) for method in PUBLISHED)


def used(code: ast.AST) -> Iterator[str]:
    """Names of the library, as ``comm.all_reduce``, ``step.norm``, ``fds.tree.map``."""
    for node in ast.walk(code):
        if isinstance(node, ast.Attribute):
            path = ast.unparse(node)
            if re.fullmatch(r"\w+(\.\w+)+", path) and path.partition(".")[0] in ROOTS:
                yield path


@pytest.mark.parametrize("method", PUBLISHED, ids=lambda method: method.name)
def test_the_names_in_it_are_on_pages(method: Published) -> None:
    """A reader of the pages finds them, without the sources."""
    found = {name for file, names in method.places() for own in names for name in used(ast.parse(sources(file)[own]))}
    short = {name: name.rpartition(".")[2] for name in found}
    shown = {name: own if own[0].isupper() else name.partition(".")[2] for name, own in short.items()}
    unknown = {name for name, text in shown.items() if not re.search(rf"\b{re.escape(text)}\b", PROSE)}
    assert not unknown


@pytest.mark.parametrize("name", ["swing", "torus"])
def test_all_reduces_hold(name: str) -> None:
    """Each tensor by itself; on a torus of 2 x 2 ranks."""
    file = gallery("swing")

    @composed
    def function(x: object, group: object = None) -> object:
        if name == "swing":
            return tree.map(file.swing, x)
        mesh = comm.mesh(rows=2, columns=2)
        return tree.map(lambda leaf: file.torus(leaf, mesh["rows"], mesh["columns"]), x)

    some = ["start", "input", "leaves", "strides", "empty", "precision", "adjoint", "second adjoint", "jit", "shapes"]
    testing.collective_holds(function, world_sizes=[4], only=some).check(refusals=False)
