"""DeepSpeed's engine: ``initialize``, and calls of forward, backward and step over a step in halves."""

from .engine import DeepSpeedEngine
from .initialize import initialize

__all__ = ["DeepSpeedEngine", "initialize"]


def __dir__() -> list[str]:
    return __all__
