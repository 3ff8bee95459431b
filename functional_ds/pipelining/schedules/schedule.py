"""``Schedule``: for each rank its actions in order, and which rank holds which stage."""

import itertools
from collections.abc import Iterable, Iterator, Sequence
from numbers import Integral
from typing import Any, Literal

import attrs
import numpy as np

from functional_ds.comm.record.notebook import html_text

from .action import COMPUTE, MESSAGES, Action, Codes, Kind, kinds, microbatches, packed, unpack

_SHOWN_ROWS, _SHOWN_ACTIONS = 16, 24


class ScheduleError(ValueError):
    """Raised for a schedule that cannot run.

    Attributes:
        why: what is wrong with the action.
        action: the first offending action.
        rank: the rank in whose row it is, or is missing.
        place: its place in the row; None if it is missing.
    """

    def __init__(self, why: str, action: Action, rank: int, place: int | None = None) -> None:
        super().__init__(why, action, rank, place)  # unpickling calls the class with these
        self.why, self.action, self.rank, self.place = why, action, rank, place

    @staticmethod
    def at(row: Codes, place: int, why: str, *, rank: int) -> "ScheduleError":
        """The error for the action at a place of a rank's row."""
        return ScheduleError(why, unpack(row[place : place + 1])[0], rank, int(place))

    def __str__(self) -> str:
        where = f"rank {self.rank}" if self.place is None else f"rank {self.rank}, place {self.place}"
        return f"{where}: {self.action} {self.why}"


def _frozen(rows: Iterable[Any]) -> tuple[Codes, ...]:
    frozen = tuple(np.ascontiguousarray(row, np.int64) for row in rows)
    for row in frozen:
        row.flags.writeable = False
    return frozen


def _numbers(placement: Iterable[int]) -> tuple[int, ...]:
    return tuple(int(rank) for rank in placement)


def _count(microbatches: Any) -> int:
    if not isinstance(microbatches, Integral):
        raise TypeError(f"microbatches={microbatches!r}: how many there are is an int")
    return int(microbatches)


