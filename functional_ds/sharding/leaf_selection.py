"""Some of the leaves in the tensors that an optimizer gets: views of params, gradients and states, and the way back."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import attrs
import optree
from torch import Tensor

from functional_ds.base import tree
from functional_ds.base.byte_ranges import begin_together
from functional_ds.base.tree import NAMESPACE

from .leaf_map import LeafMap, TensorRange

__all__ = ["IndivisibleStateError", "LeafSelection", "StateParts", "Unused"]


class IndivisibleStateError(ValueError):
    """An optimizer's state cannot be taken apart by leaves."""


@attrs.frozen(eq=False)
class Unused:
    """The trained leaves that no rank's loss has used.

    Attributes:
        paths: in this step.
        idle: how many updates before this one left a leaf alone, by path; a leaf that is not there was always used.
    """

    paths: frozenset[str]
    idle: Mapping[str, int]


@attrs.frozen(eq=False)
class LeafSelection:
    """Some leaves of a leaf map.

    Attributes:
        extents: where they lie in this rank's tensors; None where each tensor is one leaf, which then keeps its shape.
        tensors: the indices of their tensors, one for each view.
        leaf_map: of the views alone.
    """

    extents: tuple[TensorRange, ...] | None
    tensors: tuple[int, ...]
    leaf_map: LeafMap

    @staticmethod
    def of(leaf_map: LeafMap, leaves: Collection[int]) -> "LeafSelection":
        """The leaves with these indices."""
        extents, inner = leaf_map.select(leaves)
        if leaf_map.flat:
            return LeafSelection(extents, tuple(extent.tensor for extent in extents), inner)
        kept = set(leaves)
        tensors = tuple(shard.tensor for shard in leaf_map.shards if shard.leaf in kept)
        number = {leaf: place for place, leaf in enumerate(sorted(kept))}
        ranks = [[shard for shard in shards if shard.leaf in kept] for shards in leaf_map.shards_by_rank]
        renumbered = (
            tuple(attrs.evolve(shard, leaf=number[shard.leaf], tensor=place) for place, shard in enumerate(shards))
            for shards in ranks
        )
        return LeafSelection(None, tensors, attrs.evolve(inner, shards_by_rank=tuple(renumbered), flat=False))

    def views(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Views of the leaves, in lists of tensors like those of the params; pairs of reals stay pairs."""
        if self.extents is None:
            return [tensors[place] for place in self.tensors]
        return [tensors[extent.tensor][extent.start : extent.stop] for extent in self.extents]

    def put(self, tensors: list[Tensor], views: Sequence[Tensor], moved: Sequence[Tensor]) -> None:
        """Puts what became of the views into the tensors."""
        for place, view, new in zip(self.tensors, views, moved, strict=True):
            if self.extents is None:
                tensors[place] = new
            elif not begin_together(new, view):
                view.copy_(new)


@attrs.define(eq=False)
class StateParts:
    """An optimizer's state as lists like that of the params, with a tensor or a number for each, and single numbers.

    Attributes:
        nodes: the lists and the single numbers.
        roles: the path of each, without places in lists.
        spec: puts them together.
        params: what the lists are like.
    """

    nodes: list[Any]
    roles: tuple[str, ...]
    spec: optree.PyTreeSpec
    params: Sequence[Tensor]

    @staticmethod
    def of(state: Any, params: Sequence[Tensor]) -> "StateParts":
        """The parts of the state of an optimizer of these params.

        Raises:
            IndivisibleStateError: something is in no such list and no number.
        """

        def is_list(node: Any) -> bool:
            return type(node) in (list, tuple) and len(node) == len(params) and all(map(_belongs, node, params))

        paths, nodes, spec = optree.tree_flatten_with_path(state, is_leaf=is_list, namespace=NAMESPACE)
        roles = tuple(".".join(str(part) for part in path if not str(part).isdecimal()) for path in paths)
        for role, node in zip(roles, nodes, strict=True):
            if not is_list(node) and not _is_number(node):
                shown = f"a tensor of shape {list(node.shape)}" if isinstance(node, Tensor) else type(node).__name__
                raise IndivisibleStateError(f"its state has {shown} in {role!r}, which belongs to no param alone")
        return StateParts([[*node] if is_list(node) else node for node in nodes], roles, spec, params)

    def numbers(self) -> list[tuple[str, Any]]:
        """The numbers, with their roles."""
        pairs = zip(self.roles, self.nodes, strict=True)
        flat = ((role, child) for role, node in pairs for child in (node if isinstance(node, list) else [node]))
        return [(role, child) for role, child in flat if _is_number(child)]

    def select(self, selection: LeafSelection, counts: Collection[str], idle: int) -> Any:
        """The state of some leaves: views of tensors, and numbers; those whose roles are in ``counts`` less ``idle``."""
        nodes: list[Any] = []
        for role, node in zip(self.roles, self.nodes, strict=True):
            if role in counts:
                nodes.append([node[i] - idle for i in selection.tensors] if isinstance(node, list) else node - idle)
            elif self._holds_numbers(node):
                nodes.append([node[i] for i in selection.tensors])
            else:
                nodes.append(selection.views(node) if isinstance(node, list) else node)
        return tree.unflatten(self.spec, nodes)

    def put(self, selection: LeafSelection, before: Any, after: Any, counts: Collection[str]) -> None:
        """Puts what became of the tensors in the state of some leaves into this one; numbers stay."""
        views: list[Any] = self.spec.flatten_up_to(before)
        moved: list[Any] = self.spec.flatten_up_to(after)
        for role, node, old, new in zip(self.roles, self.nodes, views, moved, strict=True):
            if isinstance(node, list) and role not in counts and not self._holds_numbers(node):
                selection.put(node, old, new)

    def joined(self, counts: Collection[str], step: Any) -> Any:
        """The whole state; ``step`` is added to the numbers whose roles are in ``counts``."""
        nodes = [
            node if role not in counts else [one + step for one in node] if isinstance(node, list) else node + step
            for role, node in zip(self.roles, self.nodes, strict=True)
        ]
        return tree.unflatten(self.spec, nodes)

    def _holds_numbers(self, node: Any) -> bool:
        return isinstance(node, list) and any(
            not child.dim() and param.dim() for child, param in zip(node, self.params, strict=True)
        )


def _belongs(child: Any, param: Tensor) -> bool:
    """Whether it is a number, or has a value, or a pair of them, for each element of the param."""
    return isinstance(child, Tensor) and (not child.dim() or child.shape in (param.shape, (*param.shape, 2)))


def _is_number(node: Any) -> bool:
    return not node.dim() if isinstance(node, Tensor) else type(node) in (int, float)
