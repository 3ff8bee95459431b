"""N ranks in one process: a thread each, one running at a time, in an order that a seed picks.

A rank runs until it waits for a collective that is not complete; then the seed picks who goes on. The last rank to come
to a collective carries out its denotation for all. So a simulated run is deterministic, and at the moment when no rank
can go on, the simulator knows exactly who waits for whom.
"""

import random
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import attrs
import torch
from torch import Tensor

from functional_ds.comm.record.collective import Call, Here
from functional_ds.comm.record.errors import CommError, DeadlockError, MismatchError, UnmatchedError
from functional_ds.comm.record.group import Group, call_site, each, place_in
from functional_ds.comm.record.ledger import Ledger

from .current import HERE, only_simulation
from .rng_state import Ambient, drop_spare_normal
from .shapes import run_on_shapes

__all__ = ["simulate"]


_PATIENCE = 10_000  # fruitless polls after which a program that only polls is taken to be stuck


class _AbortedError(BaseException):
    """Unwinds the other ranks once one has failed; no user code should catch it."""


@attrs.frozen(eq=False)
class _Arrival:
    """One rank's part of a collective: what it called, on what, and where."""

    call: Call
    here: Here
    inputs: list[Tensor]
    site: str

    def __str__(self) -> str:
        return self.call.signature(self.inputs, self.here)


@attrs.define(eq=False)
class _Slot:
    """One collective of one group: who has come so far, and the results once all have."""

    group: Group
    members: tuple[int, ...]  # ranks of the world, in the denotation's order
    agreement: tuple[Any, ...]
    arrivals: dict[int, _Arrival] = attrs.field(factory=dict)
    outputs: dict[int, list[Tensor]] | None = None

    def missing(self) -> list[int]:
        return [rank for rank in self.members if rank not in self.arrivals]

    def complete(self) -> None:
        """Applies the denotation leaf by leaf; by law 12 that is what a coalesced call means."""
        arrivals = [self.arrivals[rank] for rank in self.members]
        call = arrivals[0].call
        options = call.merged([arrival.call.private() for arrival in arrivals])
        leaves = zip(*(arrival.inputs for arrival in arrivals), strict=True)
        with torch.inference_mode(False), torch.no_grad():  # the modes of whoever came last are not the others'
            results = [call.collective.denotation(xs, options) for xs in leaves]
        self.outputs = {rank: [result[i] for result in results] for i, rank in enumerate(self.members)}


def _copy(tensor: Tensor) -> Tensor:
    """What a message would carry: the values, laid out plainly, whatever the sender's modes are."""
    with torch.inference_mode(False):
        return tensor.detach().clone(memory_format=torch.contiguous_format)


@attrs.define(eq=False)
class _SimulatedHandle:
    world: "SimulatedWorld"
    slot: _Slot
    ended: float | None = None

    def wait(self) -> list[Tensor]:
        self.world.simulator.wait(self.world.rank, self.slot)
        outputs = self.slot.outputs
        if outputs is None:
            raise DeadlockError(f"{self.slot.arrivals[self.world.rank]} was waited for and is not complete")
        return outputs.pop(self.world.rank)

    def poll(self, patience: float) -> bool:
        return self.world.simulator.poll(self.world.rank, self.slot, patience > 0)


