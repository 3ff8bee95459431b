"""Process groups of ZeRO: shards over one group, in one or two levels, and replicas of the shards over another."""

from functools import cached_property
from typing import Any, Protocol

import attrs
from torch import Tensor

from functional_ds import comm
from functional_ds.sharding.segment import Blocks


class GroupArguments(Protocol):
    """The arguments of ``zero`` that define its groups."""

    @property
    def group(self) -> comm.Group | None: ...

    @property
    def intra_node(self) -> comm.Group | int | None: ...

    @property
    def replicate(self) -> comm.Group | None: ...


@attrs.frozen(eq=False)
class ProcessGroups:
    """The groups of data-parallel ranks, as one rank sees them.

    ```
    group        the ranks that shard a state, in the order in which they share a batch
    intra_node   a block of consecutive ranks of the group, usually those of one node
    inter_node   the ranks that have this rank's place in their blocks
    shards       the group's ranks in the order of their shards: this rank has shard ``intra.rank * inter.size + inter.rank``
    replicas     the ranks that have the same shard as this one
    ```

    In that order a gather over ``inter_node`` gives neighbouring shards: ``AG_group = AG_intra ∘ AG_inter``, without a copy.
    """

    group: comm.Group
    intra_node: comm.Group | None
    inter_node: comm.Group | None
    shards: comm.Group
    replicas: comm.Group | None

    @staticmethod
    def by(arguments: GroupArguments) -> "ProcessGroups":
        """The groups of this rank; without ``group`` those of the current world."""
        return ProcessGroups.of(arguments.group or comm.world(), arguments.intra_node, arguments.replicate)

    @staticmethod
    def of(
        group: comm.Group, intra_node: comm.Group | int | None = None, replicate: comm.Group | None = None
    ) -> "ProcessGroups":
        """The groups that follow from the arguments of ``zero``.

        Args:
            group: the ranks that shard the state.
            intra_node: this rank's block, or how many consecutive ranks of the group make a block.
            replicate: the ranks that have the same shard as this one.

        Raises:
            ValueError: the group does not factor into such blocks, or ``replicate`` shares more than this rank with it.

        >>> def program():
        ...     groups = ProcessGroups.of(comm.world(), 2)
        ...     return groups.intra_node.ranks, groups.inter_node.ranks, groups.shards.ranks
        >>> comm.simulate(program, world_size=6)[3]
        ((2, 3), (1, 3, 5), (0, 2, 4, 1, 3, 5))
        """
        if replicate is not None:
            _check_replicas(group, replicate)
        if intra_node is None:
            return ProcessGroups(group, None, None, group, replicate)
        size = intra_node if isinstance(intra_node, int) else intra_node.size
        _check_block(group, intra_node, size)
        count, world = group.size // size, group.world
        first = group.rank // size * size
        block = intra_node
        if isinstance(block, int):
            block = world.group(group.ranks[first : first + size], f"{group.name}:intra_node")
        inter_node = world.group(group.ranks[group.rank % size :: size], f"{group.name}:inter_node")
        order = tuple(group.ranks[index % count * size + index // count] for index in range(group.size))
        shards = group if order == group.ranks else world.group(order, group.name)
        return ProcessGroups(group, block, inter_node, shards, replicate)

    def among(self, sharers: Blocks | None) -> "ProcessGroups":
        """The groups over which leaves with these sharers are gathered and reduced: this rank's block, in one level.

        Args:
            sharers: the blocks of shards, as in ``Segment.sharers``; None for leaves that all ranks share.
        """
        if sharers is None:
            return self
        block = next(block for block in sharers if self.shards.rank in block)
        ranks = [self.shards.ranks[place] for place in block]
        group = self.group.world.group(ranks, f"{self.group.name}:sharers")
        return ProcessGroups(group, None, None, group, self.replicas)

    @cached_property
    def levels(self) -> tuple[comm.Group, ...]:
        """The groups of a hierarchical gather, in order; a reduction takes them in reverse order."""
        levels = (self.shards,) if self.intra_node is None or self.inter_node is None else (self.inter_node, self.intra_node)
        return tuple(level for level in levels if level.size > 1)

    @property
    def n(self) -> int:
        """How many shards there are."""
        return self.group.size

    def broadcast(self, value: Any, channel: str = "") -> Any:
        """The value of the first rank of the first replica, on every rank."""
        for level in (self.shards, self.replicas):
            if level is not None and level.size > 1:
                value = comm.broadcast(value, 0, level.channel(channel) if channel else level)
        return value

    def any_rank(self, flags: Tensor) -> Tensor:
        """The largest of all ranks' values, on every rank."""
        for level in (self.shards, self.replicas):
            if level is not None and level.size > 1:
                flags = comm.all_reduce(flags, level.channel("control"), op="max")
        return flags

    def check_agreement(self, layout: Any) -> None:
        """Checks that all ranks have the same layout, and that the groups form a grid.

        Raises:
            ValueError: they do not.
        """
        groups = [self.group] if self.replicas is None else [self.group, self.replicas]
        differ, mend = "other leaves, shapes, dtypes or frozen leaves", "build the same model on every rank"
        ranks = comm.agree(layout, *groups, what="params", differ=differ, mend=mend)
        if len(set(ranks)) != len(ranks) and self.group.channel("control").world.has_peers:
            raise ValueError(
                f"replicate: the groups {self.group.name!r} and {getattr(self.replicas, 'name', None)!r} make no grid: "
                f"together their members name the ranks {ranks}; take two axes of one mesh"
            )


def _check_block(group: comm.Group, intra_node: comm.Group | int, size: int) -> None:
    if isinstance(intra_node, int):
        if size < 1 or group.size % size:
            fits = ", ".join(str(d) for d in range(1, group.size + 1) if group.size % d == 0)
            raise ValueError(
                f"intra_node={intra_node}: group {group.name!r} of {group.size} does not factor into blocks of that; use {fits}"
            )
        return
    blocks = [group.ranks[start : start + size] for start in range(0, group.size, size)]
    if group.size % size or intra_node.ranks != blocks[group.rank // size]:
        raise ValueError(
            f"intra_node={intra_node!r}: group {group.name!r} of ranks {list(group.ranks)} does not factor into blocks of "
            "consecutive ranks of which this is one; name both axes, the outer one first: "
            "zero(3, mesh['inter', 'intra'], intra_node=mesh['intra'])"
        )


def _check_replicas(group: comm.Group, replicate: comm.Group) -> None:
    shared = set(group.ranks) & set(replicate.ranks)
    if shared != {group.ranks[group.rank]}:
        raise ValueError(
            f"replicate={replicate!r}: it shares ranks {sorted(shared)} with group {group.name!r}, over which the state is "
            "sharded; the two may have this rank alone in common: zero(3, mesh['shard'], replicate=mesh['replica'])"
        )
