"""Reduction operators: DeepSpeed's ``ReduceOp``, torch's, or this library's names."""

from enum import Enum
from typing import Any

__all__ = ["ReduceOp"]


class ReduceOp(Enum):
    """DeepSpeed's names. Bitwise reductions raise an error when they are used."""

    SUM = 0
    PRODUCT = 1
    MIN = 2
    MAX = 3
    BAND = 4
    BOR = 5
    BXOR = 6
    AVG = 7
    UNUSED = 8


_WORDS = {"SUM": "sum", "PRODUCT": "product", "MIN": "min", "MAX": "max", "AVG": "avg"}


def word_of(op: Any) -> str:
    """This library's name for a reduction.

    Raises:
        ValueError: there is none.

    >>> import torch
    >>> word_of(ReduceOp.AVG), word_of(torch.distributed.ReduceOp.MAX), word_of("sum")
    ('avg', 'max', 'sum')
    """
    name = getattr(op, "name", None) or str(op).rpartition(".")[2]
    if name.upper() not in _WORDS:
        raise ValueError(f"op={op!r}: ranks' values combine by {', '.join(f'ReduceOp.{word}' for word in _WORDS)}")
    return _WORDS[name.upper()]
