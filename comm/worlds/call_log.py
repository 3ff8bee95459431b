"""A log of collective calls in the shared store, with which processes check that they make the same calls.

Each rank writes its calls to the store, and a call starts once all its members have written the same. The log does not use the
connections that carry tensors, so it works when those hang.
"""

import pickle
from collections.abc import Callable, Sequence
from contextlib import suppress
from time import monotonic, sleep
from typing import Any

import attrs
from torch import Tensor
from torch.distributed.distributed_c10d import Store

from functional_ds.comm.backends.primitives import Options
from functional_ds.comm.record.group import Group, call_site
from functional_ds.comm.table.collective import Call, CallContext
from functional_ds.comm.table.errors import CommError, MismatchError, TimedOutError

_MIN_PAUSE, _MAX_PAUSE = 50e-6, 5e-3  # seconds between two requests to the store, at first and later
_REPORT_AFTER = 0.2  # seconds: a rank that waits longer writes to the store what it waits for


@attrs.frozen(eq=False)
class _LoggedCall:
    """An entry of the log."""

    rank: int
    agreement: tuple[Any, ...]
    private: Options
    signature: str
    site: str

    def __str__(self) -> str:
        return f"rank {self.rank} called {self.signature} at {self.site}"


@attrs.define(eq=False)
class CallLog:
    """One rank's view of the log.

    Attributes:
        rank: this rank of the world.
        store: holds the entries; requests to it do not block on other ranks.
        timeout: seconds to wait for other ranks.
        everything: whether all calls are logged, so that a missing rank is known to be in no collective.
        given_up: whether waits must raise at once.
    """

    rank: int
    store: Store
    timeout: float
    everything: bool = True
    given_up: Callable[[], bool] = bool
    _turns: dict[str, int] = attrs.field(factory=dict)
    _open: set[str] = attrs.field(factory=set)
    _failures: list[Exception] = attrs.field(factory=list)

    def announce(self, call: Call, tensors: Sequence[Tensor], group: Group, here: CallContext) -> Callable[[], None]:
        """Logs this rank's next call; returns a function that waits for the other members' entries and compares them."""
        row = call.collective
        order = f"{group.name} {group.ranks} {row.order(call.options)}"
        turn = self._turns[order] = self._turns.get(order, -1) + 1
        members = [group.ranks[member] for member in row.members(call.options, group.size)]
        purpose, signature = group.world.purpose(group), call.signature(tensors, here)
        signature += f", for {purpose}" if purpose else ""
        mine = _LoggedCall(self.rank, (*call.agreement(tensors, here), purpose), call.private(), signature, call_site())
        entry = pickle.dumps(attrs.astuple(mine, recurse=False))
        self.store.set(f"{order} {turn} {self.rank}", entry)  # type: ignore[arg-type]  # it takes bytes, too
        self._open.add(f"{order} {turn}")
        return lambda: self._settle(call, mine, group, members, f"{order} {turn}")

    def _settle(self, call: Call, mine: _LoggedCall, group: Group, members: Sequence[int], turn: str) -> None:
        try:
            self._agree(call, mine, group, members, turn)
        except Exception as error:
            self._failures.append(error)
            raise
        finally:
            self._open.discard(turn)

    def finish(self) -> None:
        """Waits until all announced calls are compared; raises the first failure."""
        known, deadline = len(self._failures), monotonic() + self.timeout + _REPORT_AFTER
        while self._open and monotonic() < deadline:
            sleep(_MIN_PAUSE)
        if len(self._failures) > known:
            raise self._failures[known]

    def _agree(self, call: Call, mine: _LoggedCall, group: Group, members: Sequence[int], turn: str) -> None:
        keys = {member: f"{turn} {member}" for member in members}
        self._await(mine, group, keys)
        entries = [_LoggedCall(*pickle.loads(self.store.get(key))) for key in keys.values()]
        if self.store.add(f"{turn} readers", 1) == len(members):  # the last reader deletes the entries
            for key in (*keys.values(), f"{turn} readers"):
                self.store.delete_key(key)
        for theirs in entries:
            if theirs.agreement != mine.agreement:
                raise MismatchError(
                    f"the ranks of group {group.name!r} {list(group.ranks)} called different collectives: {mine}, {theirs}"
                )
        call.merged([entry.private for entry in entries])

    def _await(self, mine: _LoggedCall, group: Group, keys: dict[int, str]) -> None:
        """Waits until all keys are in the store; raises if one of their ranks has left, or after the timeout."""
        began, pause, told = monotonic(), _MIN_PAUSE, False
        while not self.store.check(list(keys.values())):
            if self.given_up():
                raise CommError(f"rank {self.rank} has given up {mine.signature} on group {group.name!r} at {mine.site}")
            waited = monotonic() - began
            if waited > _REPORT_AFTER:
                missing = [rank for rank, key in keys.items() if not self.store.check([key])]
                if missing and not told:
                    self.store.set(f"waits {self.rank}", f"{mine.signature} at {mine.site} for rank {_listed(missing)}")
                    told = True
                gone = [rank for rank in missing if self.store.check([f"left {rank}"])]
                if waited > self.timeout or any(not self.store.check([keys[rank]]) for rank in gone):
                    raise self._failure(mine, group, missing, waited)
            sleep(pause)
            pause = min(pause * 1.5, _MAX_PAUSE)
        if told:
            self.store.delete_key(f"waits {self.rank}")

    def _failure(self, mine: _LoggedCall, group: Group, missing: Sequence[int], waited: float) -> CommError:
        lines = [
            f"rank {self.rank} waited {waited:.1f} s in {mine.signature} on group {group.name!r} at {mine.site}; "
            f"rank {_listed(missing)} had not come"
        ]
        for rank in missing:
            if self.store.check([f"waits {rank}"]):
                what = f"waits in {self.store.get(f'waits {rank}').decode()}"
            elif self.store.check([f"left {rank}"]):
                what = self.store.get(f"left {rank}").decode()
            elif self.everything:
                what = "is in no collective: it computes, hangs elsewhere, or its process has died"
            else:
                what = "may be anywhere (under comm.debug.checked() this line says where it waits)"
            lines.append(f"  rank {rank} {what}")
        return TimedOutError("\n".join(lines))

    def leave(self, error: BaseException | None) -> None:
        """Tells the other ranks that this one will make no more calls."""
        how = "has left the checked block" if error is None else f"has raised {type(error).__name__}: {error}"
        with suppress(Exception):  # the store may be gone with the process that held it
            self.store.set(f"left {self.rank}", how)


def _listed(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks))
