"""Plans an offloaded state from shapes, and makes the first state piece by piece."""

from typing import Any

import attrs
import torch
from torch import Tensor

from functional_ds.base import tree
from functional_ds.base.marks import ORIGIN, is_trainable, like_marked
from functional_ds.sharding.leaf_map import LeafMap
from functional_ds.sharding.sources import is_deferred, values_of
from functional_ds.step.state.state import State
from functional_ds.step.step import Step

from .handles import OnPaper, Version
from .leaf_states import assembled, beside_params, content, flat, joined, list_lengths, shared
from .plan import LeafPiece, OffloadedLeaf, OffloadPlan, Place, StateTensor, chunk_of, cut, tensor_specs
from .storage import GRAD_BYTES, PARAM, OffloadSlot, Storage


@attrs.frozen
class Options:
    """The user's options: places, the fraction to offload, bytes of a buffer."""

    optimizer: Place
    params: Place
    ratio: float
    buffer_bytes: int


# -- the plan ------------------------------------------------------------------------------------------------------------


def plan_of(inner: Any, step: Step, params: Any, options: Options) -> OffloadPlan:
    """Runs the inner init on shapes, for the whole tree and for each leaf alone.

    Raises:
        ValueError: the state cannot be split by leaves.
    """
    parts, asked = step.leaf_map(State.fresh(params, (), 0)), []  # an optimizer that asks for the leaf map gets whole leaves

    def alone(leaf: Tensor, trained: int | None) -> State:
        def leaf_map(*_: Any) -> LeafMap:
            asked.append(trained)
            return cut(parts, trained, 0, leaf.numel())

        state: State = inner(step.wrapped("piece", leaf_map=leaf_map), [leaf])
        return state

    leaves, spec = tree.flatten(params)
    shapes, trained = [_meta(leaf) for leaf in leaves], _trained(leaves)
    try:
        whole = inner(step, tree.unflatten(spec, shapes))
        states = list(map(alone, shapes, trained))
    except (NotImplementedError, RuntimeError) as error:
        raise ValueError(f"offload: the state of {step} cannot be planned from shapes alone: {error}") from error
    slots = tuple(sorted(whole.slots))
    rests = [beside_params(state, slots) for state in states]
    _check(beside_params(whole, slots), rests)
    resident = attrs.evolve(options, optimizer="device")
    offloaded = [options if moves else resident for moves in _offloaded(trained, parts, options.ratio)]
    rows = zip(tree.named(params), states, trained, offloaded, strict=True)
    units = (
        _unit(i, path, leaf, s, which, leaf_options, bool(asked))
        for i, ((path, leaf), s, which, leaf_options) in enumerate(rows)
    )
    return OffloadPlan(tuple(units), parts, slots, tuple(map(list_lengths, rests)))


def _unit(
    index: int, path: str, leaf: Tensor, state: State, trained: int | None, options: Options, whole: bool
) -> OffloadedLeaf:
    shape, numel = tuple(leaf.shape), leaf.numel()
    tensors = tensor_specs(state, shape, param=options.params, rest=options.optimizer)
    offloaded, chunk = (options.optimizer, options.params) != ("device", "device"), max(numel, 1)
    if offloaded and not whole:
        staged = leaf.dtype.itemsize + (0 if leaf.device.type == "cpu" else GRAD_BYTES)
        chunk = chunk_of(tensors, numel, room=options.buffer_bytes, staged=staged)
    return OffloadedLeaf(index, trained, path, shape, offloaded, chunk, tensors, flat(content(state, state.slots))[1])


def _meta(leaf: Tensor) -> Tensor:
    meta = like_marked(torch.empty_like(leaf, device="meta", memory_format=torch.contiguous_format), leaf)
    meta.__dict__.pop(ORIGIN, None)  # a plan reads no values
    return meta


def _trained(leaves: list[Tensor]) -> list[int | None]:
    """Each leaf's index among the trained ones."""
    count = iter(range(len(leaves)))
    return [next(count) if is_trainable(leaf) else None for leaf in leaves]


def _offloaded(trained: list[int | None], parts: LeafMap, ratio: float) -> list[bool]:
    """The first leaves, up to this fraction of the trained elements of all ranks, and the frozen ones."""
    sizes: dict[int, int] = {}
    for piece in (piece for pieces in parts.shards_by_rank for piece in pieces):
        sizes[piece.tensor] = sizes.get(piece.tensor, 0) + piece.numel
    wanted, so_far, moved = ratio * sum(sizes.values()), 0, []
    for which in trained:
        moved.append(which is None or (so_far < wanted) or ratio == 1)
        so_far += 0 if which is None else sizes.get(which, 0)
    return moved


