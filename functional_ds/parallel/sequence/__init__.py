"""Sequence parallelism of a model: attention over sequences that are cut among ranks, and functions applied in tiles."""

from .axis import SequenceAxis, documents_of, sequence_axis
from .block_products import BlockProduct, ring_pairs
from .blockwise import attention
from .ring import ring
from .sequence_layout import SequenceLayout
from .softmax_merge import merge
from .tiled_loss import tiled_loss

__all__ = [
    "BlockProduct",
    "SequenceAxis",
    "SequenceLayout",
    "attention",
    "documents_of",
    "merge",
    "ring",
    "ring_pairs",
    "sequence_axis",
    "tiled_loss",
]
