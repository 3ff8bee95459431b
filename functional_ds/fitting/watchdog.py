"""``watchdog``: ranks that hang or die end the others, with a report that names them."""

import itertools
import math
import os
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import timedelta
from time import monotonic, sleep

import attrs
import torch.distributed as dist
from torch.distributed import HashStore  # type: ignore[attr-defined]  # public, but torch's __all__ lacks it
from torch.distributed.distributed_c10d import PrefixStore, Store

from functional_ds import comm
from functional_ds.comm.worlds.current import simulated_world
from functional_ds.comm.worlds.process import ProcessWorld

from .heartbeat import Beat, Beats, Seen

__all__ = ["EXIT_CODE", "Hang", "Watch", "report", "watchdog"]

_FINISHED = "finished"


@attrs.frozen
class Hang:
    """What is wrong, in words, and with which ranks."""

    story: str
    ranks: tuple[int, ...]

    @staticmethod
    def found(seen: Mapping[int, Seen], timeout: float, *, silent: float, grace: float) -> "Hang | None":
        """What is wrong by now: who is silent, who raised and took no one along, in whom nothing moves."""
        now = monotonic()
        there = {rank: one for rank, one in seen.items() if not one.beat.left}
        stands = any(now - one.moved > timeout for one in there.values())
        quiet = grace if stands else silent  # who is silent hangs in nothing
        dead = tuple(rank for rank, one in there.items() if now - one.fresh > quiet)
        if dead:
            longest = max(now - there[rank].fresh for rank in dead)
            return Hang(f"{_ranks(dead)} died, is stopped, or cannot be reached: silent for {longest:.1f} s", dead)
        raised = _raised(seen)
        gone = tuple(rank for rank in raised if there and now - seen[rank].fresh > grace)
        if gone:
            return Hang(f"{_ranks(gone)} {seen[gone[0]].beat.left}", gone)
        if not stands:
            return None
        # The others wait for those that are in no collective. They stopped at about the same time.
        stuck = {rank: one for rank, one in there.items() if now - one.moved > timeout / 2}
        elsewhere = tuple(rank for rank, one in stuck.items() if not one.beat.call)
        return Hang(
            f"{_ranks(elsewhere or tuple(stuck))} hangs: nothing has moved for {timeout:.1f} s", elsewhere or tuple(stuck)
        )

    @staticmethod
    def blamed(seen: Mapping[int, Seen], rank: int, *, silent: float) -> "Hang | None":
        """Over whom this rank's collective has failed: who has been silent so long, or else raised something of its own."""
        now = monotonic()
        dead = tuple(r for r, one in seen.items() if r != rank and not one.beat.left and now - one.fresh > silent)
        if dead:
            return Hang(f"{_ranks(dead)} died, is stopped, or cannot be reached", dead)
        raised = tuple(r for r in _raised(seen) if r != rank)
        return Hang(f"{_ranks(raised)} {seen[raised[0]].beat.left}", raised) if raised else None


def _raised(seen: Mapping[int, Seen]) -> tuple[int, ...]:
    return tuple(rank for rank, one in seen.items() if one.beat.left not in ("", _FINISHED))


def report(hang: Hang, seen: Mapping[int, Seen]) -> str:
    """The story, and a line for each rank."""
    now = monotonic()
    lines = [hang.story]
    for rank, one in sorted(seen.items()):
        mark = "* " if rank in hang.ranks else "  "
        lines.append(f"{mark}rank {rank}, for {now - one.moved:.1f} s: {one.beat}; heard {now - one.fresh:.1f} s ago")
    return "\n".join(lines)


def _ranks(ranks: tuple[int, ...]) -> str:
    return f"rank {', '.join(map(str, ranks))}"


EXIT_CODE = 75  # sysexits' EX_TEMPFAIL: try again; what a process that a watchdog ends exits with
_BEATS = 10  # within the time-out
_SLOWEST = 0.5  # seconds between two beats
_SILENT = 4  # beats without which a rank that others failed over is taken for dead


