"""Prints the table of DeepSpeed's own unit tests; with --write, puts it into docs/laws.md. A TOML file has the counts."""

import sys
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs

__all__ = ["DIFFERENCES", "PAGE", "ROWS", "OwnTests", "written"]

PAGE = Path(__file__).parents[3] / "docs/laws.md"
START, END = "<!-- own tests -->\n", "<!-- /own tests -->"
_TABLE = tomllib.loads(Path(__file__).with_name("own_tests.toml").read_text(encoding="utf-8"))


@attrs.frozen
class OwnTests:
    """A file of DeepSpeed's tests.

    Attributes:
        file: below ``tests/unit``.
        equal: how many of its cases hold here.
        differs: by a word of ``DIFFERENCES``, how many hold otherwise.
        refused: by a name, or a config's key with ":" before it, how many are refused by it.
    """

    file: str
    equal: int
    differs: Mapping[str, int]
    refused: Mapping[str, int]

    @property
    def tried(self) -> int:
        """All cases."""
        return self.equal + sum(self.differs.values()) + sum(self.refused.values())


_FILES: list[tuple[str, dict[str, Any]]] = [*_TABLE["files"].items()]
DIFFERENCES: Mapping[str, str] = _TABLE["differences"]  # by a word, what is said of it
ROWS = tuple(OwnTests(file, row["equal"], row.get("differs", {}), row.get("refused", {})) for file, row in _FILES)


def _listed(held: Mapping[str, int]) -> str:
    def said(name: str) -> str:
        return DIFFERENCES.get(name) or (f"`{name[1:]}`" if name.startswith(":") else f"`deepspeed.{name}`")

    return ", ".join(f"{said(name)} {count}" for name, count in held.items())


def table() -> str:
    """A row for each file whose cases differ, the others, and their sum."""
    same = [row for row in ROWS if row.equal == row.tried]
    rows = ["| tests/unit | tried | equal | different | raises an error |", "|---|---|---|---|---|"]
    rows += [
        f"| {r.file} | {r.tried} | {r.equal} | {_listed(r.differs)} | {_listed(r.refused)} |" for r in ROWS if r not in same
    ]
    cases = sum(row.tried for row in same)
    rows.append(f"| {', '.join(row.file for row in same)} | {cases} | {cases} | | |")
    differ, refused = (sum(sum(getattr(row, name).values()) for row in ROWS) for name in ("differs", "refused"))
    rows.append(f"| all | {sum(r.tried for r in ROWS)} | {sum(r.equal for r in ROWS)} | {differ} | {refused} |")
    return "\n".join(rows) + "\n"


def written(page: str) -> str:
    """The page with its table renewed."""
    before, _, rest = page.partition(START)
    return before + START + "\n" + table() + "\n" + END + rest.partition(END)[2]


def main(words: list[str]) -> Any:
    """Prints or writes the table."""
    if words == ["--write"]:
        return PAGE.write_text(written(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    return sys.stdout.write(table())


if __name__ == "__main__":
    main(sys.argv[1:])
