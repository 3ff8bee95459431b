"""``watchdog``: ends all ranks when one hangs or dies, with a report that names it."""

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
from functional_ds.comm.worlds.process import ProcessWorld, check_timeout
from functional_ds.comm.worlds.rendezvous import holder, reconnect

from .heartbeat import Heartbeat, Heartbeats, PeerStatus, Watch

_FINISHED = "finished"


@attrs.frozen
class Failure:
    """The failed ranks, and the reason."""

    message: str
    ranks: tuple[int, ...]

    @staticmethod
    def detect(seen: Mapping[int, PeerStatus], timeout: float, *, silent: float, grace: float) -> "Failure | None":
        """The failure of a rank that is silent, that raised while others run, or that makes no progress; None if there is none.

        Args:
            seen: the status of each rank.
            timeout: seconds without progress.
            silent: seconds without a heartbeat.
            grace: the same, if some rank makes no progress or has raised.
        """
        now = monotonic()
        there = {rank: one for rank, one in seen.items() if not one.beat.left}
        stands = any(now - one.moved > timeout for one in there.values())
        quiet = grace if stands else silent  # a rank without heartbeats is dead, not hung
        dead = tuple(rank for rank, one in there.items() if now - one.fresh > quiet)
        if dead:
            longest = max(now - there[rank].fresh for rank in dead)
            return Failure(f"{_ranks(dead)} died, is stopped, or cannot be reached: silent for {longest:.1f} s", dead)
        raised = _raised(seen)
        gone = tuple(rank for rank in raised if there and now - seen[rank].fresh > grace)
        if gone:
            return Failure(f"{_ranks(gone)} {seen[gone[0]].beat.left}", gone)
        if not stands:
            return None
        # Ranks in a collective wait for those outside. All stopped at about the same time.
        stuck = {rank: one for rank, one in there.items() if now - one.moved > timeout / 2}
        elsewhere = tuple(rank for rank, one in stuck.items() if not one.beat.call)
        return Failure(
            f"{_ranks(elsewhere or tuple(stuck))} hangs: nothing has moved for {timeout:.1f} s", elsewhere or tuple(stuck)
        )

    @staticmethod
    def behind(seen: Mapping[int, PeerStatus], rank: int, *, silent: float) -> "Failure | None":
        """The failure of another rank that made this rank's collective fail: a rank that is silent, or else one that raised.

        Args:
            seen: the status of each rank.
            rank: this rank.
            silent: seconds without a heartbeat.
        """
        now = monotonic()
        dead = tuple(r for r, one in seen.items() if r != rank and not one.beat.left and now - one.fresh > silent)
        if dead:
            return Failure(f"{_ranks(dead)} died, is stopped, or cannot be reached", dead)
        raised = tuple(r for r in _raised(seen) if r != rank)
        return Failure(f"{_ranks(raised)} {seen[raised[0]].beat.left}", raised) if raised else None


def _raised(seen: Mapping[int, PeerStatus]) -> tuple[int, ...]:
    return tuple(rank for rank, one in seen.items() if one.beat.left not in ("", _FINISHED))


def report(failure: Failure, seen: Mapping[int, PeerStatus]) -> str:
    """The message, and a line for each rank."""
    now = monotonic()
    lines = [failure.message]
    for rank, one in sorted(seen.items()):
        mark = "* " if rank in failure.ranks else "  "
        lines.append(f"{mark}rank {rank}, for {now - one.moved:.1f} s: {one.beat}; heard {now - one.fresh:.1f} s ago")
    return "\n".join(lines)


def _ranks(ranks: tuple[int, ...]) -> str:
    return f"rank {', '.join(map(str, ranks))}"


EXIT_CODE = 75  # of a process that a watchdog ends: EX_TEMPFAIL of sysexits, which means try again
_BEATS = 10  # heartbeats within the timeout
_SLOWEST = 0.5  # seconds between two heartbeats
_SILENT = 4  # missing heartbeats after which a rank counts as dead if another rank's collective failed


@contextmanager
def watchdog(timeout: timedelta | None) -> Iterator[Watch]:
    """A context in which all ranks end if one dies, or makes no progress for ``timeout``.

    Every rank of the world enters it, and calls ``watch.at(step, what)`` as it makes progress. A thread of each rank writes
    heartbeats into the process group's store; the connections for tensors are not used. Rank 0's thread checks all ranks, and
    every other rank's checks rank 0. A process that is ended prints what all ranks were doing and exits with code 75, so
    torchrun restarts all. If a collective fails because a rank died, the error names the rank.

    Simulations need no watchdog: they detect deadlocks immediately.

    Args:
        timeout: longer than the longest time between two calls of ``watch.at``; None for no watchdog.

    Cost: about six requests a second to the store from each rank; from rank 0 four a second and rank.

    Raises:
        RankFailedError: a collective failed, and other ranks are silent or have raised; names them, and what all were doing.
        ValueError: the timeout is not positive.

    >>> with watchdog(timedelta(seconds=60)) as watch:
    ...     for step in range(3):
    ...         watch.at(step, "counting")
    """
    if timeout is not None:
        check_timeout(timeout)
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


