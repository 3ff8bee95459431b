"""Leaves that have no values yet: where these come from, and how each rank gets its own part of them.

A leaf on the meta device that is marked with an origin is *deferred*. ``step.init`` reads deferred leaves where it stores
them: under ``zero`` each rank reads its own shards, unit by unit, and nothing is broadcast.
"""

from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

import attrs
import torch
from torch import Tensor, nn

from functional_ds.base import tree
from functional_ds.base.marks import ORIGIN, is_trainable

__all__ = ["Origin", "Source", "Whole", "from_source", "home", "is_deferred", "piece", "values_of"]


@runtime_checkable
class Source(Protocol):
    """Where values come from: the same on every rank."""

    def read(self, path: str, start: int, stop: int) -> Tensor:
        """Elements ``start`` to ``stop`` of the flattened leaf, on any device, of any dtype that casts to the leaf's."""
        ...


@attrs.frozen
class Whole:
    """A source that gives whole leaves: a function from paths to tensors."""

    values: Callable[[str], Tensor]

    def read(self, path: str, start: int, stop: int) -> Tensor:
        """A stretch of the whole."""
        return self.values(path).detach().reshape(-1)[start:stop]


@attrs.frozen(eq=False)
class Origin:
    """A deferred leaf's: under which path its values are in which source, and where they shall lie."""

    source: Source
    path: str
    device: torch.device


def from_source(params: Any, source: Source | Callable[[str], Tensor], *, device: str | torch.device = "cpu") -> Any:
    """The tree with every leaf deferred: a shape and a dtype, to be read from the source under its path.

    ``params`` may be on the meta device, as of a module that was built there; values that are there already are not used.
    Each rank reads what it stores, at most one leaf at a time, so the source must be readable on all of them.

    Args:
        params: shapes, dtypes, and what is frozen.
        source: has ``read(path, start, stop)``, or is a function from a path to the whole tensor.
        device: where the values shall lie.

    Raises:
        TypeError: no source. What the source gives is checked when it is read.

    >>> import functional_ds as fds
    >>> params = {"w": torch.empty(2, 3, device="meta")}
    >>> step = fds.train_step(lambda params, x: (params["w"] * x).sum(), fds.sgd(0.5))
    >>> state = step.init(from_source(params, {"w": torch.arange(6.0).view(2, 3)}.__getitem__))
    >>> step.params(state)["w"].tolist()
    [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]
    """
    if isinstance(source, Source):
        found: Source = source
    elif callable(source):
        found = Whole(source)
    else:
        raise TypeError(f"source={source!r} has no read(path, start, stop), and is no function from a path to a tensor")
    tree.tensors(params, "params")
    place = torch.device(device)
    leaves = [_deferred(leaf, Origin(found, path, place)) for path, leaf in tree.named(params)]
    return tree.unflatten(tree.structure(params), leaves)


def _deferred(leaf: Tensor, origin: Origin) -> Tensor:
    bare = torch.empty(leaf.shape, dtype=leaf.dtype, device="meta")
    frozen = isinstance(leaf, nn.Parameter) and not is_trainable(leaf)
    marked = nn.Parameter(bare, requires_grad=False) if frozen else bare
    marked.__dict__.update({**leaf.__dict__, ORIGIN: origin})
    return marked


def _origin(leaf: Tensor) -> Origin | None:
    return getattr(leaf, ORIGIN, None) if leaf.is_meta else None


def is_deferred(leaf: Tensor) -> bool:
    """Whether the leaf's values are still to be read."""
    return _origin(leaf) is not None


def home(leaf: Tensor) -> torch.device:
    """The device that the leaf's values shall lie on."""
    origin = _origin(leaf)
    return leaf.device if origin is None else origin.device


def piece(leaf: Tensor, start: int, stop: int) -> Tensor:
    """Elements ``start`` to ``stop`` of a flattened leaf, read where it is deferred, else as a view if possible.

    Raises:
        ValueError: the source gives another number of elements, or no tensor.
    """
    origin = _origin(leaf)
    if origin is None:
        return leaf.detach().reshape(-1)[start:stop]
    found: Any = origin.source.read(origin.path, start, stop)
    if not isinstance(found, Tensor) or found.numel() != stop - start:
        gave = f"{found.numel()} elements" if isinstance(found, Tensor) else f"a {type(found).__name__}"
        raise ValueError(
            f"source: asked for elements {start} to {stop} of {origin.path!r}, of shape {list(leaf.shape)}, it gave {gave}"
        )
    return found.detach().reshape(-1).to(device=origin.device, dtype=leaf.dtype)


def values_of(leaf: Tensor) -> Tensor:
    """The leaf's values as a tensor of its own: read, or copied."""
    if not is_deferred(leaf):
        return leaf.detach().clone(memory_format=torch.contiguous_format)
    found = piece(leaf, 0, leaf.numel()).reshape(leaf.shape)
    return found.clone(memory_format=torch.contiguous_format)
