"""Collectives of CUDA tensors with NCCL's collectives. A wait makes the current stream wait, not the host."""

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn import functional

from functional_ds.base.byte_ranges import begin_together

from .primitives import Options, Started

# torch 2.13 renamed these two, and warns of the old names.
_ALL_GATHER = dist.all_gather_single if hasattr(dist, "all_gather_single") else dist.all_gather_into_tensor
_REDUCE_SCATTER = dist.reduce_scatter_single if hasattr(dist, "reduce_scatter_single") else dist.reduce_scatter_tensor

_OPS = {"sum": dist.ReduceOp.SUM, "product": dist.ReduceOp.PRODUCT, "min": dist.ReduceOp.MIN, "max": dist.ReduceOp.MAX}


def _numbers(tensor: Tensor) -> Tensor:
    """A view in a dtype that NCCL can reduce: complex numbers as pairs, bools (min and max only) as bytes."""
    if tensor.is_complex():
        return torch.view_as_real(tensor)
    return tensor.view(torch.uint8) if tensor.dtype == torch.bool else tensor


def _raw(tensor: Tensor) -> Tensor:
    """The bytes of a contiguous tensor, also of an empty one, since torch compares the dtypes of inputs and outputs."""
    return tensor.view(torch.uint8)


def _started(work: dist.Work | None, result: Tensor) -> Started:
    return _finished(work, lambda: result)


def _finished(work: dist.Work | None, finish: Callable[[], Tensor]) -> Started:
    return Started([] if work is None else [work], finish)


def _refuse_complex_product(tensor: Tensor, options: Options) -> None:
    if tensor.is_complex() and options["op"] == "product":
        raise ValueError("op='product' of a complex tensor is not available over NCCL: gather and multiply instead")


def _padded(rows: Tensor, sizes: Sequence[int]) -> Tensor:
    """Pads pieces to one size, as NCCL's collectives require: [all rows, m] -> [n, most, m]."""
    most = max(sizes)
    return torch.stack([functional.pad(piece, (0, 0, 0, most - len(piece))) for piece in rows.split(list(sizes))])


def all_gather(pg: ProcessGroup, piece: Tensor, options: Options) -> Started:
    sizes = options.get("sizes")
    if sizes is not None:
        piece = functional.pad(piece, (0, 0, 0, max(sizes) - len(piece)))  # [rows, m] -> [most, m]
    rows = options["out"].view(pg.size(), *piece.shape) if "out" in options else piece.new_empty(pg.size(), *piece.shape)
    work = _ALL_GATHER(_raw(rows.view(-1)), _raw(piece.contiguous().view(-1)), group=pg, async_op=True)
    if sizes is None:
        return _started(work, rows)
    return _finished(work, lambda: torch.cat([row[:size] for row, size in zip(rows, sizes, strict=True)]))


def reduce_scatter(pg: ProcessGroup, rows: Tensor, options: Options) -> Started:
    _refuse_complex_product(rows, options)
    sizes = options.get("sizes")
    rows = rows if sizes is None else _padded(rows, sizes)
    result = torch.empty_like(rows[0], memory_format=torch.contiguous_format)
    source = _numbers(rows.contiguous())
    work = _REDUCE_SCATTER(_numbers(result), source, _OPS[options["op"]], group=pg, async_op=True)
    return _started(work, result) if sizes is None else _finished(work, lambda: result[: sizes[pg.rank()]])


def all_reduce(pg: ProcessGroup, piece: Tensor, options: Options) -> Started:
    _refuse_complex_product(piece, options)
    result = piece if "out" in options and begin_together(options["out"], piece) else piece.clone()
    return _started(dist.all_reduce(_numbers(result), _OPS[options["op"]], group=pg, async_op=True), result)


def broadcast(pg: ProcessGroup, piece: Tensor, options: Options) -> Started:
    result = piece.clone()
    return _started(dist.broadcast(_raw(result), group_src=options["src"], group=pg, async_op=True), result)


def reduce(pg: ProcessGroup, piece: Tensor, options: Options) -> Started:
    _refuse_complex_product(piece, options)
    result, root = piece.clone(), options["dst"]
    work = dist.reduce(_numbers(result), op=_OPS[options["op"]], group_dst=root, group=pg, async_op=True)
    return _finished(work, lambda: result if pg.rank() == root else torch.zeros_like(result))


def gather(pg: ProcessGroup, piece: Tensor, options: Options) -> Started:
    root, n, source = options["dst"], pg.size(), piece.contiguous()
    if pg.rank() != root:
        work = dist.gather(_raw(source), None, group_dst=root, group=pg, async_op=True)
        return _finished(work, lambda: piece.new_zeros(()).expand(n, piece.numel()))
    rows = piece.new_empty(n, piece.numel())
    return _started(dist.gather(_raw(source), list(_raw(rows).unbind(0)), group_dst=root, group=pg, async_op=True), rows)


def scatter(pg: ProcessGroup, payload: Tensor, options: Options) -> Started:
    root = options["src"]
    if pg.rank() != root:
        received = torch.empty_like(payload, memory_format=torch.contiguous_format)
        return _started(dist.scatter(_raw(received), None, group_src=root, group=pg, async_op=True), received)
    rows = payload.contiguous()
    received = torch.empty_like(rows[0])
    pieces = list(_raw(rows).unbind(0))
    return _started(dist.scatter(_raw(received), pieces, group_src=root, group=pg, async_op=True), received)


def all_to_all(pg: ProcessGroup, rows: Tensor, options: Options) -> Started:
    source = rows.contiguous()
    result = torch.empty_like(source)
    return _started(dist.all_to_all_single(_raw(result), _raw(source), group=pg, async_op=True), result)


def all_to_all_rows(pg: ProcessGroup, rows: Tensor, options: Options) -> Started:
    sent, expected, source = list(options["input_splits"]), list(options["output_splits"]), rows.contiguous()
    result = rows.new_empty(sum(expected), rows.shape[1])
    work = dist.all_to_all_single(_raw(result), _raw(source), expected, sent, group=pg, async_op=True)
    return _started(work, result)


def permute(pg: ProcessGroup, piece: Tensor, options: Options) -> Started:
    """All ranks call, also those without a source or destination, since a communicator connects at its first call."""
    perm, n, rank = options["perm"], pg.size(), pg.rank()
    source, target = perm.source.get(rank), perm.target.get(rank)
    sent = piece if target is not None else piece[:0]
    received = torch.zeros_like(piece) if source is None else torch.empty_like(piece)
    into = received if source is not None else received[:0]
    sends = [sent.nbytes if peer == target else 0 for peer in range(n)]
    arrivals = [into.nbytes if peer == source else 0 for peer in range(n)]
    return _started(dist.all_to_all_single(_raw(into), _raw(sent), arrivals, sends, group=pg, async_op=True), received)


def transfer(pg: ProcessGroup, piece: Tensor, options: Options) -> Started:
    """A message from rank 0 to rank 1 of a communicator of two ranks."""
    sends = pg.rank() == 0
    buffer = piece if sends else torch.empty_like(piece)
    op = dist.P2POp(dist.isend if sends else dist.irecv, _raw(buffer), group=pg, group_peer=1 if sends else 0)
    works = dist.batch_isend_irecv([op]) if piece.numel() else []
    return Started(works, lambda: piece.new_zeros(()).expand(piece.shape) if sends else buffer)


def barrier(pg: ProcessGroup, piece: Tensor, options: Options) -> Started:
    return _started(dist.barrier(group=pg, async_op=True), piece)
