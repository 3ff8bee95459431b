"""Ranks as processes: collectives of CPU tensors are messages over Gloo, those of CUDA tensors are NCCL's own."""

import weakref
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
from torch.distributed.distributed_c10d import Store

from functional_ds.base.side_stream import Sent, SideStream
from functional_ds.comm.record.collective import Call, Handle, Here
from functional_ds.comm.record.errors import CommError
from functional_ds.comm.record.group import Beside, Group, World, at_site, call_site, last
from functional_ds.comm.record.watched import WatchedInputs

from .call_log import CallLog
from .gloo import GLOO, Communicator, Started
from .nccl import NCCL, message
from .worker import Performed, Posted, Queued, Worker

__all__ = ["DEFAULT_TIMEOUT", "ProcessWorld", "leave_process_world", "process_world", "torch_group"]

DEFAULT_TIMEOUT = timedelta(minutes=10)
_POSTED = 2**20  # bytes: smaller messages are posted by the caller's thread, which is faster than waking another
_CLOSING = 1.0  # seconds for a thread to end once its world is left
_TAGS = 2**30  # smaller tags are free for the program's own messages through torch


@attrs.define(eq=False)
class _Coalesced:
    """Leaves of one dtype that are sent as one payload.

    Attributes:
        places: their indices among the call's leaves.
        shares: each leaf's elements along the payload's last dim.
        started: the primitive under way.
        sent: the payload, where it is on a GPU.
    """

    places: Sequence[int]
    shares: Sequence[int]
    started: Started | Performed | Posted | Queued
    sent: Sent | None = None

    def pieces(self) -> Sequence[Tensor]:
        result = self.started.wait()
        if self.sent is not None:
            self.sent.arrived()
            self.sent = None
        # Copies, because views would share one storage, and each would keep all of it alive.
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

    def poll(self, timeout: float) -> bool:
        deadline = monotonic() + timeout
        return all(part.started.poll(max(0.0, deadline - monotonic())) for part in self.parts)

    def wait(self) -> list[Tensor]:
        results, unpack = [*self.tensors], self.call.collective.unpack
        try:
            for part in self.parts:
                for place, piece in zip(part.places, part.pieces(), strict=True):
                    results[place] = unpack(piece, self.tensors[place], self.here)
        except CommError:
            raise
        except RuntimeError as error:  # from Gloo or NCCL: a time-out, or a rank that has ended
            signature = self.call.signature(self.tensors, self.here)
            raise CommError(
                f"rank {self.group.rank} of {self.group.name!r} failed in {signature} at {call_site()}: {error}\n"
                "(under comm.checked() the error says which ranks had not come)"
            ) from error
        return results


def _by_kind(tensors: Sequence[Tensor]) -> Iterable[Sequence[int]]:
    """The indices of the tensors, grouped by dtype and device."""
    if len(tensors) == 1:
        return ((0,),)
    places: dict[tuple[torch.dtype, torch.device], list[int]] = {}
    for place, tensor in enumerate(tensors):
        places.setdefault((tensor.dtype, tensor.device), []).append(place)
    return places.values()


def _plain(tensor: Tensor) -> Tensor:
    """The tensor without its graph, and with conjugation and negation applied to its bytes."""
    return (tensor.detach() if tensor.requires_grad else tensor).resolve_conj().resolve_neg()


def _dense(payload: Tensor) -> Tensor:
    """Contiguous, and viewable as bytes: torch calls a tensor of one element contiguous whatever its stride."""
    return payload.contiguous() if payload.stride(-1) == 1 else payload.clone(memory_format=torch.contiguous_format)


Key = tuple[tuple[int, ...], str]


