"""The scheduler of simulated ranks: threads that pass a baton, in an order picked by a seed.

A rank runs until it waits for an incomplete collective; then the seed picks the rank that runs next. Background work of ranks
(``World.beside``) is scheduled in the same way, with a thread for each lane. When no rank can continue, the scheduler reports
which ranks wait for which.
"""

import ctypes
import random
import threading
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import attrs
import torch
from torch import Tensor

from functional_ds.base.torch_private import disable_dispatch_modes
from functional_ds.comm.record.group import Group
from functional_ds.comm.table.collective import Call, CallContext
from functional_ds.comm.table.errors import DeadlockError, MismatchError
from functional_ds.comm.worlds.rng_state import RngState, drop_spare_normal


class Awaited(Protocol):
    """A collective, or a chain of them, that a rank or one of its lanes can wait for."""

    @property
    def done(self) -> bool: ...

    def awaited(self, rank: int) -> str:
        """Describes the call that the rank waits in, and the ranks that it waits for."""


_PATIENCE = 1.0  # seconds for the ranks to end when the caller is interrupted
_MAX_FRUITLESS_POLLS = 10_000  # after these a program that only polls is reported as a deadlock


class AbortedError(BaseException):
    """Ends the other ranks once one has failed; a BaseException, so that user code does not catch it."""


@attrs.frozen(eq=False)
class RankCall:
    """One rank's part of a collective: its call, inputs, call site, and the function it is called for."""

    call: Call
    here: CallContext
    inputs: list[Tensor]
    site: str
    purpose: str = ""

    def __str__(self) -> str:
        return self.call.signature(self.inputs, self.here) + (f", for {self.purpose}" if self.purpose else "")


@attrs.define(eq=False)
class GroupCall:
    """A collective of a group: the calls so far, and the results once all members have called it."""

    group: Group
    members: tuple[int, ...]  # ranks of the world, in the denotation's order
    agreement: tuple[Any, ...]
    arrivals: dict[int, RankCall] = attrs.field(factory=dict)
    outputs: dict[int, list[Tensor]] | None = None

    @property
    def done(self) -> bool:
        return self.outputs is not None

    def awaited(self, rank: int) -> str:
        """Describes the rank's call, its call site, and the ranks that have not called."""
        arrival, missing = self.arrivals[rank], ", ".join(str(member) for member in self.members if member not in self.arrivals)
        return f"{arrival} on group {self.group.name!r} at {arrival.site} for rank {missing}"

    def complete(self) -> None:
        """Applies the reference implementation to each leaf, which is the meaning of a call on a tree."""
        arrivals = [self.arrivals[rank] for rank in self.members]
        call = arrivals[0].call
        options = call.merged([arrival.call.private() for arrival in arrivals])
        leaves = zip(*[arrival.inputs for arrival in arrivals], strict=True)
        with torch.inference_mode(False), torch.no_grad(), disable_dispatch_modes():  # not in the modes of the last rank
            results = [call.collective.denotation(xs, options) for xs in leaves]
        self.outputs = {rank: [result[i] for result in results] for i, rank in enumerate(self.members)}


def copied(tensor: Tensor) -> Tensor:
    """A copy of the values as a message carries them: contiguous, detached, and not an inference tensor."""
    if torch.is_inference_mode_enabled():
        with torch.inference_mode(False):
            return copied(tensor)
    return tensor.detach().clone(memory_format=torch.contiguous_format)


