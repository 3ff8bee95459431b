"""ZeRO: states, gradients and params in shards (Rajbhandari, Rasley, Ruwase, He 2020)."""

import zlib
from collections.abc import Callable, Collection, Sequence
from typing import Any

import attrs
import torch
from torch import Tensor

from functional_ds import comm, tree
from functional_ds.layout import Layout, shard
from functional_ds.parts import Parts
from functional_ds.state import State
from functional_ds.step import Metrics, Step, Transform, wrap
from functional_ds.tape import Tape
from functional_ds.trainable import like_marked
from functional_ds.training import stored_view
from functional_ds.weighted import Weighted

from .convoy import Route
from .gathering import Gatherer
from .reducing import Order, Reducer
from .units import Resident, Units

__all__ = ["zero"]


@attrs.define(eq=False)
class _Learned:
    """What the ranks found out together about the order of things, and what is worked out once; it changes no value."""

    order: Order
    parts: Parts
    forward: Route = attrs.field(factory=Route)
    backward: Route = attrs.field(factory=Route)
    of_parts: "dict[frozenset[str], _Part]" = attrs.field(factory=dict)

    @staticmethod
    def fresh(layout: Layout, parts: Parts) -> "_Learned":
        """Before anything is learned."""
        return _Learned(Order(tuple(dict.fromkeys(s.unit for s in reversed(layout.segments) if s.trainable))), parts)

    def of_part(self, layout: Layout, paths: frozenset[str]) -> "_Part":
        """The same for some of the leaves alone, which is learned alone."""
        if paths not in self.of_parts:
            alone, segments = layout.restrict(paths)
            self.of_parts[paths] = _Part(alone, segments, _Learned.fresh(alone, Parts.of_layout(alone, None)))
        return self.of_parts[paths]

    def __eq__(self, other: object) -> bool:
        """Not what makes two states differ in structure."""
        return isinstance(other, _Learned)

    __hash__ = None  # type: ignore[assignment]


@attrs.frozen(eq=False)
class _Part:
    """Some of the leaves: how they lie, in which of all segments, and what is learned about them."""

    layout: Layout
    segments: tuple[int, ...]
    learned: _Learned


@tree.record
class Partition:
    """zero's slot in the state: how the params lie in shards.

    Attributes:
        exact: in stages 1 and 2, where what is gathered is compressed, this rank's shards as the optimizer has them.
    """

    layout: Layout = tree.static()
    learned: _Learned = tree.static()
    exact: Sequence[Tensor] = ()


