"""What leaves are marked with: whether the optimizer moves them, and the dtype that they are to be stored in."""

import re
from typing import Any

import torch
from torch import Tensor, nn

from . import tree

__all__ = ["freeze", "is_trainable", "like_marked", "mark_stored", "stored_in", "trainable"]


def is_trainable(leaf: Tensor) -> bool:
    """Floating and complex leaves are trained, but for an ``nn.Parameter`` that does not require grad."""
    frozen = isinstance(leaf, nn.Parameter) and not leaf.requires_grad
    return (leaf.is_floating_point() or leaf.is_complex()) and not frozen


def trainable(params: Any) -> list[Tensor]:
    """The trained leaves of a tree, in order; gradients are lists like this."""
    return [leaf for leaf in tree.leaves(params) if is_trainable(leaf)]


def like_marked(value: Tensor, model: Tensor) -> Tensor:
    """``value``, marked as ``model`` is."""
    frozen = isinstance(model, nn.Parameter) and not model.requires_grad
    marked = nn.Parameter(value, requires_grad=False) if frozen else value
    dtype = stored_in(model)
    return marked if dtype is None else mark_stored(marked, dtype)


def mark_stored(leaf: Tensor, dtype: torch.dtype | None) -> Tensor:
    """The leaf's values in a new tensor, marked to be stored in ``dtype``; None takes the mark away.

    Leaves that differ in it lie in segments of their own, as trained and frozen ones do.
    """
    frozen = isinstance(leaf, nn.Parameter) and not leaf.requires_grad
    marked = nn.Parameter(leaf.detach(), requires_grad=False) if frozen else leaf.detach()
    marked._fds_stored_in = dtype  # type: ignore[attr-defined]  # a tensor's own attribute, as pytrees have no place for one
    return marked


def stored_in(leaf: Tensor) -> torch.dtype | None:
    """The dtype that a leaf is marked to be stored in."""
    return getattr(leaf, "_fds_stored_in", None)


def freeze(params: Any, pattern: str = "") -> Any:
    """Marks the leaves whose path matches the regular expression as frozen: they get no gradient and no optimizer state.

    Raises:
        ValueError: no path matches.

    >>> import torch
    >>> params = {"base.w": torch.ones(2), "lora.a": torch.ones(2)}
    >>> [is_trainable(leaf) for leaf in freeze(params, "^base").values()]
    [False, True]
    """
    paths = [path for path, _ in tree.named(params)]
    hits = [re.search(pattern, path) is not None for path in paths]
    if not any(hits):
        raise ValueError(f"pattern={pattern!r} matches no path; the paths are {', '.join(paths)}")
    leaves, spec = tree.flatten(params)
    marked = [nn.Parameter(x.detach(), requires_grad=False) if hit else x for x, hit in zip(leaves, hits, strict=True)]
    return tree.unflatten(spec, marked)
