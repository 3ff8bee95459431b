"""Prints the tables of DeepSpeed's keys; with --write, puts them into docs/deepspeed-config.md."""

import sys
from collections.abc import Iterable, Mapping
from itertools import groupby
from pathlib import Path
from typing import Any

from functional_ds.deepspeed.config.ds_optimizers import OPTIMIZERS
from functional_ds.deepspeed.config.keys.config_key import ConfigKey, Fate
from functional_ds.deepspeed.config.keys.config_table import DEAD, SECTIONS
from functional_ds.deepspeed.config.schedules.ds_schedules import SCHEDULERS

PAGE = Path(__file__).parents[2] / "docs/deepspeed-config.md"
UNREAD = "Read only if its block is active, which is unsupported."
START, END = "<!-- keys -->\n", "<!-- /keys -->"


def _json(value: Any) -> str:
    words = {True: "true", False: "false", None: "-"}
    if value is None or isinstance(value, bool):
        return words[value]
    return f'"{value}"' if isinstance(value, str) else str(list(value)) if isinstance(value, tuple) else str(value)


def _answer(key: ConfigKey) -> str:
    """What becomes of a key; its fate is named unless it is supported."""
    fates = {Fate.REFUSED: "**Unsupported**", Fate.ENGINE: "**Engine**", Fate.IGNORED: "**Ignored**"}
    return f"{fates[key.fate]}. {key.text}" if key.fate in fates else key.text


def _row(names: Iterable[str], *cells: str) -> str:
    return f"| {_listed(names)} | {' | '.join(cells)} |\n"


def _listed(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _names(key: ConfigKey) -> list[str]:
    return [key.path, *key.aliases]


def table(keys: Iterable[ConfigKey]) -> str:
    """A row for each answer: neighbouring keys with the same one share it, with their defaults. Below it, what the engine does.

    The ignored keys come last.
    """
    keys = list(keys)
    rows = ""
    counted = (key for key in keys if key.fate in (Fate.BECAME, Fate.REFUSED))
    for answer, group in groupby(counted, key=_answer):
        same = list(group)
        rows += _row([name for key in same for name in _names(key)], ", ".join(_json(key.default) for key in same), answer)
    parts = [f"| key | DeepSpeed's default | here |\n|---|---|---|\n{rows}"] if rows else []
    if names := [name for key in keys if key.fate is Fate.ENGINE for name in _names(key)]:
        parts.append(f"Engine: {_listed(names)}.\n")
    if names := [name for key in keys if key.fate is Fate.IGNORED and key.text != UNREAD for name in _names(key)]:
        parts.append(f"Ignored: {_listed(names)}.\n")
    unread = [key.path.partition(".")[0] for key in keys if key.fate is Fate.IGNORED and key.text == UNREAD]
    if unread:
        blocks = ", ".join(f"{unread.count(block)} of `{block}`" for block in dict.fromkeys(unread))
        parts.append(f"Ignored, because they are read only if their blocks are active: the other keys, {blocks}.\n")
    return "\n".join(parts)


def shared(owners: Mapping[str, Iterable[ConfigKey]]) -> str:
    """One table of the keys of several optimizers or schedulers: a row for each key with one answer, and who has it."""
    rows: dict[tuple[str, str, str], list[str]] = {}
    for owner, keys in owners.items():
        for key in keys:
            default = "" if key.fate is Fate.IGNORED else _json(key.default)
            rows.setdefault((key.name, default, _answer(key)), []).append(owner)
    head = "| key | of | DeepSpeed's default | here |\n|---|---|---|---|\n"
    names = [*dict.fromkeys(name for name, *_ in rows)]
    ordered = sorted(rows.items(), key=lambda row: names.index(row[0][0]))
    for (who, answer), group in groupby(ordered, key=lambda row: (row[1], row[0][2])):
        same = [key for key, _ in group]
        defaults = ", ".join(default for _, default, _ in same if default)
        owned = "all" if len(who) == len(owners) else ", ".join(who)
        head += _row([name for name, *_ in same], owned, defaults, answer)
    return head


def tables() -> str:
    """All tables, with their headings."""
    parts = [f"### {name}\n\n{table(keys)}" for name, keys in SECTIONS.items()]
    rules = "".join(f"| `{rule.name}` | {rule.text} |\n" for rule in OPTIMIZERS)
    parts.append(f"### Optimizers\n\n| type | here |\n|---|---|\n{rules}")
    parts.append(shared({rule.name: rule.keys for rule in OPTIMIZERS}))
    parts.append(f"### Schedulers\n\n{shared({name: rule.keys for name, rule in SCHEDULERS.items()})}")
    dead = "\n".join(f"| `{name}` | {why} |" for name, why in DEAD.items())
    return "\n".join([*parts, f"### Names that DeepSpeed accepts and never reads\n\n| name | |\n|---|---|\n{dead}\n"])


def written(page: str) -> str:
    """The page with its tables renewed."""
    before, _, rest = page.partition(START)
    return before + START + "\n" + tables() + "\n" + END + rest.partition(END)[2]


if __name__ == "__main__":
    if sys.argv[1:] == ["--write"]:
        PAGE.write_text(written(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    else:
        sys.stdout.write(tables())
