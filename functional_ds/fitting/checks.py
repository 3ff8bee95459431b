"""Checks of ``fit``'s arguments."""

from typing import Any


def check_steps(name: str, value: Any, *, least: int = 1, optional: bool = True) -> None:
    """Raises ValueError unless the value is a number of steps.

    Args:
        name: the argument's, for the message.
        value: what was given.
        least: the smallest number.
        optional: whether None is allowed.
    """
    if not (value is None and optional) and (type(value) is not int or value < least):
        raise ValueError(f"{name}={value!r}: a number of steps is an int of at least {least}")


def positive_steps(record: Any, field: Any, value: Any) -> None:
    """``check_steps`` as a validator of a record's field."""
    check_steps(field.name, value)
