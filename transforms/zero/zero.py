"""ZeRO: optimizer states, gradients and params in shards (Rajbhandari, Rasley, Ruwase, He 2020)."""

from collections.abc import Collection, Sequence
from functools import lru_cache, partial
from itertools import repeat
from operator import attrgetter
from typing import Any

import attrs
import torch
from torch import Tensor

from functional_ds import comm
from functional_ds.base import tree
from functional_ds.base.torch_private import version_of
from functional_ds.base.weighted import Weighted
from functional_ds.comm.record.graph_notes import UnitGathering
from functional_ds.comm.worlds.current import recorder
from functional_ds.sharding.layout import Layout
from functional_ds.sharding.leaf_map import LeafMap
from functional_ds.step.compose import check_step, wrap
from functional_ds.step.over_ranks.mesh_axes import Axis, AxisRole, GradientParts
from functional_ds.step.phase_signatures import Metrics
from functional_ds.step.phases import Trait
from functional_ds.step.state.state import State
from functional_ds.step.step import Step
from functional_ds.step.views.view import View

from .collectives import Collectives
from .combine import Combine, combining
from .config import ZeroConfig
from .cost_report import report_costs
from .gather import Gatherer, GatherOnce
from .initial_shards import InitialShards
from .lazy_params import LazyParams
from .process_groups import ProcessGroups
from .reduce import Reducer
from .state import Partition, ZeroCache
from .units.unit_source import UnitSource, WholeParams


