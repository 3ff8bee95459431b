"""The outcome of each key of a config."""

from typing import Any

import attrs

from .keys.config_key import Fate


@attrs.frozen
class ExplainedKey:
    """One key of a config, as it is spelled there, with its value, its outcome, and the reason."""

    key: str
    value: Any
    fate: Fate
    reason: str

    def __str__(self) -> str:
        return f"{self.key}: {_shown(self.value)} -> {self.fate.value}: {self.reason}"


@attrs.frozen
class Explanation:
    """All keys of a config, in its order, then consequences of omitted keys."""

    rows: tuple[ExplainedKey, ...]

    def of(self, fate: Fate) -> tuple[ExplainedKey, ...]:
        """The rows with one fate."""
        return tuple(row for row in self.rows if row.fate is fate)

    @property
    def refused(self) -> tuple[ExplainedKey, ...]:
        """The rows of unsupported keys."""
        return self.of(Fate.REFUSED)

    def __getitem__(self, key: str) -> ExplainedKey:
        """The row of a key, by the spelling of the config."""
        for row in self.rows:
            if row.key == key:
                return row
        raise KeyError(f"{key}: the config has {', '.join(row.key for row in self.rows)}")

    def __str__(self) -> str:
        blocks = [(fate, self.of(fate)) for fate in Fate]
        return "\n".join(
            line
            for fate, rows in blocks
            if rows
            for line in (f"{fate.value}:", *(f"  {row.key}: {_shown(row.value)} -> {row.reason}" for row in rows))
        )


class UsageError(ValueError, RuntimeError, TypeError, AssertionError):
    """A call that DeepSpeed rejects by ``assert``; programs may catch AssertionError, or the appropriate class."""


class ConfigError(ValueError, AssertionError, NotImplementedError):
    """An unsupported config; ``explanation`` has every key of it.

    DeepSpeed raises one of the three classes, by the key.
    """

    def __init__(self, message: str, explanation: Explanation | None = None) -> None:
        super().__init__(message)
        self.explanation = explanation or Explanation(())

    @classmethod
    def of(cls, explanation: Explanation) -> "ConfigError":
        """The error for all unsupported keys."""
        rows = explanation.refused
        head = f"the config has {len(rows)} key{'s' * (len(rows) > 1)} that cannot be taken over:"
        return cls("\n".join([head, *(f"  {row.key}: {_shown(row.value)}: {row.reason}" for row in rows)]), explanation)


def _shown(value: Any) -> str:
    if attrs.has(type(value)) or value is attrs.NOTHING:
        return "left out"
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
