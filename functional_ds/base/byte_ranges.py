"""Finds tensors that share memory."""

from collections.abc import Iterable, Iterator

import attrs
import torch
from torch import Tensor, nn

from .torch_private import has_values, is_fake, storage_id

_KINDS = (Tensor, nn.Parameter)


def begin_together(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors start at the same element of a storage; works without addresses, as for fake tensors."""
    return storage_id(one) == storage_id(other) and one.storage_offset() == other.storage_offset()


@attrs.frozen
class ByteRange:
    """The memory of a tensor.

    Attributes:
        name: the tensor's name.
        tensor: the tensor.
        space: 0 for addresses; else the id of a storage without an address.
        start: the first byte.
        end: the byte after the last.
    """

    name: str
    tensor: Tensor
    space: int
    start: int
    end: int

    @staticmethod
    def of(name: str, tensor: Tensor) -> "ByteRange | None":
        """The memory of a tensor; None for empty tensors, other layouts and other classes."""
        if not (type(tensor) in _KINDS or is_fake(tensor)) or tensor.layout != torch.strided or not tensor.numel():
            return None
        extent = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        address = tensor.data_ptr() if has_values(tensor) else 0
        start = address or int(tensor.storage_offset()) * tensor.element_size()
        return ByteRange(name, tensor, 0 if address else storage_id(tensor), start, start + extent * tensor.element_size())

    def meets(self, other: "ByteRange") -> bool:
        """Whether two tensors with overlapping ranges, the first of which starts first, share an element."""
        one, two, size = self.tensor, other.tensor, self.tensor.element_size()
        dense = all(extent.end - extent.start == extent.tensor.nbytes for extent in (self, other))
        if dense or one.element_size() != two.element_size() or (other.start - self.start) % size:
            return True
        marked = torch.zeros((max(self.end, other.end) - self.start) // size, dtype=torch.bool)
        marked.as_strided(one.shape, one.stride(), 0).fill_(True)
        return bool(marked.as_strided(two.shape, two.stride(), (other.start - self.start) // size).any())


def overlapping(named: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[ByteRange, ByteRange]]:
    """The pairs of tensors that share an element."""
    extents = [extent for name, tensor in named if (extent := ByteRange.of(name, tensor)) is not None]
    extents.sort(key=lambda extent: (extent.space, extent.start))
    for index, one in enumerate(extents):
        for other in extents[index + 1 :]:
            if (other.space, other.start) >= (one.space, one.end):
                break
            if one.meets(other):
                yield one, other