@attrs.frozen(eq=False, repr=False)
class Zero(ZeroConfig):
    """ZeRO data parallelism over ``group``: each rank has its own batch; the stage determines what is sharded.

    | stage | stored on each rank | gather | reduce |
    |---|---|---|---|
    | 0 | everything | never | all-reduce, once a step |
    | 1 | params; 1/n of the optimizer's state (and masters) | after the update | reduce-scatter, once a step |
    | 2 | as 1, gradients 1/n too | after the update | reduce-scatter, each micro-batch |
    | 3 | 1/n of everything | each unit, at first use | reduce-scatter, each micro-batch |

    For any stage, group, unit partition and other arguments it equals the single-device step on the concatenated batch.
    Ranks may leave params unused, and use them in different orders and several times.

    Bytes for mixed-precision Adam with Ψ params: 16Ψ; 4Ψ + 12Ψ/n; 2Ψ + 14Ψ/n; 16Ψ/n, plus padding. Elements that each
    rank sends in a step: 2Ψ(n-1)/n in stages 0 to 2, 3Ψ(n-1)/n in stage 3, less what ``reshard_last_units=False``
    saves; docs/zero.md has the formulas for all other arguments. ``print(zero(...).cost_report(params, n=8))`` shows the costs.

    Gradients are sent in the dtype that the policy of ``mixed_precision`` names; reductions overlap the backward pass. ``init``
    uses rank 0's params; every rank reads its part of deferred ones (``fds.deferred``, ``fds.from_source``). Leaves that
    ``experts`` has split are gathered and reduced among the ranks that hold the same experts.

    Args:
        stage: 0, 1, 2 or 3.
        group: the ranks that shard the state; None for the whole world.
        intra_node: this rank's block of consecutive ranks of the group (``mesh["intra"]`` for a group ``mesh["inter",
            "intra"]``), or the number of ranks in a block. Gathers are hierarchical, first between the blocks and then inside
            them; reductions in reverse. So 1/intra_node of the traffic crosses blocks.
        replicate: the ranks that have the same shard as this one and their own batches: HSDP and MiCS. They sum the gradients
            of their shards once a step.
        unit_of: maps a leaf's path to the name of its FSDP unit, or one of ``fds.units``; by default its repeated block.
        reshard_last_units: whether stage 3 also frees the units that are whole at the end of the forward pass, which the
            backward pass needs first. All others are always freed after their forward, as with FSDP2's
            ``reshard_after_forward=True``.
        prefetch: how many units stage 3 fetches ahead.
        max_live_units: how many units stage 3 keeps whole at once, without the prefetched ones: at most ``max_live_units +
            prefetch`` units exist at once, and more only if one operation takes leaves of more units.
        persistence_threshold: stage 3 keeps leaves of at most that many elements whole, and gathers them after the update, as
            in stage 2.
        hpz: whether stage 3 keeps what the forward pass gathered between blocks until the end of the backward, which then
            gathers inside blocks only: ZeRO++'s hpZ. It costs 1/intra_node of the params.
        aggregate: how stages 1 to 3 sum gradients: "reduce_scatter"; "all_reduce", of which each rank keeps its shard; or
            "owner": every unit belongs to one rank, to which its gradients are reduced and which broadcasts it. Or, in any
            stage, ``T.Combine(reduce)``: a custom reduction of whole leaves' gradients, once a step.
        gradient_predivide_factor: gradients are divided by this before they are summed, so that a sum in fp16 stays in range.
            The weight is divided too, so the mean does not change.
        all_gather: the collective for params in stages 1 to 3; compressed by ``comm.codecs.Blocks(8)`` it is ZeRO++'s qwZ. The
            optimizer's params, and those of ``step.params``, stay exact.
        reduce_scatter: the collective for gradients in stages 1 to 3; compressed by blocks, with ``intra_node``, it is ZeRO++'s
            qgZ.
        all_reduce: the collective for gradients in stage 0, with ``aggregate="all_reduce"``, and between replicas.

    Raises:
        ValueError: a stage or word is unknown, a number is out of range, or an argument has no effect in this stage; a group
            does not factor into blocks; a pattern matches no path; the ranks' params differ in structure; the step has a zero
            already, or a transform before this one wraps ``view``, which zero replaces.
        TypeError: a group is not a ``comm.Group``.

    >>> import functional_ds as fds
    >>> def program(stage):
    ...     step = zero(stage)(fds.train_step(lambda params, x: (params["w"] * x).sum(), fds.sgd(0.5)))
    ...     x = torch.tensor([1.0, 2.0]) + comm.world().rank
    ...     state, metrics = step(step.init({"w": torch.ones(2)}), x)
    ...     return step.params(state)["w"].tolist(), metrics["loss"].item()
    >>> comm.simulate(program, 3, world_size=2) == comm.simulate(program, 0, world_size=2)
    True
    """

    cost_report = report_costs

    def __call__(self, step: Step) -> Step:
        """The step, wrapped."""
        check_step(self, step)
        if step.wraps("view"):
            raise ValueError(
                f"zero({self.stage}): this step has another view already ({step}); use one zero, and put it before "
                "transforms that wrap view"
            )
        stage = self.stage
        published = stage in (1, 2) or bool(self.persistence_threshold)
        sharded: dict[str, Any] = {"scatter": self.scatter, "update": self.update, "publish": self.publish} if published else {}
        divided: dict[str, Any] = {"reduce": self.reduce} if self.gradient_predivide_factor != 1 else {}
        step = wrap(
            str(self),
            slot="zero",
            traits=self._traits(),
            axes=self._axes(),
            init=self.init,
            view=self.view,
            params=self.params,
            leaf_map=self.leaf_map,
            select=self.select,
            **sharded,
            **divided,
        )(step)
        return step if self.combine is None else combining(self, self.combine, step)

    @property
    def combine(self) -> Combine | None:
        """The custom reduction of whole leaves' gradients, if there is one."""
        return self.aggregate if isinstance(self.aggregate, Combine) else None

    def _axes(self) -> list[Axis]:
        replicas = [] if self.replicate is None else [Axis(self.replicate, AxisRole.BATCH)]
        summed_in: Any = "gradients" if self.combine is None else "reduce"
        return [*replicas, Axis(self.group, AxisRole.BATCH, self.parts, summed_in=summed_in)]

    def parts(self, step: Step, state: State) -> GradientParts | None:
        """Which gradients this rank counts: its shards; of whole gradients, those of shared leaves that it holds first."""
        if self.stage:
            return GradientParts()
        layout: Layout = state.slots["zero"].layout
        if not layout.has_sharers:
            return None
        rank, trained = ProcessGroups.by(self).shards.rank, [segment for segment in layout.segments if segment.trainable]
        return GradientParts({place: 0 for place, segment in enumerate(trained) if rank not in segment.holders(0)})

    def _traits(self) -> list[Trait]:
        traits = [Trait.HEEDS_SKIPS]
        traits += [Trait.DATA_PARALLEL] if self.combine is None and not self.replaced else []
        traits += [Trait.SUMS_LAST] if self.combine is None and (self.stage < 2 or self.replicate is not None) else []
        traits += [Trait.SHARDS_STATE] if self.stage else []
        traits += [Trait.SHARDS_PARAMS] if self.stage == 3 else []
        return traits + ([Trait.KEEPS_WHOLE] if self.persistence_threshold else [])

    # -- what is stored ------------------------------------------------------------------------------------------------

    def init(self, inner: Any, step: Step, params: Any) -> State:
        """The inner init of this rank's shards (stage 0: of whole flat tensors); gathers what stays whole."""
        groups = ProcessGroups.by(self)
        layout = self.layout(params, groups.n, groups.shards.ranks)
        groups.check_agreement((layout.paths, layout.segments, layout.units))
        parts = LeafMap.of_layout(layout, groups.shards if self.stage else None)
        cache = ZeroCache.fresh(layout, attrs.evolve(parts, group=None))
        new = Partition(layout, cache, ())
        known = step.wrapped("layout", leaf_map=lambda inner, step, state: inner(step, state.put(zero=new)))  # it has none yet
        source = InitialShards(layout, tree.leaves(params), groups, whole=not self.stage)
        state: State = inner(known, [source.shard(index) for index in range(len(layout.segments))])
        exact: Sequence[Tensor | None] = ()
        whole = self._whole(layout) if self.stage else []
        if whole:
            shards, state = list(state.params), tree.replace(state, params=())
            exact = self._exact(layout, shards, whole, groups)
            state = tree.replace(state, params=Collectives(groups, self).gather_all(layout.segments, shards, whole))
        return state.put(zero=Partition(layout, cache, exact))

    def _whole(self, layout: Layout) -> list[int]:
        return [i for i, segment in enumerate(layout.segments) if self.stays_whole(segment)]

    def _exact(
        self, layout: Layout, shards: Sequence[Tensor], whole: Sequence[int], groups: ProcessGroups
    ) -> Sequence[Tensor | None]:
        """The exact shards to store in addition to whole segments, if gathers are not exact."""
        if groups.n == 1 or not self.inexact:
            return ()
        kept = [index in whole and not segment.alone for index, segment in enumerate(layout.segments)]
        return [shard if keeps else None for shard, keeps in zip(shards, kept, strict=True)]

    def params(self, inner: Any, step: Step, state: State) -> Any:
        """The user's tree, gathered from the shards."""
        partition: Partition = state.slots["zero"]
        layout, groups = partition.layout, ProcessGroups.by(self)
        stored = inner(step, tree.replace(state, params=_either(partition.exact, state.params)))
        exactly = Collectives(groups, attrs.evolve(self, all_gather=comm.all_gather))
        return layout.unflatten(exactly.gather_all(layout.segments, [*stored], _in_shards(layout, stored, groups)))

    def update(self, inner: Any, step: Step, state: State, grads: Weighted) -> tuple[State, Metrics]:
        """If params are whole: the inner update of this rank's shards, then a gather of all ranks' new shards.

        The state is donated, so the gather reuses the memory of the old params.
        """
        before = [flat.detach() if isinstance(flat, Tensor) else flat for flat in state.params]  # others are on the host
        state, metrics = inner(step, self._scattered(state), grads)
        return self._published(state, before), metrics

    def scatter(self, inner: Any, step: Step, state: State) -> State:
        """Replaces whole segments by this rank's shards."""
        return inner(step, self._scattered(state))  # type: ignore[no-any-return]

    def publish(self, inner: Any, step: Step, state: State) -> State:
        """Gathers all ranks' shards."""
        return self._published(inner(step, state))

    def _scattered(self, state: State) -> State:
        partition: Partition | None = state.slots.get("zero")
        if partition is None or partition.frozen is not None:  # in an inner ``init`` or ``update``, which already have shards
            return state
        layout, rank, flats = partition.layout, ProcessGroups.by(self).shards.rank, state.params
        whole = self._whole(layout)
        pairs = zip(layout.segments, flats, strict=True)
        shards = [s.own(flat, rank) if i in whole else flat for i, (s, flat) in enumerate(pairs)]
        stored = _either(partition.exact, shards)
        frozen = {i: (flats[i], stored[i]) for i in whole if not layout.segments[i].trainable}
        versions = tuple(version_of(shard) for _, shard in frozen.values())
        return tree.replace(state, params=stored).put(zero=tree.replace(partition, exact=(), frozen=frozen, versions=versions))

    def _published(self, state: State, out: list[Tensor] | None = None) -> State:
        partition: Partition = state.slots["zero"]
        layout, shards, groups = partition.layout, state.params, ProcessGroups.by(self)
        whole = self._whole(layout)
        exact = self._exact(layout, shards, whole, groups)
        frozen = partition.frozen or {}
        known = zip(frozen.items(), partition.versions, strict=True)  # others are changed: new, or written to
        kept = {i for (i, (_, shard)), version in known if shards[i] is shard and version_of(shard) == version}
        stored = [frozen[i][0] if i in kept else new for i, new in enumerate(shards)]
        state = tree.replace(state, params=()).put(zero=tree.replace(partition, exact=exact, frozen=None, versions=()))
        del shards
        moved = [i for i in whole if i not in kept]
        return tree.replace(state, params=Collectives(groups, self).gather_all(layout.segments, stored, moved, out))

    # -- what the loss sees --------------------------------------------------------------------------------------------

    def view(self, inner: Any, step: Step, state: State, trains: bool, whole: bool) -> View:
        """Lazy leaves: of whole units in stages 0 to 2, of units that are gathered at first use in stage 3."""
        partition: Partition = state.slots["zero"]
        if partition.frozen is not None:
            raise ValueError(
                f"{self}: the params of this state are shards, as scatter and an inner update have them, and no function runs "
                "on those; pass step.publish(state)"
            )
        layout, cache = _as_stored(partition, state.params), partition.cache
        pool = None if comm.world().world.host is None else cache.pool
        collectives = Collectives(ProcessGroups.by(self), self, lru_cache(lambda dtype: step.comm_dtype(state, dtype)), pool)
        device = state.params[0].device if state.params else torch.device("cpu")
        params = LazyParams(
            layout,
            cache,
            partial(self._source, layout, state.params, collectives, trains),
            partial(self._reducer, layout, cache, collectives),
            device,
            trains=trains,
            whole=whole,
            looks=trains and step.guarded and state.begins(),
            reshard_last_units=self.reshard_last_units,
        )
        return params.view()

    def _source(
        self,
        layout: Layout,
        stored: Sequence[Any],
        collectives: Collectives,
        trains: bool,
        params: LazyParams,
    ) -> UnitSource:
        groups = collectives.groups
        if self.stage < 3 or (groups.n == 1 and all(map(isinstance, stored, repeat(Tensor)))):  # none on the host or a disk
            return WholeParams(layout, stored)
        if recorder().records:
            recorder().gathers(UnitGathering(self.max_live_units, self.reshard_last_units, self.prefetch, self.hpz))
            return GatherOnce(layout, stored, collectives)
        return Gatherer(
            layout,
            stored,
            collectives,
            params.forget,
            max_live_units=self.max_live_units,
            prefetch=self.prefetch,
            hpz=self.hpz and trains and len(groups.levels) > 1,
            on_fetch=params.fetched,
        )

    def _reducer(
        self,
        layout: Layout,
        cache: ZeroCache,
        collectives: Collectives,
        sums: list[Tensor] | None,
        last: bool,
        passes: int,
    ) -> Reducer:
        """Stages 0 and 1 add micro-batches up and reduce the last; 2 and 3 reduce each and add the shards up.

        A ``T.Combine`` runs in the phase ``reduce``, so with one all stages only add up here.
        """
        reduces_each = self.stage >= 2 and self.combine is None
        last = last and self.combine is None
        trained = [i for i, segment in enumerate(layout.segments) if segment.trainable]
        carry = dict(zip(trained, sums, strict=True)) if sums is not None else {}
        if passes == 1 and not reduces_each:  # one micro-batch, which turned out to be the last, and so travels as such
            carry = {i: grads.to(layout.segments[i].dtype) for i, grads in carry.items()}
        return Reducer(
            layout,
            collectives,
            cache.order,
            now=reduces_each or last,
            more=not last,
            local={} if reduces_each else carry,
            sums=carry if reduces_each else {},
        )

    def reduce(self, inner: Any, step: Step, state: State, grads: Weighted) -> tuple[State, Weighted]:
        """Divides the weight by ``gradient_predivide_factor``, as the sums were."""
        state, grads = inner(step, state, grads)
        return state, tree.replace(grads, weight=grads.weight / self.gradient_predivide_factor)

    # -- what is where ------------------------------------------------------------------------------------------------

    def leaf_map(self, inner: Any, step: Step, state: State) -> LeafMap:
        """The leaves in this rank's shards, in stage 0 in whole segments."""
        parts: LeafMap = state.slots["zero"].cache.leaf_map
        return attrs.evolve(parts, group=ProcessGroups.by(self).shards) if self.stage else parts

    def select(self, inner: Any, step: Step, state: State, paths: Collection[str]) -> tuple[State, tuple[int, ...]]:
        """The segments of these leaves, with their own cache."""
        partition: Partition = state.slots["zero"]
        known = partition.cache.subset(partition.layout, frozenset(paths))
        trained = [i for i, segment in enumerate(partition.layout.segments) if segment.trainable]
        slot = Partition(known.layout, known.cache)
        alone = tree.replace(state, params=[state.params[i] for i in known.segments]).put(zero=slot)
        return alone, tuple(place for place, i in enumerate(trained) if i in known.segments)


