"""Maps leaves to the tensors that an optimizer gets, and sums over the elements of each leaf.

Under ZeRO an optimizer gets flat tensors, or shards of them, that contain many leaves. Elementwise optimizers do not depend on
that. Optimizers that use whole leaves, or treat leaves differently, get a ``LeafMap`` (``fds.PerParameter``).
"""

import functools
import re
import reprlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import attrs
import torch
from torch import Tensor

from functional_ds import comm
from functional_ds.base import tree
from functional_ds.base.marks import is_trainable, slices_of
from functional_ds.base.torch_private import is_fake, is_transformed

from .layout import Layout
from .leaf_region import LeafRegion
from .leaf_slice import LeafSlice
from .path_patterns import check_expression, nearest
from .segment import Blocks

_SHOWN_RANKS = 32


@attrs.frozen
class LeafSpec:
    """A trained leaf of the user's tree.

    Attributes:
        path: its path.
        shape: the shape of this rank's slice, or of the whole leaf.
        numel: the number of elements of that shape.
        dtype: the dtype that the user gave it.
        slices: this rank's slice of the whole leaf, one for each dim that tensor or expert parallelism has split.
        sharers: for shards: the blocks of ranks that share a slice, as in ``Segment.sharers``; None if all ranks do.
        stack: for a matrix of a stack: the path of the leaf.
    """

    path: str
    shape: tuple[int, ...]
    numel: int
    dtype: torch.dtype
    slices: tuple[LeafSlice, ...] = ()
    sharers: Blocks | None = None
    stack: str | None = None

    @property
    def region(self) -> LeafRegion:
        """The region of the whole leaf that this rank has."""
        return LeafRegion.of(self.shape, self.slices)


@attrs.frozen
class LeafShard:
    """A contiguous part of a leaf on one rank.

    Attributes:
        leaf: the index of the leaf.
        offset: its first element in the flattened leaf.
        tensor: the index of the tensor that contains it.
        start: its first element in that flattened tensor.
        numel: its number of elements.
    """

    leaf: int
    offset: int
    tensor: int
    start: int
    numel: int


@attrs.frozen
class TensorRange:
    """Elements ``start`` to ``stop`` of a flattened tensor."""

    tensor: int
    start: int
    stop: int

    def view(self, tensors: Sequence[Tensor]) -> Tensor:
        """The elements as a flat view."""
        return tensors[self.tensor].view(-1)[self.start : self.stop]


