"""Prints the tables of DeepSpeed's keys; with --write, puts them into docs/deepspeed-config.md."""

import sys
from collections.abc import Iterable
from itertools import groupby
from pathlib import Path
from typing import Any

from functional_ds.deepspeed.config.ds_optimizers import OPTIMIZERS
from functional_ds.deepspeed.config.keys.config_key import ConfigKey, Fate
from functional_ds.deepspeed.config.keys.config_table import DEAD, SECTIONS
from functional_ds.deepspeed.config.schedules.ds_schedules import SCHEDULERS

PAGE = Path(__file__).parents[2] / "docs/deepspeed-config.md"
START, END = "<!-- keys -->\n", "<!-- /keys -->"


def _json(value: Any) -> str:
    words = {True: "true", False: "false", None: "-"}
    if value is None or isinstance(value, bool):
        return words[value]
    return f'"{value}"' if isinstance(value, str) else str(list(value)) if isinstance(value, tuple) else str(value)


def _fate(key: ConfigKey) -> str:
    return "unsupported if active" if key.fate is Fate.REFUSED else key.fate.value


def table(keys: Iterable[ConfigKey], *, short: bool = False) -> str:
    """A row for each answer: neighbouring keys with the same one share it, with their defaults."""
    rows = ["| key | DeepSpeed's default | here | |", "|---|---|---|---|"]
    for (fate, text), group in groupby(keys, key=lambda key: (_fate(key), key.text)):
        same = list(group)
        names = [", ".join(f"`{name}`" for name in (key.name if short else key.path, *key.aliases)) for key in same]
        rows.append(f"| {', '.join(names)} | {', '.join(_json(key.default) for key in same)} | {fate} | {text} |")
    return "\n".join(rows) + "\n"


def tables() -> str:
    """All tables, with their headings."""
    parts = [f"### {name}\n\n{table(keys)}" for name, keys in SECTIONS.items()]
    parts += [f"### Optimizer `{rule.name}`\n\n{rule.text}\n\n{table(rule.keys, short=True)}" for rule in OPTIMIZERS]
    parts += [f"### Scheduler `{name}`\n\n{table(rule.keys, short=True)}" for name, rule in SCHEDULERS.items()]
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
