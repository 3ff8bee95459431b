"""Operations by their costs: a category, floating-point operations, and bytes read and written."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from math import prod
from typing import Any

import attrs
import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from functional_ds.base import tree
from functional_ds.base.torch_private import (
    CPU_ATTENTION,
    CPU_ATTENTION_BACKWARD,
    GROUPED_PRODUCT,
    TorchDispatchMode,
    backward_pass,
    schema_of,
)

WORK_KINDS = ("products", "attention", "elementwise", "copies", "update", "pages")

_MAPPED = 32 << 20  # glibc's malloc gives larger blocks back to the system as soon as they are freed
_UPDATES = ("_fused_adam", "_fused_sgd", "_fused_adagrad")  # the optimizers' kernels
_PICKS = {"embedding", "gather", "index", "index_select", "nll_loss_forward", "take"}  # read a part of their argument
_COPIES = _PICKS | {
    *("copy", "clone", "_to_copy", "_foreach_copy", "_copy_from", "cat", "stack", "repeat", "roll", "constant_pad_nd"),
    *("fill", "zero", "zeros", "zeros_like", "new_zeros", "ones", "ones_like", "full", "full_like", "new_full"),
    *("slice_backward", "select_backward", "split_with_sizes_copy", "scalar_tensor", "index_put", "_index_put_impl"),
    "_foreach_zero",
}
_FREE = {"_unsafe_view", "empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}  # no byte is touched


@attrs.frozen
class SizedOperation:
    """One operation; equal ones are counted together.

    Attributes:
        kind: one of ``WORK_KINDS``, except "pages"; views and empty tensors are copies of no byte.
        half: whether it computes on numbers of 2 bytes.
        flops: by torch's formulas, of products and attention; 0 for others.
        bytes: read and written, each tensor once.
        pages: bytes of new storages of more than 32 MiB.
        again: whether a backward pass recomputes it.
    """

    kind: str
    half: bool = False
    flops: int = 0
    bytes: int = 0
    pages: int = 0
    again: bool = False


class OperationCounter(TorchDispatchMode):
    """Counts the operations inside, and the floating-point operations of products, convolutions and attention.

    Unlike ``torch.utils.flop_counter.FlopCounterMode`` it sets no hooks on modules, and it also counts operations for which
    torch has no formula: grouped products, products with vectors, and attention's kernel for the CPU.

    >>> import torch
    >>> with OperationCounter() as counter:
    ...     _ = (torch.ones(2, 3) @ torch.ones(3, 5)).relu_().view(10)
    >>> for operation, count in counter.operations.items():
    ...     print(operation.kind, operation.flops, operation.bytes, count)
    copies 0 24 1
    copies 0 60 1
    products 60 124 1
    elementwise 0 80 1
    copies 0 0 1
    >>> counter.flops
    60
    """

    def __init__(self) -> None:
        super().__init__()
        self.operations: Counter[SizedOperation] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        self.add(operation_of(func, args, kwargs, result), result)
        return result

    def add(self, operation: SizedOperation, result: Any) -> None:
        """An operation ran and returned this."""
        self.operations[operation] += 1

    @property
    def flops(self) -> int:
        """Of all operations."""
        return sum(operation.flops * count for operation, count in self.operations.items())


def operation_of(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> SizedOperation:
    """An operator with its result, with or without values, as category and sizes; in a backward pass, as it runs."""
    flops = _flops(func, args, kwargs, result)
    again = torch.is_grad_enabled() and backward_pass() != -1  # a backward pass that records a graph recomputes
    name = func.overloadpacket.__name__
    schema = schema_of(func)
    fresh = [] if any(given.alias_info for given in schema.returns) else tensors_in(result)
    pages = sum(x.untyped_storage().nbytes() for x in fresh if x.untyped_storage().nbytes() > _MAPPED)
    if func.is_view or name in _FREE:
        return SizedOperation("copies", pages=0 if name == "_unsafe_view" else pages, again=again)
    changed: list[Tensor] = []
    read: list[Tensor] = []
    for i, given in enumerate(schema.arguments):
        held = tensors_in(args[i] if i < len(args) else kwargs.get(given.name))
        (changed if given.alias_info is not None and given.alias_info.is_write else read).extend(held)
    plain = name.rstrip("_")
    if flops:
        kind = "attention" if "attention" in name else "products"
    elif name.startswith(_UPDATES):
        kind = "update"
    else:
        kind = "copies" if plain in _COPIES else "elementwise"
    written = _bytes(changed) + _bytes(fresh)
    if kind != "copies":
        moved = _bytes(read) + _bytes(changed) + written
    else:
        moved = written + (min(written, _bytes(read)) if plain in _PICKS else _bytes(read))
    half = any(x.is_floating_point() and x.element_size() == 2 for x in (*read, *changed))
    return SizedOperation(kind, half, flops, moved, pages, again)


def tensors_in(held: Any) -> list[Tensor]:
    """The tensors among the leaves of a tree, except sparse and nested ones, which have no storage."""
    return [leaf for leaf in tree.leaves(held) if isinstance(leaf, Tensor) and leaf.layout is torch.strided]


def _bytes(tensors: Iterable[Tensor]) -> int:
    """Of their elements; an expanded tensor has no more than its storage."""
    return sum(min(x.nbytes, x.untyped_storage().nbytes()) for x in tensors)


def _flops(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> int:
    """The floating-point operations of an operator with its result; 0 without a formula."""
    formula = flop_registry.get(func.overloadpacket)
    if formula is not None:
        return int(formula(*args, **kwargs, out_val=result))
    more = _MORE.get(func.overloadpacket.__name__)
    return 0 if more is None else more(*[x for x in args if isinstance(x, Tensor)])


def _grouped(a: Tensor, b: Tensor, *rest: Tensor) -> int:
    """A row, a column, or an index of the inner dim belongs to one group; if both have 3 dims, each group has its own."""
    return 2 * a.shape[-2] * a.shape[-1] * b.shape[-1] * (len(a) if a.dim() == b.dim() == 3 else 1)


_MORE: Mapping[str, Callable[..., int]] = {
    GROUPED_PRODUCT.overloadpacket.__name__: _grouped,
    CPU_ATTENTION.overloadpacket.__name__: lambda q, k, v, *rest: int(sdpa_flop_count(q.shape, k.shape, v.shape)),
    CPU_ATTENTION_BACKWARD.overloadpacket.__name__: lambda grad, q, k, v, *rest: int(
        sdpa_backward_flop_count(grad.shape, q.shape, k.shape, v.shape)
    ),
    "mv": lambda matrix, vector: 2 * matrix.numel(),
    "addmv": lambda given, matrix, vector: 2 * matrix.numel(),
    "dot": lambda a, b: 2 * a.numel(),
    "vdot": lambda a, b: 2 * a.numel(),
    "addr": lambda given, a, b: 2 * a.numel() * b.numel(),
    "addbmm": lambda given, a, b: 2 * prod(a.shape) * b.shape[-1],
}
