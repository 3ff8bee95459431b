"""ZeRO: states, gradients and params in shards (Rajbhandari, Rasley, Ruwase, He 2020)."""

from collections.abc import Callable, Collection, Sequence
from typing import Any

import attrs
import torch
from torch import Tensor

from functional_ds import comm
from functional_ds.base import tree
from functional_ds.base.weighted import Weighted
from functional_ds.sharding.grouping import UnitOf
from functional_ds.sharding.layout import Layout, Segment
from functional_ds.sharding.leaf_map import LeafMap
from functional_ds.sharding.sources import is_deferred
from functional_ds.step.state import State
from functional_ds.step.step import Metrics, Step, wrap
from functional_ds.step.tape import Tape
from functional_ds.step.train_step import stored_view

from .collectives import Carriage
from .config import Knobs
from .cost_report import Plan, plan
from .gather import Gatherer
from .lazy_params import Resident, Units
from .process_groups import Ranks
from .reduce import Order, Reducer
from .state import Learned, Partition

__all__ = ["Zero", "zero"]


def zero(
    stage: int,
    group: comm.Group | None = None,
    *,
    inside: comm.Group | int | None = None,
    replicate: comm.Group | None = None,
    unit_of: UnitOf | None = None,
    keep: bool = True,
    prefetch: int = 1,
    live: int = 2,
    persist: int = 0,
    secondary: bool = False,
    aggregate: str = "reduce_scatter",
    predivide: float = 1.0,
    all_gather: Callable[..., Any] = comm.all_gather,
    reduce_scatter: Callable[..., Any] = comm.reduce_scatter,
    all_reduce: Callable[..., Any] = comm.all_reduce,
) -> "Zero":
    """Data parallelism over ``group``, each rank with its own batch, the states in shards as the stage says.

    | stage | stored on each rank | gather | reduce |
    |---|---|---|---|
    | 0 | everything | never | all-reduce, once a step |
    | 1 | params; 1/n of the optimizer's state (and masters) | after the update | reduce-scatter, once a step |
    | 2 | as 1, gradients 1/n too | after the update | reduce-scatter, each micro-batch |
    | 3 | 1/n of everything | each unit, when first touched | reduce-scatter, each micro-batch |

    Law 19: any stage, group, unit partition and choice of all below is the single-device step on the concatenated batch.
    Params unused on some ranks, touched in other orders, or several times change nothing.

    Bytes (law 20), mixed-precision Adam, Ψ params: 16Ψ; 4Ψ + 12Ψ/n; 2Ψ + 14Ψ/n; 16Ψ/n, plus padding. Elements each rank
    sends in a step (law 21): 2Ψ(n-1)/n in stages 0 to 2, 3Ψ(n-1)/n in stage 3, less what ``keep`` saves there; docs/zero.md
    has the formulas of everything else. Gradients travel in the dtype that ``mixed_precision``'s policy says. Reductions run
    while the backward pass goes on. Rank 0's params count at ``init``, the others' are ignored; deferred ones
    (``fds.deferred``, ``fds.from_source``) are read by every rank. ``print(zero(...).plan(params, n=8))`` says all this.

    Args:
        stage: 0, 1, 2 or 3.
        group: the ranks that cut the state into shards; None for the whole world.
        inside: this rank's block of consecutive ranks of the group (``mesh["intra"]`` for a group ``mesh["inter", "intra"]``),
            or how many ranks make one. Gathers go across the blocks, then inside; reductions inside, then across: so 1/inside
            of what is gathered or reduced crosses blocks.
        replicate: the ranks that have the same shard as this one, each with a batch of its own, too: HSDP and MiCS. Their
            shards' gradients are summed once a step.
        unit_of: from a leaf's path to the name of its unit, or one of ``fds.units``; by default its repeated block.
        keep: stage 3 keeps what the end of the forward pass leaves whole, which the backward pass needs first, instead of
            gathering it again.
        prefetch: how many units stage 3 fetches ahead.
        live: how many units are whole at once in stage 3 beside those: at most ``live + prefetch`` units are there, and
            more only where one operation takes leaves of more.
        persist: stage 3 keeps leaves of at most that many elements whole; they are gathered after the update, as in stage 2.
        secondary: stage 3 keeps what comes across for the forward pass until the end of the backward, which then gathers
            inside alone: ZeRO++'s hpZ. It costs 1/inside of the params.
        aggregate: how gradients are summed in stages 1 to 3: "reduce_scatter"; "all_reduce", of which each rank takes its
            shard; or "owner": every unit belongs to one rank, to which its gradients are reduced and which broadcasts it.
        predivide: gradients are divided by this before they are summed, so that a sum in fp16 stays in range; the weight
            is, too, so nothing else changes.
        all_gather: how params travel to the loss in stages 1 to 3: ``comm.compressed(comm.all_gather, comm.Blocks(8))`` is
            ZeRO++'s qwZ. The optimizer's params, and those of ``step.params``, stay exact.
        reduce_scatter: how gradients travel in stages 1 to 3; compressed by blocks, with ``inside``, it is ZeRO++'s qgZ.
        all_reduce: how gradients travel in stage 0, and with ``aggregate="all_reduce"``; with replicas, between those.

    Raises:
        ValueError: a stage or word that is unknown, a number out of range, something that would change nothing in this stage;
            a group that does not factor into blocks; a pattern that matches nothing; the ranks' params differ in structure;
            the step has a zero already, or a transform before this one wraps ``view``, which zero replaces.
        TypeError: a group that is none.

    >>> import functional_ds as fds
    >>> def program(stage):
    ...     step = zero(stage)(fds.train_step(lambda params, x: (params["w"] * x).sum(), fds.sgd(0.5)))
    ...     x = torch.tensor([1.0, 2.0]) + comm.world().rank
    ...     state, metrics = step(step.init({"w": torch.ones(2)}), x)
    ...     return step.params(state)["w"].tolist(), metrics["loss"].item()
    >>> comm.simulate(program, 3, world_size=2) == comm.simulate(program, 0, world_size=2)
    True
    """
    return Zero(
        Knobs(
            stage=stage,
            group=group,
            inside=inside,
            replicate=replicate,
            unit_of=unit_of,
            keep=keep,
            prefetch=prefetch,
            live=live,
            persist=persist,
            secondary=secondary,
            aggregate=aggregate,
            predivide=predivide,
            all_gather=all_gather,
            reduce_scatter=reduce_scatter,
            all_reduce=all_reduce,
        )
    )


