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
    storage_id,
)
from functional_ds.remat.operator_arguments import tensors_written

_MOST = 2**20  # elements; larger ones have no values
_DTYPES = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
_READS = (Tensor.tolist, Tensor.numpy, Tensor.__array__)


class KnownIndices(TorchDispatchMode):
    """``torch.arange``, and integers and booleans that follow from nothing else, have values in addition to the graph's nodes.

    transformers reads whether positions are consecutive, and then builds no attention mask. Without values it builds one, with
    which attention takes another kernel and rounds differently.
    """

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self._known: dict[Any, tuple[Tensor, Tensor]] = {}  # by place: with values, and as the graph has it
        self._storages: set[int] = set()  # of what the graph has
        self._written: set[int] = set()  # those whose values are no longer known

    def traced(self, x: Any) -> Any:
        """What the graph has for a tensor with known values; anything else is returned as it is."""
        return self._known[_place(x)][1] if self._has(x) else x

    def stale(self, func: Any, x: Any) -> bool:
        """Whether a read of a tensor's memory, which no operator shows, may miss what the graph writes."""
        return func in _READS and self._has(x) and (func is not Tensor.tolist or storage_id(self.traced(x)) in self._written)

    def _has(self, x: Any) -> bool:
        return isinstance(x, Tensor) and not isinstance(x, FakeTensor) and _place(x) in self._known

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        traced_args, traced_kwargs = tree.map(self.traced, (args, kwargs))
        if not hasattr(func, "overloadpacket"):  # a higher-order operator
            return func(*traced_args, **traced_kwargs)
        if torch.Tag.inplace_view in func.tags and self._has(args[0]):  # of this tensor alone, so of an alias in the graph
            out = torch.ops.aten.alias(traced_args[0])
            func(out, *traced_args[1:], **traced_kwargs)
            return self._keep(_value(func, args, kwargs), out)
        given = [x for x in tree.leaves((args, kwargs)) if isinstance(x, Tensor)]
        known = all(self._has(x) and storage_id(self.traced(x)) not in self._written for x in given)
        known = known and (bool(given) or func.overloadpacket is torch.ops.aten.arange)
        if known and torch.Tag.data_dependent_output in func.tags:
            return _value(func, args, kwargs)
        written = tensors_written(func, args, kwargs)
        self._written |= self._storages & {storage_id(self.traced(x)) for x in written if x.layout == torch.strided}
        out = func(*traced_args, **traced_kwargs)
        known = known and not written and torch.Tag.nondeterministic_seeded not in func.tags and func.namespace == "aten"
        known = known and get_proxy_mode() is not None  # else the graph has no node for it: a trial within the trace
        if any(x.shape != self.traced(x).shape for x in written):
            raise RuntimeError(f"{func} makes torch.arange's result larger or smaller")
        return self._keep(_value(func, args, kwargs), out) if known and all(map(_may_have_values, tree.leaves(out))) else out

    def _keep(self, values: Any, outs: Any) -> Any:
        for value, out in zip(tree.leaves(values), tree.leaves(outs), strict=True):
            self._known[_place(value)] = value, out
            self._storages.add(storage_id(out))
        return values


def _may_have_values(x: Any) -> bool:
    return isinstance(x, Tensor) and x.dtype in _DTYPES and x.numel() <= _MOST


def _place(x: Tensor) -> Any:
    return storage_id(x), x.storage_offset(), x.shape, x.stride(), x.dtype


def _value(func: Any, args: Any, kwargs: Any) -> Any:
    with disable_dispatch_modes():
        return func(*args, **kwargs)
