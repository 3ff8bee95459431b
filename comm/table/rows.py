"""The table of collectives.

The rows are in the order of the docs: reductions, gathers and scatters, exchanges, point to point, and the four whose
transposes depend on whether a value is replicated, varying or a partial sum along the group.
"""

from collections.abc import Sequence
from itertools import product

import attrs
import torch
from torch import Tensor

from functional_ds.comm.backends import gloo, nccl
from functional_ds.comm.backends.primitives import Options
from functional_ds.comm.backends.reduction import OPS, fold

from .collective import Call, Collective, Here, Traffic
from .errors import MismatchError
from .nodes import all_gather_volume, all_reduce_volume, fold_nodes, shares_by_node
from .tiling import check_cut, check_dim, cut, join, pack_cut, pack_rows, piece_shape, unpack_joined, unpack_piece, unpack_rows
from .variance import Variance

__all__ = [
    "ALL_GATHER",
    "ALL_REDUCE",
    "ALL_TO_ALL",
    "ALL_TO_ALL_ROWS",
    "BARRIER",
    "BROADCAST",
    "COPY_TO",
    "GATHER",
    "GATHER_FROM",
    "PERMUTE",
    "REDUCE",
    "REDUCE_FROM",
    "REDUCE_SCATTER",
    "SCATTER",
    "SCATTER_TO",
    "TABLE",
    "TRANSFER",
    "as_sent",
]


def _copies(value: Tensor, n: int) -> list[Tensor]:
    """A new tensor, and copies of it."""
    return [value, *(value.clone() for _ in range(n - 1))]


def as_sent(shape: Sequence[int], here: Here) -> Sequence[int]:
    """The ``result`` of a primitive that gives as much as it is given."""
    return shape


def _nothing(like: Tensor, shape: Sequence[int]) -> Tensor:
    """Zeros that take no memory."""
    return like.new_zeros(()).expand(list(shape))


_WITHOUT_ARITHMETIC = {
    dtype
    for dtype in vars(torch).values()
    if isinstance(dtype, torch.dtype) and dtype.is_floating_point and dtype.itemsize == 1
} | {torch.uint16, torch.uint32, torch.uint64}


def _check_op(leaf: Tensor, here: Here) -> None:
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


def _check_rank(name: str, here: Here) -> None:
    rank = here[name]
    if not isinstance(rank, int) or isinstance(rank, bool) or not 0 <= rank < here.n:
        raise ValueError(f"{name}={rank!r} is no rank of the group; its ranks are 0..{here.n - 1}")


# -- reductions -------------------------------------------------------------------------------------------------------


def _reduce(xs: Sequence[Tensor], options: Options) -> list[Tensor]:
    total = fold(xs, options["op"])
    return [total.clone() if rank == options["dst"] else torch.zeros_like(total) for rank in range(len(xs))]


def _check_reduce(leaf: Tensor, here: Here) -> None:
    _check_rank("dst", here)
    _check_op(leaf, here)


ALL_REDUCE: Collective = Collective(
    name="all_reduce",
    denotation=lambda xs, options: _copies(fold_nodes(xs, options), len(xs)),
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
    check=lambda leaf, here: _check_rank("src", here),
    gives=Variance.REPLICATED,
)


# -- all_gather and reduce_scatter, gather and scatter: each other's transposes ---------------------------------------


def _but(options: Options, *names: str) -> Options:
    return {name: value for name, value in options.items() if name not in names}


def _uneven(options: Options) -> bool:
    return "sizes" in options


def _reduce_scatter(xs: Sequence[Tensor], options: Options) -> list[Tensor]:
    return [piece.clone() for piece in cut(fold_nodes(xs, options), len(xs), options)]


def _gather(xs: Sequence[Tensor], options: Options) -> list[Tensor]:
    whole = join(xs, options)
    return [whole if rank == options["dst"] else _nothing(whole, whole.shape) for rank in range(len(xs))]


def _rows_shape(leaf: Tensor, here: Here) -> Sequence[int | str]:
    """Uneven pieces differ along ``dim`` alone."""
    return [*leaf.shape[: here["dim"]], "*", *leaf.shape[here["dim"] + 1 :]] if _uneven(here.options) else leaf.shape


