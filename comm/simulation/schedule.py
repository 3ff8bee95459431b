"""Calls of simulated ranks, and which rank runs: threads that hand a baton on, in an order that a seed picks.

A rank runs until it waits for a collective that is not complete. Then the seed picks the rank that runs next. What a rank does
beside its program (``World.beside``) has threads of its own, one a lane, which take part. When no rank can go on, the schedule
knows who waits for whom.
"""

import ctypes
import random
import threading
from collections.abc import Callable, Sequence
from typing import Any

import attrs
import torch
from torch import Tensor

from functional_ds.base.torch_private import disable_dispatch_modes
from functional_ds.comm.record.group import Group
from functional_ds.comm.table.collective import Call, Here
from functional_ds.comm.table.errors import DeadlockError, MismatchError
from functional_ds.comm.worlds.rng_state import RngState, drop_spare_normal

from .deadlock import Awaited, deadlock

__all__ = ["AbortedError", "GroupCall", "RankCall", "Simulator", "copied"]

_PATIENCE = 1.0  # seconds for the ranks to end when the caller is interrupted
_MAX_FRUITLESS_POLLS = 10_000  # after which a program that only polls is reported as a deadlock


class AbortedError(BaseException):
    """Ends the other ranks once one has failed. It is no Exception, so that user code does not catch it."""


@attrs.frozen(eq=False)
class RankCall:
    """One rank's part of a collective: its call, its inputs, the call site, and what the call is made for."""

    call: Call
    here: Here
    inputs: list[Tensor]
    site: str
    purpose: str = ""

    def __str__(self) -> str:
        return self.call.signature(self.inputs, self.here) + (f", for {self.purpose}" if self.purpose else "")


@attrs.define(eq=False)
class GroupCall:
    """One collective of one group: the calls so far, and the results once all members have called."""

    group: Group
    members: tuple[int, ...]  # ranks of the world, in the denotation's order
    agreement: tuple[Any, ...]
    arrivals: dict[int, RankCall] = attrs.field(factory=dict)
    outputs: dict[int, list[Tensor]] | None = None

    @property
    def done(self) -> bool:
        return self.outputs is not None

    def awaited(self, rank: int) -> str:
        """The rank's call, its call site, and the ranks that have not called."""
        arrival, missing = self.arrivals[rank], ", ".join(str(member) for member in self.members if member not in self.arrivals)
        return f"{arrival} on group {self.group.name!r} at {arrival.site} for rank {missing}"

    def complete(self) -> None:
        """Applies the denotation to each leaf; by law 12 that is the meaning of a coalesced call."""
        arrivals = [self.arrivals[rank] for rank in self.members]
        call = arrivals[0].call
        options = call.merged([arrival.call.private() for arrival in arrivals])
        leaves = zip(*(arrival.inputs for arrival in arrivals), strict=True)
        with torch.inference_mode(False), torch.no_grad(), disable_dispatch_modes():  # those of the last rank see nothing of it
            results = [call.collective.denotation(xs, options) for xs in leaves]
        self.outputs = {rank: [result[i] for result in results] for i, rank in enumerate(self.members)}


def copied(tensor: Tensor) -> Tensor:
    """The values as a message would carry them: contiguous, and independent of the sender's modes."""
    if torch.is_inference_mode_enabled():
        with torch.inference_mode(False):
            return copied(tensor)
    return tensor.detach().clone(memory_format=torch.contiguous_format)


