"""Cutting a value into a piece for each rank and joining the pieces, along a dim or on a leading axis of the ranks.

Options: ``dim`` and ``tiled``; ``sizes`` where the pieces differ in size along ``dim``. A payload is the form in which a
backend gets a leaf: ``[m]`` (one piece), ``[n, m]`` (a piece for each rank) or ``[rows, m]`` (pieces of several rows).
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from functional_ds.comm.backends.primitives import Options

from .collective import Here

__all__ = [
    "check_cut",
    "check_dim",
    "cut",
    "join",
    "pack_cut",
    "pack_rows",
    "pad_rows",
    "piece_shape",
    "unpack_joined",
    "unpack_piece",
    "unpack_rows",
]


def join(pieces: Sequence[Tensor], options: Options) -> Tensor:
    """The whole from the ranks' pieces."""
    return torch.cat(list(pieces), options["dim"]) if options["tiled"] else torch.stack(list(pieces))


def cut(whole: Tensor, n: int, options: Options) -> Sequence[Tensor]:
    """The ranks' pieces of the whole: the inverse of ``join``."""
    if "sizes" in options:
        pieces: Sequence[Tensor] = whole.split(list(options["sizes"]), options["dim"])
        return pieces
    return whole.tensor_split(n, options["dim"]) if options["tiled"] else whole.unbind(0)


# -- payloads ---------------------------------------------------------------------------------------------------------


def pack_cut(leaf: Tensor, here: Here, dim: int | None = None) -> Tensor:
    """The whole as [n, m], a row for each rank."""
    dim = here["dim"] if dim is None else dim
    if dim == 0:  # tiled or stacked
        return leaf.reshape(here.n, -1) if leaf.numel() else leaf.new_empty(here.n, 0)
    shape = leaf.shape
    parts = leaf.reshape(*shape[:dim], here.n, shape[dim] // here.n, *shape[dim + 1 :])
    return parts.movedim(dim, 0).reshape(here.n, leaf.numel() // here.n)


def unpack_joined(rows: Tensor, piece: Sequence[int], here: Here, dim: int | None = None) -> Tensor:
    """The whole from [n, m], where every piece has the shape ``piece``."""
    if not here.options.get("tiled", True):
        return rows.reshape(here.n, *piece)
    dim = here["dim"] if dim is None else dim
    if dim == 0:
        return rows.reshape(here.n * piece[0], *piece[1:])  # no copy
    return rows.reshape(here.n, *piece).movedim(0, dim).flatten(dim, dim + 1)  # [.., n, d, ..] -> [.., n*d, ..]


def piece_shape(leaf: Tensor, here: Here, dim: int | None = None) -> list[int]:
    """The shape of one rank's piece of the whole."""
    shape = list(leaf.shape)
    if not here.options.get("tiled", True):
        return shape[1:]
    shape[here["dim"] if dim is None else dim] //= here.n
    return shape


def unpack_piece(piece: Tensor, leaf: Tensor, here: Here) -> Tensor:
    """One rank's piece of the whole ``leaf``."""
    return piece.reshape(piece_shape(leaf, here))


def pad_rows(leaf: Tensor, n: int) -> Tensor:
    """The leaf's elements as [n, m], with zeros at the end; a view where n divides them."""
    flat, size = leaf.reshape(-1), -(-leaf.numel() // n)
    missing = n * size - flat.numel()
    return (torch.cat([flat, flat.new_zeros(missing)]) if missing else flat).view(n, size)


def pack_rows(leaf: Tensor, here: Here) -> Tensor:
    """The leaf as [rows, m], a row for each index along ``dim``."""
    moved = leaf.movedim(here["dim"], 0)
    return moved.reshape(moved.shape[0], math.prod(moved.shape[1:]))


def unpack_rows(rows: Tensor, leaf: Tensor, here: Here) -> Tensor:
    """The inverse of ``pack_rows``, for however many rows have come."""
    dim = here["dim"]
    rest = [*leaf.shape[:dim], *leaf.shape[dim + 1 :]]
    return rows.reshape(rows.shape[0], *rest).movedim(0, dim).contiguous()


# -- checks -----------------------------------------------------------------------------------------------------------


def check_dim(leaf: Tensor, here: Here, name: str = "dim") -> int:
    """The dim to cut or join along; raises ValueError where the leaf does not have it."""
    dim: int = here[name]
    if not here.options.get("tiled", True):
        if dim != 0:
            raise ValueError(
                f"{name}={dim} with tiled=False: the ranks' values stack on a new leading axis, so {name} must be 0"
            )
        return 0
    if leaf.dim() == 0:
        raise ValueError("a scalar has no dim to cut or concatenate along; use tiled=False to stack on a new axis")
    if not 0 <= dim < leaf.dim():
        raise ValueError(f"{name}={dim} is out of range for a tensor of shape {list(leaf.shape)}")
    return dim


def check_cut(leaf: Tensor, here: Here, name: str = "dim") -> None:
    """Raises ValueError where the leaf cannot be cut into a piece for each rank."""
    if leaf.dim() == 0:
        raise ValueError("a scalar cannot be cut into pieces; it needs a dim to cut along")
    tiled = here.options.get("tiled", True)
    size, n = leaf.shape[check_dim(leaf, here, name)], here.n
    if "sizes" in here.options:
        if size != sum(here["sizes"]):
            raise ValueError(f"sizes={here['sizes']} add up to {sum(here['sizes'])}, and {name}={here[name]} has size {size}")
    elif size % n if tiled else size != n:
        need = f"a multiple of {n}" if tiled else f"exactly {n} (tiled=False)"
        raise ValueError(
            f"{name}={here[name]} of a tensor of shape {list(leaf.shape)} has size {size}; a group of {n} needs {need}; "
            "pad the tensor or use another dim"
        )