@attrs.define(eq=False, slots=False)
class ProcessWorld(World):
    """The world of one process.

    Attributes:
        store: the key-value store that all ranks share.
        timeout: for a message, and for a call under ``checked``.
        adopted: torch's process groups that were made outside, by ranks and name; the default group is one.
        nccl_groups: torch's process groups for CUDA tensors, made when a group first needs one.
        workers: each group's communicator, and the thread for its asynchronous calls.
        call_log: under ``checked()``, compares calls before they start.
        barrier_log: compares monitored barriers outside ``checked()``.
        checked_blocks: the number of ``checked()`` blocks so far.
    """

    store: Store
    timeout: timedelta = DEFAULT_TIMEOUT
    adopted: dict[Key, dist.ProcessGroup] = attrs.field(factory=dict)
    nccl_groups: dict[Key, dist.ProcessGroup] = attrs.field(factory=dict)
    workers: dict[tuple[Key, Hashable], tuple[Communicator, Worker]] = attrs.field(factory=dict)
    call_log: CallLog | None = None
    barrier_log: CallLog | None = None
    checked_blocks: int = 0
    _streams: dict[tuple[Any, ...], Any] = attrs.field(factory=dict)  # of chains, by lane and device
    _batch: list[tuple[dist.P2POp, Started]] | None = None
    _left: bool = False

    @cached_property
    def device(self) -> torch.device:
        """The CPU if the world has a backend for it, else CUDA."""
        return torch.device("cpu" if "cpu" in self._backends else "cuda")

    def start(self, call: Call, tensors: Sequence[Tensor], group: Group, *, async_op: bool) -> Handle:
        if self._left:
            shown = call.shown(group.rank)
            raise CommError(f"{shown} on {group!r}: its processes' group was destroyed; take a group of the new world")
        here, pack = Here(call.options, group.rank, group.size), call.collective.pack
        agreed = self.call_log.announce(call, tensors, group, here) if self.call_log else None
        parts = []
        for places in _by_kind(tensors):
            device = tensors[places[0]].device
            if device.type not in self._supported:
                self._refuse(device, group)
            payloads = [pack(_plain(tensors[place]), here) for place in places]
            payload = torch.cat(payloads, dim=-1) if len(payloads) > 1 else _dense(payloads[0])
            start = self._start_nccl if device.type == "cuda" else self._start_gloo
            shares = [part.shape[-1] for part in payloads]
            parts.append(_Coalesced(places, shares, start(call, group, payload, agreed, async_op), Sent.of(payload)))
            agreed = None  # the log is waited for once a call
        if agreed is not None:  # a tree without leaves sends nothing, but must be compared, too
            agreed()
        handle = _ProcessHandle(call, tensors, group, here, parts)
        return WatchedInputs.of(handle, call, tensors, group) if async_op and self.call_log else handle

    def _start_gloo(
        self, call: Call, group: Group, payload: Tensor, agreed: Callable[[], None] | None, async_op: bool
    ) -> Performed | Posted | Queued:
        comm, worker = self._worker(group, call.collective.order(call.options))
        primitive = GLOO[call.collective.primitive]
        small = payload.numel() * payload.element_size() <= _POSTED
        if async_op and agreed is None and small and call.collective.primitive == "transfer" and worker.idle:
            return Posted(worker, primitive(comm, payload, call.options).wait)

        def job() -> Tensor:
            if agreed is not None:
                agreed()
            return primitive(comm, payload, call.options).wait()

        # A call that is waited for at once runs on the caller's thread, unless earlier calls are queued. It runs to its end
        # there, as it would on the worker, so that the group's messages keep one order on all ranks.
        return worker.submit(job) if async_op or not worker.idle else worker.perform(job)

    def _start_nccl(
        self, call: Call, group: Group, payload: Tensor, agreed: Callable[[], None] | None, async_op: bool
    ) -> Started:
        if agreed is not None:
            agreed()
        pg, row = self._nccl_group(group), call.collective
        if row.primitive != "transfer":
            return NCCL[row.primitive](pg, payload, call.options)
        op, finish = message(pg, payload, call.options)
        started = Started([], finish)
        if self._batch is None:
            started.works = dist.batch_isend_irecv([op])
        else:
            self._batch.append((op, started))
        return started

    def adopt(self, pg: dist.ProcessGroup, name: str) -> Group:
        """The group for a process group of torch's."""
        ranks = tuple(dist.get_process_group_ranks(pg))
        self.adopted[ranks, name] = pg
        return self.group(ranks, name)

    @contextmanager
    def batch(self) -> Iterator[None]:
        """Over NCCL, messages within this context are posted as one batch at its end; over Gloo each is posted at once."""
        outer, self._batch = self._batch, []
        try:
            yield
            if self._batch:
                works = dist.batch_isend_irecv([op for op, _ in self._batch])
                for _, started in self._batch:
                    started.works = works
        finally:
            self._batch = outer

    def beside(self, steps: Callable[[], Iterator[Any]], lane: Group, device: torch.device) -> Beside:
        """Carries out the steps on a thread of the lane's; on CUDA at once, on a stream of the lane's."""
        if device.type != "cuda":
            site = call_site()

            def job() -> Any:
                with at_site(site):
                    return last(steps())

            return self._worker(lane, "beside")[1].submit(job)
        key = (lane.ranks, lane.name, device)
        if key not in self._streams:
            self._streams[key] = torch.cuda.Stream(device)
        return SideStream.run(steps, self._streams[key])

    def __attrs_post_init__(self) -> None:
        weakref.finalize(self, _close, self.workers)  # before the interpreter exits, too

    def leave(self) -> None:
        """Makes every later call on this world's groups raise."""
        self._left = True
        self.nccl_groups.clear()
        _close(self.workers)
        self.workers.clear()
        self.adopted.clear()

    # -- transports ----------------------------------------------------------------------------------------------------

    def _worker(self, group: Group, order: Hashable) -> tuple[Communicator, Worker]:
        key = ((group.ranks, group.name), order)
        found = self.workers.get(key)
        if found is None:
            tag = self._tag(repr(key)) if group.size > 1 else 0
            found = self.workers[key] = Communicator(self._everyone, group.ranks, group.rank, tag), Worker(group.name)
        return found

    def _tag(self, name: str) -> int:
        """A number for the name. The first rank that asks sets it, and all others get the same; no rank waits."""
        mine = _TAGS + self.store.add("functional_ds/tags", 1)
        return int(self.store.compare_set(f"functional_ds/tag/{name}", "", str(mine)))

    @cached_property
    def _everyone(self) -> dist.ProcessGroup:
        pg = dist.group.WORLD
        if pg is None:
            raise CommError("torch's default process group is gone; call comm.init_distributed()")
        return pg

    @cached_property
    def _backends(self) -> dict[str, str]:
        """The default group's backends by kind of device."""
        return dict(pair.split(":", 1) for pair in str(dist.get_backend_config()).split(","))  # cpu:gloo,cuda:nccl

    @cached_property
    def _supported(self) -> set[str]:
        """The kinds of devices whose tensors can be sent: CPU over Gloo, CUDA over NCCL."""
        return {kind for kind, backend in (("cpu", "gloo"), ("cuda", "nccl")) if self._backends.get(kind) == backend}

    def _refuse(self, device: torch.device, group: Group) -> NoReturn:
        names = ", ".join(f"{kind} by {backend}" for kind, backend in self._backends.items())
        raise ValueError(
            f"a tensor is on {device}, and the world of {group!r} serves {names}: move it there, "
            "or call init_distributed with a backend for that device (Gloo for CPU, NCCL for CUDA tensors)"
        )

    def _nccl_group(self, group: Group) -> dist.ProcessGroup:
        """torch's NCCL group. torch numbers such groups, so their members must first use them in one order."""
        key = (group.ranks, group.name)
        pg = self.adopted.get(key) or self.nccl_groups.get(key)
        if pg is None:
            pg = self.nccl_groups[key] = torch_group(group.ranks, group.name)
        return pg


