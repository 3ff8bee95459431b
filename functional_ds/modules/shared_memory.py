"""Tensors of a module that lie in the same memory, which functional values cannot do."""

from collections.abc import Iterator, Mapping
from typing import Any

import attrs
import torch
from torch import Tensor, nn

from functional_ds.base import tree
from functional_ds.base.torch_private import buffers_of, is_fake, storage_id

from .skeleton import Place, joined
from .stale import Stale

__all__ = ["SharedMemory", "attributes_of"]

_KINDS = (Tensor, nn.Parameter)
_FOLLOWS = "fds.functional got the module, and would not follow training"


def attributes_of(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The tensors that are plain attributes of a module and those in it, or lie in lists, tuples and dicts that are."""
    for path, owner in module.named_modules():
        for key, value in vars(owner).items():
            if key in ("_parameters", "_buffers", "_modules"):
                continue
            if isinstance(value, Tensor):
                yield joined(path, key), value
            elif isinstance(value, (list, tuple, dict)):
                yield from ((f"{joined(path, key)}.{name}", x) for name, x in tree.named(value) if isinstance(x, Tensor))


@attrs.frozen
class _ByteRange:
    """Where a tensor lies.

    Attributes:
        space: 0 for addresses; else a storage that has none.
        start: in bytes, as ``end``.
    """

    name: str
    tensor: Tensor
    space: int
    start: int
    end: int

    @staticmethod
    def of(name: str, tensor: Tensor) -> "_ByteRange | None":
        if not (type(tensor) in _KINDS or is_fake(tensor)) or tensor.layout != torch.strided or not tensor.numel():
            return None
        extent = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        address = 0 if tensor.is_meta or is_fake(tensor) else tensor.data_ptr()
        start = address or int(tensor.storage_offset()) * tensor.element_size()
        return _ByteRange(name, tensor, 0 if address else storage_id(tensor), start, start + extent * tensor.element_size())

    def meets(self, other: "_ByteRange") -> bool:
        """Whether the two, which begin in this order and lie in one another's range, share an element."""
        one, two, size = self.tensor, other.tensor, self.tensor.element_size()
        dense = all(each.end - each.start == each.tensor.nbytes for each in (self, other))
        if dense or one.element_size() != two.element_size() or (other.start - self.start) % size:
            return True
        marked = torch.zeros((max(self.end, other.end) - self.start) // size, dtype=torch.bool)
        marked.as_strided(one.shape, one.stride(), 0).fill_(True)
        return bool(marked.as_strided(two.shape, two.stride(), (other.start - self.start) // size).any())


@attrs.frozen
class SharedMemory:
    """What shares memory in a module.

    Attributes:
        buffers: those that overlap another buffer, an attribute or a frozen parameter, with the name of that.
        stale: what is to stand in place of attributes that would not follow training, by their ids.
    """

    buffers: Mapping[str, str]
    stale: Mapping[int, "Stale"]

    @staticmethod
    def of(module: nn.Module, params: Mapping[str, nn.Parameter], names: Mapping[Place, str]) -> "SharedMemory":
        """The module's.

        Raises:
            ValueError: two parameters, or a parameter that is trained and a buffer, share memory: they would part.
        """
        named: dict[int, tuple[str, Tensor]] = {id(p): (name, p) for name, p in params.items()}
        for path, owner in module.named_modules():
            for key, buffer in buffers_of(owner).items():
                if buffer is not None:
                    named.setdefault(id(buffer), (names.get((path, key)) or joined(path, key), buffer))
        buffers = {name for name, tensor in named.values()} - params.keys()
        for name, tensor in attributes_of(module):
            named.setdefault(id(tensor), (name, tensor))
        shared: dict[str, str] = {}
        computed = ((name, x) for name, x in attributes_of(module) if x.grad_fn is not None)
        stale = {
            id(x): Stale(f"the attribute {name!r} was computed, with a graph, before {_FOLLOWS}: compute it in forward")
            for name, x in computed
        }
        for one, other in _overlapping([named[key] for key in named]):
            first, second = (one, other) if one.name in params else (other, one)
            trained = first.name in params and first.tensor.requires_grad
            if second.name in params and (trained or second.tensor.requires_grad):
                raise ValueError(
                    f"fds.functional: the parameters {one.name!r} and {other.name!r} share memory, which training would part; "
                    f"tie them by assigning the parameter itself (b.weight = a.weight), not its data"
                )
            if trained and second.name in buffers:
                both = f"{one.name!r} and {other.name!r}"
                raise ValueError(
                    f"fds.functional: {both} share memory, and training would change only one; give the buffer memory of its "
                    "own, or compute it in forward"
                )
            if trained:
                what = f"the attribute {second.name!r} shared memory with the parameter {first.name!r}"
                stale.setdefault(id(second.tensor), Stale(f"{what} when {_FOLLOWS}: use the parameter itself in forward"))
            elif not buffers.isdisjoint((one.name, other.name)):
                shared |= {one.name: other.name, other.name: one.name}
        return SharedMemory(shared, stale)


def _overlapping(named: list[tuple[str, Tensor]]) -> Iterator[tuple[_ByteRange, _ByteRange]]:
    found = [extent for name, tensor in named if (extent := _ByteRange.of(name, tensor)) is not None]
    found.sort(key=lambda each: (each.space, each.start))
    for index, one in enumerate(found):
        for other in found[index + 1 :]:
            if (other.space, other.start) >= (one.space, one.end):
                break
            if one.meets(other):
                yield one, other
