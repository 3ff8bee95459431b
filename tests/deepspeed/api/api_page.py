"""Prints the tables of DeepSpeed's names; with --write, puts them into docs/deepspeed-config.md."""

import sys
from collections.abc import Mapping
from pathlib import Path

from functional_ds.deepspeed.api_names import HERE, REFUSED, module_at

PAGE = Path(__file__).parents[3] / "docs/deepspeed-config.md"
START, END = "<!-- names -->\n", "<!-- /names -->"


def _by_reason(names: Mapping[str, str]) -> list[str]:
    """A row for each reason, with all names that have it."""
    same: dict[str, list[str]] = {}
    for path, why in sorted(names.items()):
        same.setdefault(why, []).append(f"`deepspeed.{path}`")
    return [f"| {', '.join(paths)} | {why} |" for why, paths in same.items()]


def tables() -> str:
    """What is here, and what is unsupported."""
    rows = ["### Here", "", "| module | names |", "|---|---|"]
    for path in HERE:
        module = module_at(path)
        if path and module is not None:
            names = ", ".join(f"`{name}`" for name in module.__all__)
            rows.append(f"| `deepspeed.{path}` | {names} |")
    rows += ["", "### Unsupported", "", "| name | why, and what to use instead |", "|---|---|"]
    rows += _by_reason(REFUSED)
    return "\n".join(rows) + "\n"


def written(page: str) -> str:
    """The page with its tables renewed."""
    before, _, rest = page.partition(START)
    return before + START + "\n" + tables() + "\n" + END + rest.partition(END)[2]


if __name__ == "__main__":
    if sys.argv[1:] == ["--write"]:
        PAGE.write_text(written(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    else:
        sys.stdout.write(tables())
