"""The explanation of settings: a row for each key of the config."""

import attrs

from .config_key import Fate
from .config_reader import Settings
from .config_table import key_of
from .explain import ExplainedKey, Explanation

__all__ = ["explanation"]


def explanation(s: Settings) -> Explanation:
    """What is noted of a key, or else what the table says of it; the config's keys first, in its order."""
    rows: dict[str, ExplainedKey] = {}
    for path, value in s.given.items():
        name = s.spelled[path]
        key = key_of(path)
        if name in s.rows:
            rows[name] = s.rows[name]
        elif key is not None:
            rows[name] = ExplainedKey(name, value, Fate.IGNORED if key.fate is Fate.REFUSED else key.fate, key.text)
    return Explanation(tuple(attrs.evolve(row) for row in (rows | s.rows).values()))
