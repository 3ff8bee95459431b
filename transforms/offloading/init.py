"""The plan of an offloaded state, from shapes alone, and the state itself, piece by piece."""

from typing import Any

import attrs
import torch
from torch import Tensor

from functional_ds.base import tree
from functional_ds.base.marks import ORIGIN, is_trainable, like_marked
from functional_ds.sharding.leaf_map import LeafMap
from functional_ds.sharding.sources import is_deferred, values_of
from functional_ds.step.state import State
from functional_ds.step.step import Step

from .handles import OnPaper
from .plan import Kind, Place, Plan, Unit, bare, chunk_of, content, cut, flat, joined, kinds_of, lengths, rest_of, shared
from .storage import Home, Offloaded, Version

__all__ = ["Options", "initial", "planned"]


@attrs.frozen
class Options:
    """What the user asked for."""

    optimizer: Place
    params: Place
    ratio: float
    room: int


@attrs.define
class _Asking:
    """A step that says what lies where in one stretch, and remembers whether anybody asked."""

    parts: LeafMap
    asked: bool = False

    def at(self, step: Step, tensor: int | None, start: int, stop: int) -> Step:
        def parts(*_: Any) -> LeafMap:
            self.asked = True
            return cut(self.parts, tensor, start, stop)

        return step.wrapped("piece", leaf_map=parts)


def planned(inner: Any, step: Step, params: Any, options: Options) -> Plan:
    """Runs the inner init on shapes, leaf by leaf.

    Raises:
        ValueError: what is to be offloaded cannot be taken apart by leaves.
    """
    asking = _Asking(step.leaf_map(State.fresh(params, (), 0)))
    leaves, spec = tree.flatten(params)
    shapes = [_meta(leaf) for leaf in leaves]
    try:
        whole = inner(step, tree.unflatten(spec, shapes))
        trained = _trained(leaves)
        alone = [inner(asking.at(step, which, 0, leaf.numel()), [leaf]) for leaf, which in zip(shapes, trained, strict=True)]
    except (NotImplementedError, RuntimeError) as error:
        raise ValueError(f"offload: the state of {step} cannot be planned from shapes alone: {error}") from error
    slots = tuple(sorted(whole.slots))
    rests = [rest_of(state, slots) for state in alone]
    _check(whole, rests, slots)
    away = _away(trained, asking.parts, options.ratio)
    named = zip(tree.named(params), alone, trained, away, strict=True)
    units = tuple(
        _unit(i, path, leaf, state, which, options if moves else attrs.evolve(options, optimizer="here"), asking.asked)
        for i, ((path, leaf), state, which, moves) in enumerate(named)
    )
    return Plan(units, asking.parts, slots, tuple(map(lengths, rests)))


def _unit(index: int, path: str, leaf: Tensor, state: State, trained: int | None, options: Options, whole: bool) -> Unit:
    kinds = kinds_of(state, tuple(leaf.shape), param=options.params, rest=options.optimizer)
    away, spec = (options.optimizer, options.params) != ("here", "here"), flat(content(state, state.slots))[1]
    unit = Unit(index, trained, path, tuple(leaf.shape), away, max(leaf.numel(), 1), kinds, spec)
    staged = leaf.dtype.itemsize if leaf.device.type == "cpu" else 16 + leaf.dtype.itemsize
    chunk = chunk_of(kinds, leaf.numel(), room=options.room, staged=staged)
    return unit if whole or not away else attrs.evolve(unit, chunk=chunk)


def _meta(leaf: Tensor) -> Tensor:
    found = like_marked(torch.empty_like(leaf, device="meta", memory_format=torch.contiguous_format), leaf)
    found.__dict__.pop(ORIGIN, None)  # a plan reads no values
    return found


def _trained(leaves: list[Tensor]) -> list[int | None]:
    """Which of the trained ones each leaf is."""
    count = iter(range(len(leaves)))
    return [next(count) if is_trainable(leaf) else None for leaf in leaves]


def _away(trained: list[int | None], parts: LeafMap, ratio: float) -> list[bool]:
    """The first leaves, until they are this part of what is trained, on all ranks alike; frozen ones, too."""
    sizes: dict[int, int] = {}
    for piece in (piece for pieces in parts.shards_by_rank for piece in pieces):
        sizes[piece.tensor] = sizes.get(piece.tensor, 0) + piece.numel
    wanted, so_far, found = ratio * sum(sizes.values()), 0, []
    for which in trained:
        found.append(which is None or (so_far < wanted) or ratio == 1)
        so_far += 0 if which is None else sizes.get(which, 0)
    return found


