"""What ranks of a simulation wait for, told where none can go on, or where some never came to what others have started."""

from collections.abc import Collection, Iterable, Mapping
from typing import Protocol

__all__ = ["Awaited", "deadlock", "unmatched"]


class Awaited(Protocol):
    """What a rank, or a lane of one, can wait for: a collective or a chain of them."""

    @property
    def done(self) -> bool: ...

    def awaited(self, rank: int) -> str:
        """What the rank waits for, and whom, in words."""


def deadlock(world_size: int, unfinished: Collection[int], waiting: Mapping[int, Awaited], lanes: Mapping[int, int]) -> str:
    """The state of every rank: finished, or the call that it waits in and the ranks that it waits for.

    Args:
        world_size: how many ranks there are.
        unfinished: those that go on.
        waiting: what each waits for, and each lane.
        lanes: the rank beside whose program each lane works.
    """
    lines = ["deadlock: no rank can go on"]
    for rank in range(world_size):
        if rank not in unfinished:
            lines.append(f"  rank {rank} has finished")
        elif rank in waiting:
            lines.append(f"  rank {rank} waits in {waiting[rank].awaited(rank)}")
    for actor, rank in lanes.items():
        if actor in waiting:
            lines.append(f"  rank {rank}, beside its program, waits in {waiting[actor].awaited(rank)}")
    return "\n".join(lines)


def unmatched(calls: Iterable[tuple[Awaited, Iterable[int]]]) -> str:
    """Calls that some ranks have started, that no rank waited for and that are not complete."""
    stories = [f"  rank {rank} started {call.awaited(rank)}" for call, ranks in calls for rank in ranks]
    return "\n".join(["all ranks have finished, but some never came to what others started", *sorted(stories)])