@attrs.define(eq=False)
class _Guard:
    """Two threads: one talks to the store, and the other checks that it still gets answers."""

    watch: Watch
    beats: Heartbeats
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
        store: Store = reconnect(world.store, timeout) if isinstance(world, ProcessWorld) else HashStore()
        turn = store.add(f"functional_ds/watchdog/{everyone.rank}", 1)  # all ranks have entered equally often
        beats = Heartbeats(
            everyone.rank, everyone.size, PrefixStore(f"functional_ds/watchdog/{turn}", store), threading.get_ident()
        )
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
            except Exception as error:  # any error of the store when its process is gone
                self.lost = error
                return
            self.heard = monotonic()
            if self.over.wait(self.pause):
                return

    def _round(self, count: int) -> None:
        self.beats.send(Heartbeat.now(self.watch, count=count, thread=self.beats.thread))
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
        """A report, if one of the ranks has died or raised, or makes no progress."""
        self.beats.read(ranks)
        seen = {rank: self.beats.peers[rank] for rank in ranks}
        failure = Failure.detect(
            seen, self.timeout if hangs else math.inf, silent=self.timeout, grace=min(self.timeout, 5 * self.pause)
        )
        if failure is None:
            return None
        self.beats.read(range(self.beats.size))
        return report(failure, self.beats.peers)

    def _listen(self) -> None:
        """Ends this process when the store does not answer, as the talking thread cannot."""
        while not self.over.wait(self.pause):
            quiet = monotonic() - self.heard
            if quiet > self.timeout or (self.lost is not None and quiet > 5 * self.pause):
                self._end(self._cut_off(quiet))

    def _cut_off(self, quiet: float) -> str:
        why = f": {str(self.lost).splitlines()[0]}" if self.lost else ""
        self.beats.peers[self.beats.rank] = self.beats.mine(self.watch)
        message = f"the store that {holder(self.beats.store)} has not answered for {quiet:.1f} s{why}"
        return report(Failure(message, ()), self.beats.peers)

    def _end(self, message: str) -> None:
        """Ends the process, even if its main thread is blocked."""
        if self.over.is_set():
            return
        error = comm.errors.TimedOutError(f"rank {self.beats.rank} is ended by its watchdog: {message}")
        print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)  # noqa: T201
        with suppress(Exception):  # for torchrun's summary
            from torch.distributed.elastic.multiprocessing.errors import get_error_handler

            get_error_handler().record_exception(error)
        os._exit(EXIT_CODE)

    # -- the end of the block ------------------------------------------------------------------------------------------

    def finished(self) -> None:
        """Waits until all ranks have finished, as the store may end with the first of them. The threads watch meanwhile."""
        self.watch.at(self.watch.step, "waiting for the other ranks to finish")
        with suppress(RuntimeError):  # the store has ended, so all had finished
            self.beats.leave("finished")
            self._wait_for("left", self.beats.size, math.inf)
            self.over.set()
            self.talker.join(self.pause)
            self.beats.count("gone", 1)  # this rank's last request
            if self.beats.rank == 0:  # its process may hold the store
                self._wait_for("gone", self.beats.size, 5 * self.pause)

    def _wait_for(self, what: str, ranks: int, patience: float) -> None:
        deadline = monotonic() + patience
        while self.beats.count(what, 0) < ranks and monotonic() < deadline:
            sleep(min(self.pause, 0.01))

    def failed(self, error: BaseException) -> None:
        """Tells the other ranks; if one of them caused this failure, raises an error that names it."""
        self.watch.at(
            self.watch.step, f"looking for the cause of {type(error).__name__}, which it raised while {self.watch.what}"
        )
        message = self.verdict
        if message is None and isinstance(error, comm.errors.CommError | dist.DistError):
            message = self._cause()
        if message is not None:
            self.over.set()
            raise comm.errors.RankFailedError(f"rank {self.beats.rank} failed because of others: {message}") from error
        with suppress(Exception):
            self.beats.leave(f"raised {type(error).__name__}: {error}".splitlines()[0])

    def _cause(self) -> str | None:
        """A report of ranks that have died or raised, if there are any; reads several heartbeats first."""
        everyone = range(self.beats.size)
        try:
            self.beats.read(everyone)
            deadline = monotonic() + _SILENT * self.pause
            while monotonic() < deadline:
                sleep(self.pause / 2)
                self.beats.read(everyone)
        except Exception as error:
            self.lost = error
            return self._cut_off(monotonic() - self.heard)
        failure = Failure.behind(self.beats.peers, self.beats.rank, silent=(_SILENT - 1) * self.pause)
        return None if failure is None else report(failure, self.beats.peers)
