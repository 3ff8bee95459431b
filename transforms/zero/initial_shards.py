"""The initial shards that each rank stores, from the first rank's params."""

from functools import partial

import attrs
from torch import Tensor

from functional_ds.base.torch_private import detect_fake_mode
from functional_ds.sharding.layout import Layout
from functional_ds.sharding.segment import Segment
from functional_ds.sharding.sources import home, is_deferred

from .process_groups import ProcessGroups


@attrs.frozen(eq=False)
class InitialShards:
    """Makes what this rank stores of the initial params, on the device where it is stored.

    Attributes:
        layout: the segments.
        leaves: this rank's params; the first rank's are used.
        groups: of this rank.
        whole: whether it stores whole segments, or its shards.
    """

    layout: Layout
    leaves: list[Tensor]
    groups: ProcessGroups
    whole: bool

    def shard(self, index: int) -> Tensor:
        """What this rank stores of a segment: a deferred leaf, where the params have values."""
        segment = self.layout.segments[index]
        start, stop = self._cut(segment)
        if home(self.leaves[segment.slots[0].leaf]).type == "meta" or detect_fake_mode() is not None:
            return self.read(str(index), 0, stop - start)
        return self.layout.deferred(self.leaves, index, stop - start, self)

    def read(self, path: str, start: int, stop: int) -> Tensor:
        """Elements of this rank's part of the segment with that number."""
        segment = self.layout.segments[int(path)]
        first, _ = self._cut(segment)
        bring = partial(_of_first, groups=self.groups.among(segment.sharers))
        return self.layout.stretch(self.leaves, int(path), first + start, first + stop, bring)

    def _cut(self, segment: Segment) -> tuple[int, int]:
        return (0, segment.size) if self.whole else segment.cut(self.groups.shards.rank)


def _of_first(leaf: Tensor, groups: ProcessGroups) -> Tensor:
    """The leaf of the first rank that shares it; every rank reads deferred ones itself."""
    return leaf if is_deferred(leaf) else groups.broadcast(leaf.detach())
