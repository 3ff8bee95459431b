"""Which rank is to blame, and what all were doing."""

from collections.abc import Mapping
from time import monotonic

import attrs

from .beats import Seen

__all__ = ["Hang", "report"]

_FINISHED = "finished"


@attrs.frozen
class Hang:
    """What is wrong, in words, and with which ranks."""

    story: str
    ranks: tuple[int, ...]

    @staticmethod
    def found(seen: Mapping[int, Seen], timeout: float, *, silent: float, grace: float) -> "Hang | None":
        """What is wrong by now: who is silent, who raised and took no one along, in whom nothing moves."""
        now = monotonic()
        there = {rank: one for rank, one in seen.items() if not one.beat.left}
        stands = any(now - one.moved > timeout for one in there.values())
        quiet = grace if stands else silent  # who is silent hangs in nothing
        dead = tuple(rank for rank, one in there.items() if now - one.fresh > quiet)
        if dead:
            longest = max(now - there[rank].fresh for rank in dead)
            return Hang(f"{_ranks(dead)} died, is stopped, or cannot be reached: silent for {longest:.1f} s", dead)
        raised = _raised(seen)
        gone = tuple(rank for rank in raised if there and now - seen[rank].fresh > grace)
        if gone:
            return Hang(f"{_ranks(gone)} {seen[gone[0]].beat.left}", gone)
        if not stands:
            return None
        # The others wait for those that are in no collective. They stopped at about the same time.
        stuck = {rank: one for rank, one in there.items() if now - one.moved > timeout / 2}
        elsewhere = tuple(rank for rank, one in stuck.items() if not one.beat.call)
        return Hang(
            f"{_ranks(elsewhere or tuple(stuck))} hangs: nothing has moved for {timeout:.1f} s", elsewhere or tuple(stuck)
        )

    @staticmethod
    def blamed(seen: Mapping[int, Seen], rank: int, *, silent: float) -> "Hang | None":
        """Over whom this rank's collective has failed: who has been silent so long, or else raised something of its own."""
        now = monotonic()
        dead = tuple(r for r, one in seen.items() if r != rank and not one.beat.left and now - one.fresh > silent)
        if dead:
            return Hang(f"{_ranks(dead)} died, is stopped, or cannot be reached", dead)
        raised = tuple(r for r in _raised(seen) if r != rank)
        return Hang(f"{_ranks(raised)} {seen[raised[0]].beat.left}", raised) if raised else None


def _raised(seen: Mapping[int, Seen]) -> tuple[int, ...]:
    return tuple(rank for rank, one in seen.items() if one.beat.left not in ("", _FINISHED))


def report(hang: Hang, seen: Mapping[int, Seen]) -> str:
    """The story, and a line for each rank."""
    now = monotonic()
    lines = [hang.story]
    for rank, one in sorted(seen.items()):
        mark = "* " if rank in hang.ranks else "  "
        lines.append(f"{mark}rank {rank}, for {now - one.moved:.1f} s: {one.beat}; heard {now - one.fresh:.1f} s ago")
    return "\n".join(lines)


def _ranks(ranks: tuple[int, ...]) -> str:
    return f"rank {', '.join(map(str, ranks))}"
