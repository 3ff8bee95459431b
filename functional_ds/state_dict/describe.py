"""A state as shards of global tensors, with names that do not depend on ranks, mesh, stage or units."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import attrs
import optree
import torch
from torch import Tensor

from functional_ds import comm
from functional_ds.base import tree
from functional_ds.base.marks import like_marked
from functional_ds.base.tree import NAMESPACE
from functional_ds.optim.matrix.per_matrix import MatrixStates
from functional_ds.optim.param_groups import GroupStates
from functional_ds.sharding.leaf_map import LeafMap
from functional_ds.sharding.leaf_region import LeafRegion
from functional_ds.step.state.slots import Apart, Role
from functional_ds.step.state.state import State

from .leaf_places import Frame, StateLayout, of_extents
from .stored_view import PieceReader, StoredView

_NUMBERS = {bool: torch.bool, int: torch.int64, float: torch.float64, complex: torch.complex128}


@attrs.frozen(eq=False)
class TensorShard:
    """This rank's shard of a global tensor: a range of its flattened elements, or of those of its slice.

    Attributes:
        name: ``role/leaf`` if the tensor belongs to a leaf of the model, else a path in the state.
        region: which of the global tensor's elements this rank's slice has; all if no dim is split.
        offset: the first element's place in the flattened slice.
        view: the elements, flat, in the state's own memory, or on disk.
        shared: whether one scalar has several names, as Adam's counts do.
        per_rank: whether ranks have different values.
    """

    name: str
    region: LeafRegion
    offset: int
    view: Any = attrs.field(repr=False)  # a Tensor, except in describe_in_place
    shared: bool = False
    per_rank: bool = False

    @staticmethod
    def whole(name: str, value: Tensor, *, per_rank: bool = False) -> "TensorShard":
        """All of a global tensor."""
        return TensorShard(name, LeafRegion(tuple(value.shape)), 0, value.detach().reshape(-1), per_rank=per_rank)

    @property
    def shape(self) -> tuple[int, ...]:
        """The global tensor's."""
        return self.region.shape


def describe(state: State) -> list[TensorShard]:
    """All shards of a state whose leaves are all tensors.

    A list whose tensors have the layouts of the stored params, or of the trained ones, holds values for the model's leaves in
    the same order, so new optimizers and transforms need no registration. A scalar in such a list belongs to each leaf at its
    place. All other tensors are one value that is equal on all ranks, named by its path.

    Names omit the numbers in a path (an optimizer's place in a chain or a param group); a second shard of a name gets ``#1``.

    >>> import functional_ds as fds
    >>> state = fds.train_step(lambda params, x: params["w"].sum(), fds.adamw(0.1)).init({"w": torch.ones(3)})
    >>> [shard.name for shard in describe(state)][:4]
    ['params/w', 'optimizer.steps/w', 'optimizer.exp_avg/w', 'optimizer.exp_avg_sq/w']
    """
    places = StateLayout.of(state)
    walk = _Walk(places)
    walk.list(("params",), tree.leaves(state.params), places.stored)
    frames = (places.stored, places.trained)
    for name in ("optimizer", "step", "key", "skip"):
        walk.visit((name,), getattr(state, name), frames, places.parts)
    walk.visit(("idle",), state.idle, (), places.parts)
    for name, slot in sorted(state.slots.items()):
        walk.slot(name, slot, frames, places.parts)
    if any(isinstance(x, Apart) for x in state.slots.values()):
        return [_of_model(state, shard) for shard in walk.shards]
    return walk.shards


def _of_model(state: State, shard: TensorShard) -> TensorShard:
    """The shard as one of this rank's model, if ranks train separate models; ``step/outer.0`` counts its updates."""
    role, _, leaf = shard.name.partition("/")
    return shard if shard.per_rank else attrs.evolve(shard, name=f"{role}/{Apart.named(state, leaf)}".removesuffix("/"))


