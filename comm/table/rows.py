"""Rows of the table of collectives: reductions, broadcast, all_gather and reduce_scatter."""

from collections.abc import Sequence

import torch
from torch import Tensor

from functional_ds.comm.backends import gloo, nccl
from functional_ds.comm.backends.primitives import Options
from functional_ds.comm.backends.reduction import OPS, fold, fold_by_node

from .collective import Call, CallContext, Collective, Traffic, Variance
from .nodes import all_gather_volume, all_reduce_volume, shares_by_node
from .packing import pack_cut, pack_rows, unpack_joined, unpack_piece, unpack_rows
from .tiling import check_cut, check_dim, cut, join


def _copies(value: Tensor, n: int) -> list[Tensor]:
    """The tensor and n - 1 copies of it."""
    return [value, *(value.clone() for _ in range(n - 1))]


def as_sent(shape: Sequence[int], here: CallContext) -> Sequence[int]:
    """The ``result`` of a collective whose output has the shape of its input."""
    return shape


_WITHOUT_ARITHMETIC = {
    dtype
    for dtype in vars(torch).values()
    if isinstance(dtype, torch.dtype) and dtype.is_floating_point and dtype.itemsize == 1
} | {torch.uint16, torch.uint32, torch.uint64}


def _check_op(leaf: Tensor, here: CallContext) -> None:
    op = here["op"]
    if not isinstance(op, str) or op not in OPS:
        raise ValueError(f"op={op!r} is unknown; use one of {', '.join(sorted([*OPS, 'avg']))}")
    if leaf.is_complex() and op in ("min", "max"):
        raise ValueError(f"op={op!r} of a complex tensor ({leaf.dtype}): complex numbers have no order; use sum or product")
    if leaf.dtype == torch.bool and op in ("sum", "product"):
        raise ValueError(f"op={op!r} of a bool tensor: use max for 'any' and min for 'all', or cast it first")
    if op != "product" and leaf.dtype in _WITHOUT_ARITHMETIC:
        wide = "float32 or bfloat16" if leaf.is_floating_point() else "int32 or int64"
        raise ValueError(
            f"op={op!r} of a tensor of {leaf.dtype}, which torch has no {op} for: cast it to {wide} first, or all_gather it"
        )


def check_rank(name: str, here: CallContext) -> None:
    rank = here[name]
    if not isinstance(rank, int) or isinstance(rank, bool) or not 0 <= rank < here.n:
        raise ValueError(f"{name}={rank!r} is not a rank of the group; its ranks are 0..{here.n - 1}")


# -- reductions -------------------------------------------------------------------------------------------------------


def _reduce(xs: Sequence[Tensor], options: Options) -> list[Tensor]:
    total = fold(xs, options["op"])
    return [total.clone() if rank == options["dst"] else torch.zeros_like(total) for rank in range(len(xs))]


def _check_reduce(leaf: Tensor, here: CallContext) -> None:
    check_rank("dst", here)
    _check_op(leaf, here)


ALL_REDUCE: Collective = Collective(
    name="all_reduce",
    denotation=lambda xs, options: _copies(fold_by_node(xs, options), len(xs)),
    adjoint=lambda options: Call(ALL_REDUCE, options) if options["op"] == "sum" else None,
    volume=all_reduce_volume,
    shares=shares_by_node,
    by_node=True,
    gloo=gloo.all_reduce,
    nccl=nccl.all_reduce,
    result=as_sent,
    traffic=Traffic("reduction", passes=2, keeps_share=True),
    check=_check_op,
    takes=Variance.PARTIAL,
    gives=Variance.REPLICATED,
)

REDUCE: Collective = Collective(
    name="reduce",
    denotation=_reduce,
    adjoint=lambda options: Call(BROADCAST, {"src": options["dst"]}) if options["op"] == "sum" else None,
    volume=lambda leaf, here: 0 if here.rank == here["dst"] else leaf.numel(),
    shares=lambda here: {here["dst"]: 1},
    gloo=gloo.reduce,
    nccl=nccl.reduce,
    result=as_sent,
    traffic=Traffic("reduction"),
    check=_check_reduce,
    takes=Variance.PARTIAL,
)