def _check(whole: Any, rests: list[Any]) -> None:
    """Raises an error for a state that is not composed of the states of its leaves."""
    large = [node for node in shared(whole) if isinstance(node, Tensor) and node.numel() > 1]
    try:
        same = tree.structure(joined(rests, whole)) == tree.structure(whole)
    except ValueError:
        same = False
    if large or not same:
        why = "it is not a list with an entry for each leaf"
        if large:
            why = f"a tensor of shape {list(large[0].shape)} belongs to no leaf"
        raise ValueError(
            f"offload: this optimizer, or a transform before offload, has a state that cannot be taken apart by leaves: {why}; "
            "use fds.adamw or another of the library's, or leave it where it is: optimizer=None"
        )


# -- the state -----------------------------------------------------------------------------------------------------------


def initial_state(inner: Any, step: Step, params: Any, storage: Storage) -> State:
    """The first state. Memory: what stays in memory, and at most one buffer more."""
    leaves, spec = tree.flatten(params)
    plan, contents = storage.plan, []
    first: State | None = None
    for unit, leaf in zip(plan.units, leaves, strict=True):
        unit_state = _UnitState(storage, unit)
        values = like_marked(values_of(leaf), leaf) if is_deferred(leaf) else leaf
        for piece in [LeafPiece(unit, 0, unit.numel)] if storage.on_paper else unit.pieces():
            seen = step.wrapped("piece", leaf_map=lambda *_, piece=piece: piece.leaf_map(plan.parts))
            state = inner(seen, [_values(piece, values)])
            unit_state.put(piece, tree.leaves(content(state, plan.slots)))
            first = state if first is None else first
        contents.append(tree.unflatten(unit.spec, unit_state.done()))
    first = inner(step, params) if first is None else first
    state = assembled(first, first, contents, params=spec, slots=plan.slots, device=storage.device)
    return state.put(offload=OffloadSlot(storage))


def _values(piece: LeafPiece, leaf: Tensor) -> Tensor:
    values = leaf.detach() if piece.unit.whole else leaf.detach().reshape(-1)[piece.start : piece.stop]
    return like_marked(values.cpu() if piece.unit.offloaded and not values.is_meta else values, leaf)


@attrs.define(eq=False)
class _UnitState:
    """A unit's content, collected from its pieces."""

    storage: Storage
    unit: OffloadedLeaf
    leaves: list[Any] = attrs.field(factory=list)
    versions: dict[int, Version] = attrs.field(factory=dict)

    def put(self, piece: LeafPiece, leaves: list[Any]) -> None:
        """Stores the leaves of a piece's content, and waits for the disk."""
        if not self.leaves:
            self.leaves = list(map(self._allocated, self.unit.tensors, leaves))
            written = [] if self.storage.on_paper else self.unit.on_disk()
            self.versions = {i: self.storage.version(self.unit, tensor) for i, tensor in written}
        for target, tensor, leaf in zip(self.leaves, self.unit.tensors, leaves, strict=True):
            if tensor is not None and tensor.place != "disk" and not self.unit.whole:
                piece.of(tensor, target).copy_(leaf)
        writes = []
        for i, version in self.versions.items():
            room = self.storage.buffers[0].memory[self.storage.regions[self.unit.leaf][i]]
            writes.append(version.write(leaves[i], room))
        for write in writes:
            write.result()

    def done(self) -> list[Any]:
        """The leaves of the state, with handles for offloaded ones."""
        return [
            self._handle(i, tensor, leaf) for i, (tensor, leaf) in enumerate(zip(self.unit.tensors, self.leaves, strict=True))
        ]

    def _allocated(self, tensor: StateTensor | None, leaf: Any) -> Any:
        """What stays in memory: the value of a whole unit, else empty memory for it."""
        if tensor is None or tensor.place == "disk":
            return leaf if tensor is None else None
        pinned = tensor.place == "cpu" and self.storage.cuda
        device = self.storage.device if tensor.place == "device" or self.storage.on_paper else torch.device("cpu")
        if self.unit.whole and not pinned:
            return like_marked(leaf.detach().to(device), leaf)
        room = torch.empty(tensor.shape, dtype=tensor.dtype, device=device, pin_memory=pinned)
        return like_marked(room.copy_(leaf) if self.unit.whole else room, leaf)

    def _handle(self, i: int, tensor: StateTensor | None, leaf: Any) -> Any:
        if tensor is None or tensor.place == "device" or (tensor.place == "cpu" and i != PARAM):
            return leaf
        if tensor.place == "disk" and self.storage.on_paper:
            return OnPaper(torch.Size(tensor.shape), tensor.dtype)
        handle = self.versions[i].done() if i in self.versions else self.storage.on_host(self.unit, leaf)
        if i == PARAM:
            self.storage.prefetcher.know(handle)
        return handle
