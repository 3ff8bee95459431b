"""Every key of DeepSpeed's config in one table, ``keys.toml``, and lookups in it."""

import difflib
import tomllib
from importlib.resources import files
from typing import Any

from .config_key import ConfigKey, Fate

_TABLE = tomllib.loads(files(__package__).joinpath("keys.toml").read_text(encoding="utf-8"))
_TUPLES = ("aliases", "choices", "harmless")

DEAD: dict[str, str] = _TABLE["dead"]
NOT_HERE: dict[str, dict[str, str]] = _TABLE["not_here"]
OPTIMIZERS: list[dict[str, Any]] = _TABLE["optimizer"]

# By the name of an engine's method, the key whose value it returns.
QUESTIONS: dict[str, str] = {
    key.replace("zero_optimization.", "zero_").replace("zero_zero_", "zero_").replace(".", "_"): key
    for key in _TABLE["questions"]["asked"]
} | _TABLE["questions"]["called"]


def _key(group: dict[str, Any], name: str, entry: Any) -> ConfigKey:
    row: dict[str, Any] = entry if isinstance(entry, dict) else {"default": entry}
    fate = next(fate for given in (row, group) for fate in Fate if fate.column in given)
    row = {**group, **row}
    default: Any = row.get("default")
    default, text = tuple(default) if row.get("type") == "betas" else default, row[fate.column]
    more: dict[str, Any] = {column: row[column] for column in ("least", "most", "auto", "removed", "says") if column in row}
    more |= {column: tuple(row[column]) for column in _TUPLES if column in row}
    path = f"{group.get('block', '')}.{name}".lstrip(".")
    return ConfigKey(path, row.get("type", type(default).__name__), default, fate, _TABLE["texts"].get(text, text), **more)


def _sections() -> dict[str, tuple[ConfigKey, ...]]:
    sections: dict[str, tuple[ConfigKey, ...]] = {}
    for group in _TABLE["group"]:
        keys = tuple(_key(group, name, entry) for name, entry in group["keys"].items())
        sections[group["section"]] = sections.get(group["section"], ()) + keys
    return sections


def optimizer_keys(optimizer: dict[str, Any]) -> tuple[ConfigKey, ...]:
    """The arguments of a row of ``OPTIMIZERS``."""
    given = optimizer["params"] | {name: {} for name in optimizer.get("also", ())}
    shared = {"block": "optimizer.params"}
    return tuple(_key(shared | _TABLE["arguments"].get(name, {}), name, entry) for name, entry in given.items())


def schedule_rows(schedule: str) -> dict[str, dict[str, Any]]:
    """The table's rows for the arguments of a schedule, by name."""
    overrides = _TABLE["schedulers"].get(schedule, {})
    return {name: row | overrides.get(name, {}) for name, row in _TABLE["schedule_arguments"].items()}


def argument_key(block: str, name: str, row: dict[str, Any], default: Any) -> ConfigKey:
    """The key of an argument that a row describes."""
    return _key({"block": block} | row, name, {} if default is None else {"default": default})


SECTIONS = _sections()
KEYS: dict[str, ConfigKey] = {key.path: key for keys in SECTIONS.values() for key in keys}

_SPELLED = {f"{key.block}.{alias}".removeprefix("."): key for key in KEYS.values() for alias in key.aliases} | KEYS

# Paths that have keys below them.
BLOCKS = {key.path[:place] for key in KEYS.values() for place, letter in enumerate(key.path) if letter == "."}


def key_of(path: str) -> ConfigKey | None:
    """The key with this path or alias."""
    return _SPELLED.get(path)


def nearest(path: str) -> str:
    """A hint for an unknown key: what is known of it, or the nearest name."""
    if path in DEAD:
        return f"DeepSpeed accepts the name and does nothing with it: {DEAD[path]}"
    block, _, name = path.rpartition(".")
    known = [*_SPELLED, *BLOCKS]
    elsewhere = [key for key in known if key.rpartition(".")[2] == name]
    if elsewhere:
        return (
            f"there is no such key in {f'`{block}`' if block else 'the top level'}; it belongs at `{min(elsewhere, key=len)}`"
        )
    beside = [key for key in known if key.rpartition(".")[0] == block]
    close = difflib.get_close_matches(path, beside, 1, 0.6) or difflib.get_close_matches(path, known, 1, 0.0)
    return f"DeepSpeed 0.19.8 has no such key; the nearest is `{close[0]}`"
