"""N ranks in one process: a thread each, one running at a time, in an order that a seed picks.

A rank runs until it waits for a collective that is not complete; then the seed picks who goes on. The last rank to come
to a collective carries out its denotation for all. So a simulated run is deterministic, and at the moment when no rank
can go on, the simulator knows exactly who waits for whom.
"""

import random
import threading
from collections.abc import Callable, Sequence
from typing import Any

import attrs
import torch
from torch import Tensor

from .collective import Call
from .errors import DeadlockError, MismatchError
from .group import Group, call_site
from .ledger import Ledger

__all__ = ["simulate", "simulated_world"]

_HERE = threading.local()  # the simulated rank that the current thread is


class _AbortedError(BaseException):
    """Unwinds the other ranks once one has failed; no user code should catch it."""


@attrs.define(eq=False)
class _Slot:
    """One collective of one group: what has come so far, and the results once all have."""

    group: Group
    call: Call
    signature: str
    first: tuple[int, str]  # the rank that came first and where it called
    inputs: dict[int, list[Tensor]] = attrs.field(factory=dict)
    outputs: dict[int, list[Tensor]] | None = None

    def missing(self) -> list[int]:
        return [r for r in self.group.ranks if r not in self.inputs]

    def complete(self) -> None:
        """Applies the denotation leaf by leaf; by law 12 that is what a coalesced call means."""
        ranks = self.group.ranks
        leaves = zip(*(self.inputs[r] for r in ranks), strict=True)
        results = [self.call.collective.denotation(xs, self.call.options) for xs in leaves]
        self.outputs = {r: [result[i] for result in results] for i, r in enumerate(ranks)}
        self.inputs.clear()


@attrs.define(eq=False)
class _SimulatedHandle:
    world: "SimulatedWorld"
    slot: _Slot
    site: str

    def wait(self) -> list[Tensor]:
        self.world.simulator.wait(self.world.rank, self.slot, self.site)
        outputs = self.slot.outputs
        if outputs is None:
            raise DeadlockError(f"{self.slot.call} was waited for and is not complete")
        return outputs.pop(self.world.rank)

    def poll(self, patience: float) -> bool:
        return self.world.simulator.wait(self.world.rank, self.slot, self.site, polls=True)


@attrs.define(eq=False)
class SimulatedWorld:
    """The world as one simulated rank sees it."""

    simulator: "Simulator"
    rank: int
    books: list[Ledger] = attrs.field(factory=list)
    counts: dict[tuple[Any, ...], int] = attrs.field(factory=dict)

    def start(self, call: Call, tensors: Sequence[Tensor], group: Group, *, ahead: bool) -> _SimulatedHandle:
        site = call_site()
        key = (group.ranks, group.name)
        turn = self.counts[key] = self.counts.get(key, -1) + 1
        slot = self.simulator.arrive((*key, turn), self.rank, _Slot(group, call, call.signature(tensors), (self.rank, site)))
        slot.inputs[self.rank] = [t.detach().clone() for t in tensors]
        self.simulator.settle((*key, turn))
        return _SimulatedHandle(self, slot, site)

    def group(self, ranks: Sequence[int], name: str) -> Group:
        return Group(tuple(ranks), list(ranks).index(self.rank), name, self)

    def channel(self, group: Group, name: str) -> Group:
        return attrs.evolve(group, name=f"{group.name}/{name}")


