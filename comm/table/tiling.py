"""Splits a tensor into a piece for each rank and joins pieces, along a dim or on a leading dim of size n.

Options: ``dim`` and ``tiled``; ``sizes`` if the pieces differ in size along ``dim``. A back end gets a leaf as a payload:
``[m]`` (one piece), ``[n, m]`` (a piece for each rank) or ``[rows, m]`` (pieces of several rows).
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from functional_ds.comm.backends.primitives import Options

from .collective import CallContext


def join(pieces: Sequence[Tensor], options: Options) -> Tensor:
    """The ranks' pieces, concatenated or stacked."""
    return torch.cat(list(pieces), options["dim"]) if options["tiled"] else torch.stack(list(pieces))


def cut(whole: Tensor, n: int, options: Options) -> Sequence[Tensor]:
    """Splits a tensor into the ranks' pieces: the inverse of ``join``."""
    if "sizes" in options:
        pieces: Sequence[Tensor] = whole.split(list(options["sizes"]), options["dim"])
        return pieces
    return whole.tensor_split(n, options["dim"]) if options["tiled"] else whole.unbind(0)


def check_dim(leaf: Tensor, here: CallContext, name: str = "dim") -> int:
    """The dim to split or join along; raises ValueError if the leaf does not have it."""
    dim: int = here[name]
    if not here.options.get("tiled", True):
        if dim != 0:
            raise ValueError(
                f"{name}={dim} with tiled=False: the ranks' values stack on a new leading axis, so {name} must be 0"
            )
        return 0
    if leaf.dim() == 0:
        raise ValueError("a scalar has no dim to split or concatenate along; use tiled=False to stack on a new axis")
    if not 0 <= dim < leaf.dim():
        raise ValueError(f"{name}={dim} is out of range for a tensor of shape {list(leaf.shape)}")
    return dim


def check_cut(leaf: Tensor, here: CallContext, name: str = "dim") -> None:
    """Raises ValueError if the leaf cannot be split into a piece for each rank."""
    if leaf.dim() == 0:
        raise ValueError("a scalar cannot be split into pieces; it needs a dim to split along")
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
