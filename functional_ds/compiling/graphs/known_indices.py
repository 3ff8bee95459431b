"""Integers that follow from sizes alone keep their values in a trace, so that a program may read them, as in the eager step."""

from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import get_proxy_mode

from functional_ds.base import tree
from functional_ds.base.torch_private import (
    FakeTensor,
    TorchDispatchMode,
    disable_dispatch_modes,
    schema_of,
    storage_id,
)

_MOST = 2**20  # elements; larger ones have no values


class KnownIndices(TorchDispatchMode):
    """``torch.arange``, and integers and booleans that follow from nothing else, have values in addition to the graph's nodes.

    transformers reads whether positions are consecutive, and then builds no attention mask. Without values it builds one, with
    which attention takes another kernel and rounds differently.
    """

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self._known: dict[Any, tuple[Tensor, Tensor]] = {}  # by place: with values, and as the graph has it
        self._written: set[int] = set()  # storages whose values are no longer known

    def traced(self, x: Any) -> Any:
        """What the graph has for a tensor with known values; anything else is returned as it is."""
        return self._known[_place(x)][1] if self._has(x) else x

    def _has(self, x: Any) -> bool:
        return isinstance(x, Tensor) and not isinstance(x, FakeTensor) and _place(x) in self._known

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        traced_args, traced_kwargs = tree.map(self.traced, (args, kwargs))
        if not hasattr(func, "overloadpacket"):  # a higher-order operator
            return func(*traced_args, **traced_kwargs)
        given = [x for x in tree.leaves((args, kwargs)) if isinstance(x, Tensor)]
        known = all(self._has(x) and storage_id(x) not in self._written for x in given)
        known = known and (bool(given) or func.overloadpacket is torch.ops.aten.arange)
        if known and torch.Tag.data_dependent_output in func.tags:
            return _value(func, args, kwargs)
        written = _written(func, args, kwargs)
        self._written |= {storage_id(x) for x in written if self._has(x)}
        out = func(*traced_args, **traced_kwargs)
        known = known and not written and torch.Tag.nondeterministic_seeded not in func.tags
        known = known and get_proxy_mode() is not None  # else the graph has no node for it: a trial within the trace
        if not known or not isinstance(out, Tensor) or out.is_floating_point() or out.numel() > _MOST:
            return out
        value = _value(func, args, kwargs)
        self._known[_place(value)] = value, out
        return value


def _place(x: Tensor) -> Any:
    return storage_id(x), x.storage_offset(), x.shape, x.stride(), x.dtype


def _value(func: Any, args: Any, kwargs: Any) -> Any:
    with disable_dispatch_modes():
        return func(*args, **kwargs)


def _written(func: Any, args: Any, kwargs: Any) -> list[Tensor]:
    """The tensors that an operator writes into."""
    arguments = [argument for argument in schema_of(func).arguments if argument.is_write]
    given = dict(zip([argument.name for argument in schema_of(func).arguments], args, strict=False)) | kwargs
    return [x for argument in arguments for x in tree.leaves(given.get(argument.name)) if isinstance(x, Tensor)]
