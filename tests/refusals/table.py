"""Prints the tables of what is refused; ``python -m tests.refusals.table --write`` puts them into docs/troubleshooting.md."""

import sys
from pathlib import Path

from tests.refusals import collectives, derivatives, engines, files, losses, modules, strategies
from tests.refusals.refusal import Refusal

PAGE = Path(__file__).parents[2] / "docs/troubleshooting.md"
AREAS: dict[str, list[Refusal]] = {
    "modules": modules.REFUSALS,
    "losses": losses.REFUSALS,
    "strategies": strategies.REFUSALS,
    "derivatives": derivatives.REFUSALS,
    "collectives": collectives.REFUSALS,
    "files": files.REFUSALS,
    "engines": engines.REFUSALS,
}


def table(refusals: list[Refusal]) -> str:
    """A row for each refusal."""
    return "| unsupported | instead |\n|---|---|\n" + "".join(f"| {r.what} | {r.instead} |\n" for r in refusals)


def block(page: str, area: str) -> str:
    """What stands on the page between ``<!-- refused: area -->`` and ``<!-- /refused: area -->``."""
    return page.partition(f"<!-- refused: {area} -->\n")[2].partition(f"<!-- /refused: {area} -->")[0]


def written(page: str) -> str:
    """The page with its tables renewed."""
    for area, refusals in AREAS.items():
        start, end = f"<!-- refused: {area} -->\n", f"<!-- /refused: {area} -->"
        if (page.count(start), page.count(end)) != (1, 1):
            raise SystemExit(f"{PAGE.name} must have one block {start.strip()} ... {end}")
        before, _, rest = page.partition(start)
        page = before + start + table(refusals) + end + rest.partition(end)[2]
    return page


if __name__ == "__main__":
    if sys.argv[1:] == ["--write"]:
        PAGE.write_text(written(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    else:
        sys.stdout.write("\n".join(map(table, AREAS.values())))