@attrs.define(eq=False)
class Watch:
    """What a rank says of itself: call ``at`` more often than the time-out."""

    step: int = 0
    what: str = "starting"
    turn: int = 0

    def at(self, step: int, what: str) -> None:
        """This rank is at a step and does something. Costs nothing worth counting: a thread reads it now and then."""
        self.step, self.what, self.turn = step, what, self.turn + 1


@contextmanager
def watchdog(timeout: timedelta | None) -> Iterator[Watch]:
    """While the block runs, a rank that dies, or in which nothing moves for ``timeout``, ends all the others within it.

    Every rank of the world enters the block, and calls ``watch.at(step, what)`` as it goes on. A thread of each rank writes
    beats into the store through which the processes met; nothing is sent over the connections that carry tensors. Rank 0's
    judges all ranks, and every other's judges rank 0. A process that is ended prints what all ranks were doing, and exits with
    code 75, so that torchrun starts all anew. Where a collective fails because a rank died, the error says which.

    A simulation needs none, for it finds deadlocks at once. None for ``timeout`` watches nothing.

    Args:
        timeout: longer than anything that goes on between two calls of ``watch.at``.

    Cost: some six requests a second to the store from each rank; from rank 0 four a second and rank.

    Raises:
        RankFailedError: a collective failed, and other ranks are silent or have raised; which, and what all were doing.
        ValueError: a timeout that is not positive.

    >>> with watchdog(timedelta(seconds=60)) as watch:
    ...     for step in range(3):
    ...         watch.at(step, "counting")
    """
    if timeout is not None and timeout.total_seconds() <= 0:
        raise ValueError(f"timeout={timeout}: how long nothing may move must be positive; None watches nothing")
    watch = Watch()
    if timeout is None or simulated_world() is not None:
        yield watch
        return
    guard = _Guard.of(watch, timeout.total_seconds())
    guard.start()
    try:
        yield watch
    except BaseException as error:
        guard.failed(error)
        raise
    else:
        guard.finished()
    finally:
        guard.over.set()


def _twin(store: Store) -> Store:
    """The same store over a connection of its own: a request that waits on the other one must not hold up beats."""
    twin: Store = store.clone()  # type: ignore[attr-defined]  # torch's stubs lack it
    return twin


