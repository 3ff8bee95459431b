"""The memory and communication of a ZeRO configuration, from a dry run of its step."""

import math
from collections import Counter
from collections.abc import Callable
from typing import Any, TypeVar

import attrs
import torch

from functional_ds import comm
from functional_ds.base import tree
from functional_ds.base.marks import like_marked, without_values
from functional_ds.base.weighted import Weighted
from functional_ds.comm.codecs.compressed import Compressed, encode_leaf
from functional_ds.comm.record.ledger import Row
from functional_ds.sharding.layout import Layout
from functional_ds.sharding.leaf_region import LeafRegion
from functional_ds.sharding.segment import Segment
from functional_ds.step.compose import wrap
from functional_ds.step.phase_signatures import Passed
from functional_ds.step.state.state import State
from functional_ds.step.step import Step
from functional_ds.step.train_step import train_step

from .combine import Combine
from .config import ZeroConfig
from .process_groups import ProcessGroups

T = TypeVar("T")


@attrs.frozen(repr=False)
class CostReport:
    """The memory and communication of a configuration for given params; prints as a few lines.

    Attributes:
        config: the arguments of ``zero``.
        params: the user's tree, without values.
        layout: units, segments and shards.
        ranks: the number of ranks in the group.
        block: how many of them make a block; None for one level.
        replicas: how many ranks have the same shard.
        stored_dtype: the dtype in which floating leaves are stored; None for their own.
        comm_dtype: the dtype in which their gradients are sent; None for the stored one.
    """

    config: ZeroConfig
    params: Any
    layout: Layout
    ranks: tuple[int, ...]
    block: int | None
    replicas: int
    stored_dtype: torch.dtype | None = None
    comm_dtype: torch.dtype | None = None

    def __repr__(self) -> str:
        return f"CostReport({self.config}, {self.layout})"

    @property
    def whole(self) -> list[Segment]:
        """The segments whose params are whole between steps."""
        return [s for s in self.layout.segments if self.config.stays_whole(s)]

    @property
    def sharded(self) -> list[Segment]:
        """The segments whose params are in shards between steps."""
        return [s for s in self.layout.segments if not self.config.stays_whole(s)]

    def held(self, rank: int = 0) -> int:
        """Bytes of params that a rank stores, including exact shards in addition to compressed params."""

        def program(config: ZeroConfig) -> int:
            state = self._step(config, 1, lambda params, batch: NotImplemented).init(self.params)
            return sum(leaf.nbytes for leaf in tree.leaves([state.params, state.slots["zero"].exact]))

        return self._on_rank(program, rank)

    def fetched(self) -> int:
        """The largest bytes of units that stage 3 has gathered or in flight at once."""
        sizes = [
            sum(s.size * self._dtype(s).itemsize for s in self._of(unit) if not (s.persistent or s.alone))
            for unit in range(len(self.layout.units))
        ]
        most = sorted(sizes, reverse=True)[: self.config.max_live_units + self.config.prefetch]
        return sum(most) if self.config.stage == 3 and self.layout.n > 1 else 0

    def hpz_bytes(self) -> int:
        """Bytes of the secondary shards that ``hpz`` keeps from the forward pass to the end of the backward."""
        levels = self._levels()
        if not self.config.hpz or len(levels) < 2:
            return 0
        return levels[0][1] * sum(self._payload(s) for s in self.sharded if s.sharers is None)

    def sent(self, *, micro_batches: int = 1, rank: int = 0, replica: int = 0) -> dict[tuple[str, str], int]:
        """Bytes that a rank sends in a step, by collective and group, named as in a ledger.

        Only params and gradients are counted, not scalars, the optimizer's messages and agreements between ranks. Stage 3 is
        assumed to use every unit once in the forward and once in the backward pass, except integers, and frozen leaves before
        the first trained one, which need no backward; without ``reshard_last_units`` it gathers up to ``max_live_units`` units
        fewer in each micro-batch.

        Args:
            micro_batches: how many the step has.
            rank: whose shard.
            replica: which replica.
        """
        from functional_ds.dry_run.dry_run import dry_run, loss_of_all

        def program(config: ZeroConfig) -> dict[tuple[str, str], int]:
            step = self._step(attrs.evolve(config, reshard_last_units=True), micro_batches, loss_of_all(self.params))
            rows = dry_run(step, step.init(self.params), torch.empty(1, device="meta")).sent
            rows_of_values = (row for row in rows if row.bytes and not row.group.endswith("/control"))
            return {(row.collective, row.group): row.bytes for row in rows_of_values if not _carries_scalars(row)}

        return self._on_rank(program, rank, replica) if self.layout.segments else {}

    # -- the dry run ---------------------------------------------------------------------------------------------------

    def _on_rank(self, program: Callable[[ZeroConfig], T], rank: int = 0, replica: int = 0) -> T:
        """Runs a program for the configuration on the rank with a shard, in a world of shapes only."""
        from functional_ds.comm.worlds.shapes import rank_on_shapes  # training does not need it

        count = self.layout.n // (self.block or 1)
        place = rank if self.block is None else rank % count * self.block + rank // count
        outside = max(self.ranks) + 1
        alike = [outside + other for other in range(self.replicas)]
        alike[replica] = self.ranks[place]

        def on_shapes() -> T:
            world, given = comm.world().world, self.config
            group = world.group(self.ranks, "world" if given.group is None else given.group.name)
            within: comm.Group | int | None = self.block
            if self.block is not None and isinstance(given.intra_node, comm.Group):
                first = place // self.block * self.block
                within = world.group(self.ranks[first : first + self.block], given.intra_node.name)
            over = world.group(alike, getattr(given.replicate, "name", "replicas")) if self.replicas > 1 else None
            return program(attrs.evolve(given, group=group, intra_node=within, replicate=over))

        return rank_on_shapes(on_shapes, world_size=outside + self.replicas, rank=self.ranks[place])

    def _step(self, config: Any, micro_batches: int, loss: Callable[..., Any]) -> Step:
        """A step with the configuration and these dtypes."""
        from functional_ds.optim.sgd import sgd

        def init(inner: Any, step: Step, params: Any) -> State:
            state: State = inner(step, [like_marked(x.to(self._stored(x.dtype)), x) for x in params])
            return state

        def comm_dtype(inner: Any, step: Step, state: State, dtype: torch.dtype) -> torch.dtype:
            computed: torch.dtype = inner(step, state, dtype)
            stored = {self._dtype(segment) for segment in self.layout.segments}
            if self.comm_dtype is None or not computed.is_floating_point or computed not in stored:
                return computed
            return self.comm_dtype

        def gradients(inner: Any, step: Step, state: State, batch: Any, carry: Weighted | None, last: bool) -> Passed:
            for i in range(micro_batches):
                state, carry, metrics = inner(step, state, batch, carry, last and i == micro_batches - 1)
            return state, carry, metrics  # type: ignore[return-value]

        stored = wrap("stored", init=init, comm_dtype=comm_dtype)(train_step(loss, sgd(0.1)))
        return wrap("micro-batches", gradients=gradients)(config(stored))

    def _levels(self) -> list[tuple[str, int]]:
        """The names and sizes of the groups of a gather, in order."""
        return self._on_rank(lambda config: [(level.name, level.size) for level in ProcessGroups.by(config).levels])

    def _of(self, unit: int) -> list[Segment]:
        return [self.layout.segments[i] for i in self.layout.units[unit].segments]

    def _dtype(self, segment: Segment) -> torch.dtype:
        return self._stored(segment.dtype)

    def _stored(self, dtype: torch.dtype) -> torch.dtype:
        return self.stored_dtype if self.stored_dtype is not None and dtype.is_floating_point else dtype

    def _payload(self, segment: Segment) -> int:
        """Bytes that a gather sends for a shard."""
        row, gather = torch.empty(1, segment.shard, dtype=self._dtype(segment), device="meta"), self.config.all_gather
        return sum(part.nbytes for part in encode_leaf(gather.codec, row)) if isinstance(gather, Compressed) else row.nbytes

    # -- as text -------------------------------------------------------------------------------------------------------

    def _repr_html_(self) -> str:
        from functional_ds.comm.record.notebook import html_text

        return html_text(self)

    def __str__(self) -> str:
        config, layout = self.config, self.layout
        sizes = [sum(s.size for s in self._of(unit)) for unit in range(len(layout.units))]
        regions = [LeafRegion.of(slot.shape, slot.slices) for segment in layout.segments for slot in segment.slots]
        cut = [region for region in regions if region.ranges]
        lines = [
            str(config),
            f"ranks      {layout.n} shards"
            + "".join(f", {name!r} of {size}" for name, size in self._levels())
            + (f"; replicated over {getattr(config.replicate, 'name', 'replicas')!r} of {self.replicas}" * (self.replicas > 1)),
            f"units      {len(layout.units)}: "
            + _listed([f"{u.name} ({size:,})" for u, size in zip(layout.units, sizes, strict=True)]),
            f"stored     {self.held():,} bytes of params"
            + (f", {_elements(self.whole):,} elements whole" if self.whole else "")
            + (f", {_elements(self.sharded):,} in shards" if self.sharded else ""),
        ]
        if cut:
            here, whole = sum(region.numel for region in cut), sum(math.prod(region.shape) for region in cut)
            lines.append(f"slices     {len(cut)} of {len(regions)} leaves: {here:,} elements of {whole:,}")
        if config.stage == 3:
            lines.append(
                f"fetched    {config.max_live_units} whole and {config.prefetch} ahead, at most {self.fetched():,} bytes"
                + (f"; kept for the backward pass {self.hpz_bytes():,} bytes" if config.hpz else "")
            )
        how = "one reduce to each unit's owner" if config.aggregate == "owner" else str(config.aggregate)
        how = "all_reduce" if config.stage == 0 else how
        lines.append(
            f"gradients  {how} of {_name(self.comm_dtype) if self.comm_dtype else 'what is computed'}"
            + (f", divided by {config.gradient_predivide_factor:g} before" if config.gradient_predivide_factor != 1 else "")
            + (", each micro-batch" if config.stage >= 2 else ", once a step")
        )
        if config.aggregate == "owner":
            owners = Counter(self._of(unit)[0].owner for unit in range(len(layout.units)))
            lines.append(f"owners     {', '.join(f'rank {rank}: {owners[rank]} units' for rank in range(layout.n))}")
        sent = self.sent()
        most = "up to " if config.stage == 3 and not config.reshard_last_units and layout.n > 1 else ""
        shown = [
            f"{name} over {group!r} {most if name == 'all_gather' else ''}{size:,}" for (name, group), size in sent.items()
        ]
        lines.append(f"sends      bytes a micro-batch and rank: {', '.join(shown) or 'none'}")
        return "\n".join(lines)