class Simulator:
    """Lets one actor run at a time, the one that holds the baton: a rank (0 to n - 1) or a lane (from n on)."""

    def __init__(self, world_size: int, seed: int) -> None:
        self.world_size = world_size
        self.lanes: dict[int, tuple[int, threading.Thread]] = {}  # by actor: the rank and thread
        self.random = random.Random(seed)
        self.batons = [threading.Lock() for _ in range(world_size)]  # all are locked except that of the running rank
        for baton in self.batons:
            baton.acquire()
        self.waiting: dict[int, Awaited] = {}
        self.blocked: set[int] = set()  # the waiting actors whose collective is incomplete
        self.polling: set[int] = set()
        self.fruitless = 0  # consecutive unsuccessful polls since the last call of any rank
        self.unfinished = set(range(world_size))
        self.slots: dict[tuple[Any, ...], GroupCall] = {}  # incomplete collectives
        self.rng_states = RngState.now().copies(world_size)
        self.failure: BaseException | None = None
        self.over = threading.Event()
        self.running: int | None = None
        self.abandoned = False

    # -- methods that a rank calls while it holds the baton ------------------------------------------------------------

    def arrive(self, key: tuple[Any, ...], rank: int, slot: GroupCall, arrival: RankCall) -> GroupCall:
        """Adds a call to its collective; raises MismatchError if it differs from the first member's."""
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
        if len(known.arrivals) == len(known.members):
            del self.slots[key]
            known.complete()
            self.unblock(known)
        return known

    def wait(self, rank: int, slot: Awaited, *, polls: bool = False) -> bool:
        """Lets other ranks run until the collective is complete. A poll also ends when no other rank can continue."""
        drop_spare_normal()
        while not slot.done:
            self.check()
            self.waiting[rank] = slot
            self.blocked.add(rank)
            if not self.pass_on(rank, may_return=polls):
                return False
        self.check()
        return True

    def poll(self, rank: int, slot: Awaited, patient: bool) -> bool:
        """Whether the collective is complete, after letting other ranks run.

        A patient poll lets them run until none can continue, other polls for a random number of turns.
        """
        if patient:
            done = self.wait(rank, slot, polls=True)
        else:
            while not slot.done and self.random.random() < 0.5:
                self.check()
                successor = self.pick()
                self.hand_over(rank, rank if successor is None else successor)
            self.check()
            done = slot.done
        self.fruitless = 0 if done else self.fruitless + 1
        if self.fruitless > _MAX_FRUITLESS_POLLS:
            self.waiting[rank] = slot
            raise self.deadlock()
        return done

    def check(self) -> None:
        if self.failure is not None:
            raise AbortedError

    def pass_on(self, rank: int, *, may_return: bool) -> bool:
        """Passes the baton and waits until it is back; False if it came back because no other rank can continue."""
        if may_return:
            self.polling.add(rank)
        successor = self.pick()
        if successor is None:
            self.failure = self.failure or self.deadlock()
            raise AbortedError
        self.hand_over(rank, successor)
        self.polling.discard(rank)
        self.blocked.discard(rank)
        slot = self.waiting.pop(rank)
        return slot.done or self.failure is not None

    def hand_over(self, rank: int, successor: int) -> None:
        """Passes the baton to the successor and waits until it is back."""
        if successor != rank:
            self.rng_states[rank] = RngState.now()
            self.pass_to(successor)
            self.take(rank)

    def take(self, rank: int) -> None:
        """Waits for the baton."""
        self.batons[rank].acquire()
        if self.abandoned:  # ``simulate`` has returned
            raise AbortedError
        self.rng_states[rank].restore()

    def pass_to(self, successor: int) -> None:
        """Lets the successor run."""
        self.running = successor
        self.batons[successor].release()

    # -- the schedule --------------------------------------------------------------------------------------------------

    def pick(self) -> int | None:
        """Picks a rank that can continue; if there is none, a rank that polls; else None."""
        able = sorted(self.unfinished if self.failure is not None else self.unfinished - self.blocked) or sorted(self.polling)
        return self.random.choice(able) if able else None

    def unblock(self, slot: Awaited) -> None:
        """Unblocks the actors that wait for a completed collective or chain."""
        self.blocked -= {actor for actor, waited in self.waiting.items() if waited is slot}

    def finish(self, rank: int) -> None:
        """Removes a finished rank; passes the baton, or ends the run."""
        self.unfinished.discard(rank)
        if not self.unfinished:
            self.over.set()
            return
        successor = self.pick()
        if successor is None:
            self.failure = self.failure or self.deadlock()
            successor = self.pick()
        if successor is not None:
            self.pass_to(successor)

    def interrupt(self, threads: Sequence[threading.Thread]) -> None:
        """Ends the ranks: raises in the running one at its next Python instruction; if that takes long, they end later."""
        rank = self.running
        if rank is not None and rank in self.unfinished:
            ident, error = ctypes.c_ulong(threads[rank].ident or 0), ctypes.py_object(AbortedError)
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ident, error)
        self.abandoned = not self.over.wait(_PATIENCE)

    # -- background work -----------------------------------------------------------------------------------------------

    def add_lane(self, rank: int, name: str, work: Callable[[int], None]) -> int:
        """Starts a thread for background work of a rank, which runs whenever it has the baton; returns its actor number."""
        actor = len(self.batons)
        self.batons.append(threading.Lock())
        self.batons[actor].acquire()
        self.rng_states += RngState.now().copies(1)
        thread = threading.Thread(target=work, args=(actor,), daemon=True, name=f"rank {rank}, {name}")
        self.lanes[actor] = rank, thread
        thread.start()
        return actor

    def end_lanes(self) -> None:
        """Ends the lanes' threads, after the run."""
        for actor, (_, thread) in self.lanes.items():
            self.batons[actor].release()
            thread.join()

    def unmatched(self) -> str:
        """Describes calls that some ranks have started and others have not made."""
        stories = [f"  rank {rank} started {call.awaited(rank)}" for call in self.slots.values() for rank in call.arrivals]
        return "\n".join(["all ranks have finished, but some never came to what others started", *sorted(stories)])

    def deadlock(self) -> DeadlockError:
        """The error with the state of every rank: finished, or the call that it waits in and the ranks that it waits for."""
        lines = ["deadlock: no rank can proceed"]
        waits: dict[int, tuple[str, tuple[int, ...]]] = {}
        for rank in range(self.world_size):
            slot = self.waiting.get(rank)
            if rank not in self.unfinished:
                lines.append(f"  rank {rank} has finished")
            elif slot is not None:
                lines.append(f"  rank {rank} waits in {slot.awaited(rank)}")
            if isinstance(slot, GroupCall) and rank in slot.arrivals:
                call, missing = slot.arrivals[rank], set(slot.members) - set(slot.arrivals)
                waits[rank] = f"{call} at {call.site}", tuple(sorted(missing))
        for actor, (rank, _) in self.lanes.items():
            if actor in self.waiting:
                lines.append(f"  rank {rank}, beside its program, waits in {self.waiting[actor].awaited(rank)}")
        return DeadlockError("\n".join(lines), waits=waits)
