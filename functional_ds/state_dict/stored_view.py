"""Views of offloaded tensors, read from their files piece by piece on demand."""

from collections.abc import Iterator
from typing import Any, Protocol

import attrs
import torch
from torch import Tensor


class StoredTensorPieces(Protocol):
    """An offloaded tensor. Its pieces have ``chunk`` elements each, the last one perhaps fewer."""

    chunk: int
    dtype: torch.dtype

    def piece(self, index: int) -> Tensor:
        """The elements of a piece, in host memory."""


@attrs.define(eq=False)
class PieceReader:
    """Reads pieces, and caches the last one, which neighbouring views share."""

    _source: Any = None
    _index: int = -1
    _values: Tensor | None = None

    def read(self, source: StoredTensorPieces, index: int) -> Tensor:
        """The piece ``index`` of a tensor."""
        values = self._values
        if values is None or self._source is not source or self._index != index:
            values = self._values = None  # no two pieces at a time
            values = source.piece(index)
            self._source, self._index, self._values = source, index, values
        return values


@attrs.frozen(eq=False)
class StoredView:
    """The elements ``start`` to ``stop`` of a flattened offloaded tensor, with the methods of a flat tensor that a save needs.

    Attributes:
        source: the offloaded tensor.
        start: the first element.
        stop: the element after the last.
        reader: one for all views of a state.
    """

    source: StoredTensorPieces
    start: int
    stop: int
    reader: PieceReader = attrs.field(repr=False)

    @property
    def dtype(self) -> torch.dtype:
        """Of the tensor."""
        return self.source.dtype

    @property
    def device(self) -> torch.device:
        """The device of the elements once they are read."""
        return torch.device("cpu")

    def numel(self) -> int:
        """How many elements."""
        return self.stop - self.start

    def element_size(self) -> int:
        """Bytes of an element."""
        return self.dtype.itemsize

    def __getitem__(self, where: slice) -> "StoredView":
        """Some of the elements, from ``where.start`` to ``where.stop``."""
        low, high, _ = where.indices(self.numel())
        return StoredView(self.source, self.start + low, self.start + high, self.reader)

    def pieces(self) -> Iterator[Tensor]:
        """The elements in order; one piece of the file is in memory at a time. Tensors are valid until the next one.

        Raises:
            OSError: the file cannot be read, or was changed.
        """
        chunk, low = self.source.chunk, self.start
        while low < self.stop:
            index = low // chunk
            high = min(self.stop, (index + 1) * chunk)
            yield self.reader.read(self.source, index)[low - index * chunk : high - index * chunk]
            low = high
