"""Classes whose definition declares constructor arguments: ``class WarmupLR(LRScheduler, warmup_num_steps=1000)``."""

import inspect
from collections.abc import Mapping
from typing import Any

REQUIRED: Any = inspect.Parameter.empty  # an argument without a default


def sign(made: type, first: str, defaults: Mapping[str, Any]) -> None:
    """Gives a class the signature of its constructor: the first argument, then the others with their defaults."""
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    others = [inspect.Parameter(name, kind, default=default) for name, default in defaults.items()]
    made.__signature__ = inspect.Signature([inspect.Parameter(first, kind), *others])  # type: ignore[attr-defined]


def bound(made: type, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """All arguments of a call of the class, by name.

    Raises:
        TypeError: there is no such argument, or one is missing.
    """
    arguments = inspect.signature(made).bind(*args, **kwargs)
    arguments.apply_defaults()
    return dict(arguments.arguments)