@attrs.frozen(eq=False, repr=False)
class Schedule:
    """A pipeline schedule: each rank's actions in order, as data to print, compare, validate and cost before anything runs.

    Law: two schedules are equal if their rows, placements and numbers of micro-batches are.

    Attributes:
        codes: each rank's actions, packed; ``schedule[rank]`` unpacks them.
        placement: the rank that holds each stage.
        microbatches: the number of micro-batches.

    >>> mine = Schedule.of(["0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1"])
    >>> print(mine)
    2 stages on 2 ranks, 2 micro-batches
    rank 0: 0F0 0F1 0B0 0B1
    rank 1: 1F0 1B0 1F1 1B1
    >>> mine[1][:2], mine.placement, mine.microbatches
    ((1F0, 1B0), (0, 1), 2)
    """

    codes: tuple[Codes, ...] = attrs.field(converter=_frozen)
    placement: tuple[int, ...] = attrs.field(converter=_numbers)
    microbatches: int = attrs.field(converter=_count)

    def __attrs_post_init__(self) -> None:
        if not self.codes or not self.placement or self.microbatches < 1:
            raise ValueError(
                f"{len(self.codes)} ranks, {len(self.placement)} stages, {self.microbatches} micro-batches: a schedule has at "
                "least one of each"
            )
        check_placement(self.placement, len(self.codes))

    @staticmethod
    def of(
        rows: Sequence[str | Iterable[Action | str]],
        placement: Sequence[int] | None = None,
        microbatches: int | None = None,
    ) -> "Schedule":
        """A schedule from written rows.

        Args:
            rows: each rank's actions in order: a string such as ``"0F0 0B0"``, or a sequence of actions or strings.
            placement: the rank that holds each stage; by default the rank with the stage's first compute action.
            microbatches: the number of micro-batches; by default as many as the rows name.

        Raises:
            ValueError: a text is not an action; a stage is in no row, and no placement was given.
        """
        listed = [row.split() if isinstance(row, str) else row for row in rows]
        made = [[Action.of(cell) if isinstance(cell, str) else cell for cell in row] for row in listed]
        if placement is None:
            placement = _placement(made)
        if microbatches is None:
            microbatches = 1 + max((action.microbatch for row in made for action in row), default=0)
        return Schedule([packed(row) for row in made], placement, max(1, microbatches))

    @property
    def ranks(self) -> int:
        """The number of ranks."""
        return len(self.codes)

    @property
    def stages(self) -> int:
        """The number of stages."""
        return len(self.placement)

    @property
    def actions(self) -> tuple[tuple[Action, ...], ...]:
        """Every rank's actions. In a large schedule, look at single ranks instead."""
        return tuple(self[rank] for rank in range(self.ranks))

    @property
    def lowered(self) -> bool:
        """Whether a row has an action other than compute actions."""
        return any(bool((kinds(row) > max(COMPUTE)).any()) for row in self.codes)

    def has(self, *some: Kind) -> bool:
        """Whether a row has an action of one of these kinds."""
        return any(bool(np.isin(kinds(row), some).any()) for row in self.codes)

    def __getitem__(self, rank: int) -> tuple[Action, ...]:
        return unpack(self.codes[rank])

    def __len__(self) -> int:
        return self.ranks

    def __iter__(self) -> Iterator[tuple[Action, ...]]:
        return (self[rank] for rank in range(self.ranks))

    def steps(self, rank: int) -> Iterator[tuple[Action, ...]]:
        """A rank's steps for an executor: adjacent sends and receives are one step, any other action is one.

        An executor starts all messages of a step before it waits for one.

        >>> lowered = Schedule.of(["0F0 0SEND_F0 0RECV_B0 0B0", "1RECV_F0 1F0 1B0 1SEND_B0"])
        >>> list(lowered.steps(0))
        [(0F0,), (0SEND_F0, 0RECV_B0), (0B0,)]
        """
        for are_messages, adjacent in itertools.groupby(self[rank], lambda action: action.kind in MESSAGES):
            actions = tuple(adjacent)
            yield from [actions] if are_messages else ((action,) for action in actions)

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """The stages that a rank holds, ascending."""
        return tuple(stage for stage, holder in enumerate(self.placement) if holder == rank)

    def compute_only(self) -> "Schedule":
        """The compute actions only.

        Law: ``lower(s).compute_only() == s`` for a schedule of compute actions.
        """
        return attrs.evolve(self, codes=[row[kinds(row) <= max(COMPUTE)] for row in self.codes])

    def only_forward(self) -> "Schedule":
        """The forwards only, for evaluation.

        >>> Schedule.of(["0F0 0F1 0B0 0B1"]).only_forward()[0]
        (0F0, 0F1)
        """
        return attrs.evolve(self, codes=[row[kinds(row) == Kind.F] for row in self.codes])

    def first(self, count: int) -> "Schedule":
        """The actions of the first ``count`` micro-batches, and all gathers, evictions and reductions.

        >>> Schedule.of(["0F0 0F1 0F2"]).first(2)[0]
        (0F0, 0F1)
        """
        rows = [row[microbatches(row) < count] for row in self.codes]
        return attrs.evolve(self, codes=rows, microbatches=count)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Schedule):
            return NotImplemented
        return (
            self.microbatches == other.microbatches
            and self.placement == other.placement
            and all(map(np.array_equal, self.codes, other.codes))
        )

    def __hash__(self) -> int:
        return hash((self.microbatches, self.placement, self.codes[0].tobytes()))

    def __str__(self) -> str:
        lines = [f"{self.stages} stages on {self.ranks} ranks, {self.microbatches} micro-batches"]
        for rank, row in enumerate(self.codes[:_SHOWN_ROWS]):
            more = f" ... and {len(row) - _SHOWN_ACTIONS} more" if len(row) > _SHOWN_ACTIONS else ""
            lines.append(f"rank {rank}: " + " ".join(map(str, unpack(row[:_SHOWN_ACTIONS]))) + more)
        if self.ranks > _SHOWN_ROWS:
            lines.append(f"... and {self.ranks - _SHOWN_ROWS} more ranks")
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        return html_text(self)

    def __repr__(self) -> str:
        count = sum(map(len, self.codes))
        return f"<Schedule: {self.stages} stages on {self.ranks} ranks, {self.microbatches} micro-batches, {count} actions>"


def _placement(rows: Sequence[Sequence[Action]]) -> tuple[int, ...]:
    holder: dict[int, int] = {}
    for rank, row in enumerate(rows):
        for action in row:
            if action.kind in COMPUTE:
                holder.setdefault(action.stage, rank)
    count = 1 + max(holder, default=-1)
    for stage in range(count):
        if stage not in holder:
            raise ValueError(f"stage {stage} of {count} is in no rank's row; add its actions, or pass placement=")
    return tuple(holder[stage] for stage in range(count))


def check_placement(placement: Sequence[int], ranks: int) -> None:
    """Raises an error for a placement on ranks that do not exist."""
    for stage, rank in enumerate(placement):
        if not 0 <= rank < ranks:
            raise ValueError(f"placement puts stage {stage} on rank {rank}; there are {ranks}, counted from 0")


def stage_to_rank(ranks: int, chunks: int = 1, style: Literal["loop", "v"] = "loop") -> tuple[int, ...]:
    """The rank of each of ``ranks * chunks`` stages.

    Args:
        ranks: the number of ranks.
        chunks: stages on each rank.
        style: ``loop``: stage s is on rank s mod ranks, as for interleaved schedules. ``v``: down the ranks and up again, so
            that the last rank holds two neighbouring stages and sends nothing between them.

    Raises:
        ValueError: fewer than one rank or chunk, or an unknown style.

    >>> stage_to_rank(3, 2), stage_to_rank(3, 2, "v")
    ((0, 1, 2, 0, 1, 2), (0, 1, 2, 2, 1, 0))
    """
    if ranks < 1 or chunks < 1:
        raise ValueError(f"ranks={ranks}, chunks={chunks}: there is at least one of each")
    if style not in ("loop", "v"):
        raise ValueError(f"style={style!r} is unknown; use 'loop' or 'v'")
    way = list(range(ranks))
    return tuple(rank for chunk in range(chunks) for rank in (way[::-1] if style == "v" and chunk % 2 else way))
