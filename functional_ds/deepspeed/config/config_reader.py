"""Reads a DeepSpeed config (a path, a dict or base64 text) into values by path."""

import base64
import binascii
import json
import os
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar

import attrs

from functional_ds.base.disk.files import check_plain, parse_json, read_text

from .explain import ConfigError, ExplainedKey, Explanation
from .keys.config_key import ConfigKey, Fate
from .keys.config_table import BLOCKS, DEAD, SECTIONS, key_of, nearest

T = TypeVar("T")
Config = str | os.PathLike[str] | Mapping[str, Any]

ABSENT = object()  # the value of an "auto" that is not replaced
_OF_DYNAMIC_SCALES = tuple(
    f"fp16.{name}"
    for name in ("hysteresis", "consecutive_hysteresis", "initial_scale_power", "loss_scale_window", "min_loss_scale")
)
_OPEN = ("optimizer.params", "scheduler.params")


@attrs.define
class Settings:
    """A config's values, and the outcome of its keys so far.

    Attributes:
        values: by canonical path, the config's values; "auto" where it stays open.
        spelled: by canonical path, the path as the config has it.
        given: by canonical path, the values as the config has them.
        rows: the outcome of keys, by the path as the config has it, if it differs from the table's.
    """

    values: dict[str, Any] = attrs.field(factory=dict)
    spelled: dict[str, str] = attrs.field(factory=dict)
    given: dict[str, Any] = attrs.field(factory=dict)
    rows: dict[str, ExplainedKey] = attrs.field(factory=dict)

    def __getitem__(self, path: str) -> Any:
        """The value of a key, or DeepSpeed's default."""
        key = key_of(path)
        if path not in self.values and key is None:
            raise KeyError(path)
        return self.values.get(path, key.default if key else None)

    def __contains__(self, path: str) -> bool:
        return path in self.values

    def refuse(self, path: str, reason: str) -> None:
        """Marks a key as unsupported, whether the config has it or not."""
        self.note(path, Fate.REFUSED, reason)

    def attempt(self, path: str, make: Callable[[], T]) -> T | None:
        """The result of ``make``; a ValueError marks the key as unsupported."""
        try:
            return make()
        except ValueError as error:
            self.refuse(path, str(error))
            return None

    def explanation(self) -> Explanation:
        """The outcome of each key, by default from the table; the config's keys first, in its order."""
        rows: dict[str, ExplainedKey] = {}
        for path, value in self.given.items():
            name, key = self.spelled[path], key_of(path)
            if name in self.rows:
                rows[name] = self.rows[name]
            elif key is not None:
                off = self._why_off(key) if key.fate in (Fate.BECAME, Fate.ENGINE) else None
                fate = Fate.IGNORED if off or key.fate is Fate.REFUSED else key.fate
                rows[name] = ExplainedKey(name, value, fate, off or key.reason(self[path]))
        return Explanation(tuple((rows | self.rows).values()))

    def _why_off(self, key: ConfigKey) -> str | None:
        """Why a key that can change the plan does not."""
        block = key_of(f"{key.block}.enabled")
        if block is not None and block is not key and self[block.path] is False:
            return f"`{block.path}` is false."
        value, stage = self[key.path], self["zero_optimization.stage"]
        if (value is False and key.default in (False, None)) or value == key.default == "none":
            return "It is off, as it is by default."
        if key.name == "nvme_path" and self[f"{key.block}.device"] != "nvme":
            return "It is read with `device: nvme`."
        if key.path in _OF_DYNAMIC_SCALES and self["fp16.loss_scale"]:
            return "The loss scale is constant."
        if key.path in _OF_DYNAMIC_SCALES[:2] and not stage:
            return "DeepSpeed's stage 0 ignores it."
        if key.path == "gradient_predivide_factor" and self["prescale_gradients"]:
            return "`prescale_gradients` takes its place."
        if key in SECTIONS["ZeRO stage 3"] and stage < 3:
            return f"It is for stage 3, and the stage is {stage}."
        return None

    def put(self, key: ConfigKey, path: str, value: Any) -> None:
        """Parses and stores a key's value; records if it is unsupported, or off."""
        if value is ABSENT:
            if key.auto:
                off = key.default is False
                why = "It is off." if off else key.reason(key.default)
                fate = Fate.IGNORED if off else key.fate
                self.note(path, fate, f"DeepSpeed reads auto as its default, {key.default!r}. {why}")
            elif key.default == "auto":
                self.values[path] = "auto"
            else:
                self.refuse(path, f"auto needs a value: from_ds_config(..., auto={{{path!r}: ...}})")
            return
        try:
            self.values[path] = key.parse(value)
        except ValueError as error:
            self.refuse(path, str(error))
            return
        if key.fate is Fate.REFUSED:
            if key.is_harmless(self.values[path]):
                self.note(path, Fate.IGNORED, "It is off." + " DeepSpeed 0.19.8 raises even so." * key.removed)
            else:
                self.refuse(path, key.text)

    def note(self, path: str, fate: Fate, reason: str) -> None:
        """Records the outcome of a key. An unsupported key stays unsupported."""
        name = self.spelled.get(path, path)
        value = self.given.get(path, attrs.NOTHING)
        if name not in self.rows or self.rows[name].fate is not Fate.REFUSED:
            self.rows[name] = ExplainedKey(name, value, fate, reason)


