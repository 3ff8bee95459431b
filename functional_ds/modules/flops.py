"""``FlopCounter``: the floating-point operations of matrix products, convolutions and attention."""

from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any

from torch import Tensor
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from functional_ds.base.torch_private import CPU_ATTENTION, CPU_ATTENTION_BACKWARD, GROUPED_PRODUCT, TorchDispatchMode

__all__ = ["FlopCounter", "flops_of"]


class FlopCounter(TorchDispatchMode):
    """Counts the floating-point operations of matrix products, convolutions and attention inside, by torch's formulas.

    Unlike ``torch.utils.flop_counter.FlopCounterMode`` it sets no hooks on modules, and it counts what torch has no formula
    for: grouped products, products with vectors, and attention's kernel for the CPU.

    >>> import torch
    >>> with FlopCounter() as counter:
    ...     _ = torch.ones(2, 3) @ torch.ones(3, 5)
    >>> counter.total
    60
    """

    def __init__(self) -> None:
        super().__init__()
        self.total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        found = flops_of(func, args, kwargs, result)
        if found is not None:
            self.add(found, result)
        return result

    def add(self, flops: int, result: Any) -> None:
        """An operation of so many floating-point operations ran and gave this."""
        self.total += flops


def flops_of(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> int | None:
    """The floating-point operations of an operator that gave a result; None where there is no formula."""
    formula = flop_registry.get(func.overloadpacket)
    if formula is not None:
        return int(formula(*args, **kwargs, out_val=result))
    more = _MORE.get(func.overloadpacket.__name__)
    return None if more is None else more(*[x for x in args if isinstance(x, Tensor)])


def _grouped(a: Tensor, b: Tensor, *rest: Tensor) -> int:
    """A row, a column, or an index of the inner dim belongs to one group; where both have 3 dims, each group has its own."""
    return 2 * a.shape[-2] * a.shape[-1] * b.shape[-1] * (len(a) if a.dim() == b.dim() == 3 else 1)


def _attention(query: Tensor, key: Tensor, value: Tensor, *rest: Tensor) -> int:
    return int(sdpa_flop_count(query.shape, key.shape, value.shape))


def _attention_backward(grad: Tensor, query: Tensor, key: Tensor, value: Tensor, *rest: Tensor) -> int:
    return int(sdpa_backward_flop_count(grad.shape, query.shape, key.shape, value.shape))


_MORE: Mapping[str, Callable[..., int]] = {
    GROUPED_PRODUCT.overloadpacket.__name__: _grouped,
    CPU_ATTENTION.overloadpacket.__name__: _attention,
    CPU_ATTENTION_BACKWARD.overloadpacket.__name__: _attention_backward,
    "mv": lambda matrix, vector: 2 * matrix.numel(),
    "addmv": lambda given, matrix, vector: 2 * matrix.numel(),
    "dot": lambda a, b: 2 * a.numel(),
    "vdot": lambda a, b: 2 * a.numel(),
    "addr": lambda given, a, b: 2 * a.numel() * b.numel(),
    "addbmm": lambda given, a, b: 2 * prod(a.shape) * b.shape[-1],
}