def describe_in_place(state: State) -> list[TensorShard]:
    """All shards of a state, with offloaded tensors left on disk.

    Law: the names and values of ``describe(as_tensors(state))``; a view of an offloaded tensor is a ``StoredView``.

    Raises:
        TypeError: a leaf is neither a number, a tensor nor an offloaded tensor.
    """
    held, reader = list[tuple[torch.UntypedStorage, Any]](), PieceReader()

    def without_values(leaf: Any) -> Tensor:
        if not _is_elsewhere(leaf):
            return _as_tensor(leaf)
        empty = torch.empty(leaf.shape, dtype=leaf.dtype, device="meta")
        held.append((empty.untyped_storage(), leaf))
        return empty

    _check_leaves(state)
    shards = describe(tree.map(without_values, state))
    sources = {id(storage): leaf for storage, leaf in held}

    def with_source(shard: TensorShard) -> TensorShard:
        view = shard.view
        if not view.is_meta:
            return shard
        source, start = sources[id(view.untyped_storage())], int(view.storage_offset())
        return attrs.evolve(shard, view=StoredView(source, start, start + view.numel(), reader))

    return [with_source(shard) for shard in shards]


def as_tensors(state: State) -> State:
    """The state with its Python numbers as scalar tensors, and offloaded tensors in memory.

    Raises:
        TypeError: a leaf is neither a number, a tensor nor an offloaded tensor.
    """
    _check_leaves(state)
    return tree.map(_as_tensor, state)  # type: ignore[no-any-return]


def _check_leaves(state: State) -> None:
    for path, leaf in tree.named(state):
        if not isinstance(leaf, Tensor) and type(leaf) not in _NUMBERS and not _is_elsewhere(leaf):
            raise TypeError(
                f"state: the leaf at {path!r} is {type(leaf).__name__} {leaf!r}; only tensors and numbers are saved"
            )


def dense(state: State) -> State:
    """The state with contiguous copies of tensors that are not contiguous, so that ``describe`` gives views of all memory."""
    return tree.map(lambda x: x if x.is_contiguous() else like_marked(x.contiguous(), x), state)  # type: ignore[no-any-return]


def as_before(leaf: Any, value: Tensor) -> Any:
    """A tensor in the form of ``leaf``: a tensor, a number, or values on the same disk."""
    if isinstance(leaf, Tensor):
        return value
    return leaf.written([value.reshape(-1)]) if _is_elsewhere(leaf) else type(leaf)(value.item())


def _as_tensor(leaf: Any) -> Tensor:
    if isinstance(leaf, Tensor):
        return leaf
    if _is_elsewhere(leaf):
        values: Tensor = leaf.read()
        return values.view(leaf.shape)
    return torch.tensor(leaf, dtype=_NUMBERS[type(leaf)])


def _is_elsewhere(leaf: Any) -> bool:
    """Whether it is the handle of an offloaded tensor, which reads and writes its file."""
    return callable(getattr(leaf, "read", None)) and callable(getattr(leaf, "written", None))


