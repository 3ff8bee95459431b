"""List scheduling: a rank that is free takes the best of its ready actions that its memory and a rule allow.

::

    the forwards of the first stage are ready at time 0
    for each (time, rank) at which something gets ready or a rank gets free, in the order of time:
        if the rank is free:
            take a W if more than ``behind`` of them wait
            else the backward of the earliest micro-batch
            else the forward of the deepest stage, if fewer than ``ahead`` are in flight and there is memory for it
            else a W, or nothing
            what depends on the action gets ready at its end, on another rank a message later
"""

import heapq
from collections import deque
from collections.abc import Sequence

import attrs
import numpy as np

from functional_ds.pipelining.schedules.action import Action, Kind, packed
from functional_ds.pipelining.schedules.schedule import Schedule

from .costs import Costs

__all__ = ["PriorityRule", "list_schedule"]


@attrs.frozen
class PriorityRule:
    """What each rank prefers.

    Attributes:
        ahead: for each rank, how many forwards may be in flight.
        behind: for each rank, how many backwards for weights may wait while there is other work.
        split: whether backwards are split.
    """

    ahead: tuple[int, ...]
    behind: tuple[int, ...]
    split: bool


def list_schedule(
    microbatches: int, costs: Costs, placement: Sequence[int], limits: Sequence[float], rule: PriorityRule
) -> Schedule | None:
    """The schedule that follows from a rule; None if the limits or the rule bring it to a halt.

    Args:
        microbatches: how many.
        costs: of each stage.
        placement: the rank that holds each stage.
        limits: each rank's bytes of activations.
        rule: what each rank prefers.
    """
    return _ListScheduler(costs, placement, limits, rule).run(microbatches)


class _Rank:
    """A rank's row so far, what is ready there, and what it holds."""

    def __init__(self, ahead: int, behind: int, limit: float) -> None:
        self.ahead, self.behind, self.limit = ahead, behind, limit
        self.row: list[Action] = []
        self.free_at = 0.0
        self.held = 0.0  # bytes of activations
        self.in_flight = 0
        self.arrivals: list[tuple[float, Kind, int, int]] = []  # heap of (time, kind, stage, micro-batch)
        self.forwards: list[tuple[int, int]] = []  # heap of (-stage, micro-batch)
        self.backwards: list[tuple[int, int]] = []  # heap of (micro-batch, -stage)
        self.weights: deque[tuple[int, int]] = deque()  # (stage, micro-batch)

    def admit(self, now: float) -> None:
        """Queues what has arrived."""
        while self.arrivals and self.arrivals[0][0] <= now:
            _, kind, stage, microbatch = heapq.heappop(self.arrivals)
            if kind is Kind.F:
                heapq.heappush(self.forwards, (-stage, microbatch))
            else:
                heapq.heappush(self.backwards, (microbatch, -stage))

    def choose(self, backward: Kind, needed: Sequence[float]) -> Action | None:
        """Takes the best action from the queues; ``needed`` is the memory that each stage's forward must find free."""
        if len(self.weights) > self.behind:
            return Action(Kind.W, *self.weights.popleft())
        if self.backwards:
            microbatch, stage = heapq.heappop(self.backwards)
            return Action(backward, -stage, microbatch)
        if self.forwards and self.in_flight < self.ahead and self.held + needed[-self.forwards[0][0]] <= self.limit:
            stage, microbatch = heapq.heappop(self.forwards)
            return Action(Kind.F, -stage, microbatch)
        return Action(Kind.W, *self.weights.popleft()) if self.weights else None


class _ListScheduler:
    """The ranks, the events to come, and the costs as lists, which are faster to index than arrays.

    Attributes:
        needed: for each stage its activations and those of the rank's later stages, so that a micro-batch that has begun can
            always pass all of them.
    """

    def __init__(self, costs: Costs, placement: Sequence[int], limits: Sequence[float], rule: PriorityRule) -> None:
        count = len(placement)
        self.placement = placement
        self.backward = Kind.I if rule.split else Kind.B
        self.ranks = [_Rank(*each) for each in zip(rule.ahead, rule.behind, limits, strict=True)]
        self.events: list[tuple[float, int]] = []  # heap of (time, rank)
        self.seconds: list[list[float]] = costs.seconds(count).tolist()
        self.crossing: list[float] = costs.crossing(count).tolist()
        shared = costs.shared_on(placement)  # counted with the stage before, whose backward comes later
        self.taken: list[float] = (costs.of("activations", count) - shared).tolist()
        self.freed: list[list[float]] = (costs.freed(count) - np.outer(shared, [0, 0, 1, 1])).tolist()  # of F, I, W, B
        self.needed = [
            sum(self.taken[later] for later in range(stage, count) if placement[later] == rank)
            for stage, rank in enumerate(placement)
        ]

    def run(self, microbatches: int) -> Schedule | None:
        """Goes through the events; None if they end before all actions are done."""
        for microbatch in range(microbatches):
            self._release(Kind.F, 0, microbatch, 0.0)
        while self.events:
            now, index = heapq.heappop(self.events)
            rank = self.ranks[index]
            if now < rank.free_at:
                continue  # there is an event for the time when it is free
            rank.admit(now)
            action = rank.choose(self.backward, self.needed)
            if action is not None:
                rank.free_at = self._carry_out(rank, action, now)
                heapq.heappush(self.events, (rank.free_at, index))
        expected = microbatches * len(self.placement) * (3 if self.backward is Kind.I else 2)
        if sum(len(rank.row) for rank in self.ranks) < expected:
            return None
        return Schedule([packed(rank.row) for rank in self.ranks], tuple(self.placement), microbatches)

    def _carry_out(self, rank: _Rank, action: Action, now: float) -> float:
        """Appends an action to a row, and releases what depends on it; the time of its end."""
        kind, stage, microbatch = action
        end = now + self.seconds[stage][kind]
        rank.row.append(action)
        rank.held -= self.freed[stage][kind]
        if kind is Kind.F:
            rank.held += self.taken[stage]
            rank.in_flight += 1
            if stage + 1 < len(self.placement):
                self._release(Kind.F, stage + 1, microbatch, end + self._crossing(stage))
            else:
                self._release(Kind.B, stage, microbatch, end)
        elif kind is Kind.W:
            rank.in_flight -= 1
        else:
            if kind is Kind.I:
                rank.weights.append((stage, microbatch))
            else:
                rank.in_flight -= 1
            if stage:
                self._release(Kind.B, stage - 1, microbatch, end + self._crossing(stage - 1))
        return end

    def _release(self, kind: Kind, stage: int, microbatch: int, time: float) -> None:
        """Lets an action be ready from a time on."""
        rank = self.placement[stage]
        heapq.heappush(self.ranks[rank].arrivals, (time, kind, stage, microbatch))
        heapq.heappush(self.events, (time, rank))

    def _crossing(self, stage: int) -> float:
        """Seconds between a stage and the next."""
        return self.crossing[stage] if self.placement[stage] != self.placement[stage + 1] else 0.0
