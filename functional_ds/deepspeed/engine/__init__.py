"""DeepSpeed's engine: ``initialize``, and forward, backward and step calls over a step in two halves."""

from .engine import DeepSpeedEngine
from .initialize import initialize

__all__ = ["DeepSpeedEngine", "initialize"]
