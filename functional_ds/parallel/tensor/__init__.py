"""Tensor parallelism of a model: linears cut by columns or rows, embeddings and losses cut by the vocabulary."""

from .linear import column, row
from .vocabulary import cross_entropy, embed
from .words import Packed, plan_of

__all__ = ["Packed", "column", "cross_entropy", "embed", "plan_of", "row"]
