"""Sequence (context) parallelism of a model: attention over sequences split over ranks, and functions applied in tiles."""

from .axis import SequenceAxis, documents_of, sequence_axis
from .block_products import BlockProduct, ring_pairs
from .blockwise import attention, merge
from .gathered_keys import gathered
from .hugging_face import SequenceMask, register_attention
from .ring import ring
from .sequence_layout import SequenceLayout
from .tiling.tiled_loss import tiled_loss
from .ulysses import HeadShares, head_shares, ulysses

__all__ = [
    "BlockProduct",
    "HeadShares",
    "SequenceAxis",
    "SequenceLayout",
    "SequenceMask",
    "attention",
    "documents_of",
    "gathered",
    "head_shares",
    "merge",
    "register_attention",
    "ring",
    "ring_pairs",
    "sequence_axis",
    "tiled_loss",
    "ulysses",
]
