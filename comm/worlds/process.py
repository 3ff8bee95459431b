"""Ranks as processes: CPU tensors are sent as messages over Gloo, CUDA tensors with NCCL's collectives."""

import atexit
import os
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from datetime import timedelta
from functools import cached_property, partial
from time import sleep
from typing import Any, NoReturn

import attrs
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import Store

from functional_ds.base.device_streams import SideStream, Streams
from functional_ds.comm.backends.primitives import Communicator, Options, Started
from functional_ds.comm.backends.torch_groups import new_process_group
from functional_ds.comm.record.failed_steps import FailedSteps
from functional_ds.comm.record.group import Beside, Group, World, at_site, call_site, last
from functional_ds.comm.record.pending import watched_inputs
from functional_ds.comm.table.collective import Call, CallContext, Handle
from functional_ds.comm.table.errors import CommError

from .call_log import CallLog
from .communicator_key import CommunicatorKey
from .leaving import GRACE, ending_error, finish, follows_another_rank
from .process_handle import ProcessHandle
from .rendezvous import ended_store
from .worker import Performed, Posted, Queued, Worker

DEFAULT_TIMEOUT = timedelta(minutes=10)


def check_timeout(timeout: Any) -> None:
    """Raises TypeError unless it is a timedelta, ValueError unless that is above 0."""
    if not isinstance(timeout, timedelta):
        raise TypeError(f"timeout={timeout!r}: pass timedelta(seconds=...)")
    if timeout <= timedelta(0):
        raise ValueError(f"timeout={timeout}: it must be positive")


_POSTED = 2**20  # bytes: smaller messages are posted by the caller's thread, which is faster than waking another
_GONE = "its processes' group was destroyed; take a group of the new world, which comm.init_distributed() joins"
_TAGS = 2**30  # this tag is unused; smaller tags are left to the program's own messages through torch


Key = tuple[tuple[int, ...], str]


def _config() -> str:
    """The default group's backends, such as "cpu:gloo,cuda:nccl"."""
    return str(dist.get_backend_config())


