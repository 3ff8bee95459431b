"""Deferred (meta-device) initialization: values are read from a source when the state is made, each rank only its part.

A leaf on the meta device that is marked with an origin is *deferred*. ``step.init`` reads deferred leaves directly into their
storage: under ``zero`` each rank reads its shards, unit by unit, and nothing is broadcast. Sources have whole leaves; for a
slice, only its elements are used.
"""

import math
from collections.abc import Callable, Iterator
from typing import Any, Protocol, runtime_checkable

import attrs
import torch
from torch import Tensor, nn

from functional_ds.base import tree
from functional_ds.base.marks import ORIGIN, is_trainable, like_marked, slices_of

from .leaf_region import Box, LeafRegion, grouped, stretches
from .leaf_slice import LeafSlice, mark_slice

_GAP = 1 << 20  # bytes; ranges of a slice with a smaller gap between them are read at once


@runtime_checkable
class Source(Protocol):
    """A source of leaves' values, the same on all ranks.

    A source whose ``read`` always makes the whole leaf sets an attribute ``at_once = True``; it is then read once per slice.
    """

    def read(self, path: str, start: int, stop: int) -> Tensor:
        """Elements ``start`` to ``stop`` of the flattened leaf, on any device, in any dtype that can be cast to the leaf's."""
        ...


@attrs.frozen
class Whole:
    """A source from a function that maps a path to the whole tensor."""

    values: Callable[[str], Tensor]

    at_once = True

    def read(self, path: str, start: int, stop: int) -> Tensor:
        """Elements ``start`` to ``stop`` of the flattened tensor."""
        return self.values(path).detach().reshape(-1)[start:stop]


@attrs.frozen(eq=False)
class Origin:
    """The origin of a deferred leaf.

    Attributes:
        source: has the values.
        path: the leaf's path in the source.
        device: the device that will hold the values.
    """

    source: Source
    path: str
    device: torch.device


def from_source(params: Any, source: Source | Callable[[str], Tensor], *, device: str | torch.device = "cpu") -> Any:
    """Deferred initialization: a pytree of meta tensors whose values ``step.init`` reads from a source.

    ``params`` may be on the meta device, as from a module that was built there; their values are not used. Each rank reads only
    what it stores, at most one leaf at a time, so all ranks must be able to read the source. The source has whole leaves, even
    if ``params`` has slices.

    Args:
        params: a pytree that gives shapes, dtypes, and which leaves are frozen.
        source: an object with ``read(path, start, stop)``, or a function from a path to the whole tensor.
        device: the device for the values.

    Raises:
        TypeError: ``source`` is neither. Its tensors are checked when they are read.

    >>> import functional_ds as fds
    >>> params = {"w": torch.empty(2, 3, device="meta")}
    >>> step = fds.train_step(lambda params, x: (params["w"] * x).sum(), fds.sgd(0.5))
    >>> state = step.init(from_source(params, {"w": torch.arange(6.0).view(2, 3)}.__getitem__))
    >>> step.params(state)["w"].tolist()
    [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]
    """
    if isinstance(source, Source):
        reader: Source = source
    elif callable(source):
        reader = Whole(source)
    else:
        raise TypeError(f"source={source!r} has no read(path, start, stop), and is not a function from a path to a tensor")
    tree.tensors(params, "params")
    place = torch.device(device)
    return tree.map_named(lambda path, leaf: deferred(leaf, Origin(reader, path, place)), params)


def deferred(leaf: Tensor, origin: Origin) -> Tensor:
    """A deferred leaf of the same shape, dtype and marks, whose values are read from the origin."""
    bare = torch.empty(leaf.shape, dtype=leaf.dtype, device="meta")
    frozen = isinstance(leaf, nn.Parameter) and not is_trainable(leaf)
    marked = nn.Parameter(bare, requires_grad=False) if frozen else bare
    marked.__dict__.update({**leaf.__dict__, ORIGIN: origin})
    return marked


