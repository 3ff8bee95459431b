"""One key of DeepSpeed's config as a record, and how its value is read."""

from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from math import inf, isfinite
from types import MappingProxyType
from typing import Any, Literal

import attrs

Kind = Literal["int", "float", "number", "bool", "str", "list", "dict", "betas", "rate", "any"]


class Fate(Enum):
    """The outcome of a key: it changes the plan, only the engine, or nothing; or it raises an error if it is active."""

    BECAME = "supported"
    ENGINE = "engine"
    IGNORED = "ignored"
    REFUSED = "unsupported"

    @property
    def column(self) -> str:
        """Its column in the table of keys."""
        return self.name.lower()


@attrs.frozen
class ConfigKey:
    """One key of DeepSpeed 0.19.8.

    Attributes:
        path: its place, with dots.
        kind: of its value: "number" is a float that may be infinite, "rate" one that may be the only one of a list.
        default: DeepSpeed's.
        fate: its outcome.
        text: one sentence: what it becomes, why it has no effect, or why it is unsupported and what to do instead.
        aliases: other spellings of the last name that DeepSpeed accepts.
        choices: the allowed values; () for any.
        least: the lowest value of a number.
        most: the highest value of a number.
        harmless: values without effect, in addition to the default, which an unsupported key may have.
        auto: whether DeepSpeed itself reads "auto" as its default, as it does in some blocks.
        removed: whether DeepSpeed 0.19.8 raises an error for any use of the key.
        says: by value, what takes the place of ``text``; "else" is of other values.
    """

    path: str
    kind: Kind
    default: Any
    fate: Fate
    text: str
    aliases: tuple[str, ...] = ()
    choices: tuple[Any, ...] = ()
    least: float = -inf
    most: float = inf
    harmless: tuple[Any, ...] = ()
    auto: bool = False
    removed: bool = False
    says: Mapping[str, str] = attrs.field(default=MappingProxyType({}), hash=False)

    @property
    def name(self) -> str:
        """The last name."""
        return self.path.rpartition(".")[2]

    @property
    def block(self) -> str:
        """The path without its last name."""
        return self.path.rpartition(".")[0]

    def reason(self, value: Any) -> str:
        """What becomes of the key with this value.

        >>> from functional_ds.deepspeed.config.keys.config_table import KEYS
        >>> KEYS["fp16.loss_scale"].reason(0.0), KEYS["fp16.loss_scale"].reason(128.0)
        ('`T.DynamicScale`.', '`T.StaticScale(128)`.')
        """
        word = str(value).removesuffix(".0") if isinstance(value, float) else str(value)
        text = self.says.get(word.lower() if isinstance(value, bool) else word, self.says.get("else", self.text))
        return text.replace("{value}", word).replace("=`", f"={value}`")

    def is_harmless(self, value: Any) -> bool:
        """Whether an unsupported key has no effect with this value: DeepSpeed's default, or one that turns it off."""
        off = isinstance(value, dict) and value.get("enabled", bool(value)) in (False, "false", "auto")
        return off or any(type(value) is type(none) and value == none for none in (self.default, *self.harmless))

    def parse(self, value: Any) -> Any:
        """The value in the key's type; numbers and booleans may be strings.

        Raises:
            ValueError: another type, or a value out of range; the message says what to do instead.
        """
        if value is None:
            if self.default is None or self.kind == "dict":
                return None
            raise ValueError(f"null: leave the key out for DeepSpeed's default, {self.default!r}")
        parsed = _PARSERS[self.kind](value)
        if self.choices:
            for choice in self.choices:
                if parsed == choice or (
                    isinstance(parsed, str) and isinstance(choice, str) and parsed.lower() == choice.lower()
                ):
                    return choice
            raise ValueError(f"{value!r} is not one of {', '.join(map(repr, self.choices))}")
        if isinstance(parsed, int | float) and not isinstance(parsed, bool) and not self.least <= parsed <= self.most:
            raise ValueError(f"{value!r} must be in {self.least}..{self.most}")
        return parsed


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise ValueError(f"{value!r} is not a number")
    try:
        return float(value)
    except ValueError:
        raise ValueError(f"{value!r} is not a number") from None


def _float(value: Any) -> float:
    number = _number(value)
    if not isfinite(number):
        raise ValueError(f"{value!r} must be finite")
    return number


def _int(value: Any) -> int:
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    number = _float(value)
    if number != int(number):
        raise ValueError(f"{value!r} must be a whole number")
    return int(number)


def _bool(value: Any) -> bool:
    if isinstance(value, str) and value.lower() in ("true", "false"):
        return value.lower() == "true"
    if value in (0, 1):  # True and False among them
        return bool(value)
    raise ValueError(f"{value!r} is neither true nor false")


def _passing(kind: type, words: str) -> Callable[[Any], Any]:
    def parse(value: Any) -> Any:
        if not isinstance(value, kind):
            raise ValueError(f"{value!r} is not {words}")
        return value

    return parse


def _list(value: Any) -> list[Any]:
    if isinstance(value, str):
        return [value]
    if not isinstance(value, Sequence):
        raise ValueError(f"{value!r} is not a list")
    return list(value)


def _betas(value: Any) -> tuple[float, float]:
    if isinstance(value, str) or not isinstance(value, Sequence) or len(value) != 2:
        raise ValueError(f"{value!r} is not a pair of numbers")
    return _float(value[0]), _float(value[1])


def _rate(value: Any) -> float:
    if isinstance(value, list | tuple) and len(value) == 1:
        return _float(value[0])
    if isinstance(value, list | tuple):
        raise ValueError(f"{value!r}: a rate for each of several param groups; use `fds.param_groups` with one schedule")
    return _float(value)


_PARSERS: dict[Kind, Any] = {
    "int": _int,
    "float": _float,
    "number": _number,
    "bool": _bool,
    "str": _passing(str, "a string"),
    "list": _list,
    "dict": _passing(dict, "a block of keys"),
    "betas": _betas,
    "rate": _rate,
    "any": lambda value: value,
}
