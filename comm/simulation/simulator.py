"""The world of a simulated rank. Ranks are threads, which run one at a time in an order picked by a seed.

The last rank to call a collective computes its reference implementation for all members, so a run is deterministic.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, TypeVar, TypeVarTuple

import attrs
import torch
from torch import Tensor

from functional_ds.comm.record.group import Beside, Group, World, call_site
from functional_ds.comm.record.pending import watched_inputs
from functional_ds.comm.table.collective import Call, CallContext, Handle
from functional_ds.comm.table.errors import CommError, DeadlockError

from .lanes import Lane, run_beside
from .schedule import GroupCall, RankCall, Simulator, copied

if TYPE_CHECKING:
    from .nccl_rules import RankRules

T = TypeVar("T")
Ts = TypeVarTuple("Ts")


@attrs.define(eq=False)
class _SimulatedHandle:
    world: "SimulatedWorld"
    slot: GroupCall
    ended: float | None = None

    def wait(self) -> list[Tensor]:
        self.world.simulator.wait(self.world.here, self.slot)
        outputs = self.slot.outputs
        if outputs is None:
            raise DeadlockError(f"{self.slot.arrivals[self.world.rank]} was waited for and is not complete")
        return outputs.pop(self.world.rank)

    def poll(self, timeout: float) -> bool:
        if self.world.rules is not None:  # as on NCCL, where the host does not wait
            return True
        return self.world.simulator.poll(self.world.here, self.slot, timeout > 0)


@attrs.define(eq=False)
class SimulatedWorld(World):
    """The world of a simulated rank.

    Attributes:
        simulator: runs all ranks.
        threads: the threads that may call collectives: their numbers in the schedule, by identifier.
        lanes: the lanes of background work, by group.
        counts: the index of the last call, by order.
        rules: checks this rank's calls by NCCL's rules, with ``rules="nccl"``.
    """

    simulator: Simulator
    threads: dict[int, int] = attrs.field(factory=dict, kw_only=True)
    lanes: dict[tuple[Any, ...], Lane] = attrs.field(factory=dict, kw_only=True)
    counts: dict[tuple[Any, ...], int] = attrs.field(factory=dict)
    rules: "RankRules | None" = None

    @property
    def here(self) -> int:
        """This thread's number in the schedule: the rank, or a lane's."""
        return self.threads.get(threading.get_ident(), self.rank)

    def beside(self, steps: Callable[[], Iterator[Any]], lane: Group, device: torch.device) -> Beside:
        if self.rules is not None:  # all is launched at once, as on CUDA
            return super().beside(steps, lane, device)
        return run_beside(self, steps, lane)

    def start(self, call: Call, tensors: Sequence[Tensor], group: Group, *, beside: bool) -> Handle:
        if threading.get_ident() not in self.threads:
            raise CommError(
                f"{call.shown(group.rank)} on simulated rank {self.rank} comes from thread "
                f"{threading.current_thread().name!r}; a simulated rank is one thread: call collectives from there"
            )
        row, here = call.collective, CallContext(call.options, group.rank, group.size)
        key = (group.ranks, group.name, row.order(call.options))
        turn = self.counts[key] = self.counts.get(key, -1) + 1
        places = row.members(call.options, group.size)
        members = group.ranks if places == range(group.size) else tuple(group.ranks[place] for place in places)
        purpose = self.purpose(group)
        arrival = RankCall(call, here, [copied(t) for t in tensors], call_site(), purpose)
        slot = GroupCall(group, members, (*call.agreement(tensors, here), purpose))
        slot = self.simulator.arrive((*key, turn), self.rank, slot, arrival)
        if self.rules is not None:
            self.rules.launch(call, group, (*key, turn), members, f"{arrival} on group {group.name!r} at {arrival.site}")
        handle = _SimulatedHandle(self, slot)
        return watched_inputs(handle, call, tensors, group, arrival.site) if beside else handle

    @property
    def compares(self) -> bool:
        return True

    @property
    def at_once(self) -> bool:
        return self.rules is None and self.watch is None  # which follow the calls of other worlds one by one

    def in_launch_order(self, device: torch.device) -> bool:
        return self.rules is not None

    def connect(self, edges: Sequence[tuple[int, int]], group: Group, device: torch.device) -> None:
        if self.rules is not None:
            self.rules.connect(edges, group, call_site())

    def batch(self) -> AbstractContextManager[None]:
        return super().batch() if self.rules is None else self.rules.batch()