def _close(workers: dict[tuple[Key, Hashable], tuple[Communicator, Worker]]) -> None:
    """Ends the threads of a world."""
    for _, worker in workers.values():
        worker.close(_CLOSING)


def torch_group(ranks: Sequence[int], name: str) -> dist.ProcessGroup:
    """A new torch process group with the ranks in this order. All members must create their groups in one order."""
    in_order: dict[str, Any] = {}
    if list(ranks) != sorted(ranks):
        if "sort_ranks" not in signature(dist.new_group).parameters:
            raise CommError(f"group {name!r} has ranks {list(ranks)}, not ascending; for torch that needs torch >= 2.12")
        in_order["sort_ranks"] = False
    pg: dist.ProcessGroup = dist.new_group(list(ranks), use_local_synchronization=True, group_desc=name, **in_order)
    return pg


_WORLDS: dict[dist.ProcessGroup, Group] = {}  # at most one entry: torch's default process group and its world


def process_world(timeout: timedelta = DEFAULT_TIMEOUT) -> Group | None:
    """The world of torch's default process group, or None where there is none; ``timeout`` is for calls under ``checked``."""
    pg = dist.group.WORLD
    if pg is None:
        return None
    everyone = _WORLDS.get(pg)
    if everyone is None:
        leave_process_world()
        world = ProcessWorld(dist.get_rank(), pg.get_group_store(), timeout)
        everyone = _WORLDS[pg] = world.adopt(pg, "world")
    return everyone


def leave_process_world() -> None:
    """Closes the world of torch's default process group, if there is one."""
    for everyone in _WORLDS.values():
        if isinstance(everyone.world, ProcessWorld):
            everyone.world.leave()
    _WORLDS.clear()
