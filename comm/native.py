"""The flat primitives as the backend's own collectives: how collectives of CUDA tensors run over NCCL.

A wait makes the current stream wait, not the host.
"""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from .collective import Options
from .exchange import Started

__all__ = ["NATIVE"]

# torch 2.13 renamed these two, and warns of the old names.
_ALL_GATHER = dist.all_gather_single if hasattr(dist, "all_gather_single") else dist.all_gather_into_tensor
_REDUCE_SCATTER = dist.reduce_scatter_single if hasattr(dist, "reduce_scatter_single") else dist.reduce_scatter_tensor

_OPS = {
    "sum": dist.ReduceOp.SUM,
    "product": dist.ReduceOp.PRODUCT,
    "min": dist.ReduceOp.MIN,
    "max": dist.ReduceOp.MAX,
}


def _numbers(tensor: Tensor) -> Tensor:
    """As a dtype that NCCL can add up: complex numbers as pairs, bools (min and max only) as bytes."""
    if tensor.is_complex():
        return torch.view_as_real(tensor)
    return tensor.view(torch.uint8) if tensor.dtype == torch.bool else tensor


def _raw(tensor: Tensor) -> Tensor:
    return tensor.view(torch.uint8) if tensor.numel() else tensor


def _started(work: dist.Work | None, result: Tensor) -> Started:
    return Started([] if work is None else [work], lambda: result)


def _refuse_complex_product(tensor: Tensor, options: Options) -> None:
    if tensor.is_complex() and options["op"] == "product":
        raise ValueError("op='product' of a complex tensor is not available over NCCL: gather and multiply instead")


def all_gather(pg: ProcessGroup, piece: Tensor, options: Options) -> Started:
    rows = piece.new_empty(pg.size(), piece.numel())
    work = _ALL_GATHER(_raw(rows.view(-1)), _raw(piece.contiguous()), group=pg, async_op=True)
    return _started(work, rows)


def reduce_scatter(pg: ProcessGroup, rows: Tensor, options: Options) -> Started:
    _refuse_complex_product(rows, options)
    result = torch.empty_like(rows[0])
    source = _numbers(rows.contiguous())
    work = _REDUCE_SCATTER(_numbers(result), source, _OPS[options["op"]], group=pg, async_op=True)
    return _started(work, result)


def all_reduce(pg: ProcessGroup, piece: Tensor, options: Options) -> Started:
    _refuse_complex_product(piece, options)
    result = piece.clone()
    return _started(dist.all_reduce(_numbers(result), _OPS[options["op"]], group=pg, async_op=True), result)


def broadcast(pg: ProcessGroup, piece: Tensor, options: Options) -> Started:
    result = piece.clone()
    return _started(dist.broadcast(_raw(result), group_src=options["src"], group=pg, async_op=True), result)


def reduce(pg: ProcessGroup, piece: Tensor, options: Options) -> Started:
    _refuse_complex_product(piece, options)
    result, root = piece.clone(), options["dst"]
    work = dist.reduce(_numbers(result), op=_OPS[options["op"]], group_dst=root, group=pg, async_op=True)
    return Started([] if work is None else [work], lambda: result if pg.rank() == root else torch.zeros_like(result))


def barrier(pg: ProcessGroup, piece: Tensor, options: Options) -> Started:
    return _started(dist.barrier(group=pg, async_op=True), piece)


NATIVE: dict[str, Callable[[ProcessGroup, Tensor, Options], Started]] = {
    "all_gather": all_gather,
    "reduce_scatter": reduce_scatter,
    "all_reduce": all_reduce,
    "broadcast": broadcast,
    "reduce": reduce,
    "barrier": barrier,
}