BROADCAST: Collective = Collective(
    name="broadcast",
    denotation=lambda xs, options: _copies(xs[options["src"]].clone(), len(xs)),
    adjoint=lambda options: Call(REDUCE, {"dst": options["src"], "op": "sum"}),
    volume=lambda leaf, here: (here.n - 1) * leaf.numel() if here.rank == here["src"] else 0,
    reads=lambda here: here.rank == here["src"],
    gloo=gloo.broadcast,
    nccl=nccl.broadcast,
    result=as_sent,
    traffic=Traffic("gather"),
    joins=True,
    check=lambda leaf, here: check_rank("src", here),
    gives=Variance.REPLICATED,
)


# -- all_gather and reduce_scatter: each other's transposes -----------------------------------------------------------


def but(options: Options, *names: str) -> Options:
    return {name: value for name, value in options.items() if name not in names}


def _uneven(options: Options) -> bool:
    return "sizes" in options


def _reduce_scatter(xs: Sequence[Tensor], options: Options) -> list[Tensor]:
    return [piece.clone() for piece in cut(fold_by_node(xs, options), len(xs), options)]


def _rows_shape(leaf: Tensor, here: CallContext) -> Sequence[int | str]:
    """Uneven pieces differ along ``dim`` alone."""
    return [*leaf.shape[: here["dim"]], "*", *leaf.shape[here["dim"] + 1 :]] if _uneven(here.options) else leaf.shape


def _unpack_gathered(rows: Tensor, leaf: Tensor, here: CallContext) -> Tensor:
    return unpack_rows(rows, leaf, here) if _uneven(here.options) else unpack_joined(rows, leaf.shape, here)


def _gathered(shape: Sequence[int], here: CallContext) -> Sequence[int]:
    return [sum(here["sizes"]), shape[1]] if _uneven(here.options) else [here.n, *shape]  # [rows, m] or [n, m]


def _reduced(shape: Sequence[int], here: CallContext) -> Sequence[int]:
    return [here["sizes"][here.rank], shape[1]] if _uneven(here.options) else shape[1:]


def _check_gather(leaf: Tensor, here: CallContext) -> None:
    dim = check_dim(leaf, here)
    if _uneven(here.options) and leaf.shape[dim] != here["sizes"][here.rank]:
        raise ValueError(f"sizes={here['sizes']}: this rank's piece has size {leaf.shape[dim]} along dim={dim}")


def _check_reduce_scatter(leaf: Tensor, here: CallContext) -> None:
    _check_op(leaf, here)
    check_cut(leaf, here)


def sent_of(leaf: Tensor, here: CallContext, sizes: Sequence[int]) -> int:
    """Elements that leave this rank if it keeps its own of pieces of these sizes along ``dim``."""
    rows = leaf.shape[here["dim"]]
    return (rows - sizes[here.rank]) * (leaf.numel() // rows) if rows else 0


def _scattered(leaf: Tensor, here: CallContext) -> int:
    return sent_of(leaf, here, here["sizes"]) if _uneven(here.options) else (here.n - 1) * (leaf.numel() // here.n)


ALL_GATHER: Collective = Collective(
    name="all_gather",
    denotation=lambda xs, options: _copies(join(xs, options), len(xs)),
    adjoint=lambda options: Call(REDUCE_SCATTER, {**options, "op": "sum"}),
    volume=all_gather_volume,
    shares=shares_by_node,
    by_node=True,
    gloo=gloo.all_gather,
    nccl=nccl.all_gather,
    result=_gathered,
    traffic=Traffic("gather", keeps_share=True, of_result=True),
    joins=True,
    pack=lambda leaf, here: pack_rows(leaf, here) if _uneven(here.options) else leaf.reshape(-1),
    unpack=_unpack_gathered,
    check=_check_gather,
    shape=_rows_shape,
    gives=Variance.REPLICATED,
)

REDUCE_SCATTER: Collective = Collective(
    name="reduce_scatter",
    denotation=_reduce_scatter,
    adjoint=lambda options: Call(ALL_GATHER, but(options, "op")) if options["op"] == "sum" else None,
    volume=_scattered,
    shares=shares_by_node,
    by_node=True,
    gloo=gloo.reduce_scatter,
    nccl=nccl.reduce_scatter,
    result=_reduced,
    traffic=Traffic("reduction", keeps_share=True),
    joins=True,
    pack=lambda leaf, here: pack_rows(leaf, here) if _uneven(here.options) else pack_cut(leaf, here),
    unpack=lambda piece, leaf, here: (unpack_rows if _uneven(here.options) else unpack_piece)(piece, leaf, here),
    check=_check_reduce_scatter,
    takes=Variance.PARTIAL,
)