def zero(
    stage: int,
    group: comm.Group | None = None,
    *,
    unit_of: Callable[[str], str] | None = None,
    keep: bool = True,
    all_gather: Callable[..., Any] = comm.all_gather,
    reduce_scatter: Callable[..., Any] = comm.reduce_scatter,
    all_reduce: Callable[..., Any] = comm.all_reduce,
) -> Transform:
    """Data parallelism over ``group``, each rank with its own batch, the states in shards as the stage says.

    | stage | stored on each rank | gather | reduce |
    |---|---|---|---|
    | 0 | everything | never | all-reduce, once a step |
    | 1 | params; 1/n of the optimizer's state (and masters) | after the update | reduce-scatter, once a step |
    | 2 | as 1, gradients 1/n too | after the update | reduce-scatter, each micro-batch |
    | 3 | 1/n of everything | each unit, when first touched | reduce-scatter, each micro-batch |

    Law 19: any stage, group and unit partition is the single-device step on the concatenated batch. Params unused on some
    ranks, touched in other orders, or several times change nothing.

    Bytes (law 20), mixed-precision Adam, Ψ params: 16Ψ; 4Ψ + 12Ψ/n; 2Ψ + 14Ψ/n; 16Ψ/n, plus padding. Elements each rank
    sends in a step (law 21): 2Ψ(n-1)/n in stages 0 to 2, 3Ψ(n-1)/n in stage 3, less what ``keep`` saves there.

    Stage 3 holds at most two whole units beside the one that is fetched ahead. Reductions run while the backward pass goes
    on. Rank 0's params count; the others' are ignored at ``init``.

    Args:
        stage: 0, 1, 2 or 3.
        group: the data-parallel ranks; None for the whole world.
        unit_of: from a leaf's path to the name of its unit; by default its repeated block, else "rest".
        keep: stage 3 keeps what the end of the forward pass leaves whole, which the backward pass needs first, instead of
            gathering it again.
        all_gather: how params travel to the loss in stages 1 to 3: ``comm.compressed(comm.all_gather, comm.Blocks(8))`` is
            ZeRO++'s qwZ. The optimizer's params, and those of ``step.params``, stay exact.
        reduce_scatter: how gradients travel in stages 1 to 3; compressed by blocks it is ZeRO++'s qgZ in one hop.
        all_reduce: how gradients travel in stage 0.

    Raises:
        ValueError: the stage is not in 0..3, or does not use the collective that is given; the ranks' params differ in
            structure; the step has a zero already, or a transform before this one wraps ``view``, which zero replaces.
        TypeError: ``group`` is no group.

    >>> import functional_ds as fds
    >>> def program(stage):
    ...     step = zero(stage)(fds.train_step(lambda params, x: (params["w"] * x).sum(), fds.sgd(0.5)))
    ...     x = torch.tensor([1.0, 2.0]) + comm.world().rank
    ...     state, metrics = step(step.init({"w": torch.ones(2)}), x)
    ...     return step.params(state)["w"].tolist(), metrics["loss"].item()
    >>> comm.simulate(program, 3, world_size=2) == comm.simulate(program, 0, world_size=2)
    True
    """
    if stage not in (0, 1, 2, 3):
        raise ValueError(f"stage={stage!r}: ZeRO has the stages 0, 1, 2 and 3")
    if group is not None and not isinstance(group, comm.Group):
        raise TypeError(f"group={group!r} is no group: pass mesh['dp'], comm.world() or None")
    means = _Means(all_gather, reduce_scatter, all_reduce)
    for name in means.given():
        if (name == "all_reduce") != (stage == 0):
            used = "all_gather and reduce_scatter" if stage else "all_reduce alone"
            raise ValueError(f"{name}={getattr(means, name)}: stage {stage} uses {used}, so this one would change nothing")
    return _Zero(stage, group, unit_of, keep, means).transform()


@attrs.frozen
class _Means:
    """The collectives that carry params and gradients."""

    all_gather: Callable[..., Any]
    reduce_scatter: Callable[..., Any]
    all_reduce: Callable[..., Any]

    def given(self) -> list[str]:
        """Those that are not comm's own."""
        return [field.name for field in attrs.fields(_Means) if getattr(self, field.name) is not getattr(comm, field.name)]

    def __str__(self) -> str:
        return "".join(f", {name}={getattr(self, name)}" for name in self.given())