def report_costs(
    config: ZeroConfig,
    params: Any,
    *,
    n: int | None = None,
    intra_node: int | None = None,
    replicas: int | None = None,
    stored_dtype: torch.dtype | None = None,
    comm_dtype: torch.dtype | None = None,
) -> CostReport:
    """The bytes that a configuration stores and sends for these params, without running it; print it.

    Args:
        config: ``zero(...)``, whose method this is.
        params: a tree; shapes and dtypes are enough. Under tensor or expert parallelism, a rank's slices.
        n: how many ranks shard the state; by default the size of the group, or of the current world.
        intra_node: how many of them make a block; by default as given to ``zero``.
        replicas: how many replicas there are; by default as given to ``zero``.
        stored_dtype: the dtype in which floating params are stored, if ``mixed_precision`` changes it.
        comm_dtype: the dtype in which their gradients are sent, likewise.

    Raises:
        ValueError: n does not factor into blocks of ``intra_node`` ranks; ``aggregate`` is a ``T.Combine``.

    >>> from functional_ds import transforms as T
    >>> print(T.zero(3, prefetch=2).cost_report({"h.0.w": torch.ones(8, 4), "h.1.w": torch.ones(8, 4)}, n=4))
    zero(3, world, prefetch=2)
    ranks      4 shards, 'world' of 4
    units      2: h.0 (32), h.1 (32)
    stored     64 bytes of params, 64 in shards
    fetched    2 whole and 2 ahead, at most 256 bytes
    gradients  reduce_scatter of what is computed, each micro-batch
    sends      bytes a micro-batch and rank: all_gather over 'world' up to 384, reduce_scatter over 'world/reduce' 192
    """
    if isinstance(config.aggregate, Combine):
        raise ValueError(
            f"cost_report: what {config.aggregate} sends is up to its function; count a step by comm.ledger(), in "
            "comm.simulate(..., shapes_only=True) for many ranks"
        )
    group = config.group
    count = n if n is not None else (group or comm.world()).size
    given = config.intra_node.size if isinstance(config.intra_node, comm.Group) else config.intra_node
    block = given if intra_node is None else intra_node
    if count < 1 or (block is not None and (block < 1 or count % block)):
        raise ValueError(f"n={count}: it does not factor into blocks of intra_node={block} ranks")
    copies = replicas if replicas is not None else getattr(config.replicate, "size", 1)
    here = n is None and intra_node is None
    layout = config.layout(params, count, ProcessGroups.by(config).shards.ranks if here else None)
    ranks = (group or comm.world()).ranks if here else tuple(range(count))
    return CostReport(config, without_values(params), layout, ranks, block, copies, stored_dtype, comm_dtype)


def _carries_scalars(row: Row) -> bool:
    return row.collective == "all_reduce" and "/" not in row.group


def _elements(segments: list[Segment]) -> int:
    return sum(segment.size for segment in segments)


def _listed(words: list[str]) -> str:
    return ", ".join(words if len(words) < 6 else [*words[:2], "...", *words[-2:]])


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
