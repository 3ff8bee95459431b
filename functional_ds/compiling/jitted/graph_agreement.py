"""Checks that ranks can run their graphs together: equal collectives, in orders that cannot deadlock."""

import zlib
from collections.abc import Sequence
from typing import Any

import attrs
from torch import fx

from functional_ds.comm.record.group import Group
from functional_ds.comm.table.collective import Call, CallContext
from functional_ds.compiling.graphs.eager_calls import RUN_BACKWARD, eager_site
from functional_ds.compiling.graphs.graph_collectives import START, WAIT, CallSequence, CallSite, sequence_of, site_of


@attrs.frozen
class CollectiveEvent:
    """A rank starts a collective, or waits for one.

    Attributes:
        group: the index of its sequence in ``RankCollectives.groups``.
        digest: of what must be equal on all ranks that take part; None for a wait.
        does: the collective and what it carries.
        number: its number in the sequence.
        holds: whether it blocks the rank until the others are there.
    """

    group: int
    digest: int | None
    does: str
    number: int
    holds: bool


@attrs.frozen
class RankCollectives:
    """What a rank's graph starts and waits for on groups of several ranks, in order.

    Attributes:
        rank: of the world.
        groups: those, and pairs of ranks for messages: what has one order on all ranks that take part.
        events: in order.
    """

    rank: int
    groups: list[CallSequence]
    events: list[CollectiveEvent]

    def started(self) -> dict[CallSequence, list[CollectiveEvent]]:
        """The starts, by sequence."""
        by_group: dict[CallSequence, list[CollectiveEvent]] = {group: [] for group in self.groups}
        for event in self.events:
            if event.digest is not None:
                by_group[self.groups[event.group]].append(event)
        return by_group


def rank_collectives(nodes: Sequence[fx.Node], sites: Sequence[CallSite], rank: int) -> RankCollectives:
    """Those that all ranks that take part must start in one order.

    Args:
        nodes: of the graph, in order.
        sites: the collectives that they name by number.
        rank: of the world.
    """
    collectives = RankCollectives(rank, [], [])
    counts: dict[CallSequence, int] = {}
    under_way: dict[int, CollectiveEvent] = {}

    def begin(call: Call, group: Group, agreement: Any, does: str, *, holds: bool) -> CollectiveEvent:
        key = sequence_of(call, group)
        if key not in counts:
            collectives.groups.append(key)
        number = counts[key] = counts.get(key, -1) + 1
        digest = zlib.crc32(repr(agreement).encode())
        collectives.events.append(CollectiveEvent(collectives.groups.index(key), digest, does, number, holds))
        return collectives.events[-1]

    for node in nodes:
        if node.target is WAIT and site_of(node) in under_way:
            event = under_way[site_of(node)]
            collectives.events.append(attrs.evolve(event, digest=None, holds=True))
        eager = eager_site(node, sites)
        for inner in [] if eager is None else eager.inner(backward=node.target is RUN_BACKWARD):
            if inner.group.size > 1:
                does = f"{inner.call.collective.name} in an exchange of rows"
                begin(inner.call, inner.group, inner.agreement, does, holds=True)
        if node.target is not START:
            continue
        site, group = sites[site_of(node)], sites[site_of(node)].group
        here = CallContext(site.call.options, group.rank, group.size)
        xs = [x.meta["val"] for x in node.args[0]]  # type: ignore[union-attr]
        agreement = site.call.agreement(xs, here), site.label, site.turn
        does = f"{site.call.signature(xs, here)}{f' for {site.label!r}' if site.label else ''}"
        under_way[site_of(node)] = begin(site.call, group, agreement, does, holds=not site.beside)
    return collectives


def disagreement(told: Sequence[RankCollectives]) -> str:
    """Why the ranks cannot run their graphs together; empty if they can."""
    starts = [report.started() for report in told]
    for i, mine in enumerate(starts):
        for group, events in mine.items():
            for j, theirs in enumerate(starts):
                if told[j].rank in group[1]:
                    other = theirs.get(group, [])
                    if [event.digest for event in events] != [event.digest for event in other]:
                        return _different(group[0], (told[i].rank, events), (told[j].rank, other))
    return _deadlock(told)


def _different(group: str, mine: tuple[int, Sequence[CollectiveEvent]], theirs: tuple[int, Sequence[CollectiveEvent]]) -> str:
    (rank, events), (other_rank, other) = mine, theirs
    most = max(len(events), len(other))
    place = next((n for n in range(min(len(events), len(other))) if events[n].digest != other[n].digest), most - 1)
    shown = [starts[place].does if place < len(starts) else "nothing" for starts in (events, other)]
    return (
        f"the graphs of ranks {rank} and {other_rank} start other collectives on the group {group!r}, so each would wait for "
        f"the other: number {place + 1} is {shown[0]} on rank {rank} and {shown[1]} on rank {other_rank}; let the loss touch "
        "the same units in the same order on all ranks, and passes move them alike"
    )


def _deadlock(told: Sequence[RankCollectives]) -> str:
    """Runs the events of all ranks, each as far as it can."""
    there = {report.rank for report in told}
    arrived: dict[tuple[CallSequence, int], set[int]] = {}
    places, going = [0] * len(told), True
    while going:
        going = False
        for i, report in enumerate(told):
            while places[i] < len(report.events):
                event = report.events[places[i]]
                group = report.groups[event.group]
                here = arrived.setdefault((group, event.number), set())
                here.add(report.rank)
                if event.holds and here < there & {*group[1]}:
                    break
                places[i] += 1
                going = True
    stuck = [(report, report.events[place]) for report, place in zip(told, places, strict=True) if place < len(report.events)]
    if not stuck:
        return ""
    shown = " and ".join(
        f"rank {report.rank} in {event.does} on {report.groups[event.group][0]!r}" for report, event in stuck[:2]
    )
    return f"the graphs would wait for each other forever, {shown}: let passes move collectives alike on all ranks"