@attrs.define(eq=False)
class SimulatedWorld:
    """The world as one simulated rank sees it."""

    simulator: "Simulator"
    rank: int
    books: list[Ledger] = attrs.field(factory=list)
    counts: dict[tuple[Any, ...], int] = attrs.field(factory=dict)
    thread: int = attrs.field(factory=threading.get_ident)

    @property
    def device(self) -> torch.device:
        return torch.device("cpu")

    def together(self) -> AbstractContextManager[None]:
        return nullcontext()

    def repeat(self, times: int, body: Callable[[int], None]) -> None:
        each(times, body)

    def start(self, call: Call, tensors: Sequence[Tensor], group: Group, *, ahead: bool) -> _SimulatedHandle:
        if threading.get_ident() != self.thread:
            raise CommError(
                f"{call.shown(group.rank)} on simulated rank {self.rank} comes from thread "
                f"{threading.current_thread().name!r}; a simulated rank is one thread: call collectives from there"
            )
        row, here = call.collective, Here(call.options, group.rank, group.size)
        key = (group.ranks, group.name, row.order(call.options))
        turn = self.counts[key] = self.counts.get(key, -1) + 1
        members = tuple(group.ranks[member] for member in row.members(call.options, group.size))
        arrival = _Arrival(call, here, [_copy(t) for t in tensors], call_site())
        slot = _Slot(group, members, call.agreement(tensors, here))
        return _SimulatedHandle(self, self.simulator.arrive((*key, turn), self.rank, slot, arrival))

    def group(self, ranks: Sequence[int], name: str) -> Group:
        return Group(tuple(ranks), place_in(ranks, self.rank), name, self)

    def channel(self, group: Group, name: str) -> Group:
        return attrs.evolve(group, name=f"{group.name}/{name}")


class Simulator:
    """Hands one baton around: only the rank that holds it runs."""

    def __init__(self, world_size: int, seed: int) -> None:
        self.random = random.Random(seed)
        self.batons = [threading.Lock() for _ in range(world_size)]  # held, but for the one whose rank may run
        for baton in self.batons:
            baton.acquire()
        self.waiting: dict[int, _Slot] = {}
        self.polling: set[int] = set()
        self.fruitless = 0  # polls in a row that found nothing, since anybody came to anything
        self.unfinished = set(range(world_size))
        self.slots: dict[tuple[Any, ...], _Slot] = {}  # those that are not complete
        self.ambients = Ambient.now().twins(world_size)
        self.failure: BaseException | None = None
        self.over = threading.Event()

    # -- what a rank calls while it holds the baton --------------------------------------------------------------------

    def arrive(self, key: tuple[Any, ...], rank: int, slot: _Slot, arrival: _Arrival) -> _Slot:
        """The slot for this call, the first comer's if there is one; raises where the two do not fit."""
        self.check()
        known = self.slots.setdefault(key, slot)
        if known.agreement != slot.agreement:
            other, first = next(iter(known.arrivals.items()))
            raise MismatchError(
                f"the ranks of group {slot.group.name!r} {list(slot.group.ranks)} called different collectives: "
                f"rank {other} called {first} at {first.site}, rank {rank} called {arrival} at {arrival.site}"
            )
        known.arrivals[rank] = arrival
        self.fruitless = 0
        if not known.missing():
            del self.slots[key]
            known.complete()
        return known

    def wait(self, rank: int, slot: _Slot, *, polls: bool = False) -> bool:
        """Lets others run until the slot is complete; a poll ends, too, when nobody else can go on."""
        drop_spare_normal()
        while slot.outputs is None:
            self.check()
            self.waiting[rank] = slot
            if not self.pass_on(rank, may_return=polls):
                return False
        self.check()
        return True

    def poll(self, rank: int, slot: _Slot, patient: bool) -> bool:
        """Whether the slot is complete: patiently, when nobody else can go on; else after as many turns as the seed says."""
        if patient:
            found = self.wait(rank, slot, polls=True)
        else:
            while slot.outputs is None and self.random.random() < 0.5:
                self.check()
                heir = self.pick()
                self.hand_over(rank, rank if heir is None else heir)
            self.check()
            found = slot.outputs is not None
        self.fruitless = 0 if found else self.fruitless + 1
        if self.fruitless > _PATIENCE:
            self.waiting[rank] = slot
            raise DeadlockError(self.describe())
        return found

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
        self.hand_over(rank, heir)
        self.polling.discard(rank)
        slot = self.waiting.pop(rank)
        return slot.outputs is not None or self.failure is not None

    def hand_over(self, rank: int, heir: int) -> None:
        """The baton goes to the heir; returns when it is back."""
        if heir != rank:
            self.ambients[rank] = Ambient.now()
            self.batons[heir].release()
            self.batons[rank].acquire()
            self.ambients[rank].restore()

    # -- the schedule --------------------------------------------------------------------------------------------------

    def pick(self) -> int | None:
        """Someone who can go on; failing that, someone who only polls."""
        able = [r for r in sorted(self.unfinished) if self.able(r)] or sorted(self.polling)
        return self.random.choice(able) if able else None

    def able(self, rank: int) -> bool:
        waiting = self.waiting.get(rank)
        return waiting is None or waiting.outputs is not None or self.failure is not None

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

    # -- what went wrong -----------------------------------------------------------------------------------------------

    def describe(self) -> str:
        """Who waits where, and for whom."""
        lines = ["deadlock: no rank can go on"]
        for rank in range(len(self.batons)):
            if rank not in self.unfinished:
                lines.append(f"  rank {rank} has finished")
            elif rank in self.waiting:
                lines.append(f"  rank {rank} waits in {self.story(self.waiting[rank], rank)}")
        return "\n".join(lines)

    def story(self, slot: _Slot, rank: int) -> str:
        """What the rank called, where, and who has not come."""
        arrival, missing = slot.arrivals[rank], ", ".join(map(str, slot.missing()))
        return f"{arrival} on group {slot.group.name!r} at {arrival.site} for rank {missing}"

    def leftovers(self) -> str:
        """What was started and never completed, when nobody waited for it."""
        stories = [f"  rank {rank} started {self.story(slot, rank)}" for slot in self.slots.values() for rank in slot.arrivals]
        return "\n".join(["all ranks have finished, but some never came to what others started", *sorted(stories)])