def _origin(leaf: Tensor) -> Origin | None:
    return getattr(leaf, ORIGIN, None) if leaf.is_meta else None


def is_deferred(leaf: Tensor) -> bool:
    """Whether the leaf is deferred."""
    return _origin(leaf) is not None


def home(leaf: Tensor) -> torch.device:
    """The device that holds the leaf's values, or will hold them."""
    origin = _origin(leaf)
    return leaf.device if origin is None else origin.device


def piece(leaf: Tensor, start: int, stop: int) -> Tensor:
    """Elements ``start`` to ``stop`` of a flattened leaf or slice: read if the leaf is deferred, else a view if possible.

    Raises:
        ValueError: the source returns another number of elements, or something that is not a tensor.
    """
    origin = _origin(leaf)
    if origin is None:
        return leaf.detach().reshape(-1)[start:stop]
    region = LeafRegion.of(tuple(leaf.shape), slices_of(leaf))
    if not region.ranges:
        return _read(origin, start, stop, region).to(device=origin.device, dtype=leaf.dtype)
    flat = torch.empty(stop - start, dtype=leaf.dtype, device=origin.device)
    gap = math.prod(region.shape) if getattr(origin.source, "at_once", False) else _GAP // leaf.dtype.itemsize
    for low, high, boxes in _reads(region, start, stop, gap):
        values = _read(origin, low, high, region)
        for here, there in boxes:
            here.view(flat, start).copy_(there.view(values, low))
    return flat


def _read(origin: Origin, start: int, stop: int, region: LeafRegion) -> Tensor:
    values: Any = origin.source.read(origin.path, start, stop)
    if not isinstance(values, Tensor) or values.numel() != stop - start:
        gave = f"{values.numel()} elements" if isinstance(values, Tensor) else f"a {type(values).__name__}"
        raise ValueError(
            f"source: asked for elements {start} to {stop} of {origin.path!r}, of shape {list(region.shape)}, it gave {gave}"
        )
    return values.detach().reshape(-1)


def _reads(region: LeafRegion, start: int, stop: int, gap: int) -> Iterator[tuple[int, int, list[tuple[Box, Box]]]]:
    """The ranges of a whole leaf to read for a range of a slice, with pairs of boxes in the slice and in the leaf."""
    shape, total = grouped(region.shape, region.dims), math.prod(region.shape)
    pairs = []
    for box in region.boxes(start, stop, region.dims):
        for there in stretches(box.in_whole(shape), gap=gap, most=total):
            corner = [a - b for a, b in zip(there.start, box.start, strict=True)]
            pairs.append((box.part(corner, there.shape), there))
    low, high, boxes = 0, -1, list[tuple[Box, Box]]()
    for here, there in sorted(pairs, key=lambda pair: pair[1].place):
        if boxes and there.place - high > gap:
            yield low, high, boxes
            boxes = []
        low = low if boxes else there.place
        high = max(high, there.place + there.extent) if boxes else there.place + there.extent
        boxes.append((here, there))
    if boxes:
        yield low, high, boxes


def sliced(leaf: Tensor, cut: LeafSlice) -> Tensor:
    """A copy of a rank's slice of a leaf, marked as such; the slice of a deferred leaf is deferred.

    Raises:
        ValueError: the leaf is already a slice along this dim.
    """
    part = cut.of(leaf.detach())
    values = part if leaf.is_meta else part.clone(memory_format=torch.contiguous_format)
    return mark_slice(like_marked(values, leaf), cut)


def values_of(leaf: Tensor) -> Tensor:
    """A new tensor of the leaf's values, which are read if the leaf is deferred, else copied."""
    if not is_deferred(leaf):
        return leaf.detach().clone(memory_format=torch.contiguous_format)
    values = piece(leaf, 0, leaf.numel()).reshape(leaf.shape)
    return values.clone(memory_format=torch.contiguous_format)