@attrs.frozen(eq=False)
class _Zero:
    stage: int
    group: comm.Group | None
    unit_of: Callable[[str], str] | None
    keep: bool
    means: _Means

    def transform(self) -> Transform:
        """The phases that zero wraps."""
        where = "world" if self.group is None else f"{self.group.name!r} of {self.group.size}"
        sharded = {"update": self.update} if self.stage in (1, 2) else {}
        scattered = {"norm": self.norm, "finite": self.finite} if self.stage else {}
        shards = wrap(
            f"zero({self.stage}, {where}{self.means})",
            init=self.init,
            view=self.view,
            total=self.total,
            params=self.params,
            place=self.place,
            parts=self.parts,
            part=self.part,
            **sharded,
            **scattered,
        )

        def transform(step: Step) -> Step:
            if step.phases["view"] is not stored_view:
                raise ValueError(
                    f"zero({self.stage}): this step has another view already ({step}); use one zero, and put it before "
                    "transforms that wrap view"
                )
            return shards(step)

        return transform

    def ranks(self) -> comm.Group:
        """The group; the default is wherever the program runs."""
        return self.group or comm.world()

    # -- what is stored ------------------------------------------------------------------------------------------------

    def init(self, inner: Any, step: Step, params: Any) -> State:
        """Shards (stage 0: whole flat tensors) through the inner init; stages 1 and 2 then gather the params."""
        group = self.ranks()
        layout = Layout.of(params, group.size, self.unit_of)
        _agree(layout, group)
        params = _of_rank_0(params, group)
        parts = Parts.of_layout(layout, group if self.stage else None)
        known = step.wrapped("layout", parts=lambda *_: parts)  # the state does not hold it yet
        state: State = inner(known, shard(params, layout, group.rank) if self.stage else layout.flatten(params))
        exact: Sequence[Tensor] = ()
        if self.stage in (1, 2):
            exact = state.params if group.size > 1 and "all_gather" in self.means.given() else ()
            everything = range(len(layout.segments))
            state = tree.replace(state, params=_gather(self.means.all_gather, group, state.params, everything))
        return state.put(zero=Partition(layout, _Learned.fresh(layout, attrs.evolve(parts, group=None)), exact))

    def params(self, inner: Any, step: Step, state: State) -> Any:
        """The user's tree, from whatever is in shards."""
        partition: Partition = state.slots["zero"]
        layout = partition.layout
        stored = inner(step, tree.replace(state, params=partition.exact) if partition.exact else state)
        cut = [i for i, s in enumerate(layout.segments) if stored[i].numel() != s.shard * layout.n]
        return layout.unflatten(_gather(comm.all_gather, self.ranks(), stored, cut))

    def update(self, inner: Any, step: Step, state: State, grads: Weighted) -> tuple[State, Metrics]:
        """Stages 1 and 2: the optimizer on this rank's shards, then everybody's new shards."""
        partition: Partition = state.slots["zero"]
        layout, group, flats = partition.layout, self.ranks(), state.params
        own = partition.exact or layout.own(flats, group.rank)
        state, metrics = inner(step, tree.replace(state, params=own), grads)
        moved = [i for i, segment in enumerate(layout.segments) if segment.trainable]
        stored = [new if i in moved else flat for i, (new, flat) in enumerate(zip(state.params, flats, strict=True))]
        if partition.exact:
            state = state.put(zero=tree.replace(partition, exact=state.params))
        del flats, own
        return tree.replace(state, params=_gather(self.means.all_gather, group, stored, moved)), metrics

    # -- what the loss sees --------------------------------------------------------------------------------------------

    def view(self, inner: Any, step: Step, state: State, tape: Tape) -> Any:
        """Deferred leaves: of whole units in stages 0 to 2, of units that are gathered when touched in stage 3."""
        partition: Partition = state.slots["zero"]
        layout, learned, group = _as_stored(partition.layout, state.params), partition.learned, self.ranks()
        device = state.params[0].device if state.params else torch.device("cpu")
        elsewhere = any(not isinstance(shard, Tensor) for shard in state.params)  # on the host or a disk, offloaded
        lazy = self.stage == 3 and (group.size > 1 or elsewhere)
        reducer = self.reducer(layout, learned.order, group, tape) if tape.records else None
        gather = self.means.all_gather
        source = Gatherer(layout, state.params, group, all_gather=gather) if lazy else Resident(layout, state.params)
        units = Units(layout, source, reducer, device, frees=lazy, keep=self.keep)
        if isinstance(source, Gatherer):
            source.dropped = units.forget
        return units.open(tape, learned.forward, learned.backward)

    def reducer(self, layout: Layout, order: Order, group: comm.Group, tape: Tape) -> Reducer:
        """Stages 0 and 1 add micro-batches up and reduce the last; 2 and 3 reduce each and add the shards up."""
        each = self.stage >= 2
        trained = [i for i, segment in enumerate(layout.segments) if segment.trainable]
        carry = dict(zip(trained, tape.carry, strict=True)) if tape.carry is not None else {}
        return Reducer(
            layout,
            group.channel("reduce"),
            order,
            scatter=self.stage > 0,
            reduce=self.means.reduce_scatter if self.stage else self.means.all_reduce,
            now=each or tape.last,
            more=not tape.last,
            local={} if each else carry,
            sums=carry if each else {},
        )

    # -- what is summed over the ranks ---------------------------------------------------------------------------------

    def total(self, inner: Any, step: Step, state: State, scalars: Any) -> Any:
        """Sums over the group."""
        return comm.all_reduce(inner(step, state, scalars), self.ranks())

    def norm(self, inner: Any, step: Step, state: State, grads: list[Tensor]) -> Tensor:
        """‖g‖² = AR Σ ‖owned shards‖² (law 27)."""
        return comm.all_reduce(inner(step, state, grads) ** 2, self.ranks()).sqrt()  # type: ignore[no-any-return]

    def finite(self, inner: Any, step: Step, state: State, grads: list[Tensor]) -> Tensor:
        """Finite everywhere."""
        return comm.all_reduce(inner(step, state, grads), self.ranks(), op="min")  # type: ignore[no-any-return]

    def place(self, inner: Any, step: Step, state: State) -> tuple[int, int]:
        """The group's ranks share what the rank would have had."""
        index, count = inner(step, state)
        group = self.ranks()
        return index * group.size + group.rank, count * group.size

    # -- what lies where -----------------------------------------------------------------------------------------------

    def parts(self, inner: Any, step: Step, state: State) -> Parts:
        """The leaves in this rank's shards, in stage 0 in whole segments."""
        parts: Parts = state.slots["zero"].learned.parts
        return attrs.evolve(parts, group=self.ranks()) if self.stage else parts

    def part(self, inner: Any, step: Step, state: State, paths: Collection[str]) -> tuple[State, tuple[int, ...]]:
        """The segments of these leaves, and what the ranks know about their order."""
        partition: Partition = state.slots["zero"]
        known = partition.learned.of_part(partition.layout, frozenset(paths))
        trained = [i for i, segment in enumerate(partition.layout.segments) if segment.trainable]
        slot = Partition(known.layout, known.learned)
        alone = tree.replace(state, params=[state.params[i] for i in known.segments]).put(zero=slot)
        return alone, tuple(place for place, i in enumerate(trained) if i in known.segments)


