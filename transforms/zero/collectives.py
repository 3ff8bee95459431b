"""The collectives of a unit: all-gathers from shards and reductions to them, over one level of groups or several."""

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import attrs
import torch
from torch import Tensor

from functional_ds import comm
from functional_ds.base.marks import like_marked
from functional_ds.comm.backends.pool import Pool
from functional_ds.comm.calls.dispatch import relay, start
from functional_ds.comm.codecs.compressed import Compressed, decode_leaf, encode_leaf
from functional_ds.sharding.segment import Segment

from .config import ZeroConfig
from .process_groups import ProcessGroups

Flats = list[Tensor]
PendingFlats = comm.Pending[Flats]


@attrs.frozen(eq=False)
class Collectives:
    """The all-gathers and reductions that ``zero``'s arguments choose.

    | arguments | params | gradients |
    |---|---|---|
    | stage 0 | never | AR; with replicas ``AG_group ∘ AR_replicas ∘ RS_group`` |
    | aggregate="reduce_scatter" | ``AG_intra ∘ AG_inter`` | ``AR_replicas ∘ RS_inter ∘ RS_intra`` |
    | aggregate="all_reduce" | the same | AR over the group, of which each rank keeps its shard |
    | aggregate="owner" | broadcast from the owner | reduce to the owner |

    Leaves that only a block of the ranks shares, such as experts, are gathered and reduced within the block, in one level.

    A codec encodes params once, so its error does not depend on the number of levels. Gradients are summed after each level and
    encoded again.

    Reductions have their own channel, "reduce", since ranks may order them differently from gathers. So has the second level of
    a gather, "gather", which starts when the first is done, at no fixed place among the loss function's collectives. Later
    levels run in the order in which the ranks started the first ones (``relay``), in whichever order a rank polls them.

    Attributes:
        groups: the groups of this rank.
        config: the arguments of ``zero``.
        comm_dtype: maps a gradient's dtype to the dtype in which it is sent.
        pool: memory for gathered units and packed gradients.
    """

    groups: ProcessGroups
    config: ZeroConfig
    comm_dtype: Callable[[torch.dtype], torch.dtype] = lambda dtype: dtype
    pool: Pool | None = None

    # -- params --------------------------------------------------------------------------------------------------------

    def gather(
        self,
        segments: Sequence[Segment],
        shards: Sequence[Tensor],
        first_level: "comm.Pending[Any] | None" = None,
        *,
        out: Flats | None = None,
    ) -> PendingFlats:
        """All-gathers flat tensors, ``[segment.size]``, from all ranks' shards.

        Args:
            segments: of the tensors, all of one unit.
            shards: this rank's shards, ``[segment.shard]``.
            first_level: the result of ``gather_first_level`` for these shards, to skip that level.
            out: memory for the flat tensors, of which the shards may be views.
        """
        groups = self.groups.among(segments[0].sharers)
        if not groups.levels:  # one rank's shards are whole, wherever they are
            return comm.Pending.of([shard.detach() for shard in shards])
        if segments[0].owner is not None:
            return self._broadcast(segments, shards, groups.shards).then(partial(_written, out))
        # the last level writes into it
        direct = out or self._room(segments, shards) if self.config.all_gather is comm.all_gather else None
        last = len(groups.levels) - 1
        first = self._first_level(shards, groups, None if last else direct) if first_level is None else first_level
        rest = [self._next_level(level, direct if i == last else None) for i, level in enumerate(groups.levels) if i]
        lane = groups.levels[-1].channel("gather")
        gathered = relay(first, *rest, lane=lane, device=shards[0].device)
        return gathered.then(lambda flats: _written(out, self._decoded(flats, segments, shards)))

    def _room(self, segments: Sequence[Segment], shards: Sequence[Tensor]) -> Flats | None:
        """Pooled memory for a unit of one segment; others use the transport's memory."""
        if self.pool is None or len(segments) > 1 or not isinstance(shards[0], Tensor):
            return None
        room = self.pool.take(segments[0].size, shards[0].dtype, shards[0].device)
        return None if room is None else [room]

    def gather_first_level(self, shards: Sequence[Tensor]) -> "comm.Pending[Any]":
        """The first level only, encoded; any number of ``gather`` may use one result."""
        return self._first_level(shards, self.groups)

    def gather_all(self, segments: Sequence[Segment], stored: Flats, which: Sequence[int], out: Flats | None = None) -> Flats:
        """All-gathers the segments listed in ``which``, up to two more in flight, each into its shard's place in ``stored``.

        Args:
            segments: of all flat tensors.
            stored: shards of the listed segments.
            which: the list.
            out: memory for whole segments, by their numbers.
        """
        in_flight = deque[comm.Pending[tuple[int, Tensor]]]()

        def arrive() -> None:
            i, flat = in_flight.popleft().wait()
            stored[i] = like_marked(flat, stored[i])

        for i in which:
            if self.groups.among(segments[i].sharers).levels:
                room = None if out is None else [out[i]]
                in_flight.append(self.gather([segments[i]], [stored[i]], out=room).then(partial(_numbered, i)))
            if len(in_flight) > 2:
                arrive()
        while in_flight:
            arrive()
        return stored

    def _first_level(self, shards: Sequence[Tensor], groups: ProcessGroups, out: Flats | None = None) -> "comm.Pending[Any]":
        return self._all_gather(self._encoded([shard.detach() for shard in shards]), groups.levels[0], out)

    def _broadcast(self, segments: Sequence[Segment], shards: Sequence[Tensor], group: comm.Group) -> PendingFlats:
        owner = segments[0].owner or 0
        room = (torch.empty(s.size, dtype=x.dtype, device=x.device) for s, x in zip(segments, shards, strict=True))
        whole = [x.detach() for x in shards] if group.rank == owner else list(room)  # shards may be on the host
        return start(comm.broadcast, whole, owner, group)

    def _next_level(self, level: comm.Group, out: Flats | None) -> Callable[[Any], "comm.Pending[Any]"]:
        return lambda payload: self._all_gather(payload, level.channel("gather"), out)

    def _all_gather(self, payload: Any, group: comm.Group, out: Flats | None) -> "comm.Pending[Any]":
        gather = self.config.all_gather
        plain = gather.collective if isinstance(gather, Compressed) else gather
        room = {} if out is None else {"out": out}
        return start(plain, payload, group, **room)

    def _encoded(self, shards: Flats) -> Any:
        gather = self.config.all_gather
        if not isinstance(gather, Compressed):
            return shards
        return [list(encode_leaf(gather.codec, shard.view(1, -1))) for shard in shards]  # [m] -> parts of one row

    def _decoded(self, payload: Any, segments: Sequence[Segment], like: Sequence[Tensor]) -> Flats:
        gather = self.config.all_gather
        if not isinstance(gather, Compressed):
            return list(payload)
        return [
            decode_leaf(gather.codec, parts, segment.shard, shard.dtype).reshape(-1)  # [n, m] -> [n * m]
            for parts, segment, shard in zip(payload, segments, like, strict=True)
        ]

    # -- gradients -----------------------------------------------------------------------------------------------------

    def reduce(self, segments: Sequence[Segment], flats: Sequence[Tensor]) -> PendingFlats:
        """Sums gradients over the group, level by level.

        Args:
            segments: of the gradients, all of one unit.
            flats: this rank's gradients, ``[segment.size]``.

        Returns:
            Pending: this rank's shards of the sums, ``[segment.shard]``; in stage 0 whole sums over all ranks.
        """
        flats = [*map(self.to_comm_dtype, flats)]
        groups = self.groups.among(segments[0].sharers)
        if self.config.stage == 0:
            return self._reduce_whole(flats, groups)
        if not groups.levels:
            return comm.Pending.of(flats)
        if segments[0].owner is not None:
            return self._reduce_to_owner(flats, segments[0].owner, groups.shards)
        if self.config.aggregate == "all_reduce":
            return self._all_reduce_and_shard(segments, flats, groups.shards)
        first, *rest = reversed(groups.levels)
        later = (lambda pieces, level=level: self._scatter(pieces, level) for level in rest)
        return self._chain(self._scatter(flats, first), *later, device=flats[0].device)

    def alone(self, segment: Segment) -> bool:
        """Whether no other rank has gradients of a segment."""
        replicas = self.groups.replicas
        return not self.groups.among(segment.sharers).levels and (replicas is None or replicas.size == 1)

    def replicate(
        self, segments: Sequence[Segment], shards: PendingFlats, added: Callable[[Flats], Flats], device: torch.device
    ) -> PendingFlats:
        """Sums ``added(shards)`` over the replicas.

        Args:
            segments: of the gradients, all of one unit.
            shards: what ``reduce`` returned.
            added: adds the shards of earlier micro-batches.
            device: of the gradients.
        """
        replicas = self.groups.replicas
        if self.config.stage == 0 or replicas is None or replicas.size == 1:
            return shards.then(added)
        if segments[0].owner not in (None, segments[0].place(self.groups.shards.rank)):
            return shards.then(added)
        later = lambda gathered: start(comm.all_reduce, added(gathered), _channel(replicas), donate=True)  # noqa: E731
        return self._chain(shards, later, device=device)

    def _reduce_whole(self, flats: Flats, groups: ProcessGroups) -> PendingFlats:
        """Stage 0. Each rank of a group sends only its shard of the sum to the other replicas."""
        group, replicas, all_reduce = groups.group, groups.replicas, self._in_place
        if replicas is None or replicas.size == 1 or group.size == 1:
            return all_reduce(flats, _channel(group if replicas is None or replicas.size == 1 else replicas))
        rows = [flat.view(group.size, -1) for flat in flats]  # [n * m] -> [n, m]
        return self._chain(
            start(comm.reduce_scatter, rows, _channel(group), tiled=False),
            lambda pieces: all_reduce(pieces, _channel(replicas)),
            lambda pieces: start(comm.all_gather, pieces, group.channel("return")),  # starts at its own time
            device=rows[0].device,
        )

    def _chain(
        self, first: "comm.Pending[Any]", *rest: "Callable[[Any], comm.Pending[Any]]", device: torch.device
    ) -> PendingFlats:
        """Chains reductions: all of a rank's reductions share one lane, those of pipeline stages included."""
        return relay(first, *rest, lane=_channel(self.groups.shards), device=device)

    def _reduce_to_owner(self, flats: Flats, owner: int, group: comm.Group) -> PendingFlats:
        pending = start(comm.reduce, flats, owner, _channel(group))
        return pending.then(lambda sums: [total if group.rank == owner else total.new_empty(0) for total in sums])

    def _all_reduce_and_shard(self, segments: Sequence[Segment], flats: Flats, group: comm.Group) -> PendingFlats:
        pending = self._in_place(flats, _channel(group))
        return pending.then(
            lambda sums: [total[slice(*s.bounds(group.rank))].clone() for total, s in zip(sums, segments, strict=True)]
        )

    def _in_place(self, flats: Flats, group: comm.Group) -> PendingFlats:
        """The sums over a group, in the gradients' memory if the collective is comm's own."""
        room = {"donate": True} if self.config.all_reduce is comm.all_reduce else {}
        return start(self.config.all_reduce, flats, group, **room)

    def _scatter(self, flats: Sequence[Tensor], level: comm.Group) -> PendingFlats:
        rows = [flat.view(level.size, -1) for flat in flats]  # [k * m] -> [k, m]
        return start(self.config.reduce_scatter, rows, _channel(level), tiled=False)

    def to_comm_dtype(self, flat: Tensor) -> Tensor:
        """Casts gradients, and divides them in the wider of the two dtypes."""
        dtype, factor = self.comm_dtype(flat.dtype), self.config.gradient_predivide_factor
        if factor != 1:
            flat = flat.to(torch.promote_types(flat.dtype, dtype)) / factor
        return flat if flat.dtype == dtype else flat.to(dtype)


def _channel(level: comm.Group) -> comm.Group:
    return level.channel("reduce")


def _numbered(index: int, flats: Flats) -> tuple[int, Tensor]:
    return index, flats[0]


def _written(out: Flats | None, flats: Flats) -> Flats:
    """The tensors, copied into ``out`` if it is given."""
    if out is None:
        return flats
    return [room if room is flat else room.copy_(flat) for room, flat in zip(out, flats, strict=True)]
