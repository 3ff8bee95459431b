"""Every key of DeepSpeed's config in one table, and where a name is looked up in it."""

import difflib

from .config_key import ConfigKey
from .keys_of_loops import DEAD
from .keys_of_loops import KEYS as LOOPS
from .keys_of_models import KEYS as MODELS
from .keys_of_steps import KEYS as STEPS
from .keys_of_zero import KEYS as ZERO

__all__ = ["BLOCKS", "KEYS", "SECTIONS", "key_of", "nearest"]

SECTIONS: dict[str, tuple[ConfigKey, ...]] = {**STEPS, **ZERO, **MODELS, **LOOPS}
KEYS: dict[str, ConfigKey] = {key.path: key for keys in SECTIONS.values() for key in keys}

_SPELLED = {f"{key.block}.{alias}".removeprefix("."): key for key in KEYS.values() for alias in key.aliases} | KEYS

# Paths that have keys below them.
BLOCKS = {key.path[:place] for key in KEYS.values() for place, letter in enumerate(key.path) if letter == "."}


def key_of(path: str) -> ConfigKey | None:
    """The key with this path or alias."""
    return _SPELLED.get(path)


def nearest(path: str) -> str:
    """Words about an unknown key: what is known of it, or the nearest name."""
    if path in DEAD:
        return f"DeepSpeed accepts the name and does nothing with it: {DEAD[path]}"
    block, _, name = path.rpartition(".")
    known = [*_SPELLED, *BLOCKS]
    elsewhere = [each for each in known if each.rpartition(".")[2] == name]
    if elsewhere:
        return (
            f"there is no such key in {f'`{block}`' if block else 'the top level'}; it belongs at `{min(elsewhere, key=len)}`"
        )
    beside = [each for each in known if each.rpartition(".")[0] == block]
    close = difflib.get_close_matches(path, beside, 1, 0.6) or difflib.get_close_matches(path, known, 1, 0.0)
    return f"DeepSpeed 0.19.8 has no such key; the nearest is `{close[0]}`"