def simulate(program: Callable[..., Any], *args: Any, world_size: int, seed: int = 0, shapes_only: bool = False) -> list[Any]:
    """Runs ``program(*args)`` on ``world_size`` simulated ranks and returns their results in rank order.

    Law: the result does not depend on ``seed`` (which picks the interleaving) for any program whose ranks talk through
    collectives only, and equals that of ``spawn`` bit for bit.

    The default torch generator, Python's and NumPy's, and the warning filters are each rank's own, all starting as the
    caller's, which are left as they were.

    Args:
        program: what each rank runs.
        args: its arguments, the same objects on all ranks.
        world_size: how many ranks.
        seed: picks the interleaving.
        shapes_only: the ranks pass tensors without values (``device="meta"``) and get such; each runs by itself, and
            afterwards their calls are compared. So programs on thousands of ranks can be counted, by a ``ledger``.

    Raises:
        MismatchError: ranks of one group called different collectives, with both call sites.
        DeadlockError: no rank can go on; every rank, where it waits and for whom. On shapes only nobody waits, so this is
            not found.
        UnmatchedError: an asynchronous call that some of its ranks never came to.
        CommError: a rank calls a collective from a thread of its own.
        Exception: whatever a rank raised, as it is, with a note that names the rank.

    >>> from functional_ds import comm
    >>> simulate(lambda: comm.all_reduce(torch.tensor(comm.world().rank)).item(), world_size=4)
    [6, 6, 6, 6]
    """
    if type(world_size) is not int or world_size < 1:
        raise ValueError(f"world_size={world_size!r}: a world has at least one rank")
    if shapes_only:
        return run_on_shapes(program, args, world_size)
    simulator = Simulator(world_size, seed)
    results: list[Any] = [None] * world_size

    def run(rank: int) -> None:
        simulator.batons[rank].acquire()
        HERE.group = Group(tuple(range(world_size)), rank, "world", SimulatedWorld(simulator, rank))
        simulator.ambients[rank].restore()
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

    with only_simulation():
        outside, threads = Ambient.now(), torch.get_num_threads()
        workers = [threading.Thread(target=run, args=(r,), daemon=True, name=f"rank {r}") for r in range(world_size)]
        try:
            for worker in workers:
                worker.start()
            simulator.batons[simulator.random.randrange(world_size)].release()
            simulator.over.wait()
        except BaseException as error:  # an interrupt: the ranks end at their next collective
            simulator.failure = simulator.failure or error
            simulator.over.wait()
            raise
        finally:
            for worker in workers:
                worker.join()
            torch.set_num_threads(threads)
            outside.restore()
    if simulator.failure is not None:
        raise simulator.failure
    if simulator.slots:
        raise UnmatchedError(simulator.leftovers())
    return results
