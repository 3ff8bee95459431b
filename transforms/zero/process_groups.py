"""Which ranks share what: shards over one group, perhaps in two levels, and replicas of them over another."""

from typing import Any

import attrs

from functional_ds import comm

__all__ = ["Ranks"]


@attrs.frozen(eq=False)
class Ranks:
    """The data-parallel ranks as one of them sees them.

    ```
    group      the ranks that cut a state into shards, in the order in which they share a batch
    inside     a block of consecutive ranks of it, such as a node's
    across     the ranks at this one's place in each block
    shards     the group's ranks in the order of their shards: this rank has shard ``inside.rank * across.size + across.rank``
    replicas   the ranks that have the same shard as this one
    ```

    With that order what comes across first lies side by side: ``AG_group = AG_inside ∘ AG_across``, without a copy.
    """

    group: comm.Group
    inside: comm.Group | None
    across: comm.Group | None
    shards: comm.Group
    replicas: comm.Group | None

    @staticmethod
    def of(group: comm.Group, inside: comm.Group | int | None = None, replicate: comm.Group | None = None) -> "Ranks":
        """The ranks of a group.

        Args:
            group: who cuts the state into shards.
            inside: how many consecutive ranks of it make a block, or this rank's block.
            replicate: the ranks that have the same shard as this one.

        Raises:
            ValueError: the group does not factor into such blocks; ``replicate`` shares more than this rank with it.

        >>> def program():
        ...     ranks = Ranks.of(comm.world(), 2)
        ...     return ranks.inside.ranks, ranks.across.ranks, ranks.shards.ranks
        >>> comm.simulate(program, world_size=6)[3]
        ((2, 3), (1, 3, 5), (0, 2, 4, 1, 3, 5))
        """
        if replicate is not None:
            _check_replicas(group, replicate)
        if inside is None:
            return Ranks(group, None, None, group, replicate)
        size = inside if isinstance(inside, int) else inside.size
        _check_block(group, inside, size)
        count, world = group.size // size, group.world
        first = group.rank // size * size
        block = world.group(group.ranks[first : first + size], f"{group.name}:inside") if isinstance(inside, int) else inside
        across = world.group(group.ranks[group.rank % size :: size], f"{group.name}:across")
        order = tuple(group.ranks[index % count * size + index // count] for index in range(group.size))
        shards = group if order == group.ranks else world.group(order, group.name)
        return Ranks(group, block, across, shards, replicate)

    @property
    def hops(self) -> tuple[comm.Group, ...]:
        """The groups over which a gather goes, in order; a reduction goes over them in the reverse order."""
        levels = (self.shards,) if self.inside is None or self.across is None else (self.across, self.inside)
        return tuple(level for level in levels if level.size > 1)

    @property
    def levels(self) -> int:
        """Over how many groups a gradient is reduced, one after the other."""
        return len(self.hops) + (self.copies > 1)

    @property
    def n(self) -> int:
        """How many shards there are."""
        return self.group.size

    @property
    def copies(self) -> int:
        """How many replicas there are."""
        return 1 if self.replicas is None else self.replicas.size

    @property
    def place(self) -> tuple[int, int]:
        """Which of how many equal parts of the batch this rank has."""
        row = 0 if self.replicas is None else self.replicas.rank
        return row * self.n + self.group.rank, self.copies * self.n

    def total(self, scalars: Any, *, op: str = "sum") -> Any:
        """Combined over all ranks: ``AR over G × H = AR_G ∘ AR_H`` (law 13)."""
        found = comm.all_reduce(scalars, self.group, op=op)
        return found if self.replicas is None else comm.all_reduce(found, self.replicas, op=op)

    def from_first(self, value: Any, channel: str = "") -> Any:
        """What the first rank of the first replica has, on every rank."""
        for level in (self.shards, self.replicas):
            if level is not None and level.size > 1:
                value = comm.broadcast(value, 0, level.channel(channel) if channel else level)
        return value

    def agree(self, layout: Any) -> None:
        """Checks that all ranks have the same layout, and that the groups form a grid.

        Raises:
            ValueError: they do not.
        """
        groups = [self.group] if self.replicas is None else [self.group, self.replicas]
        differ, mend = "other leaves, shapes, dtypes or frozen leaves", "build the same model on every rank"
        ranks = comm.agree(layout, *groups, what="params", differ=differ, mend=mend)
        if len(set(ranks)) != len(ranks) and not comm.is_symmetric(self.group):
            raise ValueError(
                f"replicate: the groups {self.group.name!r} and {getattr(self.replicas, 'name', None)!r} make no grid: "
                f"together their members name the ranks {ranks}; take two axes of one mesh"
            )

    def __str__(self) -> str:
        where = f"{self.group.name!r} of {self.n}"
        if self.inside is not None and self.across is not None:
            where += f" ({self.inside.name!r} of {self.inside.size}, {self.across.name!r} of {self.across.size})"
        return where + (f", replicated over {self.replicas.name!r} of {self.copies}" if self.replicas is not None else "")


def _check_block(group: comm.Group, inside: comm.Group | int, size: int) -> None:
    if isinstance(inside, int):
        if size < 1 or group.size % size:
            fits = ", ".join(str(d) for d in range(1, group.size + 1) if group.size % d == 0)
            raise ValueError(
                f"inside={inside}: group {group.name!r} of {group.size} does not factor into blocks of that; use {fits}"
            )
        return
    blocks = [group.ranks[start : start + size] for start in range(0, group.size, size)]
    if group.size % size or inside.ranks != blocks[group.rank // size]:
        raise ValueError(
            f"inside={inside!r}: group {group.name!r} of ranks {list(group.ranks)} does not factor into blocks of consecutive "
            "ranks of which this is one; name both axes, the outer one first: "
            "zero(3, mesh['inter', 'intra'], inside=mesh['intra'])"
        )


def _check_replicas(group: comm.Group, replicate: comm.Group) -> None:
    shared = set(group.ranks) & set(replicate.ranks)
    if shared != {group.ranks[group.rank]}:
        raise ValueError(
            f"replicate={replicate!r}: it shares ranks {sorted(shared)} with group {group.name!r}, over which the state is "
            "cut; the two may have this rank alone in common: zero(3, mesh['shard'], replicate=mesh['replica'])"
        )
