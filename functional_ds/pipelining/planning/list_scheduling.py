"""List scheduling: each rank takes the best of what is ready, within its memory."""

import heapq
from collections import defaultdict, deque
from collections.abc import Sequence

import attrs

from functional_ds.pipelining.schedules.action import Action, Kind, packed
from functional_ds.pipelining.schedules.schedule import Schedule

from .costs import Costs

__all__ = ["PriorityRule", "list_schedule"]


@attrs.frozen
class PriorityRule:
    """What each rank prefers.

    Attributes:
        ahead: forwards that may be in flight, for each rank.
        behind: weights' gradients that may wait while there is other work, for each rank.
        split: whether backwards are split.
    """

    ahead: tuple[int, ...]
    behind: tuple[int, ...]
    split: bool


class _Rank:
    """What is ready on a rank, and what it holds."""

    def __init__(self) -> None:
        self.row: list[Action] = []
        self.free_at = 0.0
        self.held = 0.0
        self.in_flight = 0
        self.forwards: list[tuple[int, int]] = []  # heaps of (-stage, micro-batch) and (micro-batch, -stage)
        self.backwards: list[tuple[int, int]] = []
        self.weights: deque[tuple[int, int]] = deque()
        self.coming: list[tuple[float, int, int, int]] = []  # heap of (time, kind, stage, micro-batch)

    def take_in(self, now: float) -> None:
        while self.coming and self.coming[0][0] <= now:
            _, kind, stage, microbatch = heapq.heappop(self.coming)
            if kind == Kind.F:
                heapq.heappush(self.forwards, (-stage, microbatch))  # the deepest first: it is nearest to its backward
            else:
                heapq.heappush(self.backwards, (microbatch, -stage))


def list_schedule(
    microbatches: int, costs: Costs, placement: Sequence[int], limits: Sequence[float], policy: PriorityRule
) -> Schedule | None:
    """The schedule that comes of the policy, or None if the limits or the policy let it come to a halt."""
    count, last = len(placement), len(placement) - 1
    seconds, crossing = costs.seconds(count).tolist(), costs.crossing(count).tolist()
    taken, freed = costs.of("activations", count).tolist(), costs.freed(count).tolist()
    ranks = [_Rank() for _ in limits]
    own: dict[int, list[int]] = defaultdict(list)
    for stage, rank in enumerate(placement):
        own[rank].append(stage)
    room = [sum(taken[later] for later in own[rank] if later >= stage) for stage, rank in enumerate(placement)]
    events = [(0.0, placement[0])]

    def release(kind: Kind, stage: int, microbatch: int, time: float) -> None:
        heapq.heappush(ranks[placement[stage]].coming, (time, int(kind), stage, microbatch))
        heapq.heappush(events, (time, placement[stage]))

    def choose(rank: int) -> Action | None:
        here = ranks[rank]
        if here.weights and len(here.weights) > policy.behind[rank]:
            return Action(Kind.W, *here.weights.popleft())
        if here.backwards:
            microbatch, stage = heapq.heappop(here.backwards)
            return Action(Kind.I if policy.split else Kind.B, -stage, microbatch)
        if here.forwards and here.in_flight < policy.ahead[rank]:
            stage = -here.forwards[0][0]
            if here.held + room[stage] <= limits[rank]:  # so that this micro-batch can pass the rank's later stages too
                return Action(Kind.F, stage, heapq.heappop(here.forwards)[1])
        return Action(Kind.W, *here.weights.popleft()) if here.weights else None

    def carry_out(rank: int, action: Action, now: float) -> float:
        here, (kind, stage, microbatch) = ranks[rank], action
        over: float = now + seconds[stage][kind]
        here.row.append(action)
        here.held += (taken[stage] if kind is Kind.F else 0.0) - freed[stage][kind]
        here.in_flight += (kind is Kind.F) - (kind in (Kind.W, Kind.B))
        if kind is Kind.F:
            to = min(stage + 1, last)
            after = over + (crossing[stage] if placement[to] != rank else 0.0)
            release(Kind.F if stage < last else Kind.B, to, microbatch, after)
        elif kind is not Kind.W:
            if kind is Kind.I:
                here.weights.append((stage, microbatch))
            if stage:
                release(Kind.B, stage - 1, microbatch, over + (crossing[stage - 1] if placement[stage - 1] != rank else 0.0))
        return over

    for microbatch in range(microbatches):
        release(Kind.F, 0, microbatch, 0.0)
    while events:
        now, rank = heapq.heappop(events)
        here = ranks[rank]
        if now < here.free_at:
            continue  # there is an event for when it is free
        here.take_in(now)
        action = choose(rank)
        if action is not None:
            here.free_at = carry_out(rank, action, now)
            heapq.heappush(events, (here.free_at, rank))
    expected = microbatches * count * (3 if policy.split else 2)
    if sum(len(here.row) for here in ranks) < expected:
        return None
    return Schedule([packed(here.row) for here in ranks], tuple(placement), microbatches)
