"""N ranks in one process: each is a thread, one thread runs at a time, and a seed picks the interleaving.

A rank runs until it waits for a collective that is not complete. Then the seed picks the rank that runs next. The last rank
to call a collective computes its denotation for all members. So a simulated run is deterministic, and when no rank can
continue, the simulator knows who waits for whom.
"""

import ctypes
import random
import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, TypeVarTuple, cast

import attrs
import torch
from torch import Tensor

from functional_ds.comm.record.collective import Call, Here
from functional_ds.comm.record.errors import CommError, DeadlockError, MismatchError, UnmatchedError
from functional_ds.comm.record.group import Group, World, call_site

from .current import enter, exclusive_simulation
from .rng_state import RngState, drop_spare_normal, kept_rng
from .shapes import run_on_shapes

__all__ = ["SimulatedWorld", "simulate"]

_PATIENCE = 1.0  # seconds for the ranks to end when the caller is interrupted
_MAX_FRUITLESS_POLLS = 10_000  # after which a program that only polls is reported as a deadlock

T = TypeVar("T")
Ts = TypeVarTuple("Ts")


class _AbortedError(BaseException):
    """Ends the other ranks once one has failed. It is no Exception, so that user code does not catch it."""


@attrs.frozen(eq=False)
class _RankCall:
    """One rank's part of a collective: its call, its inputs and the call site."""

    call: Call
    here: Here
    inputs: list[Tensor]
    site: str

    def __str__(self) -> str:
        return self.call.signature(self.inputs, self.here)


@attrs.define(eq=False)
class _GroupCall:
    """One collective of one group: the calls so far, and the results once all members have called."""

    group: Group
    members: tuple[int, ...]  # ranks of the world, in the denotation's order
    agreement: tuple[Any, ...]
    arrivals: dict[int, _RankCall] = attrs.field(factory=dict)
    outputs: dict[int, list[Tensor]] | None = None

    def missing(self) -> list[int]:
        return [rank for rank in self.members if rank not in self.arrivals]

    def complete(self) -> None:
        """Applies the denotation to each leaf; by law 12 that is the meaning of a coalesced call."""
        arrivals = [self.arrivals[rank] for rank in self.members]
        call = arrivals[0].call
        options = call.merged([arrival.call.private() for arrival in arrivals])
        leaves = zip(*(arrival.inputs for arrival in arrivals), strict=True)
        with torch.inference_mode(False), torch.no_grad():  # whichever modes the last rank is in
            results = [call.collective.denotation(xs, options) for xs in leaves]
        self.outputs = {rank: [result[i] for result in results] for i, rank in enumerate(self.members)}


def _copy(tensor: Tensor) -> Tensor:
    """The values as a message would carry them: contiguous, and independent of the sender's modes."""
    with torch.inference_mode(False):
        return tensor.detach().clone(memory_format=torch.contiguous_format)


@attrs.define(eq=False)
class _SimulatedHandle:
    world: "SimulatedWorld"
    slot: _GroupCall
    ended: float | None = None

    def wait(self) -> list[Tensor]:
        self.world.simulator.wait(self.world.rank, self.slot)
        outputs = self.slot.outputs
        if outputs is None:
            raise DeadlockError(f"{self.slot.arrivals[self.world.rank]} was waited for and is not complete")
        return outputs.pop(self.world.rank)

    def poll(self, timeout: float) -> bool:
        return self.world.simulator.poll(self.world.rank, self.slot, timeout > 0)


@attrs.define(eq=False)
class SimulatedWorld(World):
    """The world of a simulated rank.

    Attributes:
        simulator: runs all ranks.
        counts: for each order of calls, the index of the last one.
        thread: the only thread that may call collectives.
    """

    simulator: "Simulator"
    counts: dict[tuple[Any, ...], int] = attrs.field(factory=dict)
    thread: int = attrs.field(factory=threading.get_ident)

    def start(self, call: Call, tensors: Sequence[Tensor], group: Group, *, async_op: bool) -> _SimulatedHandle:
        if threading.get_ident() != self.thread:
            raise CommError(
                f"{call.shown(group.rank)} on simulated rank {self.rank} comes from thread "
                f"{threading.current_thread().name!r}; a simulated rank is one thread: call collectives from there"
            )
        row, here = call.collective, Here(call.options, group.rank, group.size)
        key = (group.ranks, group.name, row.order(call.options))
        turn = self.counts[key] = self.counts.get(key, -1) + 1
        members = tuple(group.ranks[member] for member in row.members(call.options, group.size))
        arrival = _RankCall(call, here, [_copy(t) for t in tensors], call_site())
        slot = _GroupCall(group, members, call.agreement(tensors, here))
        return _SimulatedHandle(self, self.simulator.arrive((*key, turn), self.rank, slot, arrival))


