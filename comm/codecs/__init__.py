"""Codecs: what is sent, in fewer bytes; collectives that send it, and feedback of what a codec loses."""

from typing import TYPE_CHECKING

from functional_ds.base.package_index import lazy_index

if TYPE_CHECKING:
    from .codec import Blocks, Cast, Codec, OneBit, TopK
    from .compressed import compressed
    from .error_feedback import ErrorFeedback, Residual

__all__ = ["Blocks", "Cast", "Codec", "ErrorFeedback", "OneBit", "Residual", "TopK", "compressed"]

lazy_index(__name__)
