"""What ranks tell each other about themselves, through the store in which they met."""

import json
import os
import socket
import sys
from collections.abc import Iterable
from time import monotonic
from types import FrameType
from typing import Any, Protocol

import attrs
from torch.distributed.distributed_c10d import PrefixStore, Store

from functional_ds.comm.record.collective import Call

__all__ = ["Beat", "Beats", "Seen", "activity"]

_LIBRARIES = ("functional_ds", "torch", "optree")
_PYTHON = os.path.dirname(os.__file__) + os.sep  # noqa: PTH120  # compared as text
_COMM, _STEP = "functional_ds.comm.", "functional_ds.step"


def activity(thread: int) -> dict[str, str]:
    """Where a thread is.

    ``phase``: the step's phase that it is in; ``call``: the collective that it is in, with its options and shapes where they
    can be seen; ``site``: the file and line of the innermost code that is not this library's, torch's or Python's. What does
    not apply is left out.

    >>> import threading
    >>> isinstance(activity(threading.get_ident()), dict)
    True
    """
    frame = sys._current_frames().get(thread)
    found: dict[str, str] = {}
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        if module.startswith(_COMM) and "site" not in found:
            _note_call(frame, found)
        elif module == _STEP and not frame.f_code.co_name.startswith("_"):
            found.setdefault("phase", frame.f_code.co_name)
        elif module.partition(".")[0] not in _LIBRARIES and not _is_pythons(frame.f_code.co_filename):
            found.setdefault("site", f"{frame.f_code.co_filename.rpartition(os.sep)[2]}:{frame.f_lineno}")
        frame = frame.f_back
    return found


def _is_pythons(file: str) -> bool:
    """Whether this is Python's own library, which is where waiting often ends up."""
    return file.startswith(("<frozen", _PYTHON)) and "site-packages" not in file


def _note_call(frame: FrameType, found: dict[str, str]) -> None:
    """The call as the world carries it out, which knows its shapes; else the name of the outermost function of comm."""
    if "[" in found.get("call", ""):
        return
    local = frame.f_locals
    known = _signature(local) or _signature({name: getattr(local.get("self"), name, None) for name in _PARTS})
    found["call"] = known or frame.f_code.co_name


_PARTS = ("call", "tensors", "group", "here")


def _signature(parts: dict[str, Any]) -> str | None:
    call, tensors, group, here = (parts.get(name) for name in _PARTS)
    if not isinstance(call, Call) or tensors is None or group is None or here is None:
        return None
    return f"{call.signature(tensors, here)} on group {group.name!r} [{group.size}]"


class _Watched(Protocol):
    step: int
    what: str
    turn: int


@attrs.frozen
class Beat:
    """What a rank says of itself.

    Attributes:
        count: grows with each beat.
        turn: grows as the rank goes on.
        step: where it is.
        what: it does.
        phase, call, site: of the step, the collective and the code that its main thread is in; empty where there is none.
        host: where it runs, and in which process.
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
    def now(watch: _Watched, count: int, thread: int) -> "Beat":
        """Of this process, whose main thread is this one."""
        host = f"process {os.getpid()} on {socket.gethostname()}"
        return Beat(count, watch.turn, watch.step, watch.what, host=host, **activity(thread))

    def __str__(self) -> str:
        parts = [self.left or f"step {self.step}: {self.what}"]
        if self.phase:
            parts.append(f"phase {self.phase}")
        if self.call:
            parts.append(self.call)
        text = ", ".join(parts) + (f" at {self.site}" if self.site else "")
        return f"{text} ({self.host})" if self.host else text


@attrs.frozen
class Seen:
    """A rank's last beat, and when by our clock it was new, and its turn."""

    beat: Beat
    fresh: float
    moved: float

    def after(self, beat: Beat, now: float) -> "Seen":
        """With what was read now."""
        fresh = now if beat != self.beat else self.fresh
        return Seen(beat, fresh, now if (beat.turn, beat.left) != (self.beat.turn, self.beat.left) else self.moved)


@attrs.define(eq=False)
class Beats:
    """One rank's view of all.

    Attributes:
        rank: this one.
        size: how many there are.
        store: no request to it waits for another rank.
        thread: the thread that is watched.
        seen: what was last heard of each rank.
    """

    rank: int
    size: int
    store: PrefixStore
    thread: int
    seen: dict[int, Seen] = attrs.field(init=False)
    _mine: Beat = Beat()

    def __attrs_post_init__(self) -> None:
        now = monotonic()
        self.seen = {rank: Seen(Beat(), now, now) for rank in range(self.size)}

    def send(self, beat: Beat) -> None:
        """Writes this rank's beat down."""
        if not self._mine.left:
            self._mine = beat
            self.seen[self.rank] = self.seen[self.rank].after(beat, monotonic())
            self.store.set(f"beat {self.rank}", json.dumps(attrs.asdict(beat)))

    def look(self, ranks: Iterable[int]) -> None:
        """Reads the beats of some ranks."""
        for rank in ranks:
            key = f"beat {rank}"
            if self.store.check([key]):
                beat = Beat(**json.loads(self.store.get(key)))
                self.seen[rank] = self.seen[rank].after(beat, monotonic())

    def mine(self, watch: _Watched) -> Seen:
        """What would be sent now."""
        return self.seen[self.rank].after(Beat.now(watch, self._mine.count + 1, self.thread), monotonic())

    def leave(self, how: str) -> None:
        """This rank's last beat."""
        self._mine = attrs.evolve(self._mine, count=self._mine.count + 1, left=how)
        self.store.set(f"beat {self.rank}", json.dumps(attrs.asdict(self._mine)))
        self.count("left", 1)

    def count(self, what: str, more: int) -> int:
        """How many ranks have done it, after so many more."""
        return self.store.add(what, more)

    def judge(self, verdict: str) -> None:
        """Writes down that all are to end, and why."""
        self.store.set("verdict", verdict)

    def verdict(self) -> str | None:
        """Why all are to end; None while they are not."""
        return self.store.get("verdict").decode() if self.store.check(["verdict"]) else None

    def place(self) -> str:
        """Who holds the store, and where."""
        store: Store = self.store
        while isinstance(store, PrefixStore):
            store = store.underlying_store
        holder = "torchrun holds" if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" else "rank 0 or its parent holds"
        host, port = getattr(store, "host", None), getattr(store, "port", None)
        return holder if host is None else f"{holder} at {host}:{port}"