@attrs.frozen(eq=False, str=False)
class Zero:
    """A transform: ``zero(...)(step)``. It can also say beforehand what it will do."""

    knobs: Knobs

    def __attrs_post_init__(self) -> None:
        if self.knobs.group is not None:
            self.ranks()  # refuses groups that do not fit

    def __call__(self, step: Step) -> Step:
        """The step with the phases that zero wraps."""
        if step.phases["view"] is not stored_view:
            raise ValueError(
                f"zero({self.knobs.stage}): this step has another view already ({step}); use one zero, and put it before "
                "transforms that wrap view"
            )
        stage = self.knobs.stage
        sharded = {"update": self.update} if stage in (1, 2) or self.knobs.persist else {}
        scattered = {"norm": self.norm, "finite": self.finite} if stage else {}
        divided = {"reduce": self.reduce} if self.knobs.predivide != 1 else {}
        return wrap(
            str(self),
            init=self.init,
            view=self.view,
            sum_over_ranks=self.sum_over_ranks,
            params=self.params,
            batch_shard=self.batch_shard,
            leaf_map=self.leaf_map,
            select=self.select,
            **sharded,
            **scattered,
            **divided,
        )(step)

    def __str__(self) -> str:
        return str(self.knobs)

    def plan(
        self,
        params: Any,
        *,
        n: int | None = None,
        inside: int | None = None,
        replicas: int | None = None,
        stored: torch.dtype | None = None,
        wire: torch.dtype | None = None,
    ) -> Plan:
        """What this strategy makes of these params, before anything runs: print it.

        Args:
            params: a tree; shapes and dtypes are enough.
            n: how many ranks cut the state, by default as many as the group or the current world has.
            inside: in blocks of how many.
            replicas: how many have the same shard.
            stored: the dtype in which floating params are stored, where ``mixed_precision`` changes it.
            wire: the dtype in which their gradients travel, likewise.

        >>> print(zero(3, prefetch=2).plan({"h.0.w": torch.ones(8, 4), "h.1.w": torch.ones(8, 4)}, n=4))
        zero(3, world, prefetch=2)
        ranks      4 shards, 'world' of 4
        units      2: h.0 (32), h.1 (32)
        stored     64 bytes of params, 64 in shards
        fetched    2 whole and 2 ahead, at most 256 bytes
        gradients  reduce_scatter of what is computed, each micro-batch
        sends      bytes a micro-batch and rank: all_gather over 'world' up to 384, reduce_scatter over 'world/reduce' 192
        """
        return plan(self.knobs, params, n=n, inside=inside, replicas=replicas, stored=stored, wire=wire)

    def ranks(self) -> Ranks:
        """The ranks; the default is wherever the program runs."""
        return Ranks.of(self.knobs.group or comm.world(), self.knobs.inside, self.knobs.replicate)

    def carriage(self) -> Carriage:
        """What moves params and gradients."""
        return Carriage(self.ranks(), self.knobs)

    # -- what is stored ------------------------------------------------------------------------------------------------

    def init(self, inner: Any, step: Step, params: Any) -> State:
        """Shards (stage 0: whole flat tensors) through the inner init; what stays whole is then gathered."""
        ranks, carriage = self.ranks(), self.carriage()
        layout = self.knobs.layout(params, ranks.n)
        ranks.agree((layout.paths, layout.segments, layout.units))
        parts = LeafMap.of_layout(layout, ranks.shards if self.knobs.stage else None)
        learned = Learned.fresh(layout, attrs.evolve(parts, group=None))
        new = Partition(layout, learned, ())
        known = step.wrapped("layout", leaf_map=lambda inner, step, state: inner(step, state.put(zero=new)))  # it has none yet
        leaves = tree.leaves(params)
        own = [
            layout.stretch(leaves, index, *self._cut(segment, ranks), lambda leaf: _of_rank_0(leaf, ranks))
            for index, segment in enumerate(layout.segments)
        ]
        state: State = inner(known, own)
        exact: Sequence[Tensor | None] = ()
        whole = self._whole(layout) if self.knobs.stage else []
        if whole:
            exact = self._exact(state.params, whole, ranks)
            state = tree.replace(state, params=carriage.gather_all(layout.segments, state.params, whole))
        return state.put(zero=Partition(layout, learned, exact))

    def _cut(self, segment: Segment, ranks: Ranks) -> tuple[int, int]:
        return segment.cut(ranks.shards.rank) if self.knobs.stage else (0, segment.size)

    def _whole(self, layout: Layout) -> list[int]:
        """The segments whose params are whole on every rank between steps."""
        return [i for i, segment in enumerate(layout.segments) if self.knobs.stage < 3 or segment.persistent]

    def _exact(self, shards: Sequence[Tensor], whole: Sequence[int], ranks: Ranks) -> Sequence[Tensor | None]:
        """The shards to be kept beside what is whole, where that is not exact."""
        if ranks.n == 1 or not self.knobs.inexact:
            return ()
        return [shard if index in whole else None for index, shard in enumerate(shards)]

    def params(self, inner: Any, step: Step, state: State) -> Any:
        """The user's tree, from whatever is in shards."""
        partition: Partition = state.slots["zero"]
        layout, ranks = partition.layout, self.ranks()
        stored = inner(step, tree.replace(state, params=_either(partition.exact, state.params)))
        exactly = Carriage(ranks, attrs.evolve(self.knobs, all_gather=comm.all_gather))
        return layout.unflatten(exactly.gather_all(layout.segments, stored, _in_shards(layout, stored, ranks)))

    def update(self, inner: Any, step: Step, state: State, grads: Weighted) -> tuple[State, Metrics]:
        """Where params are whole: the optimizer on this rank's shards, then everybody's new shards."""
        partition: Partition = state.slots["zero"]
        layout, ranks, flats = partition.layout, self.ranks(), state.params
        whole = self._whole(layout)
        pairs = zip(layout.segments, flats, strict=True)
        shards = [s.own(flat, ranks.shards.rank) if i in whole else flat for i, (s, flat) in enumerate(pairs)]
        own = _either(partition.exact, shards)
        state, metrics = inner(step, tree.replace(state, params=own), grads)
        moved = [i for i in whole if layout.segments[i].trainable]
        stored = [flats[i] if i in whole and i not in moved else new for i, new in enumerate(state.params)]
        if partition.exact:
            state = state.put(zero=tree.replace(partition, exact=self._exact(state.params, whole, ranks)))
        del flats, shards, own
        return tree.replace(state, params=self.carriage().gather_all(layout.segments, stored, moved)), metrics

    # -- what the loss sees --------------------------------------------------------------------------------------------

    def view(self, inner: Any, step: Step, state: State, tape: Tape) -> Any:
        """Deferred leaves: of whole units in stages 0 to 2, of units that are gathered when touched in stage 3."""
        partition: Partition = state.slots["zero"]
        layout, learned, knobs = partition.as_stored(state.params), partition.learned, self.knobs
        carriage = Carriage(self.ranks(), knobs, lambda dtype: step.comm_dtype(state, dtype))
        device = state.params[0].device if state.params else torch.device("cpu")
        elsewhere = any(not isinstance(shard, Tensor) for shard in state.params)  # on the host or a disk, offloaded
        lazy = knobs.stage == 3 and (carriage.ranks.n > 1 or elsewhere)
        reducer = self.reducer(layout, learned.order, carriage, tape) if tape.records else None
        seconds: dict[int, Any] | None = {} if knobs.secondary and tape.records and len(carriage.ranks.hops) > 1 else None
        source = (
            Gatherer(layout, state.params, carriage, live=knobs.live, ahead=knobs.prefetch, seconds=seconds)
            if lazy
            else Resident(layout, state.params)
        )
        units = Units(layout, source, reducer, device, frees=lazy, keep=knobs.keep)
        if isinstance(source, Gatherer):
            source.dropped = units.forget
        return units.open(tape, learned.forward, learned.backward)

    def reducer(self, layout: Layout, order: Order, carriage: Carriage, tape: Tape) -> Reducer:
        """Stages 0 and 1 add micro-batches up and reduce the last; 2 and 3 reduce each and add the shards up."""
        each = self.knobs.stage >= 2
        trained = [i for i, segment in enumerate(layout.segments) if segment.trainable]
        carry = dict(zip(trained, tape.carry, strict=True)) if tape.carry is not None else {}
        return Reducer(
            layout,
            carriage,
            order,
            now=each or tape.last,
            more=not tape.last,
            local={} if each else carry,
            sums=carry if each else {},
        )

    # -- what is summed over the ranks ---------------------------------------------------------------------------------

    def reduce(self, inner: Any, step: Step, state: State, grads: Weighted) -> tuple[State, Weighted]:
        """The sums were divided, so the weight is."""
        state, grads = inner(step, state, grads)
        return state, tree.replace(grads, weight=grads.weight / self.knobs.predivide)

    def sum_over_ranks(self, inner: Any, step: Step, state: State, scalars: Any) -> Any:
        """Sums over all ranks."""
        return self.ranks().total(inner(step, state, scalars))

    def norm(self, inner: Any, step: Step, state: State, grads: list[Tensor]) -> Tensor:
        """‖g‖² = AR Σ ‖owned shards‖² (law 27)."""
        return comm.all_reduce(inner(step, state, grads) ** 2, self.ranks().group).sqrt()  # type: ignore[no-any-return]

    def finite(self, inner: Any, step: Step, state: State, grads: list[Tensor]) -> Tensor:
        """Finite everywhere."""
        return comm.all_reduce(inner(step, state, grads), self.ranks().group, op="min")  # type: ignore[no-any-return]

    def batch_shard(self, inner: Any, step: Step, state: State) -> tuple[int, int]:
        """The ranks share what the rank would have had."""
        index, count = inner(step, state)
        place, places = self.ranks().place
        return index * places + place, count * places

    # -- what lies where -----------------------------------------------------------------------------------------------

    def leaf_map(self, inner: Any, step: Step, state: State) -> LeafMap:
        """The leaves in this rank's shards, in stage 0 in whole segments."""
        parts: LeafMap = state.slots["zero"].learned.parts
        return attrs.evolve(parts, group=self.ranks().shards) if self.knobs.stage else parts

    def select(self, inner: Any, step: Step, state: State, paths: Collection[str]) -> tuple[State, tuple[int, ...]]:
        """The segments of these leaves, and what the ranks know about their order."""
        partition: Partition = state.slots["zero"]
        known = partition.learned.of_part(partition.layout, frozenset(paths))
        trained = [i for i, segment in enumerate(partition.layout.segments) if segment.trainable]
        slot = Partition(known.layout, known.learned)
        alone = tree.replace(state, params=[state.params[i] for i in known.segments]).put(zero=slot)
        return alone, tuple(place for place, i in enumerate(trained) if i in known.segments)


def _of_rank_0(leaf: Tensor, ranks: Ranks) -> Tensor:
    """What the first rank has; deferred leaves are read everywhere."""
    return leaf if is_deferred(leaf) else ranks.from_first(leaf.detach())


def _either(exact: Sequence[Tensor | None], stored: Sequence[Tensor]) -> list[Tensor]:
    """The exact shards where there are some."""
    return [flat if shard is None else shard for shard, flat in zip(exact, stored, strict=True)] if exact else list(stored)


def _in_shards(layout: Layout, stored: Sequence[Tensor], ranks: Ranks) -> list[int]:
    """The segments that are not whole here; where one rank owns a segment it can not tell, so the ranks say it together."""
    cut = torch.tensor([flat.numel() != s.size for flat, s in zip(stored, layout.segments, strict=True)], dtype=torch.int64)
    if any(segment.owner is not None for segment in layout.segments):
        cut = comm.all_reduce(cut, ranks.group.channel("control"), op="max")
    return cut.nonzero().flatten().tolist()
