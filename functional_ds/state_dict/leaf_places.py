"""Which elements of which leaves are where in a state's tensors, as data."""

import math
from collections.abc import Sequence
from typing import Any

import attrs
from torch import Tensor

from functional_ds.base import tree
from functional_ds.base.marks import is_trainable, slices_of
from functional_ds.sharding.layout import Layout
from functional_ds.sharding.leaf_map import LeafMap, TensorRange
from functional_ds.sharding.leaf_region import LeafRegion
from functional_ds.sharding.segment import Segment
from functional_ds.step.state.slots import stored_layout
from functional_ds.step.state.state import State

Shape = tuple[int, ...]


@attrs.frozen
class Cut:
    """``numel`` consecutive elements of a rank's leaf: from ``offset`` on in it, flattened, from ``start`` on in a tensor."""

    leaf: int
    offset: int
    start: int
    numel: int


@attrs.frozen
class TensorForm:
    """A tensor's shape, and the elements of leaves in it."""

    shape: Shape
    cuts: tuple[Cut, ...]

    def lanes(self, tensor: Tensor) -> int | None:
        """The number of the tensor's elements per element of a leaf; None if the tensor does not have this form.

        Optimizer states of complex leaves are pairs of reals, with one more dim.
        """
        shape = tuple(tensor.shape)
        if shape == self.shape:
            return 1
        return 2 if shape == (*self.shape, 2) and not tensor.is_complex() else None


@attrs.frozen
class TensorLayout:
    """The leaves in a stored tensor.

    Attributes:
        forms: of the whole tensor, and of this rank's shard of it if it is sharded.
        members: all leaves with elements in it, on any rank.
        complex: whether the leaves are complex.
    """

    forms: tuple[TensorForm, ...]
    members: tuple[int, ...]
    complex: bool

    def form_of(self, tensor: Tensor) -> tuple[TensorForm, int] | None:
        """The form that a tensor has, with its lanes; None if it matches none."""
        for form in self.forms:
            lanes = form.lanes(tensor)
            if lanes == 1 or (lanes == 2 and self.complex):
                return form, lanes
        return None


@attrs.frozen
class Frame:
    """The layouts of a list's tensors. Optimizers' and transforms' states contain lists like that of the params.

    Attributes:
        leaves: the leaves' paths, and what this rank has of each: a slice, or the whole leaf.
        places: the layout of each tensor.
    """

    leaves: tuple[tuple[str, LeafRegion], ...]
    places: tuple[TensorLayout, ...]

    def fits(self, children: Sequence[Any]) -> bool:
        """Whether these are such a list: each child is None, a scalar, or a tensor of a form that its layout has."""
        if len(children) != len(self.places) or not any(isinstance(child, Tensor) for child in children):
            return False
        return all(_fits(child, place) for child, place in zip(children, self.places, strict=True))


def _fits(child: Any, place: TensorLayout) -> bool:
    return child is None or (isinstance(child, Tensor) and (not child.dim() or place.form_of(child) is not None))


@attrs.frozen
class StateLayout:
    """Where a state's leaves are.

    Attributes:
        stored: the layouts of the tensors that are stored as params.
        trained: those of the trained tensors.
        parts: the optimizer's leaf map of the trained tensors.
        spec: the structure of the params.
    """

    stored: Frame
    trained: Frame
    parts: LeafMap
    spec: Any = attrs.field(repr=False)

    @staticmethod
    def of(state: State) -> "StateLayout":
        """The layout of a state that any transforms made.

        >>> import torch
        >>> state = State.fresh({"w": torch.ones(2, 3)}, (), 0)
        >>> StateLayout.of(state).stored.places[0].forms
        (TensorForm(shape=(2, 3), cuts=(Cut(leaf=0, offset=0, start=0, numel=6),)),)
        """
        stored_as = stored_layout(state)
        spec = tree.structure(state.params)
        if stored_as is None:
            return StateLayout(*_alone(state.params), LeafMap.of(state.params), spec)
        parts = stored_as.leaf_map
        if stored_as.layout is None:
            local, (whole, _) = _of_leaf_map(parts), _alone(state.params)
            return StateLayout(local if local.fits(tree.leaves(state.params)) else whole, local, parts, spec)
        stored, trained = _of_layout(stored_as.layout, parts.rank if len(parts.shards_by_rank) > 1 else None)
        return StateLayout(stored, trained, parts, spec)