zero = Zero


def _as_stored(partition: Partition, stored: Sequence[Any]) -> Layout:
    """The layout with the dtypes of ``stored``, which mixed precision changes after ``init``."""
    dtypes, known = tuple(map(attrgetter("dtype"), stored)), partition.cache.layouts
    if dtypes not in known:
        pairs = zip(partition.layout.segments, dtypes, strict=True)
        known[dtypes] = attrs.evolve(partition.layout, segments=tuple(attrs.evolve(s, dtype=dtype) for s, dtype in pairs))
    return known[dtypes]


def _either(exact: Sequence[Tensor | None], stored: Sequence[Tensor]) -> list[Tensor]:
    """The exact shards where there are any."""
    return [flat if shard is None else shard for shard, flat in zip(exact, stored, strict=True)] if exact else list(stored)


def _in_shards(layout: Layout, stored: Sequence[Tensor], groups: ProcessGroups) -> list[int]:
    """The segments that are sharded here. A segment's owner cannot tell, so with owners the ranks decide together."""
    cut = torch.tensor([flat.numel() != s.size for flat, s in zip(stored, layout.segments, strict=True)], dtype=torch.int64)
    if any(segment.owner is not None for segment in layout.segments):
        cut = comm.all_reduce(cut, groups.group.channel("control"), op="max")
    return cut.nonzero().flatten().tolist()
