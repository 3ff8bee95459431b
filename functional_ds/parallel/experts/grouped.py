"""Grouped matrix products: the linears of all local experts at once, with uneven numbers of rows."""

from collections.abc import Sequence
from typing import Any

import attrs
import torch
import torch.nn.functional as F
from torch import Tensor

from functional_ds.base.torch_private import FakeTensorMode, is_fake
from functional_ds.comm.worlds.current import runs_on_shapes


@attrs.frozen(eq=False)
class RowGroups:
    """The rows of each local expert: expert e has rows ``ends[e - 1]`` to ``ends[e]``.

    Attributes:
        ends: int32 [experts], on the device.
        counts: the number of rows of each, if the host knows them.
    """

    ends: Tensor
    counts: tuple[int, ...] | None = None

    @staticmethod
    def of(counts: Sequence[int] | Tensor) -> "RowGroups":
        """From the numbers of rows; the host does not wait for those in a tensor.

        >>> RowGroups.of([2, 0, 1]).ends
        tensor([2, 2, 3], dtype=torch.int32)
        """
        if isinstance(counts, Tensor):
            return RowGroups(counts.cumsum(0).to(torch.int32))
        return RowGroups(torch.tensor(counts).cumsum(0).to(torch.int32), tuple(counts))

    @property
    def size(self) -> int:
        """The number of experts."""
        return len(self.ends)

    def read(self) -> list[int]:
        """The numbers of rows; the host waits for them if it does not know them."""
        if self.counts is not None:
            return list(self.counts)
        ends = self.ends.tolist()
        return [end - start for start, end in zip([0, *ends], ends, strict=False)]

    def expert_of_row(self, rows: int) -> Tensor:
        """The local expert of each row, integers [rows]."""
        places = torch.arange(rows, device=self.ends.device, dtype=torch.int32)
        return torch.searchsorted(self.ends, places, right=True)


def grouped_linear(rows: Tensor, weight: Tensor, groups: RowGroups, *, bias: Tensor | None = None) -> Tensor:
    """``rows @ weight[e].T + bias[e]`` for each row of expert e, without padding.

    It calls ``torch.nn.functional.grouped_mm`` once, or one product per expert if that does not support the dtype or strides.
    Experts without rows get zero gradients. Twice differentiable.

    Args:
        rows: [R, in], sorted by expert.
        weight: [experts, out, in]; ``weight.mT`` if it is stored as [experts, in, out].
        groups: the rows of each expert.
        bias: [experts, out].

    Raises:
        ValueError: sizes or dtypes that do not match.

    >>> grouped_linear(torch.ones(3, 2), torch.ones(2, 1, 2) * torch.tensor([1.0, 5.0]).view(2, 1, 1), RowGroups.of([1, 2]))
    tensor([[ 2.],
            [10.],
            [10.]])
    """
    if weight.dim() != 3 or weight.shape[0] != groups.size:
        raise ValueError(
            f"the weight has shape {list(weight.shape)}, and the rows come in {groups.size} groups, one for each local expert: "
            "[experts, out, in] is needed, with the experts of this rank only"
        )
    if rows.dim() != 2 or rows.shape[1] != weight.shape[2]:
        raise ValueError(f"rows of shape {list(rows.shape)} and a weight of shape {list(weight.shape)}: [R, in], [E, out, in]")
    device_type = rows.device.type
    if torch.amp.is_autocast_available(device_type) and torch.is_autocast_enabled(device_type):
        dtype = torch.get_autocast_dtype(device_type)
        rows, weight, bias = rows.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
    if rows.dtype != weight.dtype:
        raise ValueError(f"rows of {rows.dtype} and a weight of {weight.dtype}: cast one")
    out: Tensor = _GroupedProduct.apply(rows, weight.mT, groups)
    return out if bias is None else out + bias.index_select(0, groups.expert_of_row(len(rows)))


class _GroupedProduct(torch.autograd.Function):
    """Rows [R, a] with matrices [E, a, b]: [R, b]."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, matrices: Tensor, groups: RowGroups) -> Tensor:
        ctx.groups = groups
        ctx.save_for_backward(rows, matrices)
        if rows.is_meta:
            return rows.new_empty(len(rows), matrices.shape[2])
        if len(rows) and _fits(rows) and _fits(matrices):
            return F.grouped_mm(rows, matrices, offs=groups.ends)
        products = rows.new_empty(len(rows), matrices.shape[2])
        counts = _counts(groups, rows)
        for piece, matrix, out in zip(rows.split(counts), matrices, products.split(counts), strict=True):
            torch.mm(piece, matrix, out=out)
        return products

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        rows, matrices = ctx.saved_tensors
        grad = grad.contiguous()
        by_rows = _GroupedProduct.apply(grad, matrices.mT, ctx.groups) if ctx.needs_input_grad[0] else None
        by_matrices = _GroupedOuterProduct.apply(rows, grad, ctx.groups) if ctx.needs_input_grad[1] else None
        return by_rows, by_matrices, None


class _GroupedOuterProduct(torch.autograd.Function):
    """The transpose by the matrices: ``left.T @ right`` [E, a, b] of each expert's rows [R, a] and [R, b]."""

    @staticmethod
    def forward(ctx: Any, left: Tensor, right: Tensor, groups: RowGroups) -> Tensor:
        ctx.groups = groups
        ctx.save_for_backward(left, right)
        shape = (groups.size, left.shape[1], right.shape[1])
        if left.is_meta:
            return left.new_empty(shape)
        if not len(left):
            return left.new_zeros(shape)
        if _fits(left) and _fits(right):
            return F.grouped_mm(left.mT, right, offs=groups.ends)
        products = left.new_empty(shape)
        counts = _counts(groups, left)
        for a, b, out in zip(left.split(counts), right.split(counts), products, strict=True):
            torch.mm(a.mT, b, out=out)
        return products

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        left, right = ctx.saved_tensors
        grad = grad.contiguous()
        by_left = _GroupedProduct.apply(right, grad.mT, ctx.groups) if ctx.needs_input_grad[0] else None
        by_right = _GroupedProduct.apply(left, grad, ctx.groups) if ctx.needs_input_grad[1] else None
        return by_left, by_right, None


def _counts(groups: RowGroups, rows: Tensor) -> list[int]:
    """The numbers of rows; without values, in a dry run, they are assumed to be even."""
    if groups.counts is None and runs_on_shapes(rows):
        return even_rows(len(rows), groups.size)
    return groups.read()


def even_rows(total: int, parts: int) -> list[int]:
    """The numbers of rows that are assumed where there are no values."""
    return [total // parts + (part < total % parts) for part in range(parts)]


def _fits(tensor: Tensor) -> bool:
    """Whether ``grouped_mm`` accepts it: dense along one of the last dims, with strides and an address of whole 16 bytes."""
    if tensor.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return False
    if is_fake(tensor):
        if tensor.dtype != torch.bfloat16 and not isinstance(tensor.fake_mode, FakeTensorMode):  # type: ignore[attr-defined]
            return False  # torch's own knows no other dtype
    elif tensor.data_ptr() % 16:
        return False
    *outer, row, column = tensor.stride()
    dense, other = (row, column) if row == 1 and tensor.shape[-2] != 1 else (column, row)
    return dense == 1 and all(stride * tensor.element_size() % 16 == 0 for stride in (*outer, other))
