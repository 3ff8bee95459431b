"""Error messages for deadlocks and unmatched calls of simulated ranks."""

from collections.abc import Collection, Iterable, Mapping
from typing import Protocol


class Awaited(Protocol):
    """A collective, or a chain of them, that a rank or one of its lanes can wait for."""

    @property
    def done(self) -> bool: ...

    def awaited(self, rank: int) -> str:
        """Describes the call that the rank waits in, and the ranks that it waits for."""


def deadlock(world_size: int, unfinished: Collection[int], waiting: Mapping[int, Awaited], lanes: Mapping[int, int]) -> str:
    """Describes the state of every rank: finished, or the call that it waits in and the ranks that it waits for.

    Args:
        world_size: the number of ranks.
        unfinished: the ranks that have not finished.
        waiting: the call that each rank and lane waits for.
        lanes: the rank of each lane.
    """
    lines = ["deadlock: no rank can proceed"]
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
    """Describes calls that some ranks have started and others have not made."""
    stories = [f"  rank {rank} started {call.awaited(rank)}" for call, ranks in calls for rank in ranks]
    return "\n".join(["all ranks have finished, but some never came to what others started", *sorted(stories)])
