"""A tensor's elements in one flat piece, and the tensor from them again."""

from collections.abc import Sequence

import attrs
from torch import Tensor

__all__ = ["Form", "compact"]


@attrs.frozen
class Form:
    """How a tensor lay in memory.

    Attributes:
        shape: its sizes.
        sizes: those of its elements that have memory of their own; 1 along axes that repeat them.
        stride: how the flat piece is to be seen.
    """

    shape: tuple[int, ...]
    sizes: tuple[int, ...]
    stride: tuple[int, ...]

    def restore(self, flat: Tensor) -> Tensor:
        """The tensor of a flat piece that ``compact`` gave: the same values, shape and order in memory."""
        return flat.as_strided(self.sizes, self.stride).expand(self.shape)


def compact(tensor: Tensor) -> tuple[Tensor, Form]:
    """The elements that have memory of their own, flat in the order of memory, and the form that undoes it.

    It is a view where the elements lie densely, else a copy. Law: ``form.restore(flat)`` is the tensor, bit for bit, and
    with its strides where it was dense.

    >>> import torch
    >>> flat, form = compact(torch.arange(6).view(2, 3).t().expand(4, 3, 2))
    >>> flat.tolist(), form.restore(flat).shape
    ([0, 1, 2, 3, 4, 5], torch.Size([4, 3, 2]))
    """
    tensor = tensor.detach().resolve_conj().resolve_neg()
    own = tensor
    for axis, (size, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
        if stride == 0 and size > 1:
            own = own.narrow(axis, 0, 1)
    if not _dense(own.shape, own.stride()):
        own = own.contiguous()
    flat = own.as_strided((own.numel(),), (1,), own.storage_offset())
    return flat, Form(tuple(tensor.shape), tuple(own.shape), tuple(own.stride()))


def _dense(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """Whether the elements fill one piece of memory, each its own place."""
    following = 1
    for step, size in sorted((step, size) for step, size in zip(stride, shape, strict=True) if size != 1):
        if step != following:
            return False
        following *= size
    return True
