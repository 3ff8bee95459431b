"""The table of collectives: each is one row.

Notation: ``n`` ranks; a payload is what a leaf looks like to the flat primitive, of shape ``[m]`` (one piece) or
``[n, m]`` (a piece for each rank).
"""

from collections.abc import Callable, Sequence
from functools import reduce as left_fold

import torch
from torch import Tensor

from .collective import Call, Collective, Options

__all__ = ["ALL_GATHER", "ALL_REDUCE", "BARRIER", "BROADCAST", "REDUCE", "REDUCE_SCATTER", "TABLE", "chunk_bounds", "fold"]


def _product(a: Tensor, b: Tensor, *, out: Tensor | None = None) -> Tensor:
    """torch.mul, but for complex numbers: those it rounds in one way in a vector and in another in its tail."""
    if not a.is_complex():
        return torch.mul(a, b, out=out)
    product = torch.complex(a.real * b.real - a.imag * b.imag, a.real * b.imag + a.imag * b.real)
    return product if out is None else out.copy_(product)


_BINARY: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "sum": torch.add,
    "product": _product,
    "min": torch.minimum,
    "max": torch.maximum,
}


def fold(pieces: Sequence[Tensor], op: str, *, out: Tensor | None = None) -> Tensor:
    """Combines the ranks' pieces from left to right, in rank order: the one definition of every reduction here.

    Half-precision sums and products are carried in fp32 and rounded once. Every world that folds like this gives the
    same bits. The result is new, or ``out``, which may be one of the first two pieces.
    """
    dtype = pieces[0].dtype
    wide = torch.float32 if dtype in (torch.float16, torch.bfloat16) and op in ("sum", "product") else dtype
    combine = _BINARY[op]
    if len(pieces) == 1:
        total = pieces[0]
    elif wide == dtype:
        total = combine(pieces[0], pieces[1], out=out)  # type: ignore[call-arg]
        for piece in pieces[2:]:
            combine(total, piece, out=total)  # type: ignore[call-arg]
        return total
    else:
        total = left_fold(combine, [piece.to(wide) for piece in pieces]).to(dtype)
    return total.clone() if out is None else out.copy_(total)


