"""How Sphinx builds the site: ``make docs``. The pages are markdown, the reference comes from the docstrings."""

import re
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parent

project = "functional_ds"
author = "the functional_ds authors"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = "functional_ds"
html_show_copyright = False
html_show_sourcelink = False

myst_heading_anchors = 4
highlight_language = "text"  # of blocks that name no language: diagrams and output

autodoc_member_order = "groupwise"
autodoc_default_options = {"members": True, "imported-members": True}
autodoc_typehints_format = "short"
python_maximum_signature_line_length = 100
napoleon_use_ivar = True  # attrs classes list their fields under Attributes


def contents(app: Any, docname: str, source: list[str]) -> None:
    """Appends the table of contents to the index: the rows of its own tables, a table a part, then the reference."""
    if docname != "index":
        return
    for part in re.split(r"^## ", source[0], flags=re.MULTILINE)[1:]:
        if rows := re.findall(r"^\| \[([\w-]+)\.md\]\(", part, re.MULTILINE):
            source[0] += _toctree(part.splitlines()[0], rows)
    source[0] += _toctree("Reference", sorted(f"reference/{path.stem}" for path in (DOCS / "reference").glob("*.rst")))


def _toctree(caption: str, names: list[str]) -> str:
    entries = "\n".join(names)
    return f"\n```{{toctree}}\n:hidden:\n:caption: {caption}\n\n{entries}\n```\n"


def setup(app: Any) -> None:
    """Called by Sphinx."""
    app.connect("source-read", contents)
