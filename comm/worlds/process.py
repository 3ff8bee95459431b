"""Ranks as processes: collectives lowered to messages over Gloo, or to NCCL's own collectives."""

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import cached_property
from inspect import signature
from time import monotonic
from typing import Any, NoReturn

import attrs
import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import Store

from functional_ds.comm.record.collective import Call, Here
from functional_ds.comm.record.errors import CommError
from functional_ds.comm.record.group import Group, call_site, each, place_in
from functional_ds.comm.record.ledger import Ledger

from .call_log import Watch
from .gloo import EXCHANGES, Started, Wire
from .nccl import NATIVE, message
from .worker import Lane, Performed, Posted, Queued

__all__ = ["DEFAULT_TIMEOUT", "ProcessWorld", "leave_process_world", "process_world", "torch_group"]

DEFAULT_TIMEOUT = timedelta(minutes=10)
_POSTED = 2**20  # bytes of a message up to which the caller's thread posts it: sooner than another thread wakes up
_TAGS = 2**30  # below are the tags that a program may use with torch's own messages


@attrs.define(eq=False)
class _Coalesced:
    """Leaves of one dtype that travel as one payload: their places in the call, their shares of it, and what carries it."""

    places: Sequence[int]
    shares: Sequence[int]
    started: Started | Performed | Posted | Queued

    def pieces(self) -> Sequence[Tensor]:
        result = self.started.wait()
        # Pieces of a coalesced payload would share one storage, each keeping all of it alive.
        return [result] if len(self.shares) == 1 else [x.clone() for x in result.split(self.shares, dim=-1)]


@attrs.define(eq=False)
class _ProcessHandle:
    call: Call
    tensors: Sequence[Tensor]
    group: Group
    here: Here
    parts: list[_Coalesced]

    @property
    def ended(self) -> float | None:
        ends = [part.started.ended for part in self.parts]
        return None if None in ends else max(ends, default=None)  # type: ignore[type-var]

    def poll(self, patience: float) -> bool:
        deadline = monotonic() + patience
        return all(part.started.poll(max(0.0, deadline - monotonic())) for part in self.parts)

    def wait(self) -> list[Tensor]:
        results, unpack = [*self.tensors], self.call.collective.unpack
        try:
            for part in self.parts:
                for place, piece in zip(part.places, part.pieces(), strict=True):
                    results[place] = unpack(piece, self.tensors[place], self.here)
        except CommError:
            raise
        except RuntimeError as error:  # the transport's: a time-out, or a rank that has gone
            signature = self.call.signature(self.tensors, self.here)
            raise CommError(
                f"rank {self.group.rank} of {self.group.name!r} failed in {signature} at {call_site()}: {error}\n"
                "(under comm.checked() the error says which ranks had not come)"
            ) from error
        return results


def _by_kind(tensors: Sequence[Tensor]) -> Iterable[Sequence[int]]:
    """The places of tensors of one dtype and device."""
    if len(tensors) == 1:
        return ((0,),)
    places: dict[tuple[torch.dtype, torch.device], list[int]] = {}
    for place, tensor in enumerate(tensors):
        places.setdefault((tensor.dtype, tensor.device), []).append(place)
    return places.values()


def _plain(tensor: Tensor) -> Tensor:
    """The tensor without its graph, its bytes as they read."""
    return (tensor.detach() if tensor.requires_grad else tensor).resolve_conj().resolve_neg()


def _dense(payload: Tensor) -> Tensor:
    """Contiguous, and viewable as bytes: torch calls a lone element contiguous whatever its stride."""
    return payload.contiguous() if payload.stride(-1) == 1 else payload.clone(memory_format=torch.contiguous_format)


Key = tuple[tuple[int, ...], str]