@attrs.define(eq=False, slots=False)
class ProcessWorld(World):
    """A world in which each rank is a process.

    Attributes:
        store: the key-value store that all ranks share.
        timeout: for a message, and for a call under ``checked``.
        adopted: existing process groups of torch, by ranks and name; among them the default group.
        communicators: process groups of torch for CUDA tensors, created on first use.
        process_groups: the number of groups made for the program, by ranks and name.
        workers: each group's communicator, and the thread for its asynchronous calls.
        call_log: under ``checked()``, compares calls before they start.
        barrier_log: compares monitored barriers outside ``checked()``.
        checked_blocks: the number of ``checked()`` blocks so far.
        lost: whether a call has failed because another rank was gone.
        over: why no more calls can be made; empty before ``leave``.
        finished: whether the threads have ended.
        given_up: whether outstanding calls fail.
    """

    store: Store
    _everyone: dist.ProcessGroup
    timeout: timedelta = DEFAULT_TIMEOUT
    adopted: dict[Key, dist.ProcessGroup] = attrs.field(factory=dict)
    communicators: dict[CommunicatorKey, dist.ProcessGroup] = attrs.field(factory=dict)
    process_groups: Counter[Key] = attrs.field(factory=Counter)
    workers: dict[tuple[Key, Hashable], tuple[Communicator, Worker]] = attrs.field(factory=dict)
    call_log: CallLog | None = None
    barrier_log: CallLog | None = None
    checked_blocks: int = 0
    lost: bool = False
    over: str = ""
    finished: bool = False
    given_up: bool = False
    _begun: str = attrs.field(factory=_config)
    _streams: Streams = attrs.field(factory=Streams)  # of chains
    _batch: list[tuple[CommunicatorKey, Started, Callable[[], Started]]] | None = None

    @property
    def compares(self) -> bool:
        return self.call_log is not None

    @cached_property
    def _backends(self) -> dict[str, str]:
        """The default group's back ends by device type; once the group is destroyed, those it had."""
        config = _config() if dist.is_initialized() else self._begun
        return dict(pair.split(":", 1) for pair in config.split(","))

    @cached_property
    def device(self) -> torch.device:
        """The CPU if the world has a back end for it, else CUDA."""
        return torch.device("cpu" if "cpu" in self._backends else "cuda")

    @cached_property
    def failed_steps(self) -> FailedSteps:
        """Tells the other ranks of steps that fail after some of their collectives."""
        return FailedSteps(self.rank, self.store, self._abandon)

    def step(self) -> AbstractContextManager[None]:
        return self.failed_steps.step()

    def start(self, call: Call, tensors: Sequence[Tensor], group: Group, *, beside: bool) -> Handle:
        if self.is_over:
            self.refuse(call, group)
        self.failed_steps.before(call, group)
        here = CallContext(call.options, group.rank, group.size)
        agreed = self.call_log.announce(call, tensors, group, here) if self.call_log else None

        def begin(payload: Tensor, options: Options) -> Performed | Posted | Queued | Started:
            nonlocal agreed
            start = self._start_nccl if payload.is_cuda else self._start_gloo
            options = call.options if self.call_log else options  # no "out", since inputs are watched for writes
            started = start(call, group, payload, options, agreed, beside)
            agreed = None  # wait for the log once per call
            return started

        carrier, lost = partial(self._carrier, group=group), partial(self._lose, group)
        handle = ProcessHandle.begin(call, tensors, group, begin, carrier, lost)
        if agreed is not None:  # a tree without leaves sends nothing, but must be compared
            agreed()
        return watched_inputs(handle, call, tensors, group) if beside and self.call_log else handle

    def _lose(self, group: Group) -> str:
        """Notes that a rank of the group did not answer; returns the reason, if it has reported one."""
        self.lost = True
        return self.failed_steps.told(group.ranks)

    def _start_gloo(
        self, call: Call, group: Group, payload: Tensor, options: Options, agreed: Callable[[], None] | None, beside: bool
    ) -> Performed | Posted | Queued:
        comm, worker = self._worker(group, call.collective.order(call.options))
        prepared = call.collective.gloo(comm, payload, options)
        if not beside and agreed is None and worker.idle:
            return worker.perform(prepared.run)
        shown = partial(call.shown, group.rank)
        small = payload.numel() * payload.element_size() <= _POSTED
        if beside and agreed is None and small and call.collective.is_message and worker.idle:
            return Posted(worker, shown, prepared.start().wait)

        def job() -> Tensor:
            if agreed is not None:
                agreed()
            return prepared.run()

        # A synchronous call runs on the caller's thread, unless earlier calls are queued. It runs to its end there, as on the
        # worker, so that the group's messages keep one order on all ranks.
        return worker.submit(job, shown) if beside or not worker.idle else worker.perform(job)

    def _start_nccl(
        self, call: Call, group: Group, payload: Tensor, options: Options, agreed: Callable[[], None] | None, beside: bool
    ) -> Started:
        if agreed is not None:
            agreed()
        key, primitive = CommunicatorKey.of(call, group), call.collective.nccl

        def launch() -> Started:
            return primitive(self._communicator(key), payload, options)

        if self._batch is None or not key.messages:
            return launch()
        started = Started((), lambda: payload)
        self._batch.append((key, started, launch))
        return started

    def in_launch_order(self, device: torch.device) -> bool:
        return device.type == "cuda" or "cpu" not in self._supported

    def connect(self, edges: Sequence[tuple[int, int]], group: Group, device: torch.device) -> None:
        if self.in_launch_order(device):
            for key in sorted(CommunicatorKey.between(group, group.rank, peer, tag) for tag, peer in edges):
                self._communicator(key)

    def adopt(self, pg: dist.ProcessGroup, name: str) -> Group:
        """The group for a process group of torch."""
        ranks = tuple(dist.get_process_group_ranks(pg))
        self.adopted[ranks, name] = pg
        return self.group(ranks, name)

    @contextmanager
    def batch(self) -> Iterator[None]:
        """Over NCCL, messages inside the block are posted at its end, in the order of their communicators on all ranks.

        They are not an NCCL group call, whose meaning is undefined when ranks pass different calls. Over Gloo messages are
        posted at once.
        """
        outer, self._batch = self._batch, []
        try:
            yield
            for _, started, launch in sorted(self._batch, key=lambda message: message[0]):
                launched = launch()
                started.works, started.finish = launched.works, launched.finish
        finally:
            self._batch = outer

    def beside(self, steps: Callable[[], Iterator[Any]], lane: Group, device: torch.device) -> Beside:
        """Runs the steps on the lane's thread; on CUDA at once, on the lane's stream."""
        if device.type != "cuda":
            site = call_site()

            def job() -> Any:
                with at_site(site):
                    return last(steps())

            return self._worker(lane, "beside")[1].submit(job, lambda: f"a chain of collectives beside {lane!r}")
        return SideStream.run(steps, self._streams.of(device, (lane.ranks, lane.name)))

    # -- the end -------------------------------------------------------------------------------------------------------

    @property
    def is_over(self) -> bool:
        """Whether no more calls can be made."""
        return bool(self.over) or dist.group.WORLD is not self._everyone

    def refuse(self, call: Call, group: Group) -> NoReturn:
        """Raises CommError, since the world is over."""
        raise CommError(f"{call.shown(group.rank)} on {group!r}: {self.over or _GONE}")

    def leave(self) -> None:
        """Makes all later calls on this world's groups raise."""
        self.finish()
        self.over = self.over or _GONE
        self.communicators.clear()
        self.workers.clear()
        self.adopted.clear()

    def finish(self) -> None:
        """Ends the threads; later calls run on their callers' threads."""
        self.finished = True
        finish([worker for _, worker in self.workers.values()], self.rank, self._break_off)

    def disown(self) -> None:
        """Makes all calls raise in a forked process, which does not have the rank's threads and connections."""
        self.over = (
            f"this process was forked from that of rank {self.rank} and is not a rank: call it in the rank's own process"
        )
        for _, worker in self.workers.values():
            worker.disown(CommError(f"a call of rank {self.rank} is waited for: {self.over}"))
        self.workers.clear()

    def _break_off(self) -> None:
        """Fails all outstanding messages: Gloo closes a process group's connections when a wait for one message times out."""
        self.given_up = True
        other = (self.rank + 1) % self._everyone.size()
        with suppress(RuntimeError):
            self._everyone.recv([torch.empty(1, dtype=torch.uint8)], other, _TAGS).wait(timedelta(milliseconds=1))

    def _abandon(self) -> None:
        """Makes the other ranks' waits for this rank fail; over NCCL they last until this process ends."""
        if "cpu" in self._supported:
            self._break_off()

    # -- transports ----------------------------------------------------------------------------------------------------

    def _worker(self, group: Group, order: Hashable) -> tuple[Communicator, Worker]:
        key = ((group.ranks, group.name), order)
        lane = self.workers.get(key)
        if lane is None:
            tag = self._tag(repr(key)) if group.size > 1 else 0
            lane = self.workers[key] = Communicator(self._everyone, group.ranks, group.rank, tag), Worker(group)
            lane[1].closed = self.finished
        return lane

    def _tag(self, name: str) -> int:
        """A number for the name, equal on all ranks; the first rank that asks sets it, and none waits."""
        try:
            mine = _TAGS + self.store.add("functional_ds/tags", 1)
            return int(self.store.compare_set(f"functional_ds/tag/{name}", "", str(mine)))
        except RuntimeError as error:
            raise ended_store(self.store, f"rank {self.rank} begins to call on ranks {name}", error) from error

    @cached_property
    def _supported(self) -> set[str]:
        """The device types whose tensors can be sent: CPU over Gloo, CUDA over NCCL."""
        return {device for device, backend in (("cpu", "gloo"), ("cuda", "nccl")) if self._backends.get(device) == backend}

    def _carrier(self, device: torch.device, group: Group) -> torch.device:
        """The device that sends a tensor on ``device``: with NCCL only, CPU tensors go through this rank's GPU."""
        if device.type in self._supported:
            return device
        if device.type == "cpu" and "cuda" in self._supported:
            return self.device
        names = ", ".join(f"{served} by {backend}" for served, backend in self._backends.items())
        raise ValueError(
            f"a tensor is on {device}, and the world of {group!r} serves {names}: move it there, "
            "or call init_distributed with a backend for that device (Gloo for CPU, NCCL for CUDA tensors)"
        )

    def _communicator(self, key: CommunicatorKey) -> dist.ProcessGroup:
        """torch's process group for a communicator; only its ranks connect, on its first use."""
        adopted = None if key.messages else self.adopted.get((key.ranks, key.name))
        if adopted is None and key not in self.communicators:
            for other in key.connected_together():
                self.communicators[other] = self._connected(other.ranks, f"functional_ds/{other.name}/{other.digest()}")
        return adopted or self.communicators[key]

    def process_group(self, ranks: Sequence[int], name: str) -> dist.ProcessGroup:
        """A new process group of torch with the ranks in this order; all members must make the same calls."""
        made = self.process_groups[tuple(ranks), name]
        self.process_groups[tuple(ranks), name] += 1
        return self._connected(ranks, f"functional_ds/{name}/{list(ranks)}/{made}")

    def _connected(self, ranks: Sequence[int], name: str) -> dist.ProcessGroup:
        device = torch.device("cuda", torch.cuda.current_device()) if "cuda" in self._supported else None
        return new_process_group(ranks, name, timeout=self.timeout, device=device)