def chunk_bounds(numel: int, n: int) -> list[int]:
    """The n+1 bounds that cut ``numel`` elements into n contiguous pieces, the last ones perhaps short or empty."""
    size = -(-numel // n)
    return [min(i * size, numel) for i in range(n + 1)]


def _copies(value: Tensor, n: int) -> list[Tensor]:
    return [value.clone() for _ in range(n)]


def _flat(leaf: Tensor, n: int, options: Options) -> Tensor:
    return leaf.reshape(-1)


def _same_shape(piece: Tensor, leaf: Tensor, n: int, options: Options) -> Tensor:
    return piece.reshape(leaf.shape)


# -- checks -----------------------------------------------------------------------------------------------------------


def _no_check(leaf: Tensor, n: int, options: Options) -> None:
    return None


def _check_op(leaf: Tensor, n: int, options: Options) -> None:
    op = options["op"]
    if op not in _BINARY:
        raise ValueError(f"op={op!r} is unknown; use one of {', '.join(sorted([*_BINARY, 'avg']))}")
    if leaf.is_complex() and op in ("min", "max"):
        raise ValueError(f"op={op!r} of a complex tensor ({leaf.dtype}): complex numbers have no order; use sum or product")
    if leaf.dtype == torch.bool and op in ("sum", "product"):
        raise ValueError(f"op={op!r} of a bool tensor: use max for 'any' and min for 'all', or cast it first")


def _check_dim(leaf: Tensor, options: Options) -> int:
    dim: int = options["dim"]
    if not options["tiled"]:
        if dim != 0:
            raise ValueError(f"dim={dim} with tiled=False: the ranks' values stack on a new leading axis, so dim must be 0")
        return 0
    if leaf.dim() == 0:
        raise ValueError("a scalar has no dim to cut or concatenate along; use tiled=False to stack on a new axis")
    if not 0 <= dim < leaf.dim():
        raise ValueError(f"dim={dim} is out of range for a tensor of shape {list(leaf.shape)}")
    return dim


def _check_gather(leaf: Tensor, n: int, options: Options) -> None:
    _check_dim(leaf, options)


def _check_scatter(leaf: Tensor, n: int, options: Options) -> None:
    _check_op(leaf, n, options)
    if leaf.dim() == 0:
        raise ValueError("a scalar cannot be scattered; reduce_scatter needs a dim to cut")
    size = leaf.shape[_check_dim(leaf, options)]
    if size % n if options["tiled"] else size != n:
        need = f"a multiple of {n}" if options["tiled"] else f"exactly {n} (tiled=False)"
        raise ValueError(
            f"dim={options['dim']} of a tensor of shape {list(leaf.shape)} has size {size}; a group of {n} needs {need}; "
            "pad the tensor or use another dim"
        )


def _check_root(leaf: Tensor, n: int, options: Options) -> None:
    root = options.get("src", options.get("dst"))
    name = "src" if "src" in options else "dst"
    if not isinstance(root, int) or not 0 <= root < n:
        raise ValueError(f"{name}={root!r} is no rank of the group; its ranks are 0..{n - 1}")
    if "op" in options:
        _check_op(leaf, n, options)


# -- all_reduce -------------------------------------------------------------------------------------------------------


def _all_reduce_adjoint(options: Options) -> Call | None:
    return Call(ALL_REDUCE, options) if options["op"] == "sum" else None


def _all_reduce_volume(numel: int, n: int, rank: int, options: Options) -> int:
    bounds = chunk_bounds(numel, n)
    own = bounds[rank + 1] - bounds[rank]
    return (numel - own) + (n - 1) * own


ALL_REDUCE = Collective(
    name="all_reduce",
    denotation=lambda xs, options: _copies(fold(xs, options["op"]), len(xs)),
    adjoint=_all_reduce_adjoint,
    volume=_all_reduce_volume,
    pack=_flat,
    unpack=_same_shape,
    primitive="all_reduce",
    check=_check_op,
)


# -- all_gather and reduce_scatter, each other's transpose ------------------------------------------------------------


def _join(pieces: Sequence[Tensor], options: Options) -> Tensor:
    return torch.cat(list(pieces), options["dim"]) if options["tiled"] else torch.stack(list(pieces))


def _cut(whole: Tensor, n: int, options: Options) -> Sequence[Tensor]:
    return whole.tensor_split(n, options["dim"]) if options["tiled"] else whole.unbind(0)


def _unpack_gathered(rows: Tensor, leaf: Tensor, n: int, options: Options) -> Tensor:
    stacked = rows.reshape(n, *leaf.shape)  # [n, m] -> [n, *shape]
    if not options["tiled"]:
        return stacked
    dim: int = options["dim"]
    return stacked.movedim(0, dim).flatten(dim, dim + 1)  # [.., n, d, ..] -> [.., n*d, ..]; no copy for dim 0


def _pack_scattered(leaf: Tensor, n: int, options: Options) -> Tensor:
    if not options["tiled"]:
        return leaf.reshape(n, -1)
    dim: int = options["dim"]
    shape = leaf.shape
    parts = leaf.reshape(*shape[:dim], n, shape[dim] // n, *shape[dim + 1 :])
    return parts.movedim(dim, 0).reshape(n, leaf.numel() // n)


def _unpack_scattered(piece: Tensor, leaf: Tensor, n: int, options: Options) -> Tensor:
    shape = list(leaf.shape)
    if not options["tiled"]:
        return piece.reshape(shape[1:])
    shape[options["dim"]] //= n
    return piece.reshape(shape)


def _reduce_scatter(xs: Sequence[Tensor], options: Options) -> list[Tensor]:
    return [piece.clone() for piece in _cut(fold(xs, options["op"]), len(xs), options)]


def _reduce_scatter_adjoint(options: Options) -> Call | None:
    if options["op"] != "sum":
        return None
    return Call(ALL_GATHER, {"dim": options["dim"], "tiled": options["tiled"]})


ALL_GATHER: Collective = Collective(
    name="all_gather",
    denotation=lambda xs, options: _copies(_join(xs, options), len(xs)),
    adjoint=lambda options: Call(REDUCE_SCATTER, {**options, "op": "sum"}),
    volume=lambda numel, n, rank, options: (n - 1) * numel,
    pack=_flat,
    unpack=_unpack_gathered,
    primitive="all_gather",
    check=_check_gather,
)

REDUCE_SCATTER: Collective = Collective(
    name="reduce_scatter",
    denotation=_reduce_scatter,
    adjoint=_reduce_scatter_adjoint,
    volume=lambda numel, n, rank, options: (n - 1) * (numel // n),
    pack=_pack_scattered,
    unpack=_unpack_scattered,
    primitive="reduce_scatter",
    check=_check_scatter,
)


# -- broadcast and reduce, each other's transpose ---------------------------------------------------------------------


def _reduce(xs: Sequence[Tensor], options: Options) -> list[Tensor]:
    total = fold(xs, options["op"])
    return [total.clone() if rank == options["dst"] else torch.zeros_like(total) for rank in range(len(xs))]


def _reduce_adjoint(options: Options) -> Call | None:
    return Call(BROADCAST, {"src": options["dst"]}) if options["op"] == "sum" else None


BROADCAST: Collective = Collective(
    name="broadcast",
    denotation=lambda xs, options: _copies(xs[options["src"]], len(xs)),
    adjoint=lambda options: Call(REDUCE, {"dst": options["src"], "op": "sum"}),
    volume=lambda numel, n, rank, options: (n - 1) * numel if rank == options["src"] else 0,
    pack=_flat,
    unpack=_same_shape,
    primitive="broadcast",
    check=_check_root,
)

REDUCE: Collective = Collective(
    name="reduce",
    denotation=_reduce,
    adjoint=_reduce_adjoint,
    volume=lambda numel, n, rank, options: 0 if rank == options["dst"] else numel,
    pack=_flat,
    unpack=_same_shape,
    primitive="reduce",
    check=_check_root,
)


# -- barrier ----------------------------------------------------------------------------------------------------------

BARRIER = Collective(
    name="barrier",
    denotation=lambda xs, options: list(xs),
    adjoint=lambda options: None,
    volume=lambda numel, n, rank, options: 0,
    pack=_flat,
    unpack=_same_shape,
    primitive="barrier",
    check=_no_check,
)

TABLE: tuple[Collective, ...] = (ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER, BROADCAST, REDUCE, BARRIER)