class Simulator:
    """Lets one rank run at a time: the one that holds the baton."""

    def __init__(self, world_size: int, seed: int) -> None:
        self.random = random.Random(seed)
        self.batons = [threading.Lock() for _ in range(world_size)]  # all are locked except the one of the rank that runs
        for baton in self.batons:
            baton.acquire()
        self.waiting: dict[int, _GroupCall] = {}
        self.polling: set[int] = set()
        self.fruitless = 0  # polls in a row that found nothing, since the last call of any rank
        self.unfinished = set(range(world_size))
        self.slots: dict[tuple[Any, ...], _GroupCall] = {}  # collectives that are not complete
        self.rng_states = RngState.now().copies(world_size)
        self.failure: BaseException | None = None
        self.over = threading.Event()
        self.running: int | None = None
        self.abandoned = False

    # -- what a rank calls while it holds the baton --------------------------------------------------------------------

    def arrive(self, key: tuple[Any, ...], rank: int, slot: _GroupCall, arrival: _RankCall) -> _GroupCall:
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
        if not known.missing():
            del self.slots[key]
            known.complete()
        return known

    def wait(self, rank: int, slot: _GroupCall, *, polls: bool = False) -> bool:
        """Lets other ranks run until the collective is complete. A poll also ends when no other rank can continue."""
        drop_spare_normal()
        while slot.outputs is None:
            self.check()
            self.waiting[rank] = slot
            if not self.pass_on(rank, may_return=polls):
                return False
        self.check()
        return True

    def poll(self, rank: int, slot: _GroupCall, patient: bool) -> bool:
        """Whether the collective is complete; other ranks run first.

        A patient poll lets them run until none can continue; any other poll, for a number of turns that the seed picks.
        """
        if patient:
            found = self.wait(rank, slot, polls=True)
        else:
            while slot.outputs is None and self.random.random() < 0.5:
                self.check()
                successor = self.pick()
                self.hand_over(rank, rank if successor is None else successor)
            self.check()
            found = slot.outputs is not None
        self.fruitless = 0 if found else self.fruitless + 1
        if self.fruitless > _MAX_FRUITLESS_POLLS:
            self.waiting[rank] = slot
            raise DeadlockError(self.describe())
        return found

    def check(self) -> None:
        if self.failure is not None:
            raise _AbortedError

    def pass_on(self, rank: int, *, may_return: bool) -> bool:
        """Passes the baton on and waits until it is back; False if it came back because no other rank can continue."""
        if may_return:
            self.polling.add(rank)
        successor = self.pick()
        if successor is None:
            self.failure = self.failure or DeadlockError(self.describe())
            raise _AbortedError
        self.hand_over(rank, successor)
        self.polling.discard(rank)
        slot = self.waiting.pop(rank)
        return slot.outputs is not None or self.failure is not None

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
            raise _AbortedError
        self.rng_states[rank].restore()

    def pass_to(self, successor: int) -> None:
        """Lets the successor run."""
        self.running = successor
        self.batons[successor].release()

    # -- the schedule --------------------------------------------------------------------------------------------------

    def pick(self) -> int | None:
        """A rank that can continue; if there is none, a rank that polls; else None."""
        able = [r for r in sorted(self.unfinished) if self.able(r)] or sorted(self.polling)
        return self.random.choice(able) if able else None

    def able(self, rank: int) -> bool:
        waiting = self.waiting.get(rank)
        return waiting is None or waiting.outputs is not None or self.failure is not None

    def finish(self, rank: int) -> None:
        """Removes a rank that is done; passes the baton on, or ends the run."""
        self.unfinished.discard(rank)
        if not self.unfinished:
            self.over.set()
            return
        successor = self.pick()
        if successor is None:
            self.failure = self.failure or DeadlockError(self.describe())
            successor = self.pick()
        if successor is not None:
            self.pass_to(successor)

    def interrupt(self, threads: Sequence[threading.Thread]) -> None:
        """Ends the ranks: the one that runs at its next line of Python. If that takes long, they end later, by themselves."""
        rank = self.running
        if rank is not None and rank in self.unfinished:
            ident, error = ctypes.c_ulong(threads[rank].ident or 0), ctypes.py_object(_AbortedError)
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ident, error)
        self.abandoned = not self.over.wait(_PATIENCE)

    # -- what went wrong -----------------------------------------------------------------------------------------------

    def describe(self) -> str:
        """The state of every rank: finished, or the call that it waits in and the ranks that it waits for."""
        lines = ["deadlock: no rank can go on"]
        for rank in range(len(self.batons)):
            if rank not in self.unfinished:
                lines.append(f"  rank {rank} has finished")
            elif rank in self.waiting:
                lines.append(f"  rank {rank} waits in {self.describe_wait(self.waiting[rank], rank)}")
        return "\n".join(lines)

    def describe_wait(self, slot: _GroupCall, rank: int) -> str:
        """The rank's call, its call site, and the ranks that have not called."""
        arrival, missing = slot.arrivals[rank], ", ".join(map(str, slot.missing()))
        return f"{arrival} on group {slot.group.name!r} at {arrival.site} for rank {missing}"

    def describe_unmatched(self) -> str:
        """The calls that were started, that no rank waited for and that are not complete."""
        stories = [
            f"  rank {rank} started {self.describe_wait(slot, rank)}" for slot in self.slots.values() for rank in slot.arrivals
        ]
        return "\n".join(["all ranks have finished, but some never came to what others started", *sorted(stories)])


