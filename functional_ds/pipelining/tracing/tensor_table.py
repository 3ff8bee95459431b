"""``TensorTable``: the tensors of a traced forward by number, with their storage and where they come from."""

import attrs
from torch import Tensor

from .interception import storage_number
from .program import TensorSource

__all__ = ["TensorTable"]


@attrs.define(eq=False)
class TensorTable:
    """The tensors that a forward has met so far, in the order in which they were met.

    The table keeps every tensor alive, so that no two of them get the same id or storage.

    Attributes:
        tensors: by number.
        storages: each tensor's storage; views share theirs, and a stand-in has a negative number of its own.
        requires_grad: whether each tensor requires grad, as far as the recorded calls tell.
        sources: of the tensors that no instruction makes, by number.
    """

    tensors: list[Tensor] = attrs.field(factory=list)
    storages: list[int] = attrs.field(factory=list)
    requires_grad: list[bool] = attrs.field(factory=list)
    sources: dict[int, TensorSource] = attrs.field(factory=dict)
    _numbers: dict[int, int] = attrs.field(factory=dict)  # by id
    _stand_ins: "dict[TensorSource, int]" = attrs.field(factory=dict)

    def add(self, tensor: Tensor, source: TensorSource | None = None) -> int:
        """Enters a tensor; its number."""
        number = self._numbers[id(tensor)] = len(self.tensors)
        return self._append(tensor, storage_number(tensor), source, number)

    def number(self, tensor: Tensor) -> int | None:
        """A tensor's number; None if it was never met."""
        return self._numbers.get(id(tensor))

    def stand_in(self, tensor: Tensor) -> int:
        """The number of the stand-in for all tensors of this shape and dtype, where a call reads no values."""
        source = TensorSource("shape", (tuple(tensor.shape), tensor.dtype))
        if source not in self._stand_ins:
            number = self._stand_ins[source] = len(self.tensors)
            self._append(tensor, -number, source, number)
        return self._stand_ins[source]

    def in_storages(self, storages: set[int]) -> frozenset[int]:
        """The numbers of all tensors that lie in these storages."""
        return frozenset(number for number, storage in enumerate(self.storages) if storage in storages)

    def _append(self, tensor: Tensor, storage: int, source: TensorSource | None, number: int) -> int:
        self.tensors.append(tensor)
        self.storages.append(storage)
        self.requires_grad.append(tensor.requires_grad)
        if source is not None:
            self.sources[number] = source
        return number
