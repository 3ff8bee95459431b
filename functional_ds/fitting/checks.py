"""Checks of what ``fit`` is given."""

from typing import Any

__all__ = ["check_steps", "positive_steps", "refuse_removed"]

# What took the place of the keywords that ``fit`` had before 1.0.
_CHECKPOINTS, _EVALUATION, _LOGGING = (
    "pass checkpoints=fds.Checkpoints(path, every=..., minutes=..., keep_last=..., keep_every=..., resume=...)",
    "pass evaluation=fds.Evaluation(function, every=...)",
    "pass logging=fds.Logging(loggers, every=..., progress=...)",
)
_REMOVED = {
    **dict.fromkeys(("path", "every", "minutes", "keep_last", "keep_every", "resume"), _CHECKPOINTS),
    **dict.fromkeys(("evaluate", "evaluate_every"), _EVALUATION),
    **dict.fromkeys(("loggers", "log_every", "progress"), _LOGGING),
    "buffers": "modules' buffers are part of the state, and saved with it",
}


def refuse_removed(given: dict[str, Any]) -> None:
    """Raises TypeError for keywords that ``fit`` does not have; it says what took a removed keyword's place."""
    for name in given:
        instead = f"; {_REMOVED[name]}" if name in _REMOVED else ""
        raise TypeError(f"fit() got an unexpected keyword argument {name!r}{instead}")


def check_steps(name: str, value: Any, *, least: int = 1, optional: bool = True) -> None:
    """Raises ValueError unless the value is a number of steps.

    Args:
        name: the argument's, for the message.
        value: what was given.
        least: the smallest number.
        optional: whether None will do, too.
    """
    if not (value is None and optional) and (type(value) is not int or value < least):
        raise ValueError(f"{name}={value!r}: a number of steps is an int of at least {least}")


def positive_steps(record: Any, field: Any, value: Any) -> None:
    """``check_steps`` as a validator of a record's field."""
    check_steps(field.name, value)