@attrs.define(eq=False)
class _Walk:
    places: StateLayout
    shards: list[TensorShard] = attrs.field(factory=list)
    seen: Counter[str] = attrs.field(factory=Counter)

    def visit(self, path: tuple[str, ...], node: Any, frames: Sequence[Frame], parts: LeafMap) -> None:
        """Describes a node of the state and all below it."""
        if isinstance(node, Tensor):
            self.shards.append(TensorShard.whole(".".join(path), node))
        elif isinstance(node, comm.codecs.Residual):
            self.residual(path, node)
        elif isinstance(node, GroupStates):
            self.groups(path, node, parts)
        elif isinstance(node, MatrixStates):
            self.matrices(path, node)
        elif (known := self.match(node, frames)) is not None:
            self.list(path, *known)
        else:
            children, _, entries, _ = optree.tree_flatten_one_level(node, namespace=NAMESPACE)
            for entry, child in zip(entries, children, strict=True):
                self.visit((*path, *filter(None, [str(entry)])), child, frames, parts)

    def slot(self, name: str, slot: Any, frames: Sequence[Frame], parts: LeafMap) -> None:
        """A transform's slot: fields with a role are named by it, for any transform."""
        fields = getattr(slot, "roles", {})
        apart = getattr(slot, "per_rank", ())
        for field, role in fields.items():
            path = (role.value, name, field) if role is Role.SETTING else (role.value,)
            before = len(self.shards)
            apart_from_params = role in (Role.BUFFER, Role.ATTRIBUTE)  # a module's list may look like the params by chance
            self.visit(path, getattr(slot, field), () if apart_from_params else frames, parts)
            if field in apart:
                self.shards[before:] = [attrs.evolve(shard, per_rank=True) for shard in self.shards[before:]]
        rest = ("slots", name)
        if not fields:
            self.visit(rest, slot, frames, parts)
            return
        for field in attrs.fields(type(slot)):
            if field.name not in fields and field.metadata.get("pytree_node", True):
                self.visit((*rest, field.name), getattr(slot, field.name), frames, parts)

    def match(self, node: Any, frames: Sequence[Frame]) -> tuple[list[Any], Frame] | None:
        """The node's children, with the frame that they match."""
        if not frames:
            return None
        if type(node) in (list, tuple):
            frame = next((frame for frame in frames if frame.fits(node)), None)
            return None if frame is None else (list(node), frame)
        if node is None or tree.structure(node) != self.places.spec or frames[0] is not self.places.stored:
            return None
        children = tree.leaves(node)
        return (children, frames[0]) if frames[0].fits(children) else None

    def list(self, path: tuple[str, ...], children: Sequence[Any], frame: Frame) -> None:
        """Describes a list whose tensors hold leaves."""
        role = ".".join(part for part in path if not part.isdecimal())
        for child, place in zip(children, frame.places, strict=True):
            if child is None:
                continue
            names = {leaf: self.unique(role, frame.leaves[leaf][0]) for leaf in place.members}
            held_as = place.form_of(child)
            if held_as is None:
                count = child.detach().view(1)
                self.shards += [TensorShard(names[leaf], LeafRegion(()), 0, count, shared=True) for leaf in place.members]
                continue
            form, lanes = held_as
            flat = child.detach().reshape(-1)
            for cut in form.cuts:
                region = frame.leaves[cut.leaf][1]
                view = flat[cut.start * lanes : (cut.start + cut.numel) * lanes]
                region = region.with_pairs() if lanes == 2 else region
                self.shards.append(TensorShard(names[cut.leaf], region, cut.offset * lanes, view))

    def unique(self, role: str, leaf: str) -> str:
        """A name that this rank has not used yet, the same on all ranks that have the leaf."""
        name = f"{role}/{leaf}"
        self.seen[name] += 1
        again = self.seen[name] - 1
        return f"{role}#{again}/{leaf}" if again else name

    def groups(self, path: tuple[str, ...], node: GroupStates, parts: LeafMap) -> None:
        """Describes the states of param groups, whose tensors are extents of the stored ones."""
        number = {leaf.path: index for index, leaf in enumerate(parts.leaves)}
        for rule, leaves, state in zip(node.rules, node.leaves, node.states, strict=True):
            extents, inner = parts.select(number[leaf] for leaf in leaves)
            self.visit((*path, str(rule)), state, (of_extents(inner, extents),), inner)

    def matrices(self, path: tuple[str, ...], node: MatrixStates) -> None:
        """The states of whole matrices, each on the ranks that own the matrix; tensors of any shapes."""
        self.visit((*path, "count"), node.count, (), self.places.parts)
        for leaf, state in node.whole.items():
            for inside, value in tree.named(state):
                role = ".".join(part for part in (*path, *inside.split(".")) if part and not part.isdecimal())
                self.shards.append(TensorShard.whole(self.unique(role, leaf), value))

    def residual(self, path: tuple[str, ...], node: comm.codecs.Residual) -> None:
        """Describes error feedback, which differs between ranks."""
        for where, leaf in tree.named(node):
            self.shards.append(TensorShard.whole(f"{'.'.join(path)}.{where}", leaf, per_rank=True))
