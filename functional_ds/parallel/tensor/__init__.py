"""Tensor parallelism of a model: linears split by columns or rows, embeddings and losses split by the vocabulary."""

from .linear import column, row
from .slice_draws import places
from .vocabulary import cross_entropy, embed
from .words import Packed, plan_of

__all__ = ["Packed", "column", "cross_entropy", "embed", "places", "plan_of", "row"]
