"""Detects programs whose calls match but would hang on NCCL, since ranks launch them in contradicting orders.

A host launches a call and continues; its device runs launched calls in order, and each runs until all its ranks run it. Calls
on different communicators can run concurrently only while the device has resources for them, so NCCL requires one order on all
ranks. Messages of one batch are unordered. Two ranks connect at their first message, for which their hosts block.
"""

from collections import deque
from collections.abc import Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager

import attrs

from functional_ds.comm.record.group import Group
from functional_ds.comm.table.collective import Call
from functional_ds.comm.table.errors import DeadlockError
from functional_ds.comm.worlds.communicator_key import CommunicatorKey


@attrs.frozen
class Operation:
    """A rank's part of a call.

    Attributes:
        key: identifies the call on all ranks that take part.
        ranks: these ranks, as ranks of the world.
        communicator: its communicator.
        text: the call and its call site, for messages.
        connects: whether it connects two ranks, for which their hosts block.
    """

    key: Hashable
    ranks: tuple[int, ...]
    communicator: CommunicatorKey
    text: str
    connects: bool = False


_HANGS = 'under rules="nccl": NCCL runs calls in the order in which each rank launches them, and these wait for each other'
_MEND = """launch calls on several groups, channels or tags in one order on all ranks, and messages that face each other as
one batch (comm.batch_p2p)"""


@attrs.define(eq=False)
class _Launch:
    """One launch of a rank: an operation, or a batch of messages.

    Attributes:
        running: the running operations, by key.
        rest: the operations that wait until two ranks have connected.
    """

    running: dict[Hashable, Operation]
    rest: deque[Operation]

    def go_on(self) -> None:
        """Starts operations up to the next connection, at which the host blocks."""
        while self.rest and not any(operation.connects for operation in self.running.values()):
            operation = self.rest.popleft()
            self.running[operation.key] = operation


@attrs.define(eq=False)
class NcclRules:
    """The queues of all ranks' devices in a simulation.

    Attributes:
        queues: each rank's launches in order; the first one runs.
        connected: the communicators of messages that each rank has connected.
    """

    queues: list[deque[_Launch]]
    connected: list[set[CommunicatorKey]]

    def launch(self, rank: int, operations: Iterable[Operation]) -> None:
        """Launches operations that may run concurrently.

        Raises:
            DeadlockError: they and other ranks' operations wait for each other; names the calls and their lines.
        """
        ordered = sorted(operations, key=lambda operation: operation.communicator)
        self._launch(rank, [op for operation in ordered for op in (*self._connection(rank, operation), operation)])

    def connect(self, rank: int, operations: Iterable[Operation]) -> None:
        """Connects the communicators of these operations, without launching them."""
        ordered = sorted(operations, key=lambda operation: operation.communicator)
        self._launch(rank, [op for operation in ordered for op in self._connection(rank, operation)])

    def _connection(self, rank: int, operation: Operation) -> list[Operation]:
        communicator, connected = operation.communicator, self.connected[rank]
        if not communicator.messages or communicator in connected:
            return []
        together = communicator.connected_together()
        connected.update(together)
        text = f"{operation.text}, which connects the two ranks,"
        return [attrs.evolve(operation, key=("connects", together[0]), text=text, connects=True)]

    def _launch(self, rank: int, operations: list[Operation]) -> None:
        if not operations:
            return
        launch = _Launch({}, deque(operations))
        self.queues[rank].append(launch)
        launch.go_on()
        if len(self.queues[rank]) > 1:
            return
        moved, free = [rank], set[int]()
        for other in moved:  # grows
            moved += self._run(other)
        for other in moved:
            self._check(other, [], free)

    def _runs(self, rank: int) -> dict[Hashable, Operation]:
        return self.queues[rank][0].running if self.queues[rank] else {}

    def _run(self, rank: int) -> list[int]:
        """Ends operations that run on all their ranks; returns the ranks that have moved on."""
        moved = []
        for operation in [op for op in self._runs(rank).values() if all(op.key in self._runs(r) for r in op.ranks)]:
            for other in operation.ranks:
                launch = self.queues[other][0]
                del launch.running[operation.key]
                launch.go_on()
                if not launch.running:
                    self.queues[other].popleft()
                moved.append(other)
        return moved

    def _check(self, rank: int, path: list[tuple[int, Operation]], free: set[int]) -> None:
        """Searches for a cycle of waiting ranks, depth-first from a rank; ``free`` are ranks known to be in none."""
        for operation in self._runs(rank).values():
            here = [*path, (rank, operation)]
            for other in operation.ranks:
                if other not in free and self.queues[other] and operation.key not in self._runs(other):
                    if other in [waiting for waiting, _ in here]:
                        raise DeadlockError(_described(here, other))
                    self._check(other, here, free)
        free.add(rank)


def _described(path: list[tuple[int, Operation]], first: int) -> str:
    cycle = path[[rank for rank, _ in path].index(first) :]
    others = [rank for rank, _ in [*cycle[1:], cycle[0]]]
    lines = [
        f"  rank {rank} launched {operation.text} and waits there for rank {other}"
        for (rank, operation), other in zip(cycle, others, strict=True)
    ]
    return "\n".join((_HANGS, *lines, _MEND))


@attrs.define(eq=False)
class RankRules:
    """The rules for the calls of one rank.

    Attributes:
        rank: the rank.
        rules: the rules of all ranks.
        unposted: the messages of an open batch.
    """

    rank: int
    rules: NcclRules
    unposted: list[Operation] | None = None

    def launch(self, call: Call, group: Group, key: Hashable, ranks: tuple[int, ...], text: str) -> None:
        """Launches a call; messages of a batch are launched at its end.

        Args:
            call: the call.
            group: its group.
            key: identifies the call on all ranks that take part.
            ranks: these ranks.
            text: the call and its call site.
        """
        operation = Operation(key, ranks, CommunicatorKey.of(call, group), text)
        if self.unposted is not None and operation.communicator.messages:
            self.unposted.append(operation)
        else:
            self.rules.launch(self.rank, [operation])

    def connect(self, edges: Sequence[tuple[int, int]], group: Group, site: str) -> None:
        """Connects the rank to others; ``edges`` are (tag, rank of the group) pairs."""
        keys = [CommunicatorKey.between(group, group.rank, peer, tag) for tag, peer in edges]
        self.rules.connect(self.rank, [Operation(key, key.ends, key, f"messages on {group} at {site}") for key in keys])

    @contextmanager
    def batch(self) -> Iterator[None]:
        """Makes the messages inside the block one batch."""
        outer, self.unposted = self.unposted, []
        try:
            yield
            self.rules.launch(self.rank, self.unposted)
        finally:
            self.unposted = outer


def rules_by_rank(world_size: int) -> list[RankRules]:
    """The rules of each rank of a new world."""
    rules = NcclRules([deque() for _ in range(world_size)], [set() for _ in range(world_size)])
    return [RankRules(rank, rules) for rank in range(world_size)]