def _check(whole: State, rests: list[Any], slots: tuple[str, ...]) -> None:
    rest = rest_of(whole, slots)
    large = [node for node in shared(rest) if isinstance(node, Tensor) and node.numel() > 1]
    try:
        same = tree.structure(joined(rests, rest)) == tree.structure(rest)
    except ValueError:
        same = False
    if large or not same:
        why = f"a tensor of shape {list(large[0].shape)} belongs to no leaf" if large else "it is no lists with a place a leaf"
        raise ValueError(
            f"offload: this optimizer, or a transform before offload, has a state that cannot be taken apart by leaves: {why}; "
            "use fds.adamw or another of the library's, or leave it where it is: optimizer=None"
        )


# -- the state ---------------------------------------------------------------------------------------------------------


def initial(inner: Any, step: Step, params: Any, home: Home) -> State:
    """The state of params, of which no more than a buffer's worth lies in memory beside what stays there."""
    leaves, spec = tree.flatten(params)
    asking, plan = _Asking(home.plan.parts), home.plan
    first: State | None = None
    contents = []
    for unit, leaf in zip(plan.units, leaves, strict=True):
        making = _Making(home, unit)
        values = like_marked(values_of(leaf), leaf) if is_deferred(leaf) else leaf
        for start, stop in [(0, unit.numel)] if home.on_paper else unit.spans():
            state = inner(asking.at(step, unit.trained, start, stop), [_piece(unit, values, start, stop)])
            making.add(tree.leaves(content(state, plan.slots)), start, stop)
            first = state if first is None else first
        contents.append(tree.unflatten(unit.spec, making.done()))
    first = inner(step, params) if first is None else first
    common = tree.map(lambda leaf: leaf.to(home.device) if isinstance(leaf, Tensor) else leaf, bare(rest_of(first, plan.slots)))
    rest = joined([found["rest"] for found in contents], common)
    state = tree.replace(
        first,
        params=tree.unflatten(spec, [found["params"][0] for found in contents]),
        optimizer=rest["optimizer"],
        step=first.step.to(home.device),
        slots=rest["slots"],
    )
    return state.put(offload=Offloaded(home))


def _piece(unit: Unit, leaf: Tensor, start: int, stop: int) -> Tensor:
    own = leaf.detach() if unit.whole else leaf.detach().reshape(-1)[start:stop]
    return like_marked(own.cpu() if unit.away and not own.is_meta else own, leaf)


@attrs.define(eq=False)
class _Making:
    """A unit's content, from the states of its pieces."""

    home: Home
    unit: Unit
    found: list[Any] = attrs.field(factory=list)
    versions: dict[int, Version] = attrs.field(factory=dict)

    def add(self, leaves: list[Any], start: int, stop: int) -> None:
        """The leaves of a piece's content."""
        if not self.found:
            self.found = [self._room(kind, leaf) for kind, leaf in zip(self.unit.kinds, leaves, strict=True)]
            written = [] if self.home.on_paper else self.unit.on_disk()
            self.versions = {i: self.home.version(self.unit, kind) for i, kind in written}
        for i, (kind, leaf) in enumerate(zip(self.unit.kinds, leaves, strict=True)):
            if kind is not None and kind.place != "disk" and not self.unit.whole:
                low, high = self.unit.span(kind, start, stop)
                self.found[i].view(-1)[low:high] = leaf.reshape(-1)
        regions = self.home.regions(self.unit)
        for i, version in self.versions.items():
            version.write(leaves[i], self.home.lanes[0].room[slice(*regions[i])])
        for version in self.versions.values():
            version.begun[-1].result()

    def done(self) -> list[Any]:
        """What stands for it in the state."""
        return [self._stands(i, kind, leaf) for i, (kind, leaf) in enumerate(zip(self.unit.kinds, self.found, strict=True))]

    def _room(self, kind: Kind | None, leaf: Any) -> Any:
        if kind is None or kind.place == "disk":
            return leaf if kind is None else None
        pinned = kind.place == "cpu" and self.home.cuda
        device = self.home.device if kind.place == "here" or self.home.on_paper else torch.device("cpu")
        if self.unit.whole and not pinned:
            return like_marked(leaf.detach().to(device), leaf)
        room = torch.empty(kind.shape, dtype=kind.dtype, device=device, pin_memory=pinned)
        if self.unit.whole:
            room.copy_(leaf)
        return like_marked(room, leaf)

    def _stands(self, i: int, kind: Kind | None, leaf: Any) -> Any:
        if kind is None or kind.place == "here" or (kind.place == "cpu" and i):
            return leaf
        if kind.place == "disk" and self.home.on_paper:
            return OnPaper(torch.Size(kind.shape), kind.dtype)
        handle = self.versions[i].done() if i in self.versions else self.home.on_host(self.unit, leaf)
        if i == 0:
            handle.reader.know(handle)
        return handle