def source(config: Config) -> dict[str, Any]:
    """The config as a dict.

    Raises:
        ConfigError: no such file and not base64 text; not JSON; a duplicate key.
    """
    if isinstance(config, Mapping):
        return dict(config)
    if not isinstance(config, str | os.PathLike):
        raise ConfigError(f"config={config!r} is neither a path, nor a dict, nor base64 text")
    path = Path(config)
    try:
        there = path.is_file()
    except OSError:  # longer than a file's name can be
        there = False
    if there:
        try:
            return _loads(read_text(path), str(path))
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{path} cannot be read as text in UTF-8: {error}") from None
    try:
        text = base64.urlsafe_b64decode(os.fspath(config)).decode()
    except (binascii.Error, ValueError):
        raise ConfigError(f"config={str(config)[:200]!r} is neither a file nor base64 text of a config") from None
    return _loads(text, "base64 text")


def _loads(text: str, where: str) -> dict[str, Any]:
    try:
        config = parse_json(text, pairs=unique)
    except json.JSONDecodeError as error:
        config = _hjson(text, f"{where}: not valid JSON: {error}")
    if not isinstance(config, dict):
        raise ConfigError(f"{where}: a config is a block of keys, and this is {config!r}")
    return dict(config)


def _hjson(text: str, message: str) -> Any:
    if find_spec("hjson") is None:
        raise ConfigError(f"{message}; comments and the like need the package hjson") from None
    hjson = import_module("hjson")
    try:
        config = hjson.loads(text, object_pairs_hook=unique)
        check_plain(config)
        return config
    except ConfigError:
        raise
    except (ValueError, RecursionError) as error:  # HjsonDecodeError is a ValueError
        raise ConfigError(f"{message}, and not valid Hjson: {error}") from None


def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """The pairs as a dict.

    Raises:
        ConfigError: a key occurs twice.
    """
    twice = [key for key, times in Counter(key for key, _ in pairs).items() if times > 1]
    if twice:
        raise ConfigError(f"these keys occur twice in one block: {', '.join(twice)}; keep one of each")
    return dict(pairs)


def read(config: Mapping[str, Any], *, auto: Mapping[str, Any], warn: bool) -> Settings:
    """Looks up and parses every key of a config, and replaces "auto".

    Args:
        config: a dict.
        auto: by path, replacements for "auto".
        warn: whether known dead keys give a warning instead of an error.
    """
    settings = Settings()
    for path, value in _flat(_renamed(config, settings), ""):
        key = key_of(path)
        if key is None:
            _unknown(settings, path, value, warn)
            continue
        canonical = key.path
        if canonical in settings.spelled:
            settings.rows[path] = ExplainedKey(
                path, value, Fate.REFUSED, f"it says the same as `{settings.spelled[canonical]}`; keep one of them"
            )
            continue
        settings.spelled.setdefault(canonical, path)
        settings.given[canonical] = value
        settings.put(key, canonical, _closed(canonical, value, auto))
    return settings


def value_of(config: Config, path: str) -> Any:
    """The value of one key, or DeepSpeed's default; other keys are not read.

    Raises:
        ConfigError: the config cannot be read, or the value is unsupported.

    >>> value_of({"comms_logger": {"enabled": "true"}}, "comms_logger.enabled")
    True
    """
    settings = read(source(config), auto={}, warn=False)
    row = settings.rows.get(settings.spelled.get(path, path))
    if row is not None and row.fate is Fate.REFUSED:
        raise ConfigError(f"{row.key}: {row.reason}")
    return settings[path]


def _closed(path: str, value: Any, auto: Mapping[str, Any]) -> Any:
    """The value with "auto" replaced."""
    if path in _OPEN and isinstance(value, dict):
        return {name: auto.get(f"{path}.{name}", entry) if entry == "auto" else entry for name, entry in value.items()}
    return auto.get(path, ABSENT) if value == "auto" else value


def _renamed(config: Mapping[str, Any], settings: Settings) -> dict[str, Any]:
    """With the block ``bfloat16`` under its new name, and a boolean ``zero_optimization`` as a block."""
    renamed = dict(config)
    if "bfloat16" in renamed:
        if "bf16" in renamed:
            settings.rows["bfloat16"] = ExplainedKey(
                "bfloat16", renamed["bfloat16"], Fate.REFUSED, "it says the same as `bf16`; keep one of them"
            )
        old = renamed.pop("bfloat16")
        renamed.setdefault("bf16", old)
    if isinstance(renamed.get("zero_optimization"), bool):
        renamed["zero_optimization"] = {"stage": int(renamed["zero_optimization"])}
    return renamed


def _flat(block: Mapping[str, Any], above: str) -> Iterator[tuple[str, Any]]:
    """Each key's path and value; known blocks are opened."""
    for name, value in block.items():
        path = f"{above}{name}"
        if isinstance(value, Mapping) and path in BLOCKS:
            yield from _flat(value, f"{path}.")
        elif not (value is None and path in BLOCKS):  # a block of null is one that is left out
            yield path, dict(value) if isinstance(value, Mapping) else value


def _unknown(settings: Settings, path: str, value: Any, warn: bool) -> None:
    reason = nearest(path)
    if path in BLOCKS:
        reason = f"it must be a block of keys, {{...}}, as {path}.{{...}} has several"
    if path in DEAD and warn:
        warnings.warn(f"config: {path}: {reason}", stacklevel=4)
        settings.rows[path] = ExplainedKey(path, value, Fate.IGNORED, reason)
    else:
        settings.rows[path] = ExplainedKey(path, value, Fate.REFUSED, reason)
