"""Compressed communication: codecs, collectives that use them, and error feedback."""

from typing import TYPE_CHECKING

from functional_ds.base.package_index import lazy_index

if TYPE_CHECKING:
    from .codec import Blocks, Cast, Codec, OneBit, TopK
    from .compressed import compressed
    from .error_feedback import ErrorFeedback, Residual

__all__ = ["Blocks", "Cast", "Codec", "ErrorFeedback", "OneBit", "Residual", "TopK", "compressed"]

lazy_index(__name__)