@attrs.define(eq=False, slots=False)
class ProcessWorld:
    """The world as one process sees it.

    Attributes:
        rank: of this process.
        store: where the ranks' processes find each other.
        timeout: how long a message may take, and ``checked`` waits.
        adopted: torch's process groups that came from outside, by ranks and name; the world's is one.
        native: torch's process groups for CUDA tensors, made when a group first needs one.
        lanes: each group's wire, and the thread for its asynchronous calls.
        books: the open ledgers.
        watch: under ``checked()``, who compares calls before they are carried out.
        doorman: who compares monitored barriers otherwise.
        blocks: how many ``checked()`` blocks there were.
    """

    rank: int
    store: Store
    timeout: timedelta = DEFAULT_TIMEOUT
    adopted: dict[Key, dist.ProcessGroup] = attrs.field(factory=dict)
    native: dict[Key, dist.ProcessGroup] = attrs.field(factory=dict)
    lanes: dict[tuple[Key, Hashable], tuple[Wire, Lane]] = attrs.field(factory=dict)
    books: list[Ledger] = attrs.field(factory=list)
    watch: Watch | None = None
    doorman: Watch | None = None
    blocks: int = 0
    _batch: list[tuple[dist.P2POp, Started]] | None = None
    _left: bool = False

    @cached_property
    def device(self) -> torch.device:
        """Where small messages live: on the CPU, where the world serves it."""
        return torch.device("cpu" if "cpu" in self._served else "cuda")

    def repeat(self, times: int, body: Callable[[int], None]) -> None:
        each(times, body)

    def start(self, call: Call, tensors: Sequence[Tensor], group: Group, *, ahead: bool) -> _ProcessHandle:
        if self._left:
            shown = call.shown(group.rank)
            raise CommError(f"{shown} on {group!r}: its processes' group was destroyed; take a group of the new world")
        here, pack = Here(call.options, group.rank, group.size), call.collective.pack
        agreed = self.watch.announce(call, tensors, group, here) if self.watch else None
        parts = []
        for places in _by_kind(tensors):
            device = tensors[places[0]].device
            if device.type not in self._carriers:
                self._refuse(device, group)
            payloads = [pack(_plain(tensors[place]), here) for place in places]
            payload = torch.cat(payloads, dim=-1) if len(payloads) > 1 else _dense(payloads[0])
            start = self._start_native if device.type == "cuda" else self._start_messages
            shares = [part.shape[-1] for part in payloads]
            parts.append(_Coalesced(places, shares, start(call, group, payload, agreed, ahead)))
            agreed = None  # once a call
        if agreed is not None:  # a tree without leaves sends nothing, but is a call
            agreed()
        return _ProcessHandle(call, tensors, group, here, parts)

    def _start_messages(
        self, call: Call, group: Group, payload: Tensor, agreed: Callable[[], None] | None, ahead: bool
    ) -> Performed | Posted | Queued:
        wire, lane = self._lane(group, call.collective.order(call.options))
        exchange = EXCHANGES[call.collective.primitive]
        small = payload.numel() * payload.element_size() <= _POSTED
        if ahead and agreed is None and small and call.collective.primitive == "transfer" and lane.idle:
            return Posted(lane, exchange(wire, payload, call.options).wait)

        def job() -> Tensor:
            if agreed is not None:
                agreed()
            return exchange(wire, payload, call.options).wait()

        # A call that is waited for at once needs no thread, unless the lane's order does. It then goes through both
        # rounds at once, as on a lane: other ranks' lanes may be busier, and messages have one order.
        return lane.submit(job) if ahead or not lane.idle else lane.perform(job)

    def _start_native(
        self, call: Call, group: Group, payload: Tensor, agreed: Callable[[], None] | None, ahead: bool
    ) -> Started:
        if agreed is not None:
            agreed()
        pg, row = self._native(group), call.collective
        if row.primitive != "transfer":
            return NATIVE[row.primitive](pg, payload, call.options)
        op, finish = message(pg, payload, call.options)
        started = Started([], finish)
        if self._batch is None:
            started.works = dist.batch_isend_irecv([op])
        else:
            self._batch.append((op, started))
        return started

    def group(self, ranks: Sequence[int], name: str) -> Group:
        """A group of these ranks. It makes no connections: its messages go over the world's."""
        return Group(tuple(ranks), place_in(ranks, self.rank), name, self)

    def channel(self, group: Group, name: str) -> Group:
        return self.group(group.ranks, f"{group.name}/{name}")

    def adopt(self, pg: dist.ProcessGroup, name: str) -> Group:
        """A torch process group as a group."""
        ranks = tuple(dist.get_process_group_ranks(pg))
        self.adopted[ranks, name] = pg
        return self.group(ranks, name)

    @contextmanager
    def together(self) -> Iterator[None]:
        """NCCL takes messages that go on together as one batch; over Gloo each goes its own way."""
        outer, self._batch = self._batch, []
        try:
            yield
            if self._batch:
                works = dist.batch_isend_irecv([op for op, _ in self._batch])
                for _, started in self._batch:
                    started.works = works
        finally:
            self._batch = outer

    def leave(self) -> None:
        """Nobody shall use this world's groups any more."""
        self._left = True
        self.native.clear()
        self.lanes.clear()
        self.adopted.clear()

    # -- transports ----------------------------------------------------------------------------------------------------

    def _lane(self, group: Group, thread: Hashable) -> tuple[Wire, Lane]:
        key = ((group.ranks, group.name), thread)
        found = self.lanes.get(key)
        if found is None:
            tag = self._tag(repr(key)) if group.size > 1 else 0
            found = self.lanes[key] = Wire(self._everyone, group.ranks, group.rank, tag), Lane(group.name)
        return found

    def _tag(self, name: str) -> int:
        """A number for the name, the same on all ranks, whoever asks first; nobody waits for anybody."""
        mine = _TAGS + self.store.add("functional_ds/tags", 1)
        return int(self.store.compare_set(f"functional_ds/tag/{name}", "", str(mine)))

    @cached_property
    def _everyone(self) -> dist.ProcessGroup:
        pg = dist.group.WORLD
        if pg is None:
            raise CommError("torch's default process group is gone; call comm.init_distributed()")
        return pg

    @cached_property
    def _served(self) -> dict[str, str]:
        """The world's backends by kind of device."""
        return dict(pair.split(":", 1) for pair in str(dist.get_backend_config()).split(","))  # cpu:gloo,cuda:nccl

    @cached_property
    def _carriers(self) -> set[str]:
        """The kinds of devices whose tensors can travel: CPU over Gloo, CUDA over NCCL."""
        return {kind for kind, backend in (("cpu", "gloo"), ("cuda", "nccl")) if self._served.get(kind) == backend}

    def _refuse(self, device: torch.device, group: Group) -> NoReturn:
        names = ", ".join(f"{kind} by {backend}" for kind, backend in self._served.items())
        raise ValueError(
            f"a tensor is on {device}, and the world of {group!r} serves {names}: move it there, "
            "or call init_distributed with a backend for that device (Gloo for CPU, NCCL for CUDA tensors)"
        )

    def _native(self, group: Group) -> dist.ProcessGroup:
        """NCCL's group; torch names it by how many groups a process has made, so members must first use theirs in one order."""
        key = (group.ranks, group.name)
        pg = self.adopted.get(key) or self.native.get(key)
        if pg is None:
            pg = self.native[key] = torch_group(group.ranks, group.name)
        return pg