class Simulator:
    """Hands one baton around: only the rank that holds it runs."""

    def __init__(self, world_size: int, seed: int) -> None:
        self.random = random.Random(seed)
        self.batons = [threading.Semaphore(0) for _ in range(world_size)]
        self.waiting: dict[int, tuple[_Slot, str]] = {}
        self.polling: set[int] = set()
        self.unfinished = set(range(world_size))
        self.slots: dict[tuple[Any, ...], _Slot] = {}
        self.rng_states = [torch.get_rng_state()] * world_size
        self.failure: BaseException | None = None
        self.over = threading.Event()

    # -- what a rank calls while it holds the baton --------------------------------------------------------------------

    def arrive(self, key: tuple[Any, ...], rank: int, slot: _Slot) -> _Slot:
        """The slot for this call, the first comer's if there is one; raises where the two do not fit."""
        self.check()
        known = self.slots.setdefault(key, slot)
        if known.signature != slot.signature:
            (other, where), here = known.first, slot.first[1]
            raise MismatchError(
                f"the ranks of group {slot.group.name!r} {list(slot.group.ranks)} called different collectives: "
                f"rank {other} called {known.signature} at {where}, rank {rank} called {slot.signature} at {here}"
            )
        return known

    def settle(self, key: tuple[Any, ...]) -> None:
        """Carries the collective out once all have come."""
        slot = self.slots[key]
        if not slot.missing():
            del self.slots[key]
            slot.complete()

    def wait(self, rank: int, slot: _Slot, site: str, *, polls: bool = False) -> bool:
        """Lets others run until the slot is complete; a poll ends, too, when nobody else can go on."""
        while slot.outputs is None:
            self.check()
            self.waiting[rank] = (slot, site)
            if not self.pass_on(rank, may_return=polls):
                return False
        self.check()
        return True

    def check(self) -> None:
        if self.failure is not None:
            raise _AbortedError

    def pass_on(self, rank: int, *, may_return: bool) -> bool:
        """Gives the baton to a rank that can go on and sleeps until it is back; False if that is for want of others."""
        if may_return:
            self.polling.add(rank)
        heir = self.pick()
        if heir is None:
            self.failure = self.failure or DeadlockError(self.describe())
            raise _AbortedError
        if heir != rank:
            self.rng_states[rank] = torch.get_rng_state()
            self.batons[heir].release()
            self.batons[rank].acquire()
            torch.set_rng_state(self.rng_states[rank])
        self.polling.discard(rank)
        slot, _ = self.waiting.pop(rank)
        return slot.outputs is not None or self.failure is not None

    # -- the schedule --------------------------------------------------------------------------------------------------

    def pick(self) -> int | None:
        """Someone who can go on; failing that, someone who only polls."""
        able = [r for r in sorted(self.unfinished) if self.able(r)] or sorted(self.polling)
        return self.random.choice(able) if able else None

    def able(self, rank: int) -> bool:
        waiting = self.waiting.get(rank)
        return waiting is None or waiting[0].outputs is not None or self.failure is not None

    def describe(self) -> str:
        """Who waits where, and for whom."""
        lines = ["deadlock: no rank can go on"]
        for rank in range(len(self.batons)):
            if rank in self.waiting and rank in self.unfinished:
                slot, site = self.waiting[rank]
                ranks = ", ".join(str(r) for r in slot.missing())
                lines.append(f"  rank {rank} waits in {slot.signature} on group {slot.group.name!r} at {site} for rank {ranks}")
            elif rank not in self.unfinished:
                lines.append(f"  rank {rank} has finished")
        return "\n".join(lines)

    def finish(self, rank: int) -> None:
        """This rank is done; the baton goes on, or the run is over."""
        self.unfinished.discard(rank)
        if not self.unfinished:
            self.over.set()
            return
        heir = self.pick()
        if heir is None:
            self.failure = self.failure or DeadlockError(self.describe())
            heir = self.pick()
        if heir is not None:
            self.batons[heir].release()


def simulated_world() -> Group | None:
    """The world of the simulated rank that this thread is, or None."""
    return getattr(_HERE, "group", None)


def simulate(program: Callable[..., Any], *args: Any, world_size: int, seed: int = 0) -> list[Any]:
    """Runs ``program(*args)`` on ``world_size`` simulated ranks and returns their results in rank order.

    Law: the result does not depend on ``seed`` (which picks the interleaving) for any program whose ranks talk through
    collectives only, and equals that of ``spawn`` bit for bit.

    The default torch generator is each rank's own, all starting from the caller's state, which is left as it was.

    Raises:
        MismatchError: ranks of one group called different collectives, with both call sites.
        DeadlockError: no rank can go on; every rank, where it waits and for whom.
        Exception: whatever a rank raised, as it is, with a note that names the rank.

    >>> from functional_ds import comm
    >>> simulate(lambda: comm.all_reduce(torch.tensor(comm.world().rank)).item(), world_size=4)
    [6, 6, 6, 6]
    """
    if world_size < 1:
        raise ValueError(f"world_size={world_size}: a world has at least one rank")
    simulator = Simulator(world_size, seed)
    results: list[Any] = [None] * world_size

    def run(rank: int) -> None:
        simulator.batons[rank].acquire()
        _HERE.group = Group(tuple(range(world_size)), rank, "world", SimulatedWorld(simulator, rank))
        torch.set_rng_state(simulator.rng_states[rank])
        torch.set_num_threads(1)  # one rank runs at a time, and each thread would start a pool of its own
        try:
            with torch.autograd.set_multithreading_enabled(False):  # a backward pass stays on its rank's thread
                simulator.check()
                results[rank] = program(*args)
        except _AbortedError:
            pass
        except BaseException as error:
            error.add_note(f"raised on simulated rank {rank} of {world_size}")
            simulator.failure = simulator.failure or error
        finally:
            simulator.finish(rank)

    rng_state, threads = torch.get_rng_state(), torch.get_num_threads()
    workers = [threading.Thread(target=run, args=(rank,), daemon=True, name=f"rank {rank}") for rank in range(world_size)]
    try:
        for worker in workers:
            worker.start()
        simulator.batons[simulator.random.randrange(world_size)].release()
        simulator.over.wait()
        for worker in workers:
            worker.join()
    finally:
        torch.set_num_threads(threads)
        torch.set_rng_state(rng_state)
    if simulator.failure is not None:
        raise simulator.failure
    return results