def simulate(program: Callable[[*Ts], T], *args: *Ts, world_size: int, seed: int = 0, shapes_only: bool = False) -> list[T]:
    """Runs ``program(*args)`` on ``world_size`` simulated ranks and returns their results in rank order.

    Law: if ranks communicate through collectives only, the result does not depend on ``seed``, and equals that of ``spawn``
    bit for bit.

    Each rank has its own default torch generator, Python and NumPy generators, warning filters and default dtype. They start as
    copies of the caller's, which do not change. Ctrl-C ends the ranks where they are.

    Args:
        program: what each rank runs.
        args: its arguments, the same objects on all ranks.
        world_size: the number of ranks.
        seed: picks the interleaving.
        shapes_only: the ranks pass tensors without values (``device="meta"``) and get such tensors. Each rank runs by itself,
            and the calls are compared afterwards. A ``ledger`` can so count programs on thousands of ranks.

    Raises:
        MismatchError: ranks of one group called different collectives; names both call sites.
        DeadlockError: no rank can continue; names where each rank waits and for which ranks. With ``shapes_only`` no rank
            waits, so deadlocks are not found.
        UnmatchedError: some ranks never made a call that others had started asynchronously.
        CommError: a rank called a collective from another thread.
        Exception: the exception that a rank raised, with a note that names the rank.

    >>> from functional_ds import comm
    >>> simulate(lambda: comm.all_reduce(torch.tensor(comm.world().rank)).item(), world_size=4)
    [6, 6, 6, 6]
    """
    if type(world_size) is not int or world_size < 1:
        raise ValueError(f"world_size={world_size!r}: a world has at least one rank")
    if shapes_only:
        return run_on_shapes(program, args, world_size)
    simulator, ranks = Simulator(world_size, seed), tuple(range(world_size))
    results: list[T | None] = [None] * world_size

    def run(rank: int) -> None:
        torch.set_num_threads(1)  # one rank runs at a time, and each thread would start a pool of its own
        try:
            simulator.take(rank)
            # Autograd without threads: a backward pass stays on its rank's thread.
            with enter(SimulatedWorld(rank, simulator), ranks), torch.autograd.set_multithreading_enabled(False):
                simulator.check()
                results[rank] = program(*args)
        except _AbortedError:
            pass
        except BaseException as error:
            error.add_note(f"raised on simulated rank {rank} of {world_size}")
            simulator.failure = simulator.failure or error
        finally:
            simulator.finish(rank)

    with exclusive_simulation(), kept_rng():
        threads = torch.get_num_threads()
        workers = [threading.Thread(target=run, args=(r,), daemon=True, name=f"rank {r}") for r in range(world_size)]
        try:
            for worker in workers:
                worker.start()
            simulator.pass_to(simulator.random.randrange(world_size))
            simulator.over.wait()
        except BaseException as error:  # KeyboardInterrupt
            simulator.failure = simulator.failure or error
            simulator.interrupt(workers)
            raise
        finally:
            for worker in [] if simulator.abandoned else workers:
                worker.join()
            torch.set_num_threads(threads)
    if simulator.failure is not None:
        raise simulator.failure
    if simulator.slots:
        raise UnmatchedError(simulator.describe_unmatched())
    return cast(list[T], results)