def torch_group(ranks: Sequence[int], name: str) -> dist.ProcessGroup:
    """A process group of torch's with the ranks in this order; its members must make theirs in one order."""
    in_order: dict[str, Any] = {}
    if list(ranks) != sorted(ranks):
        if "sort_ranks" not in signature(dist.new_group).parameters:
            raise CommError(f"group {name!r} has ranks {list(ranks)}, not ascending; for torch that needs torch >= 2.12")
        in_order["sort_ranks"] = False
    pg: dist.ProcessGroup = dist.new_group(list(ranks), use_local_synchronization=True, group_desc=name, **in_order)
    return pg


_WORLDS: dict[dist.ProcessGroup, Group] = {}  # one entry: torch's default process group and its world


def process_world(timeout: timedelta = DEFAULT_TIMEOUT) -> Group | None:
    """torch's default process group as a world, or None where there is none; ``timeout`` is how long ``checked`` waits."""
    pg = dist.group.WORLD
    if pg is None:
        return None
    everyone = _WORLDS.get(pg)
    if everyone is None:
        leave_process_world()
        world = ProcessWorld(dist.get_rank(), dist.distributed_c10d._get_default_store(), timeout)
        everyone = _WORLDS[pg] = world.adopt(pg, "world")
    return everyone


def leave_process_world() -> None:
    """Closes the world of torch's default process group, if there is one."""
    for everyone in _WORLDS.values():
        if isinstance(everyone.world, ProcessWorld):
            everyone.world.leave()
    _WORLDS.clear()