class Simulator:
    """Lets one actor run at a time, the one that holds the baton: a rank (0 to n - 1) or a lane of one (from n on)."""

    def __init__(self, world_size: int, seed: int) -> None:
        self.world_size = world_size
        self.lanes: dict[int, tuple[int, threading.Thread]] = {}  # by actor: the rank beside whose program it works
        self.random = random.Random(seed)
        self.batons = [threading.Lock() for _ in range(world_size)]  # all are locked except the one of the rank that runs
        for baton in self.batons:
            baton.acquire()
        self.waiting: dict[int, Awaited] = {}
        self.blocked: set[int] = set()  # of those that wait, the ones whose collective is not complete
        self.polling: set[int] = set()
        self.fruitless = 0  # polls in a row that found nothing, since the last call of any rank
        self.unfinished = set(range(world_size))
        self.slots: dict[tuple[Any, ...], GroupCall] = {}  # collectives that are not complete
        self.rng_states = RngState.now().copies(world_size)
        self.failure: BaseException | None = None
        self.over = threading.Event()
        self.running: int | None = None
        self.abandoned = False

    # -- what a rank calls while it holds the baton --------------------------------------------------------------------

    def arrive(self, key: tuple[Any, ...], rank: int, slot: GroupCall, arrival: RankCall) -> GroupCall:
        """Adds a call to its collective; raises MismatchError where it differs from the first member's."""
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
        """Whether the collective is complete; other ranks run first.

        A patient poll lets them run until none can continue; any other poll, for a number of turns that the seed picks.
        """
        if patient:
            found = self.wait(rank, slot, polls=True)
        else:
            while not slot.done and self.random.random() < 0.5:
                self.check()
                successor = self.pick()
                self.hand_over(rank, rank if successor is None else successor)
            self.check()
            found = slot.done
        self.fruitless = 0 if found else self.fruitless + 1
        if self.fruitless > _MAX_FRUITLESS_POLLS:
            self.waiting[rank] = slot
            raise self.deadlock()
        return found

    def check(self) -> None:
        if self.failure is not None:
            raise AbortedError

    def pass_on(self, rank: int, *, may_return: bool) -> bool:
        """Passes the baton on and waits until it is back; False if it came back because no other rank can continue."""
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
        """Passes the baton to the successor; returns when it is back."""
        if successor != rank:
            self.rng_states[rank] = RngState.now()
            self.pass_to(successor)
            self.take(rank)

    def take(self, rank: int) -> None:
        """Waits for the baton."""
        self.batons[rank].acquire()
        if self.abandoned:  # the process is its caller's again
            raise AbortedError
        self.rng_states[rank].restore()

    def pass_to(self, successor: int) -> None:
        """Lets the successor run."""
        self.running = successor
        self.batons[successor].release()

    # -- the schedule --------------------------------------------------------------------------------------------------

    def pick(self) -> int | None:
        """A rank that can continue; if there is none, a rank that polls; else None."""
        able = sorted(self.unfinished if self.failure is not None else self.unfinished - self.blocked) or sorted(self.polling)
        return self.random.choice(able) if able else None

    def unblock(self, slot: Awaited) -> None:
        """Lets those go on that wait for what is done now."""
        self.blocked -= {actor for actor, waited in self.waiting.items() if waited is slot}

    def finish(self, rank: int) -> None:
        """Removes a rank that is done; passes the baton on, or ends the run."""
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
        """Ends the ranks: the one that runs at its next line of Python. If that takes long, they end later, by themselves."""
        rank = self.running
        if rank is not None and rank in self.unfinished:
            ident, error = ctypes.c_ulong(threads[rank].ident or 0), ctypes.py_object(AbortedError)
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ident, error)
        self.abandoned = not self.over.wait(_PATIENCE)

    # -- beside the programs -------------------------------------------------------------------------------------------

    def add_lane(self, rank: int, name: str, work: Callable[[int], None]) -> int:
        """A thread that works beside a rank's program whenever it has the baton; its number in the schedule."""
        actor = len(self.batons)
        self.batons.append(threading.Lock())
        self.batons[actor].acquire()
        self.rng_states += RngState.now().copies(1)
        thread = threading.Thread(target=work, args=(actor,), daemon=True, name=f"rank {rank}, {name}")
        self.lanes[actor] = rank, thread
        thread.start()
        return actor

    def end_lanes(self) -> None:
        """Ends the lanes' threads; nothing runs any more."""
        for actor, (_, thread) in self.lanes.items():
            self.batons[actor].release()
            thread.join()

    def deadlock(self) -> DeadlockError:
        """The error that says where each rank waits."""
        lanes = {actor: rank for actor, (rank, _) in self.lanes.items()}
        calls = {rank: slot for rank, slot in sorted(self.waiting.items()) if isinstance(slot, GroupCall)}
        found = {
            rank: (slot.arrivals[rank], set(slot.members) - set(slot.arrivals))
            for rank, slot in calls.items()
            if rank in slot.arrivals
        }
        waits = {rank: (f"{call} at {call.site}", tuple(sorted(missing))) for rank, (call, missing) in found.items()}
        return DeadlockError(deadlock(self.world_size, self.unfinished, self.waiting, lanes), waits=waits)