def of_extents(parts: LeafMap, extents: Sequence[TensorRange]) -> Frame:
    """The layouts of extents that were selected from an optimizer's tensors; ``parts`` says which leaves they hold."""
    places = []
    for index, extent in enumerate(extents):
        cuts = tuple(Cut(p.leaf, p.offset, p.start, p.numel) for p in parts.shards if p.tensor == index)
        smooth = any(parts.leaves[cut.leaf].dtype.is_complex for cut in cuts)
        places.append(TensorLayout((TensorForm((extent.stop - extent.start,), cuts),), tuple(cut.leaf for cut in cuts), smooth))
    return Frame(tuple((leaf.path, leaf.region) for leaf in parts.leaves), tuple(places))


def _alone(params: Any) -> tuple[Frame, Frame]:
    named = tree.named(params)
    leaves = tuple((path, LeafRegion.of(tuple(leaf.shape), slices_of(leaf))) for path, leaf in named)
    places = [
        TensorLayout((TensorForm(tuple(leaf.shape), (Cut(i, 0, 0, leaf.numel()),)),), (i,), leaf.is_complex())
        for i, (_, leaf) in enumerate(named)
    ]
    trained = [place for place, (_, leaf) in zip(places, named, strict=True) if is_trainable(leaf)]
    return Frame(leaves, tuple(places)), Frame(leaves, tuple(trained))


def _of_leaf_map(parts: LeafMap) -> Frame:
    """The layouts of this rank's tensors, which end where their last leaf does."""
    places = []
    for index in range(1 + max((part.tensor for part in parts.shards), default=-1)):
        here = [part for part in parts.shards if part.tensor == index]
        cuts = tuple(Cut(part.leaf, part.offset, part.start, part.numel) for part in here)
        shapes: list[Shape] = [(max(cut.start + cut.numel for cut in cuts),)] if cuts else [(0,)]
        if len(here) == 1 and here[0].numel == parts.leaves[here[0].leaf].numel:
            shapes.insert(0, parts.leaves[here[0].leaf].shape)
        smooth = any(parts.leaves[cut.leaf].dtype.is_complex for cut in cuts)
        places.append(TensorLayout(tuple(TensorForm(shape, cuts) for shape in shapes), tuple(cut.leaf for cut in cuts), smooth))
    return Frame(tuple((leaf.path, leaf.region) for leaf in parts.leaves), tuple(places))


def _of_layout(layout: Layout, rank: int | None) -> tuple[Frame, Frame]:
    regions = {slot.leaf: LeafRegion.of(slot.shape, slot.slices) for segment in layout.segments for slot in segment.slots}
    leaves = tuple((path, regions[i]) for i, path in enumerate(layout.paths))
    places = []
    for segment in layout.segments:
        forms = [TensorForm((segment.size,), tuple(_cuts(segment, 0, segment.size)))]
        if rank is not None:
            low, high = segment.cut(rank)
            forms.append(TensorForm((high - low,), tuple(_cuts(segment, low, high))))
        members = tuple(slot.leaf for slot in segment.slots)
        places.append(TensorLayout(tuple(forms), members, segment.dtype.is_complex))
    trained = tuple(place for place, segment in zip(places, layout.segments, strict=True) if segment.trainable)
    return Frame(leaves, tuple(places)), Frame(leaves, trained)


def _cuts(segment: Segment, low: int, high: int) -> list[Cut]:
    """The elements of the segment's leaves between two of its elements; empty leaves are in every range."""
    cuts = []
    for slot in segment.slots:
        first, last = max(slot.offset, low), min(slot.offset + slot.numel, high)
        if last > first:
            cuts.append(Cut(slot.leaf, first - slot.offset, first - low, last - first))
        elif not math.prod(slot.shape):
            cuts.append(Cut(slot.leaf, 0, 0, 0))
    return cuts
