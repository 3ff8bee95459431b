"""Which leaves the optimizer moves."""

import re
from typing import Any

from torch import Tensor, nn

from . import tree

__all__ = ["freeze", "is_trainable", "like_marked", "trainable"]


def is_trainable(leaf: Tensor) -> bool:
    """Floating and complex leaves are trained, but for an ``nn.Parameter`` that does not require grad."""
    frozen = isinstance(leaf, nn.Parameter) and not leaf.requires_grad
    return (leaf.is_floating_point() or leaf.is_complex()) and not frozen


def trainable(params: Any) -> list[Tensor]:
    """The trained leaves of a tree, in order; gradients are lists like this."""
    return [leaf for leaf in tree.leaves(params) if is_trainable(leaf)]


def like_marked(value: Tensor, model: Tensor) -> Tensor:
    """``value``, marked as frozen where ``model`` is."""
    frozen = isinstance(model, nn.Parameter) and not model.requires_grad
    return nn.Parameter(value, requires_grad=False) if frozen else value


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