@attrs.define(eq=False)
class _Guard:
    """Two threads: one talks to the store, and one looks whether that one still gets answers."""

    watch: Watch
    beats: Beats
    timeout: float
    pause: float
    over: threading.Event = attrs.field(factory=threading.Event)
    heard: float = attrs.field(factory=monotonic)
    lost: Exception | None = None
    verdict: str | None = None
    talker: threading.Thread = attrs.field(init=False)

    @staticmethod
    def of(watch: Watch, timeout: float) -> "_Guard":
        everyone = comm.world()
        world = everyone.world
        store: Store = _twin(world.store) if isinstance(world, ProcessWorld) else HashStore()
        turn = store.add(f"functional_ds/watchdog/{everyone.rank}", 1)  # all ranks have entered equally often
        beats = Beats(everyone.rank, everyone.size, PrefixStore(f"functional_ds/watchdog/{turn}", store), threading.get_ident())
        return _Guard(watch, beats, timeout, min(timeout / _BEATS, _SLOWEST))

    def start(self) -> None:
        self.talker = threading.Thread(target=self._talk, daemon=True, name="watchdog")
        self.talker.start()
        threading.Thread(target=self._listen, daemon=True, name="watchdog of the watchdog").start()

    # -- the threads ---------------------------------------------------------------------------------------------------

    def _talk(self) -> None:
        for count in itertools.count():
            try:
                self._round(count)
            except Exception as error:  # whatever the store says when the process that holds it is gone
                self.lost = error
                return
            self.heard = monotonic()
            if self.over.wait(self.pause):
                return

    def _round(self, count: int) -> None:
        self.beats.send(Beat.now(self.watch, count, self.beats.thread))
        self.verdict = self.beats.verdict()
        if self.verdict is None and self.beats.rank == 0:
            self.verdict = self._judged(range(self.beats.size), hangs=True)
            if self.verdict is not None and not self.over.is_set():
                self.beats.judge(self.verdict)
                self.over.wait(2 * self.pause)  # this process may hold the store: let the others read it
        elif self.verdict is None:
            self.verdict = self._judged((0,), hangs=False)
        if self.verdict is not None:
            self._end(self.verdict)

    def _judged(self, ranks: range | tuple[int, ...], *, hangs: bool) -> str | None:
        """A report, if one of the ranks has died or failed, or moves no more."""
        self.beats.look(ranks)
        seen = {rank: self.beats.seen[rank] for rank in ranks}
        hang = Hang.found(
            seen, self.timeout if hangs else math.inf, silent=self.timeout, grace=min(self.timeout, 5 * self.pause)
        )
        if hang is None:
            return None
        self.beats.look(range(self.beats.size))
        return report(hang, self.beats.seen)

    def _listen(self) -> None:
        """Ends this process when the store does not answer: then the talking thread cannot."""
        while not self.over.wait(self.pause):
            quiet = monotonic() - self.heard
            if quiet > self.timeout or (self.lost is not None and quiet > 5 * self.pause):
                self._end(self._cut_off(quiet))

    def _cut_off(self, quiet: float) -> str:
        why = f": {str(self.lost).splitlines()[0]}" if self.lost else ""
        self.beats.seen[self.beats.rank] = self.beats.mine(self.watch)
        story = f"the store that {self.beats.place()} has not answered for {quiet:.1f} s{why}"
        return report(Hang(story, ()), self.beats.seen)

    def _end(self, story: str) -> None:
        """Ends the process: its main thread may be anywhere, and need not come back."""
        if self.over.is_set():
            return
        error = comm.TimedOutError(f"rank {self.beats.rank} is ended by its watchdog: {story}")
        print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)  # noqa: T201
        with suppress(Exception):  # torchrun shows it in its summary
            from torch.distributed.elastic.multiprocessing.errors import get_error_handler

            get_error_handler().record_exception(error)
        os._exit(EXIT_CODE)

    # -- the end of the block ------------------------------------------------------------------------------------------

    def finished(self) -> None:
        """Waits until all ranks have, for the store may go with the first of them. The threads watch meanwhile."""
        self.watch.at(self.watch.step, "waiting for the other ranks to finish")
        with suppress(RuntimeError):  # it has gone: so had all finished
            self.beats.leave("finished")
            self._wait_for("left", self.beats.size, math.inf)
            self.over.set()
            self.talker.join(self.pause)
            self.beats.count("gone", 1)  # this rank's last request
            if self.beats.rank == 0:  # which may hold the store
                self._wait_for("gone", self.beats.size, 5 * self.pause)

    def _wait_for(self, what: str, ranks: int, patience: float) -> None:
        deadline = monotonic() + patience
        while self.beats.count(what, 0) < ranks and monotonic() < deadline:
            sleep(min(self.pause, 0.01))

    def failed(self, error: BaseException) -> None:
        """Tells the others; where this rank failed over others, raises who they are."""
        self.watch.at(
            self.watch.step, f"looking for what {type(error).__name__} is due to, which it raised while {self.watch.what}"
        )
        story = self.verdict
        if story is None and isinstance(error, comm.CommError | dist.DistError):
            story = self._blamed()
        if story is not None:
            self.over.set()
            raise comm.RankFailedError(f"rank {self.beats.rank} failed over others: {story}") from error
        with suppress(Exception):
            self.beats.leave(f"raised {type(error).__name__}: {error}".splitlines()[0])

    def _blamed(self) -> str | None:
        """Who has died or raised, if somebody has; looks twice, some beats apart."""
        everyone = range(self.beats.size)
        try:
            self.beats.look(everyone)
            deadline = monotonic() + _SILENT * self.pause
            while monotonic() < deadline:
                sleep(self.pause / 2)
                self.beats.look(everyone)
        except Exception as error:
            self.lost = error
            return self._cut_off(monotonic() - self.heard)
        hang = Hang.blamed(self.beats.seen, self.beats.rank, silent=(_SILENT - 1) * self.pause)
        return None if hang is None else report(hang, self.beats.seen)
