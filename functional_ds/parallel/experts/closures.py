"""The variables of a function, which a graph hands to it in each step, as ``jax.closure_convert`` does."""

from collections.abc import Callable
from types import CellType, FunctionType
from typing import Any

__all__ = ["closed_over"]


def closed_over(f: Any) -> tuple[list[Any], Callable[[Any], Any]]:
    """What a function has closed over, and the function of other values in its place.

    Law: ``rebuilt(values)`` is ``f``. Of what is no plain function there is nothing.

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