_WORLDS: dict[dist.ProcessGroup, Group] = {}  # at most one entry: torch's default process group and its world


def process_world(timeout: timedelta = DEFAULT_TIMEOUT) -> Group | None:
    """The world of torch's default process group, or None if there is none; ``timeout`` is for a world made here."""
    pg = dist.group.WORLD
    everyone = None if pg is None else _WORLDS.get(pg)
    if everyone is None:
        if _WORLDS:  # its group was destroyed with torch's destroy_process_group
            leave_process_world()
        if pg is None:
            return None
        world = ProcessWorld(dist.get_rank(), pg.get_group_store(), pg, timeout)
        everyone = _WORLDS[pg] = world.adopt(pg, "world")
        atexit.register(_end)
    return everyone


def leave_process_world() -> None:
    """Ends the world of torch's default process group, if there is one."""
    for world in _worlds():
        world.leave()
    _WORLDS.clear()


def _worlds() -> list[ProcessWorld]:
    return [everyone.world for everyone in _WORLDS.values() if isinstance(everyone.world, ProcessWorld)]


def _end() -> None:
    """Runs before the interpreter exits. A rank that fails because it lost another rank lets that one exit first.

    Otherwise a launcher that sees both exit may blame the wrong one.
    """
    lost = follows_another_rank(ending_error()) or any(world.lost for world in _worlds())
    for world in _worlds():
        world.finish()
    if lost:
        sleep(GRACE)


def _forked() -> None:
    for world in _worlds():
        world.disown()


os.register_at_fork(after_in_child=_forked)
