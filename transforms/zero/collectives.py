"""How a unit's flat tensors travel: gathered from shards, and reduced to them, in one hop or several."""

from collections.abc import Callable, Sequence
from typing import Any

import attrs
import torch
from torch import Tensor

from functional_ds import comm
from functional_ds.base.marks import like_marked
from functional_ds.comm.compression.compressed import Compressed, decode_leaf, encode_leaf
from functional_ds.comm.record.pending import relay
from functional_ds.sharding.layout import Segment

from .config import Knobs
from .process_groups import Ranks

__all__ = ["Carriage"]

Flats = list[Tensor]


@attrs.frozen(eq=False)
class Carriage:
    """What moves params and gradients between ranks.

    | knobs | params | gradients |
    |---|---|---|
    | stage 0 | never | AR; with replicas ``AG_group ∘ AR_replicas ∘ RS_group`` (law 14) |
    | aggregate="reduce_scatter" | ``AG_inside ∘ AG_across`` | ``AR_replicas ∘ RS_across ∘ RS_inside`` |
    | aggregate="all_reduce" | the same | AR over the group, of which each rank takes its shard |
    | aggregate="owner" | broadcast from the owner | reduce to the owner |

    A codec encodes params once, whatever the number of hops, so that what is lost does not depend on them; gradients are
    summed after each hop, and encoded anew.

    Attributes:
        ranks: who takes part.
        knobs: how.
        wire: in which dtype gradients of a dtype travel.
    """

    ranks: Ranks
    knobs: Knobs
    wire: Callable[[torch.dtype], torch.dtype] = lambda dtype: dtype

    @staticmethod
    def plain(group: comm.Group) -> "Carriage":
        """Over one group, with nothing chosen."""
        return Carriage(Ranks.of(group), Knobs(stage=3))

    # -- params --------------------------------------------------------------------------------------------------------

    def gather(self, segments: Sequence[Segment], shards: Sequence[Tensor], across: "comm.Pending[Any] | None" = None) -> Any:
        """A pending list of flat tensors, from this rank's shards of them.

        Args:
            segments: how the tensors lie; all of one unit.
            shards: this rank's shard of each, ``[segment.shard]``.
            across: what ``gather_across`` gave for them, not to send that again.
        """
        if segments[0].owner is not None:
            return self._broadcast(segments, shards)
        if not self.ranks.hops:  # one rank's are whole, wherever they are
            found = [shard.detach() for shard in shards]
            return comm.Pending(lambda: found, lambda patience: True, lambda: "a gather of one rank's")
        first = self.gather_across(shards) if across is None else across
        return relay(first, *map(self._hop, self.ranks.hops[1:])).then(lambda found: self._decoded(found, segments, shards))

    def gather_across(self, shards: Sequence[Tensor]) -> "comm.Pending[Any]":
        """The first hop alone; one such result serves any number of gathers."""
        return self._gathered(self._encoded([shard.detach() for shard in shards]), self.ranks.hops[0])  # type: ignore[no-any-return]

    def gather_all(self, segments: Sequence[Segment], stored: Sequence[Tensor], which: Sequence[int]) -> Flats:
        """The stored tensors with those in ``which`` whole again; the next are under way while one is waited for."""
        whole = list(stored)
        del stored
        pending: list[tuple[int, Any]] = []
        for i in [*which, None, None]:
            if i is not None and (self.ranks.hops or segments[i].owner is not None):
                pending.append((i, self.gather([segments[i]], [whole[i]])))
            if pending and (i is None or len(pending) > 2):
                j, gathered = pending.pop(0)
                whole[j] = like_marked(gathered.wait()[0], whole[j])
        return whole

    def _broadcast(self, segments: Sequence[Segment], shards: Sequence[Tensor]) -> Any:
        group, owner = self.ranks.shards, segments[0].owner or 0
        own = group.rank == owner
        whole = [x.detach() if own else x.new_empty(s.size) for s, x in zip(segments, shards, strict=True)]
        return comm.broadcast(whole, owner, group, async_op=True)

    def _hop(self, level: comm.Group) -> Callable[[Any], Any]:
        return lambda payload: self._gathered(payload, level)

    def _gathered(self, payload: Any, level: comm.Group) -> Any:
        gather = self.knobs.all_gather
        plain = gather.collective if isinstance(gather, Compressed) else gather
        return plain(payload, level, async_op=True)

    def _encoded(self, shards: Flats) -> Any:
        gather = self.knobs.all_gather
        if not isinstance(gather, Compressed):
            return shards
        return [list(encode_leaf(gather.codec, shard.view(1, -1))) for shard in shards]  # [m] -> parts of one row

    def _decoded(self, payload: Any, segments: Sequence[Segment], like: Sequence[Tensor]) -> Flats:
        gather = self.knobs.all_gather
        if not isinstance(gather, Compressed):
            return list(payload)
        found = []
        for parts, segment, shard in zip(payload, segments, like, strict=True):
            found.append(decode_leaf(gather.codec, parts, segment.shard, shard.dtype).reshape(-1))  # [n, m] -> [n * m]
        return found

    # -- gradients -----------------------------------------------------------------------------------------------------

    def reduce(self, segments: Sequence[Segment], flats: Sequence[Tensor]) -> Any:
        """A pending list of this rank's shards of the sums over the group (stage 0: of the whole sums over all ranks)."""
        flats = [self._onto_wire(flat) for flat in flats]
        if self.knobs.stage == 0:
            return self._reduce_whole(segments, flats)
        if self.ranks.n == 1:
            return comm.Pending(lambda: flats, lambda patience: True, lambda: "a reduction of one rank's")
        if segments[0].owner is not None:
            return self._reduce_to_owner(segments, flats)
        if self.knobs.aggregate == "all_reduce":
            return self.knobs.all_reduce(flats, self._channel(self.ranks.shards), async_op=True).then(
                lambda sums: [
                    total[slice(*s.cut(self.ranks.shards.rank))].clone() for total, s in zip(sums, segments, strict=True)
                ]
            )
        first, *rest = reversed(self.ranks.hops)
        return relay(self._scatter(flats, first), *(lambda pieces, level=level: self._scatter(pieces, level) for level in rest))

    def replicate(self, segments: Sequence[Segment], shards: Sequence[Tensor]) -> Any:
        """A pending list of the sums over the replicas."""
        replicas = self.ranks.replicas
        if replicas is None or replicas.size == 1 or segments[0].owner not in (None, self.ranks.shards.rank):
            return comm.Pending(lambda: list(shards), lambda patience: True, lambda: "a reduction of one rank's")
        return comm.all_reduce(list(shards), self._channel(replicas), async_op=True)

    def _reduce_whole(self, segments: Sequence[Segment], flats: Flats) -> Any:
        """Stage 0. Between replicas only what a rank has of the sum travels."""
        group, replicas = self.ranks.group, self.ranks.replicas
        if replicas is None or replicas.size == 1 or group.size == 1:
            level = group if replicas is None or replicas.size == 1 else replicas
            if level.size == 1:
                return comm.Pending(lambda: flats, lambda patience: True, lambda: "a reduction of one rank's")
            return self.knobs.all_reduce(flats, self._channel(level), async_op=True)
        between, inner = self._channel(replicas), self._channel(group)
        rows = [flat.view(group.size, -1) for flat in flats]  # [n * m] -> [n, m]
        return relay(
            comm.reduce_scatter(rows, inner, tiled=False, async_op=True),
            lambda pieces: self.knobs.all_reduce(pieces, between, async_op=True),
            lambda pieces: comm.all_gather(pieces, group.channel("return"), async_op=True),  # each hop keeps its own order
        )

    def _reduce_to_owner(self, segments: Sequence[Segment], flats: Flats) -> Any:
        group, owner = self.ranks.shards, segments[0].owner or 0
        pending = comm.reduce(flats, owner, self._channel(group), async_op=True)
        return pending.then(lambda sums: [total if group.rank == owner else total.new_empty(0) for total in sums])

    def _scatter(self, flats: Sequence[Tensor], level: comm.Group) -> Any:
        rows = [flat.view(level.size, -1) for flat in flats]  # [k * m] -> [k, m]
        return self.knobs.reduce_scatter(rows, self._channel(level), tiled=False, async_op=True)

    def _channel(self, level: comm.Group) -> comm.Group:
        """Reductions keep no order with gathers."""
        return level.channel("reduce")

    def _onto_wire(self, flat: Tensor) -> Tensor:
        """Cast and divided, in the wider of the two dtypes."""
        dtype = self.wire(flat.dtype)
        if self.knobs.predivide != 1:
            flat = flat.to(torch.promote_types(flat.dtype, dtype)) / self.knobs.predivide
        return flat.to(dtype)
