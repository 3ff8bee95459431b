"""What stands for a tensor, and memory as tensors."""

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from functional_ds.base.torch_private import storage_id


class TensorInfo:
    """What a leaf with a ``shape`` and a ``dtype`` answers without its values."""

    def numel(self: Any) -> int:
        """Elements of the tensor."""
        return math.prod(self.shape)

    @property
    def nbytes(self: Any) -> int:
        """Bytes of the tensor."""
        return int(self.numel() * self.dtype.itemsize)

    def is_floating_point(self: Any) -> bool:
        """Whether the tensor is floating-point."""
        return bool(self.dtype.is_floating_point)

    def is_complex(self: Any) -> bool:
        """Whether the tensor is complex."""
        return bool(self.dtype.is_complex)


def typed(memory: Tensor, dtype: torch.dtype, shape: Iterable[int]) -> Tensor:
    """The first bytes of memory as a tensor."""
    size = torch.Size(shape)
    return memory[: size.numel() * dtype.itemsize].view(dtype).view(size)


def begins_with(target: Tensor, value: Tensor) -> bool:
    """Whether both begin at the same address; tensors without values have none."""
    places = [(storage_id(x), x.storage_offset() * x.element_size()) for x in (target, value)]
    return places[0] == places[1]
