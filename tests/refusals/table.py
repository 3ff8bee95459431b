"""Prints the tables of what is refused; ``python -m tests.refusals.table --write`` puts them into docs/refused.md."""

import re
import sys
from pathlib import Path

from tests.refusals import collectives, files, losses, modules, strategies
from tests.refusals.refusal import Refusal

PAGE = Path(__file__).parents[2] / "docs/refused.md"
AREAS: dict[str, list[Refusal]] = {
    "modules": modules.REFUSALS,
    "losses": losses.REFUSALS,
    "strategies": strategies.REFUSALS,
    "collectives": collectives.REFUSALS,
    "files": files.REFUSALS,
}


def table(refusals: list[Refusal]) -> str:
    """A row for each refusal."""
    head = "| refused | error | why | what would do |\n|---|---|---|---|\n"
    return head + "".join(f"| {r.what} | `{r.error.__name__}` | {r.why} | {r.instead} |\n" for r in refusals)


def block(page: str, area: str) -> str:
    """What stands on the page between ``<!-- refused: area -->`` and ``<!-- /refused: area -->``."""
    return page.split(f"<!-- refused: {area} -->\n")[1].split(f"<!-- /refused: {area} -->")[0]


def written(page: str) -> str:
    """The page with its tables renewed."""
    for area, refusals in AREAS.items():
        marks = f"<!-- refused: {area} -->\n", f"<!-- /refused: {area} -->"
        page, found = re.subn(
            "(?<=" + marks[0] + ").*?(?=" + marks[1] + ")", lambda _, new=table(refusals): new, page, flags=re.DOTALL
        )
        if found != 1:
            raise SystemExit(f"{PAGE.name} has {found} blocks {marks[0].strip()}, not one")
    return page


if __name__ == "__main__":
    if sys.argv[1:] == ["--write"]:
        PAGE.write_text(written(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    else:
        sys.stdout.write("\n".join(map(table, AREAS.values())))