def _unpack_gathered(rows: Tensor, leaf: Tensor, here: Here) -> Tensor:
    return unpack_rows(rows, leaf, here) if _uneven(here.options) else unpack_joined(rows, leaf.shape, here)


def _gathered(shape: Sequence[int], here: Here) -> Sequence[int]:
    return [sum(here["sizes"]), shape[1]] if _uneven(here.options) else [here.n, *shape]  # [rows, m] or [n, m]


def _reduced(shape: Sequence[int], here: Here) -> Sequence[int]:
    return [here["sizes"][here.rank], shape[1]] if _uneven(here.options) else shape[1:]


def _check_gather(leaf: Tensor, here: Here) -> None:
    dim = check_dim(leaf, here)
    if _uneven(here.options) and leaf.shape[dim] != here["sizes"][here.rank]:
        raise ValueError(f"sizes={here['sizes']}: this rank's piece has size {leaf.shape[dim]} along dim={dim}")


def _check_reduce_scatter(leaf: Tensor, here: Here) -> None:
    _check_op(leaf, here)
    check_cut(leaf, here)


def _scattered(leaf: Tensor, here: Here) -> int:
    if not _uneven(here.options):
        return (here.n - 1) * (leaf.numel() // here.n)
    rows = leaf.shape[here["dim"]]
    return (rows - here["sizes"][here.rank]) * (leaf.numel() // rows) if rows else 0


def _pack_scattered(leaf: Tensor, here: Here) -> Tensor:
    if here.rank == here["src"]:
        return pack_cut(leaf, here)  # [n, m]
    return _nothing(leaf, [leaf.numel() // here.n])  # [m], to say what arrives


def _check_scatter(leaf: Tensor, here: Here) -> None:
    _check_rank("src", here)
    check_cut(leaf, here)


def _check_gather_to(leaf: Tensor, here: Here) -> None:
    _check_rank("dst", here)
    check_dim(leaf, here)


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
    adjoint=lambda options: Call(ALL_GATHER, _but(options, "op")) if options["op"] == "sum" else None,
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

GATHER: Collective = Collective(
    name="gather",
    denotation=_gather,
    adjoint=lambda options: Call(SCATTER, {"src": options["dst"], **_but(options, "dst")}),
    volume=lambda leaf, here: 0 if here.rank == here["dst"] else leaf.numel(),
    shares=lambda here: {here["dst"]: 1},
    gloo=gloo.gather,
    nccl=nccl.gather,
    result=lambda shape, here: [here.n, *shape],
    traffic=Traffic("exchange", keeps_share=True, of_result=True),
    unpack=lambda rows, leaf, here: unpack_joined(rows, leaf.shape, here),
    check=_check_gather_to,
)

SCATTER: Collective = Collective(
    name="scatter",
    denotation=lambda xs, options: [piece.clone() for piece in cut(xs[options["src"]], len(xs), options)],
    adjoint=lambda options: Call(GATHER, {"dst": options["src"], **_but(options, "src")}),
    volume=lambda leaf, here: (here.n - 1) * (leaf.numel() // here.n) if here.rank == here["src"] else 0,
    reads=lambda here: here.rank == here["src"],
    gloo=gloo.scatter,
    nccl=nccl.scatter,
    result=lambda shape, here: shape[-1:],
    traffic=Traffic("exchange", keeps_share=True),
    pack=_pack_scattered,
    unpack=unpack_piece,
    check=_check_scatter,
)


# -- exchanges --------------------------------------------------------------------------------------------------------


def _all_to_all(xs: Sequence[Tensor], options: Options) -> list[Tensor]:
    cuts = [x.tensor_split(len(xs), options["split_dim"]) for x in xs]
    return [torch.cat([pieces[rank] for pieces in cuts], options["concat_dim"]) for rank in range(len(xs))]


def _check_all_to_all(leaf: Tensor, here: Here) -> None:
    check_cut(leaf, here, "split_dim")
    check_dim(leaf, here, "concat_dim")


def _all_to_all_rows(xs: Sequence[Tensor], options: Options) -> list[Tensor]:
    cuts = [x.split(list(splits), options["dim"]) for x, splits in zip(xs, options["input_splits"], strict=True)]
    return [torch.cat([pieces[rank] for pieces in cuts], options["dim"]) for rank in range(len(xs))]


def _reconcile_splits(options: Options) -> None:
    sent, expected = options["input_splits"], options["output_splits"]
    for src, dst in product(range(len(sent)), repeat=2):
        if sent[src][dst] != expected[dst][src]:
            raise MismatchError(
                f"all_to_all: rank {src} of the group sends {sent[src][dst]} rows to rank {dst} (input_splits="
                f"{list(sent[src])}), which expects {expected[dst][src]} (output_splits={list(expected[dst])})"
            )


def _check_rows(leaf: Tensor, here: Here) -> None:
    rows = leaf.shape[check_dim(leaf, here)]
    for name in ("input_splits", "output_splits"):
        splits = here[name]
        if len(splits) != here.n or any(size < 0 for size in splits):
            raise ValueError(f"{name}={list(splits)}: a group of {here.n} needs {here.n} sizes >= 0, one for each rank")
    if sum(here["input_splits"]) != rows:
        raise ValueError(
            f"input_splits={list(here['input_splits'])} add up to {sum(here['input_splits'])}, "
            f"and dim={here['dim']} of a tensor of shape {list(leaf.shape)} has size {rows}"
        )


def _rows_sent(leaf: Tensor, here: Here) -> int:
    rows = leaf.shape[here["dim"]]
    return (rows - here["input_splits"][here.rank]) * (leaf.numel() // rows) if rows else 0


def _rows_title(options: Options, rank: int) -> tuple[str, Options]:
    dims = {"split_dim": options["dim"], "concat_dim": options["dim"]}
    return "all_to_all", {**dims, **_but(options, "dim")}


def _rows_adjoint(options: Options) -> Call:
    splits = {"input_splits": options["output_splits"], "output_splits": options["input_splits"]}
    return Call(ALL_TO_ALL_ROWS, {**options, **splits})


def _permute(xs: Sequence[Tensor], options: Options) -> list[Tensor]:
    source = options["perm"].source
    return [xs[source[rank]].clone() if rank in source else torch.zeros_like(x) for rank, x in enumerate(xs)]


def _check_permute(leaf: Tensor, here: Here) -> None:
    if here["perm"].ranks > here.n:
        raise ValueError(f"perm={here['perm']} names rank {here['perm'].ranks - 1}; the group's ranks are 0..{here.n - 1}")


ALL_TO_ALL: Collective = Collective(
    name="all_to_all",
    denotation=_all_to_all,
    adjoint=lambda o: Call(ALL_TO_ALL, {"split_dim": o["concat_dim"], "concat_dim": o["split_dim"]}),
    volume=lambda leaf, here: (here.n - 1) * (leaf.numel() // here.n),
    gloo=gloo.all_to_all,
    nccl=nccl.all_to_all,
    result=as_sent,
    traffic=Traffic("exchange", keeps_share=True),
    pack=lambda leaf, here: pack_cut(leaf, here, here["split_dim"]),
    unpack=lambda rows, leaf, here: unpack_joined(rows, piece_shape(leaf, here, here["split_dim"]), here, here["concat_dim"]),
    check=_check_all_to_all,
)

ALL_TO_ALL_ROWS: Collective = Collective(
    name="all_to_all_rows",
    denotation=_all_to_all_rows,
    adjoint=_rows_adjoint,
    volume=_rows_sent,
    shares=lambda here: {rank: rows for rank, rows in enumerate(here["input_splits"]) if rank != here.rank},
    gloo=gloo.all_to_all_rows,
    nccl=nccl.all_to_all_rows,
    result=lambda shape, here: [sum(here["output_splits"]), shape[1]],
    traffic=Traffic("exchange", keeps_share=True),
    pack=pack_rows,
    unpack=unpack_rows,
    check=_check_rows,
    shape=lambda leaf, here: [*leaf.shape[: here["dim"]], "*", *leaf.shape[here["dim"] + 1 :]],
    private=("input_splits", "output_splits"),
    reconcile=_reconcile_splits,
    title=_rows_title,
)

PERMUTE: Collective = Collective(
    name="permute",
    denotation=_permute,
    adjoint=lambda options: Call(PERMUTE, {"perm": options["perm"].inverse}),
    volume=lambda leaf, here: leaf.numel() if here["perm"].target.get(here.rank, here.rank) != here.rank else 0,
    shares=lambda here: {here["perm"].target.get(here.rank, here.rank): 1},
    reads=lambda here: here.rank in here["perm"].target,
    gloo=gloo.permute,
    nccl=nccl.permute,
    result=as_sent,
    traffic=Traffic("exchange"),
    check=_check_permute,
)


# -- point to point ---------------------------------------------------------------------------------------------------


def _transfer_title(options: Options, rank: int) -> tuple[str, Options]:
    name, peer = ("send", "dst") if rank == options["src"] else ("recv", "src")
    return name, {peer: options[peer], **({"tag": options["tag"]} if options["tag"] else {})}


# One message between two ranks, which p2p has checked. The sender gets zeros: they carry the gradient's way back.
TRANSFER: Collective = Collective(
    name="transfer",
    denotation=lambda xs, options: [_nothing(xs[0], xs[0].shape), xs[0].clone()],
    adjoint=lambda options: Call(TRANSFER, {**options, "src": options["dst"], "dst": options["src"]}),
    volume=lambda leaf, here: leaf.numel() if here.rank == here["src"] else 0,
    shares=lambda here: {here["dst"]: 1},
    reads=lambda here: here.rank == here["src"],
    gloo=gloo.transfer,
    nccl=nccl.transfer,
    result=as_sent,
    traffic=Traffic("message"),
    members=lambda options, n: (options["src"], options["dst"]),
    order=lambda options: (options["src"], options["dst"], options["tag"]),
    title=_transfer_title,
)

BARRIER: Collective = Collective(
    name="barrier",
    denotation=lambda xs, options: list(xs),
    volume=lambda leaf, here: 0,
    gloo=gloo.barrier,
    nccl=nccl.barrier,
    result=as_sent,
    traffic=Traffic("exchange"),
)


# -- Megatron's four, in pairs of transposes ----------------------------------------------------------------------------


def _own_slice(x: Tensor, here: Here) -> Tensor:
    return x.tensor_split(here.n, here["dim"])[here.rank].clone()


COPY_TO: Collective = Collective(
    name="copy_to",
    denotation=lambda xs, options: [x.clone() for x in xs],
    adjoint=lambda options: Call(REDUCE_FROM, {"op": "sum"}),
    alone=lambda x, here: x.clone(),
    takes=Variance.INVARIANT,
    gives=Variance.REPLICATED,
)

REDUCE_FROM: Collective = attrs.evolve(
    ALL_REDUCE, name="reduce_from", adjoint=lambda options: Call(COPY_TO, {}), gives=Variance.INVARIANT
)

SCATTER_TO: Collective = Collective(
    name="scatter_to",
    denotation=lambda xs, options: [_own_slice(x, Here(options, rank, len(xs))) for rank, x in enumerate(xs)],
    adjoint=lambda options: Call(GATHER_FROM, {**options, "tiled": True}),
    check=check_cut,
    alone=_own_slice,
    takes=Variance.INVARIANT,
)

GATHER_FROM: Collective = attrs.evolve(
    ALL_GATHER,
    name="gather_from",
    adjoint=lambda options: Call(SCATTER_TO, _but(options, "tiled")),
    joins=False,
    gives=Variance.INVARIANT,
)

TABLE: tuple[Collective, ...] = (
    ALL_REDUCE,
    REDUCE,
    BROADCAST,
    ALL_GATHER,
    REDUCE_SCATTER,
    GATHER,
    SCATTER,
    ALL_TO_ALL,
    ALL_TO_ALL_ROWS,
    PERMUTE,
    TRANSFER,
    BARRIER,
    COPY_TO,
    REDUCE_FROM,
    SCATTER_TO,
    GATHER_FROM,
)
