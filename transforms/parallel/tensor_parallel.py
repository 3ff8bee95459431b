"""Tensor parallelism: leaves that are cut along a dim, a slice on each rank (Shoeybi et al., "Megatron-LM", 2019)."""

import difflib
import re
from collections.abc import Mapping, Sequence
from typing import Any

import attrs
from torch import Tensor

from functional_ds import comm
from functional_ds.base import tree
from functional_ds.base.marks import like_marked, mark_part, mark_slices, part_of, slices_of
from functional_ds.sharding.leaf_map import LeafMap
from functional_ds.sharding.leaf_slice import LeafSlice
from functional_ds.sharding.sources import sliced
from functional_ds.step.compose import wrap
from functional_ds.step.state import State
from functional_ds.step.step import Step, Transform

__all__ = ["tensor_parallel"]

_SLICED = "slices"


def tensor_parallel(dims: Mapping[str, int], group: comm.Group | None = None) -> Transform:
    """Stores a slice of the leaves whose paths match, along a dim each, on every rank of ``group``; the rest is on all.

    The loss sees the slices, so it is written for them: ``comm.copy_to`` before a product with columns, ``comm.reduce_from``
    after one with rows. It gives the same loss on every rank, from the same batch.

    Law 36: with such a loss it is the single-device step on the whole leaves, on any mesh. Norms count slices from all ranks,
    and other leaves once.

    Sends nothing in a step, beyond what the loss does, but a few scalars. Put it after ``zero`` and ``pipeline``, whose ranks
    lie along other axes. Optimizers that look at whole leaves (``lamb``, ``muon``) refuse slices.

    Args:
        dims: from a regular expression for paths to the dim that is cut.
        group: the ranks; None for the whole world.

    Raises:
        ValueError: an expression matches no path, two match the same, or a size does not divide by the ranks.
        TypeError: ``group`` is no group.

    >>> import torch
    >>> import functional_ds as fds
    >>> def program():
    ...     here = comm.world()
    ...
    ...     def loss(p, x):
    ...         hidden = comm.copy_to(x, here) @ p["columns"]
    ...         return comm.reduce_from(hidden @ p["rows"], here).sum()
    ...
    ...     step = tensor_parallel({"columns": 1, "rows": 0})(fds.train_step(loss, fds.sgd(0.5)))
    ...     state = step.init({"columns": torch.ones(2, 4), "rows": torch.ones(4, 1)})
    ...     state, metrics = step(state, torch.ones(1, 2))
    ...     return state.params["columns"].shape, metrics["loss"].item(), step.params(state)["columns"].tolist()
    >>> comm.simulate(program, world_size=2)[0]
    (torch.Size([2, 2]), 8.0, [[0.5, 0.5, 0.5, 0.5], [0.5, 0.5, 0.5, 0.5]])
    """
    if group is not None and not isinstance(group, comm.Group):
        raise TypeError(f"group={group!r} is no group: pass mesh['tp'], comm.world() or None")
    return _TensorParallel(dict(dims), group).transform()


@attrs.frozen(eq=False)
class _TensorParallel:
    dims: Mapping[str, int]
    group: comm.Group | None

    def transform(self) -> Transform:
        """The phases that it wraps."""
        where = "world" if self.group is None else f"{self.group.name!r} of {self.group.size}"
        name = f"tensor_parallel({dict(self.dims)}, {where})"
        return wrap(name, init=self.init, params=self.params, norm=self.norm, finite=self.finite)

    def ranks(self) -> comm.Group:
        """The group; the default is wherever the program runs."""
        return self.group or comm.world()

    def init(self, inner: Any, step: Step, params: Any) -> State:
        """The inner state of slices."""
        group = self.ranks()
        found = _matched(params, self.dims, group)
        leaves = [self._slice(leaf, found[path], group) if path in found else leaf for path, leaf in tree.named(params)]
        return inner(step, tree.unflatten(tree.structure(params), leaves))  # type: ignore[no-any-return]

    def _slice(self, leaf: Tensor, dim: int, group: comm.Group) -> Tensor:
        dim %= leaf.dim()
        piece = sliced(leaf, LeafSlice.even(dim, leaf.shape[dim], group.size, group.rank))
        return mark_part(piece, ", ".join(filter(None, (part_of(leaf), _SLICED))))

    def params(self, inner: Any, step: Step, state: State) -> Any:
        """The user's tree, slices put together."""
        group, found = self.ranks(), inner(step, state)

        def whole(path: str, leaf: Tensor) -> Tensor:
            dim = _dim(path, self.dims)
            if dim is None:
                return leaf
            cuts = tuple(cut for cut in slices_of(leaf) if cut.dim != dim % leaf.dim())
            return mark_slices(like_marked(comm.all_gather(leaf.detach(), group, dim=dim % leaf.dim()), leaf), cuts)

        return tree.unflatten(tree.structure(found), [whole(path, leaf) for path, leaf in tree.named(found)])

    def norm(self, inner: Any, step: Step, state: State, grads: list[Tensor]) -> Tensor:
        """‖g‖² = AR ‖g of slices‖² + ‖g of the rest‖²."""
        parts = step.leaf_map(state)
        sliced = inner(step, state, _only(grads, parts, self.dims, slices=True))
        rest = inner(step, state, _only(grads, parts, self.dims, slices=False))
        return (comm.all_reduce(sliced**2, self.ranks()) + rest**2).sqrt()  # type: ignore[no-any-return]

    def finite(self, inner: Any, step: Step, state: State, grads: list[Tensor]) -> Tensor:
        """Finite in every slice."""
        return comm.all_reduce(inner(step, state, grads), self.ranks(), op="min")  # type: ignore[no-any-return]


def _dim(path: str, dims: Mapping[str, int]) -> int | None:
    return next((dim for pattern, dim in dims.items() if re.search(pattern, path)), None)


def _matched(params: Any, dims: Mapping[str, int], group: comm.Group) -> dict[str, int]:
    """The dim of every leaf that is cut."""
    leaves = dict(tree.named(params))
    found: dict[str, int] = {}
    for pattern, dim in dims.items():
        hits = [path for path in leaves if re.search(pattern, path)]
        if not hits:
            near = difflib.get_close_matches(pattern, leaves, 1, 0.0)
            raise ValueError(f"dims: {pattern!r} matches no path; the nearest is {near[0] if near else 'none'!r}")
        for path in hits:
            if path in found:
                raise ValueError(f"dims: {path!r} matches {pattern!r} and another expression; let one match")
            shape = list(leaves[path].shape)
            if not -len(shape) <= dim < len(shape) or shape[dim] % group.size:
                raise ValueError(f"dims: {path!r} of shape {shape} does not divide along dim {dim} by the {group.size} ranks")
            found[path] = dim
    return found


def _only(grads: Sequence[Tensor], parts: LeafMap, dims: Mapping[str, int], *, slices: bool) -> list[Tensor]:
    """The gradients with those of other leaves emptied; a tensor's leaves are all slices, or none is."""
    cut = {p.tensor for pieces in parts.shards_by_rank for p in pieces if _dim(parts.leaves[p.leaf].path, dims) is not None}
    return [grad if (place in cut) == slices else grad.new_empty(0) for place, grad in enumerate(grads)]
