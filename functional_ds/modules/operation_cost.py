"""What the operations of a step cost, by kind: each the longer of computing and of moving its bytes.

An operation takes ``max(flops / rate, bytes / bandwidth)`` on a device whose kernels are perfect (the roofline of Williams,
Waterman & Patterson 2009). On the CPU a large result takes pages from the operating system, too, which clears them first. A
``Machine`` has a factor for each kind, by which it takes longer, and adds the start.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import attrs
import torch
from torch import Tensor

from functional_ds.base import tree
from functional_ds.base.torch_private import backward_pass, schema_of

from .flops import FlopCounter

__all__ = ["WORK_KINDS", "OperationCounter", "SizedOperation", "operation_of", "perfect_seconds"]

WORK_KINDS = ("products", "attention", "elementwise", "copies", "update", "pages")

_MAPPED = 32 << 20  # glibc's malloc gives larger blocks back to the system as soon as they are freed
_UPDATES = ("_fused_adam", "_fused_sgd", "_fused_adagrad")  # the optimizers' kernels
_PICKS = {"embedding", "gather", "index", "index_select", "nll_loss_forward", "take"}  # read a part of their argument
_COPIES = _PICKS | {
    *("copy", "clone", "_to_copy", "_foreach_copy", "_copy_from", "cat", "stack", "repeat", "roll", "constant_pad_nd"),
    *(
        "fill",
        "zero",
        "zeros",
        "zeros_like",
        "new_zeros",
        "ones",
        "ones_like",
        "full",
        "full_like",
        "new_full",
        "_foreach_zero",
    ),
    *("slice_backward", "select_backward", "split_with_sizes_copy", "scalar_tensor", "index_put", "_index_put_impl"),
}
_FREE = {"_unsafe_view", "empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}  # no byte is touched


@attrs.frozen
class SizedOperation:
    """One operation; equal ones count together.

    Attributes:
        kind: of ``WORK_KINDS``, but for "pages"; views and empty tensors are copies of no byte.
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


class OperationCounter(FlopCounter):
    """Counts the operations inside.

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
    """

    def __init__(self) -> None:
        super().__init__()
        self.operations: Counter[SizedOperation] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = self.total
        result = super().__torch_dispatch__(func, types, args, kwargs)
        found = operation_of(func, args, kwargs or {}, result, flops=self.total - before)
        again = torch.is_grad_enabled() and backward_pass() != -1  # a backward pass that records a graph recomputes
        self.operations[attrs.evolve(found, again=again) if again else found] += 1
        return result


def operation_of(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any, *, flops: int) -> SizedOperation:
    """An operator that gave a result, with or without values, as its kind and sizes."""
    name = func.overloadpacket.__name__
    schema = schema_of(func)
    fresh = [] if any(given.alias_info for given in schema.returns) else _tensors(result)
    pages = sum(x.untyped_storage().nbytes() for x in fresh if x.untyped_storage().nbytes() > _MAPPED)
    if func.is_view or name in _FREE:
        return SizedOperation("copies", pages=0 if name == "_unsafe_view" else pages)
    changed: list[Tensor] = []
    read: list[Tensor] = []
    for i, given in enumerate(schema.arguments):
        held = _tensors(args[i] if i < len(args) else kwargs.get(given.name))
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
    return SizedOperation(kind, half, flops, moved, pages)


def _tensors(held: Any) -> list[Tensor]:
    return [leaf for leaf in tree.leaves(held) if isinstance(leaf, Tensor)]


def _bytes(tensors: Iterable[Tensor]) -> int:
    """Of their elements; an expanded tensor has no more than its storage."""
    return sum(min(x.nbytes, x.untyped_storage().nbytes()) for x in tensors)


def perfect_seconds(
    work: Mapping[SizedOperation, int],
    *,
    flops: float,
    flops_fp32: float,
    memory_bandwidth: float,
    page_bandwidth: float = 0.0,
) -> dict[str, float]:
    """Seconds by kind, with kernels as fast as the device is.

    Args:
        work: how often each operation runs.
        flops: operations a second on numbers of 2 bytes.
        flops_fp32: the same on others.
        memory_bandwidth: bytes a second, read and written.
        page_bandwidth: bytes a second of pages that are new from the operating system; 0 where an allocator keeps memory.

    >>> work = {SizedOperation("products", flops=100, bytes=10): 2, SizedOperation("copies", bytes=10): 1}
    >>> found = perfect_seconds(work, flops=1e3, flops_fp32=1e2, memory_bandwidth=100.0)
    >>> found["products"], found["copies"]
    (2.0, 0.1)
    """
    found = dict.fromkeys(WORK_KINDS, 0.0)
    for each, count in work.items():
        rate = flops if each.half else flops_fp32
        found[each.kind] += count * max(each.flops / rate, each.bytes / memory_bandwidth)
        found["pages"] += count * each.pages / page_bandwidth if page_bandwidth else 0.0
    return found
