"""The pages' tables of ``holds``; ``python -m tests.testing.table --write`` puts them into docs/gallery.md and docs/laws.md.

Outcomes are those that the tests check; seconds are those of ``benchmarks/holds.py``.
"""

import inspect
import json
import sys
from collections.abc import Callable
from typing import Any

from functional_ds.testing.laws import LAWS
from tests.testing.methods import METHODS
from tests.testing.published import PUBLISHED, TOP, Published
from tests.testing.wrong_collectives import SAYS
from tests.testing.wrong_collectives import WRONG as WRONG_COLLECTIVES
from tests.testing.wrong_methods import WRONG

MEASURED = TOP / "benchmarks/results/holds.json"


def measured() -> dict[str, Any]:
    """What the benchmark has written, if it was run."""
    return json.loads(MEASURED.read_text(encoding="utf-8")) if MEASURED.exists() else {"methods": {}}


def seconds() -> dict[str, float]:
    """How long ``holds`` takes for each method."""
    return {name: row["wall"] for name, row in measured()["methods"].items()}


def took() -> str:
    """The machine, the date and the longest table, in a sentence."""
    found, each = measured(), seconds()
    if not each:
        return ""
    where, longest = found["machine"], max(each, key=lambda name: each[name])
    machine = f"{where['cores']} cores ({where['machine']}, torch {where['torch']}, {found['date']}, `benchmarks/holds.py`"
    machine += f", beside other programs: load {where['load']:.0f})" if where["load"] > 1 else ")"
    total = f"{sum(each.values()):.0f} for {len(each)} methods, {each[longest]:.0f} at most ({longest})"
    return f"\nSeconds are those of a whole table on {machine}: {total}; the goal is {found['goal']:.0f}.\n"


def rows_of(name: str, outcome: str) -> list[str]:
    """The laws with this outcome for a method."""
    return [f"`{law.name}`" for law in LAWS if METHODS[name].outcome(law.name) == outcome]


def table(head: str, *rows: str) -> str:
    return "\n".join([head, "|---" * (head.count("|") - 1) + "|", *rows, ""])


def published() -> str:
    def place(file: str, names: list[str]) -> str:
        shown = ", ".join(f"`{name}`" for name in names)
        return f"[{file}]({file}): {shown}" if file.endswith(".md") else f"`{file}`: {shown}"

    def outcome(method: Published) -> str:
        found = [(word, [law for name in method.tested for law in rows_of(name, word)]) for word in ("refused", "wrong")]
        return method.instead or "; ".join(f"{', '.join(dict.fromkeys(laws))} {word}" for word, laws in found if laws) or "ok"

    each = seconds()
    return table(
        "| method | code | lines | written with | right in stages | `holds` | seconds |",
        *(
            f"| {method.name} | {', '.join(place(*each) for each in method.places())} | {method.lines} "
            f"| {', '.join(f'`{name}`' for name in method.uses)} | {method.stages} | {outcome(method)} "
            f"| {', '.join(f'{each[name]:.0f}' for name in method.tested if name in each)} |"
            for method in PUBLISHED
        ),
    )


def methods() -> str:
    each = seconds()
    return (
        table(
            "| method | ok | not applicable | refused | wrong | seconds |",
            *(
                f"| {name} | {len(rows_of(name, 'ok'))} | {len(rows_of(name, 'not applicable'))} "
                f"| {', '.join(rows_of(name, 'refused'))} | {', '.join(rows_of(name, 'wrong'))} "
                f"| {f'{each[name]:.0f}' if name in each else ''} |"
                for name in METHODS
            ),
        )
        + took()
    )


def wrong() -> str:
    return table(
        "| wrong method | what it does | noticed by |",
        *(f"| `{make.__name__}` | {inspect.getdoc(make)} | `{law}` |" for make, (law, _) in WRONG.items()),
    ).replace("``", "`")


def wrong_collectives() -> str:
    says = {law: SAYS.get(law) or inspect.getdoc(function) for law, function in WRONG_COLLECTIVES.items()}
    return table("| what a wrong collective does | noticed by |", *(f"| {text} | `{law}` |" for law, text in says.items()))


BLOCKS: dict[tuple[str, str], Callable[[], str]] = {
    ("gallery.md", "methods"): published,
    ("laws.md", "holds"): methods,
    ("laws.md", "wrong methods"): wrong,
    ("laws.md", "wrong collectives"): wrong_collectives,
}


def written(page: str, text: str) -> str:
    """A page's text with its tables renewed."""
    for (file, name), make in BLOCKS.items():
        if file == page:
            before, start, rest = text.partition(f"<!-- {name} -->\n")
            _, end, after = rest.partition(f"<!-- /{name} -->")
            if not start or not end:
                raise SystemExit(f"docs/{page} must have a block <!-- {name} --> ... <!-- /{name} -->")
            text = before + start + make() + end + after
    return text


def main(*, write: bool) -> None:
    for page in dict.fromkeys(file for file, _ in BLOCKS):
        path = TOP / "docs" / page
        text = written(page, path.read_text(encoding="utf-8"))
        if write:
            path.write_text(text, encoding="utf-8")
        else:
            sys.stdout.write(text)


if __name__ == "__main__":
    main(write=sys.argv[1:] == ["--write"])
