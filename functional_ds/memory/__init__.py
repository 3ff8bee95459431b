"""Memory: what each rank will hold, and what it held."""

from .account import KINDS, Memory, measured
from .counting import Live, holdings, places, stored
from .predicting import predicted, without_values
from .tracking import Tracked, noted, peak

__all__ = [
    "KINDS",
    "Live",
    "Memory",
    "Tracked",
    "holdings",
    "measured",
    "noted",
    "peak",
    "places",
    "predicted",
    "stored",
    "without_values",
]