def _as_stored(layout: Layout, stored: Sequence[Tensor]) -> Layout:
    """The layout with the dtypes that are stored: mixed precision stores others than it was given."""
    pairs = list(zip(layout.segments, stored, strict=True))
    if all(segment.dtype == flat.dtype for segment, flat in pairs):
        return layout
    return attrs.evolve(layout, segments=tuple(attrs.evolve(segment, dtype=flat.dtype) for segment, flat in pairs))


def _agree(layout: Layout, group: comm.Group) -> None:
    """Refuses params whose structure differs between the ranks."""
    print_ = zlib.crc32(repr((layout.paths, layout.segments, layout.units)).encode())
    prints = comm.all_gather(torch.tensor([print_]), group.channel("control")).tolist()
    odd = [rank for rank, other in enumerate(prints) if other != prints[0]]
    if odd:
        raise ValueError(
            f"params: ranks {odd} of group {group.name!r} have other leaves, shapes, dtypes or frozen leaves than rank 0; "
            "build the same model on every rank"
        )


def _of_rank_0(params: Any, group: comm.Group) -> Any:
    """Rank 0's params, on every rank, one leaf at a time."""
    if group.size == 1:
        return params
    return tree.map(lambda x: like_marked(comm.broadcast(x.detach(), 0, group), x), params)


def _gather(all_gather: Callable[..., Any], group: comm.Group, stored: Sequence[Tensor], cut: Sequence[int]) -> list[Tensor]:
    """The stored tensors with those in ``cut`` whole again; the next is under way while one is waited for."""
    whole = list(stored)
    del stored
    pending: list[tuple[int, Any]] = []
    for i in [*cut, None, None]:
        if i is not None:
            pending.append((i, all_gather(whole[i].detach(), group, async_op=True)))
        if pending and (i is None or len(pending) > 2):
            j, gathered = pending.pop(0)
            whole[j] = like_marked(gathered.wait(), whole[j])
    return whole
