"""The generated parts of docs/index.md, the table of contents, and the pins of what builds the site."""

import importlib.util
import re
import tomllib
from pathlib import Path

import pytest

TOP = Path(__file__).parents[1]
DOCS = TOP / "docs"
INDEX = (DOCS / "index.md").read_text(encoding="utf-8")
_SPEC = importlib.util.spec_from_file_location("docs_tree", DOCS / "tree.py")
assert _SPEC is not None
assert _SPEC.loader is not None
tree = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(tree)

NUMBER = re.compile(r"(?<=[ |])\d[\d,]*(?=[ |])")


def _numbers(text: str) -> list[int]:
    return [int(found.replace(",", "")) for found in NUMBER.findall(text)]


def _words(text: str) -> list[str]:
    """What is left without numbers and without the padding that their width brings."""
    return NUMBER.sub("#", text).split()


@pytest.mark.parametrize("block", ["tree", "reading", "satellites"])
def test_index_is_what_tree_prints(block: str) -> None:
    """index.md's blocks are what docs/tree.py prints, up to a drift of the numbers by a tenth, or by ten lines."""
    there = INDEX.split(f"<!-- {block} -->\n")[1].split(f"<!-- /{block} -->")[0]
    printed = tree.BLOCKS[block]()
    assert _words(there) == _words(printed), "run `python docs/tree.py --write`"
    drifted = [
        (old, new) for old, new in zip(_numbers(there), _numbers(printed), strict=True) if abs(old - new) > max(10, new // 10)
    ]
    assert not drifted, f"(index.md, now): {drifted}; run `python docs/tree.py --write`"


def test_code_lines_are_counted(tmp_path: Path) -> None:
    """Blank lines, comments and docstrings are no code; other strings are."""
    source = '"""Doc."""\n\n# no\nx = """a\n\nb"""\n\n\ndef f():\n    """One.\n\n    Two.\n    """\n'
    source += "    return (  # why\n        1\n    )\n"
    (tmp_path / "a.py").write_text(source, encoding="utf-8")
    assert tree.lines(tmp_path / "a.py") == (3 + 1 + 3, 1 + 3)


def test_every_page_is_in_the_contents() -> None:
    """index.md's tables link each page once: docs/conf.py makes the site's table of contents of these rows."""
    rows = re.findall(r"^\| \[([\w-]+\.md)\]\(\1\) \|", INDEX, re.MULTILINE)
    assert sorted(rows) == sorted(path.name for path in DOCS.glob("*.md") if path.name != "index.md")


def test_the_site_is_built_with_pinned_versions() -> None:
    """constraints.txt pins what the extra `docs` names."""
    extras = tomllib.loads((TOP / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    pinned = set(re.findall(r"^([\w-]+)==", (TOP / "constraints.txt").read_text(encoding="utf-8"), re.MULTILINE))
    assert {re.split("[<>=]", name)[0] for name in extras["docs"]} <= pinned
