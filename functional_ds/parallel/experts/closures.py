"""Variables that a function has closed over, made explicit for a graph, as in ``jax.closure_convert``."""

from collections.abc import Callable
from types import CellType, FunctionType
from typing import Any


def closed_over(f: Any) -> tuple[list[Any], Callable[[Any], Any]]:
    """The values that a function has closed over, and a function that rebuilds it with other values.

    Law: ``rebuilt(values)`` is ``f``. Callables that are not plain functions have no such values.

    >>> scale = 2
    >>> values, rebuilt = closed_over((lambda scale: lambda x: scale * x)(scale))
    >>> values, rebuilt([5])(3)
    ([2], 15)
    """
    if not isinstance(f, FunctionType) or f.__closure__ is None:
        return [], lambda values: f

    def rebuilt(values: Any) -> Any:
        new = FunctionType(f.__code__, f.__globals__, f.__name__, f.__defaults__, tuple(map(CellType, values)))
        new.__kwdefaults__ = f.__kwdefaults__
        return new

    return [cell.cell_contents for cell in f.__closure__], rebuilt
