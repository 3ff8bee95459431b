"""The README and the docs: their examples run, and the files and tests that they name exist."""

import io
import re
from contextlib import redirect_stdout
from pathlib import Path

import pytest

TOP = Path(__file__).parents[1]
PAGES = [TOP / "README.md", TOP / "CHANGELOG.md", TOP / "SECURITY.md", *sorted((TOP / "docs").glob("*.md"))]
BLOCK = re.compile(r"^```python\n(.*?)^```$(?:\n\n^```text\n(.*?)^```$)?", re.MULTILINE | re.DOTALL)
SHOWING = {"README.md", "which-strategy.md", "optimizers.md", *(page.name for page in TOP.glob("docs/quickstart-*.md"))}
TEST = re.compile(r"`(tests/[\w/]+\.py)(?:::(\w+))?`")
FOLDER = re.compile(r"^\$ cd (\S+)$", re.MULTILINE)
LINK = re.compile(r"\]\((?!https?://)([^)#\s]*)(?:#([^)\s]+))?\)")


def _name(page: Path) -> str:
    return page.relative_to(TOP).as_posix()


def _blocks(page: Path) -> list[tuple[int, str, str | None]]:
    """The python blocks, each with the line it starts on, and the text block right after it."""
    text = page.read_text(encoding="utf-8")
    return [(text.count("\n", 0, found.start(1)), found[1], found[2]) for found in BLOCK.finditer(text)]


def _anchors(page: Path) -> set[str]:
    """The headings as links name them."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", [page for page in PAGES if _blocks(page)], ids=_name)
def test_examples_run(page: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A page's python blocks run from top to bottom, in one namespace, in the folder that its console blocks change to.

    On some pages a text block right after a python block is what that one prints.
    """
    monkeypatch.chdir(TOP.joinpath(*FOLDER.findall(page.read_text(encoding="utf-8"))))
    namespace: dict[str, object] = {"__name__": page.stem}
    for line, source, shown in _blocks(page):
        with redirect_stdout(io.StringIO()) as printed:
            exec(compile("\n" * line + source, str(page), "exec"), namespace)
        assert shown is None or page.name not in SHOWING or printed.getvalue() == shown


@pytest.mark.parametrize("page", PAGES, ids=_name)
def test_links_lead_somewhere(page: Path) -> None:
    """Relative links name files of this checkout, and headings that are there."""
    for target, anchor in LINK.findall(page.read_text(encoding="utf-8")):
        other = (page.parent / target).resolve() if target else page
        assert other.exists(), target
        assert not anchor or anchor in _anchors(other), f"{target}#{anchor}"


@pytest.mark.parametrize("page", PAGES, ids=_name)
def test_named_tests_exist(page: Path) -> None:
    """A page that says which test shows something names one that is there."""
    for file, test in TEST.findall(page.read_text(encoding="utf-8")):
        source = (TOP / file).read_text(encoding="utf-8")
        assert not test or f"def {test}(" in source, f"{file}::{test}"


# Names of earlier versions.
GONE = (
    *("LeafMap.pieces", "T.feedback", "T.local", "T.offloading.Traffic", "checkpointing.dcp.Reader", "comm.alike"),
    *("comm.are_alike", "fds.ByLeaf", "fds.Parts", "fds.Saving", "fds.Tape", "fds.route", "fds.saving", "fds.units.block_of"),
    *("fitting.noted_here", "group.world.books", "pipelining.named"),
)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_renamed_names_are_gone(page: Path) -> None:
    """Names of earlier versions occur in no page."""
    text = page.read_text(encoding="utf-8")
    assert [name for name in GONE if re.search(rf"(?<![\w.]){re.escape(name)}(?![\w])", text)] == []
    assert re.findall(r"`(?:feedback|local)`?\(", text) == []


def test_readme_is_what_the_map_promises() -> None:
    """The examples were found: a pattern that matches nothing would pass."""
    assert len(_blocks(TOP / "README.md")) >= 2
    assert len(PAGES) >= 6
