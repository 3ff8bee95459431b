"""Memory of each rank, predicted from shapes or measured on tensors."""

from functional_ds.base.marks import without_values
from functional_ds.dry_run.events import recorded

from .account import KINDS, Memory, measured
from .activations import Activations, activations
from .counting import holdings, noted, peak, places, stored
from .formulas import (
    EIGHTEEN,
    SINGLE,
    SIXTEEN,
    Convention,
    Formula,
    by_stage,
    elements_sent,
    layer_elements_sent,
    padding,
    padding_bound,
)
from .predict import predicted
from .reports import compared, draw_compared, draw_zero, zero_table

__all__ = [
    "EIGHTEEN",
    "KINDS",
    "SINGLE",
    "SIXTEEN",
    "Activations",
    "Convention",
    "Formula",
    "Memory",
    "activations",
    "by_stage",
    "compared",
    "draw_compared",
    "draw_zero",
    "elements_sent",
    "holdings",
    "layer_elements_sent",
    "measured",
    "noted",
    "padding",
    "padding_bound",
    "peak",
    "places",
    "predicted",
    "recorded",
    "stored",
    "without_values",
    "zero_table",
]
