"""Heartbeats: what ranks report about themselves, through the store of their process group."""

import json
import os
import socket
import sys
from collections.abc import Iterable
from time import monotonic
from types import FrameType
from typing import Any

import attrs
from torch.distributed.distributed_c10d import PrefixStore

from functional_ds.comm.record.group import Group
from functional_ds.comm.table.collective import Call, CallContext
from functional_ds.step.step import Step

_LIBRARIES = ("functional_ds", "torch", "optree")
_PYTHON = os.path.dirname(os.__file__) + os.sep  # noqa: PTH120  # compared as text
_COMM, _STEP = "functional_ds.comm.", Step.__module__


def activity(thread: int) -> dict[str, str]:
    """What a thread is doing, read from its stack.

    ``phase``: the step's phase; ``call``: the collective, with its options and shapes if they are known; ``site``: the file
    and line of the innermost code that is not this library's, torch's or Python's. Entries that do not apply are left out.

    >>> import threading
    >>> isinstance(activity(threading.get_ident()), dict)
    True
    """
    frame = sys._current_frames().get(thread)
    entries: dict[str, str] = {}
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        if module.startswith(_COMM) and "site" not in entries:
            _note_call(frame, entries)
        elif module == _STEP and not frame.f_code.co_name.startswith("_"):
            entries.setdefault("phase", frame.f_code.co_name)
        elif module.partition(".")[0] not in _LIBRARIES and not _is_pythons(frame.f_code.co_filename):
            entries.setdefault("site", f"{frame.f_code.co_filename.rpartition(os.sep)[2]}:{frame.f_lineno}")
        frame = frame.f_back
    return entries


def _is_pythons(file: str) -> bool:
    """Whether the file is in Python's standard library, in whose functions threads often wait."""
    return file.startswith(("<frozen", _PYTHON)) and "site-packages" not in file


def _note_call(frame: FrameType, entries: dict[str, str]) -> None:
    """Records the call with its shapes, if the world's frame is on the stack; else the name of comm's outermost function."""
    if "[" in entries.get("call", ""):
        return
    local = frame.f_locals
    known = _signature(local) or _signature({name: getattr(local.get("self"), name, None) for name in _PARTS})
    entries["call"] = known or frame.f_code.co_name


_PARTS = ("call", "tensors", "group", "here")


def _signature(parts: dict[str, Any]) -> str | None:
    call, tensors, group, here = (parts.get(name) for name in _PARTS)
    if not isinstance(call, Call) or tensors is None or not isinstance(group, Group) or not isinstance(here, CallContext):
        return None  # a ledger's frame has a group's name, for one
    return f"{call.signature(tensors, here)} on group {group.name!r} [{group.size}]"


@attrs.define(eq=False)
class Watch:
    """Reports a rank's progress: call ``at`` more often than the timeout.

    Attributes:
        step: the training step.
        what: what the rank is doing.
        turn: the number of reports.
    """

    step: int = 0
    what: str = "starting"
    turn: int = 0

    def at(self, step: int, what: str) -> None:
        """Reports progress, at the cost of an assignment, which a thread reads."""
        self.step, self.what, self.turn = step, what, self.turn + 1


@attrs.frozen
class Heartbeat:
    """One rank's report.

    Attributes:
        count: grows with each heartbeat.
        turn: grows whenever the rank makes progress.
        step: the training step.
        what: what the rank is doing.
        phase, call, site: what its main thread is doing, see ``activity``; empty if unknown.
        host: its process and host.
        left: how it left; empty before.
    """

    count: int = 0
    turn: int = 0
    step: int = 0
    what: str = "on its way here"
    phase: str = ""
    call: str = ""
    site: str = ""
    host: str = ""
    left: str = ""

    @staticmethod
    def now(watch: Watch, *, count: int, thread: int) -> "Heartbeat":
        """This process's heartbeat.

        Args:
            watch: what the rank is doing.
            count: the number of this heartbeat.
            thread: the thread whose stack is read.
        """
        host = f"process {os.getpid()} on {socket.gethostname()}"
        return Heartbeat(count, watch.turn, watch.step, watch.what, host=host, **activity(thread))

    def __str__(self) -> str:
        parts = [self.left or f"step {self.step}: {self.what}"]
        if self.phase:
            parts.append(f"phase {self.phase}")
        if self.call:
            parts.append(self.call)
        text = ", ".join(parts) + (f" at {self.site}" if self.site else "")
        return f"{text} ({self.host})" if self.host else text


@attrs.frozen
class PeerStatus:
    """A rank's last heartbeat, with the times by this process's clock of its arrival and of the rank's last progress."""

    beat: Heartbeat
    fresh: float
    moved: float

    def after(self, beat: Heartbeat, now: float) -> "PeerStatus":
        """The status after reading a heartbeat."""
        fresh = now if beat != self.beat else self.fresh
        return PeerStatus(beat, fresh, now if (beat.turn, beat.left) != (self.beat.turn, self.beat.left) else self.moved)


@attrs.define(eq=False)
class Heartbeats:
    """This rank's view of all ranks' heartbeats.

    Attributes:
        rank: this rank.
        size: the number of ranks.
        store: where heartbeats are; no request to it waits for another rank.
        thread: the thread that is watched.
        peers: the status of each rank.
    """

    rank: int
    size: int
    store: PrefixStore
    thread: int
    peers: dict[int, PeerStatus] = attrs.field(init=False)
    _mine: Heartbeat = Heartbeat()

    def __attrs_post_init__(self) -> None:
        now = monotonic()
        self.peers = {rank: PeerStatus(Heartbeat(), now, now) for rank in range(self.size)}

    def send(self, beat: Heartbeat) -> None:
        """Writes this rank's heartbeat into the store."""
        if not self._mine.left:
            self._mine = beat
            self.peers[self.rank] = self.peers[self.rank].after(beat, monotonic())
            self.store.set(f"beat {self.rank}", json.dumps(attrs.asdict(beat)))

    def read(self, ranks: Iterable[int]) -> None:
        """Reads the heartbeats of some ranks."""
        for rank in ranks:
            key = f"beat {rank}"
            if self.store.check([key]):
                beat = Heartbeat(**json.loads(self.store.get(key)))
                self.peers[rank] = self.peers[rank].after(beat, monotonic())

    def mine(self, watch: Watch) -> PeerStatus:
        """This rank's present status, without the store."""
        return self.peers[self.rank].after(Heartbeat.now(watch, count=self._mine.count + 1, thread=self.thread), monotonic())

    def leave(self, how: str) -> None:
        """Sends this rank's last heartbeat."""
        self._mine = attrs.evolve(self._mine, count=self._mine.count + 1, left=how)
        self.store.set(f"beat {self.rank}", json.dumps(attrs.asdict(self._mine)))
        self.count("left", 1)

    def count(self, what: str, more: int) -> int:
        """Adds to the number of ranks that have done something; returns the sum."""
        return self.store.add(what, more)

    def judge(self, verdict: str) -> None:
        """Tells all ranks to end, with the reason."""
        self.store.set("verdict", verdict)

    def verdict(self) -> str | None:
        """Why all ranks must end; None while they need not."""
        return self.store.get("verdict").decode() if self.store.check(["verdict"]) else None