@attrs.frozen
class LeafMap:
    """All trained leaves, and all ranks' shards of them.

    Attributes:
        leaves: in the order of the user's tree, with every strategy and on all ranks.
        shards_by_rank: each rank's shards; those in one tensor are in ascending order.
        group: the ranks over which leaves are sharded; None if this rank has all leaves whole.
        rank: this rank's index in the group.
        reduce_group: the ranks over which the optimizer must sum the gradients; None if they are already summed.
        other_paths: paths of trained leaves that this optimizer does not get, of other param groups and pipeline stages.
        flat: whether the tensors are flat, instead of having the leaves' shapes.
        partial: whether the optimizer is called several times per update, each time with some of the tensors or parts of them.
    """

    leaves: tuple[LeafSpec, ...]
    shards_by_rank: tuple[tuple[LeafShard, ...], ...]
    group: comm.Group | None = None
    rank: int = 0
    reduce_group: comm.Group | None = None
    other_paths: tuple[str, ...] = ()
    flat: bool = False
    partial: bool = False

    def __repr__(self) -> str:
        where = f"rank {self.rank} of {len(self.shards_by_rank)}"
        return f"LeafMap({len(self.leaves)} leaves, {len(self.shards)} shards on {where})"

    def _repr_html_(self) -> str:
        from functional_ds.comm.debug.page import Chart
        from functional_ds.comm.debug.trace import Slice

        lanes: dict[str, list[Slice]] = {}
        for rank, shards in enumerate(self.shards_by_rank[:_SHOWN_RANKS]):
            for shard in shards:
                path, end = self.leaves[shard.leaf].path, shard.start + shard.numel
                slices = lanes.setdefault(f"rank {rank}, tensor {shard.tensor}", [])
                slices.append(Slice("", path, shard.start, end, {"from element": shard.offset}))
        return Chart(repr(self), lanes, unit="elements")._repr_html_()

    @property
    def shards(self) -> tuple[LeafShard, ...]:
        """This rank's shards."""
        return self.shards_by_rank[self.rank]

    @staticmethod
    def of(params: Any) -> "LeafMap":
        """The leaf map of a pytree of whole leaves.

        >>> LeafMap.of({"w": torch.ones(2, 3)}).shards
        (LeafShard(leaf=0, offset=0, tensor=0, start=0, numel=6),)
        """
        trained = [(path, leaf) for path, leaf in tree.named(params) if is_trainable(leaf)]
        leaves = tuple(LeafSpec(path, tuple(leaf.shape), leaf.numel(), leaf.dtype, slices_of(leaf)) for path, leaf in trained)
        return LeafMap(leaves, (tuple(LeafShard(i, 0, i, 0, leaf.numel) for i, leaf in enumerate(leaves)),))

    @staticmethod
    def of_layout(layout: Layout, group: comm.Group | None) -> "LeafMap":
        """The leaf map of a layout's flat tensors or, with a group, of each rank's shards of them.

        >>> layout = Layout.of({"a": torch.ones(5), "b": torch.ones(2)}, 2)
        >>> LeafMap.of_layout(layout, None).shards
        (LeafShard(leaf=0, offset=0, tensor=0, start=0, numel=5), LeafShard(leaf=1, offset=0, tensor=0, start=8, numel=2))
        """
        segments = [segment for segment in layout.segments if segment.trainable]
        slots = [(tensor, slot) for tensor, segment in enumerate(segments) for slot in segment.slots]
        shared = [None if group is None else segment.sharers for segment in segments]
        leaves = tuple(
            LeafSpec(layout.paths[slot.leaf], slot.shape, slot.numel, segments[t].dtype, slot.slices, shared[t])
            for t, slot in slots
        )
        if group is None:
            shards = tuple(LeafShard(i, 0, t, slot.offset, slot.numel) for i, (t, slot) in enumerate(slots))
            return LeafMap(leaves, (shards,), flat=True).ordered(layout.paths)
        ranks: list[list[LeafShard]] = [[] for _ in range(layout.n)]
        for leaf, (tensor, slot) in enumerate(slots):
            segment, end = segments[tensor], slot.offset + slot.numel
            size = max(segment.shard, 1)
            reached = range(slot.offset // size, -(-end // size)) if segment.owner is None else (segment.owner,)
            for place in reached:
                start, stop = segment.bounds(place)
                low, high = max(slot.offset, start), min(end, stop)
                if high > low:
                    part = LeafShard(leaf, low - slot.offset, tensor, low - start, high - low)
                    for rank in segment.holders(place):
                        ranks[rank].append(part)
        return LeafMap(leaves, tuple(map(tuple, ranks)), group, group.rank, flat=True).ordered(layout.paths)

    def ordered(self, paths: Sequence[str]) -> "LeafMap":
        """The leaf map with its leaves in the order of these paths, which may include others; tensors are unchanged.

        >>> found = LeafMap.of({"a": torch.ones(2), "b": torch.ones(3)}).ordered(["b", "a"])
        >>> [leaf.path for leaf in found.leaves], [(shard.leaf, shard.tensor) for shard in found.shards]
        (['b', 'a'], [(1, 0), (0, 1)])
        """
        place = {path: index for index, path in enumerate(paths)}
        order = sorted(range(len(self.leaves)), key=lambda leaf: place[self.leaves[leaf].path])
        if order == [*range(len(order))]:
            return self
        number = {leaf: index for index, leaf in enumerate(order)}
        ranks = (
            tuple(LeafShard(number[s.leaf], s.offset, s.tensor, s.start, s.numel) for s in shards)
            for shards in self.shards_by_rank
        )
        return attrs.evolve(self, leaves=tuple(self.leaves[leaf] for leaf in order), shards_by_rank=tuple(ranks))

    def without_padding(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """The tensors without the padding of flat tensors; copied only if there is padding between leaves."""
        if not self.flat:
            return list(tensors)
        runs: list[list[list[int]]] = [[] for _ in tensors]
        for shard in self.shards:
            ranges, stop = runs[shard.tensor], shard.start + shard.numel
            if ranges and ranges[-1][1] == shard.start:
                ranges[-1][1] = stop
            else:
                ranges.append([shard.start, stop])
        parts = [[x.reshape(-1)[start:stop] for start, stop in ranges] for x, ranges in zip(tensors, runs, strict=True)]
        return [
            torch.cat(pieces) if len(pieces) > 1 else pieces[0] if pieces else x.new_empty(0)
            for x, pieces in zip(tensors, parts, strict=True)
        ]

    def placed(self, whole: Any, like: Sequence[Tensor]) -> list[Tensor]:
        """Copies whole leaves to new tensors in the optimizer's layout, with zeros in the padding.

        Args:
            whole: a tree with the leaves' paths, or a dict from paths to tensors.
            like: the trained tensors, which give shapes and dtypes.

        Raises:
            ValueError: a leaf is missing, or has another number of elements.

        >>> LeafMap.of({"w": torch.ones(2)}).placed({"w": torch.tensor([1.0, 2.0])}, [torch.ones(2)])
        [tensor([1., 2.])]
        """
        given, tensors = dict(tree.named(whole)), [torch.zeros_like(x, memory_format=torch.contiguous_format) for x in like]
        self.refuse_slices("placed", instead="give each rank its own slice")
        for leaf in self.leaves:
            if leaf.path not in given or given[leaf.path].numel() != leaf.numel:
                has = list(given[leaf.path].shape) if leaf.path in given else "nothing"
                raise ValueError(f"placed: {leaf.path!r} has shape {list(leaf.shape)}, and the tree has {has} there")
        for part, room in zip(self.shards, self.views(tensors), strict=True):
            room.copy_(given[self.leaves[part.leaf].path].detach().reshape(-1)[part.offset : part.offset + part.numel])
        return tensors

    def sums(self, function: Callable[..., Tensor], *lists: Sequence[Tensor]) -> Tensor:
        """Sums over the elements of each leaf, such as squared norms: a row for each leaf, on all ranks.

        Law: if ``function`` is additive, f(x and y) = f(x) + f(y), the row is f of the whole leaf, in every ZeRO stage.

        Args:
            function: from flat tensors, a part of a leaf from each list in at least fp32, to a scalar or to a tensor of several
                sums. It is also called on empty tensors, whose sums are zero.
            lists: tensors like those that the optimizer gets.

        Cost: one all-reduce of all rows if leaves are sharded; else nothing is sent.

        Raises:
            TypeError: ``function`` returns no sum: no tensor, one of booleans, or of a shape that depends on the part.
            ValueError: its sum of no elements is not zero, as of a mean.

        >>> LeafMap.of({"a": torch.ones(3), "b": torch.ones(2)}).sums(torch.sum, [torch.ones(3), 2 * torch.ones(2)])
        tensor([3., 4.])
        """
        device = lists[0][0].device if lists[0] else None if self.group is None else self.group.world.device
        wide = functools.reduce(torch.promote_types, (leaf.dtype for leaf in self.leaves), torch.float32)
        name = getattr(function, "__name__", repr(function))
        zero = function(*(torch.empty(0, dtype=wide, device=device) for _ in lists))
        found: list[Tensor] = []
        for part in self.shards:
            pieces = (tensors[part.tensor].reshape(-1)[part.start : part.start + part.numel] for tensors in lists)
            path, shape = self.leaves[part.leaf].path, getattr(zero, "shape", None)
            found.append(checked_sum(function(*map(at_least_fp32, pieces)), name, path, shape))
        if checked_sum(zero, name, "an empty part").dtype is torch.bool:
            raise TypeError(f"{name}: it gives booleans, and not a sum over the elements, such as (x > 0).sum()")
        rows = [zero for _ in self.leaves]
        for part, value in zip(self.shards, found, strict=True):
            rows[part.leaf] = rows[part.leaf] + value.to(zero.dtype)
        if zero.device.type == "cpu" and not is_fake(zero) and not is_transformed(zero) and bool(zero.count_nonzero()):
            raise ValueError(f"{name}: of an empty part it gives {zero.tolist()}, and a sum of no elements is 0")
        return self.total(torch.stack(rows) if rows else zero.new_zeros(0, *zero.shape))

    def total(self, rows: Tensor) -> Tensor:
        """Reduces sums over this rank's parts, a row per leaf, to sums over whole leaves; collective if leaves are sharded."""
        totals: Tensor = rows if self.group is None else comm.all_reduce(rows, self.group)
        return totals

    def refuse_slices(
        self,
        what: str,
        *,
        instead: str = "give such leaves to an elementwise optimizer such as fds.adamw with fds.param_groups",
    ) -> None:
        """Checks that no leaf is a slice, since ``what`` needs whole leaves.

        Raises:
            ValueError: a leaf is a slice.
        """
        for leaf in self.leaves:
            if leaf.region.ranges:
                cuts = [(cut.dim, cut.size, len(cut.ranges_by_rank)) for cut in leaf.slices]
                over = " and ".join(f"dim {dim} of {size} over {n} ranks" for dim, size, n in cuts)
                raise ValueError(
                    f"{what}: {leaf.path!r} is the slice {leaf.region} of a leaf of shape {list(leaf.region.shape)}, cut along "
                    f"{over}, but {what} looks at whole leaves; {instead}"
                )

    def views(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """This rank's shards, as flat views of its tensors."""
        return [tensors[s.tensor].view(-1)[s.start : s.start + s.numel] for s in self.shards]

    def select(self, leaves: Iterable[int]) -> tuple[tuple[TensorRange, ...], "LeafMap"]:
        """The ranges of this rank's tensors that contain the given leaves, and the leaf map of these ranges.

        Adjacent selected leaves, and the padding between them, form one range.
        """
        chosen = sorted(set(leaves))
        number = {leaf: i for i, leaf in enumerate(chosen)}
        extents = [_extents(shards, number) for shards in self.shards_by_rank]
        others = tuple(leaf.path for i, leaf in enumerate(self.leaves) if i not in number)
        selected = attrs.evolve(
            self,
            leaves=tuple(self.leaves[i] for i in chosen),
            shards_by_rank=tuple(shards for _, shards in extents),
            other_paths=self.other_paths + others,
            flat=True,
        )
        return extents[self.rank][0], selected


def at_least_fp32(x: Tensor) -> Tensor:
    """Casts half precision to fp32; other tensors are unchanged."""
    return x.float() if x.is_floating_point() and x.element_size() < 4 else x


def _extents(shards: Sequence[LeafShard], number: dict[int, int]) -> tuple[tuple[TensorRange, ...], tuple[LeafShard, ...]]:
    """The ranges that contain the numbered leaves, and these leaves' shards in them."""
    extents: list[TensorRange] = []
    inside: list[LeafShard] = []
    before: LeafShard | None = None
    for shard in shards:
        if shard.leaf in number:
            stop = shard.start + shard.numel
            if before is not None and before.leaf in number and before.tensor == shard.tensor:
                extents[-1] = attrs.evolve(extents[-1], stop=stop)
            else:
                extents.append(TensorRange(shard.tensor, shard.start, stop))
            start = shard.start - extents[-1].start
            inside.append(LeafShard(number[shard.leaf], shard.offset, len(extents) - 1, start, shard.numel))
        before = shard
    return tuple(extents), tuple(inside)


def match_leaves(leaf_map: LeafMap, where: str | Callable[[str], bool], what: str) -> set[int]:
    """The leaves whose path matches a regular expression, or satisfies a function.

    Args:
        leaf_map: the leaves.
        where: the regular expression, which is searched in the paths, or the function.
        what: the name of the argument, for errors.

    Raises:
        ValueError: the expression is invalid, or matches no path; names the nearest path.
    """
    if callable(where):
        return {i for i, leaf in enumerate(leaf_map.leaves) if where(leaf.path)}
    check_expression(f"{what}=", where)
    pattern = re.compile(where)
    hits = {i for i, leaf in enumerate(leaf_map.leaves) if pattern.search(leaf.path)}
    paths = [*(leaf.path for leaf in leaf_map.leaves), *leaf_map.other_paths]
    if not any(map(pattern.search, paths)):
        raise ValueError(f"{what}={where!r} matches no trained leaf; {nearest(where, paths)}")
    return hits


def checked_sum(given: Any, name: str, where: str, shape: torch.Size | None = None) -> Tensor:
    """What a function returned for a part of a leaf, if it is a tensor, of this shape.

    Raises:
        TypeError: it is none.
    """
    if isinstance(given, Tensor) and shape in (None, given.shape):
        return given
    what = f"a tensor of shape {list(given.shape)}, {given.dtype}" if isinstance(given, Tensor) else reprlib.repr(given)
    raise TypeError(f"{name}: for {where!r} it gives {what}, and not a sum over the elements, such as x.square().sum()")
