"""``Mailbox``: activations and gradients exchanged between stages."""

from collections import deque
from collections.abc import Sequence
from typing import Any

import attrs
from torch import Tensor

from functional_ds import comm
from functional_ds.pipelining.schedules.action import Action, Kind

from .boundary import Boundary
from .recorder import Recorder

_MOST_BATCHES = 8  # batches of sends whose values are kept until they are received

_Key = tuple[Kind, int, int]  # F or B; the stage that sends, or where a value arrives, the stage that receives; the micro-batch


@attrs.define(eq=False)
class Mailbox:
    """Values between the stage that computed them and the neighbour that uses them, on this rank or another.

    Activations (``Kind.F``) go to the next stage, gradients (``Kind.B``) to the previous one.

    Attributes:
        group: the pipeline's ranks.
        placement: the rank that holds each stage.
        boundaries: for each micro-batch, what is sent after each stage.
        recorder: records waits.
    """

    group: comm.Group
    placement: Sequence[int]
    boundaries: Sequence[Sequence[Boundary]]
    recorder: Recorder | None = None
    _local: dict[_Key, list[Tensor]] = attrs.field(factory=dict)
    _outgoing: dict[_Key, list[Tensor]] = attrs.field(factory=dict)
    _incoming: "dict[_Key, comm.Pending[list[Tensor]]]" = attrs.field(factory=dict)
    _sent: "deque[list[tuple[Action, int, comm.Pending[Any]]]]" = attrs.field(factory=deque)

    def put(self, kind: Kind, stage: int, j: int, values: list[Tensor]) -> None:
        """Sends what a stage has computed, except the last stage's outputs and gradients of the first stage's inputs."""
        to = stage + 1 if kind is Kind.F else stage - 1
        if 0 <= to < len(self.placement):
            if self.placement[to] == self.placement[stage]:
                self._local[kind, to, j] = values
            else:
                self._outgoing[kind, stage, j] = values

    def take(self, kind: Kind, stage: int, j: int) -> list[Tensor]:
        """What a stage needs; waits until it has arrived."""
        key = kind, stage, j
        if key in self._local:
            return self._local.pop(key)
        source = self.placement[stage - 1 if kind is Kind.F else stage + 1]
        received = Action(Kind.RECV_F if kind is Kind.F else Kind.RECV_B, stage, j)
        return self._waited(received, source, self._incoming.pop(key))  # type: ignore[no-any-return]

    def post(self, actions: Sequence[Action]) -> None:
        """Starts a schedule's adjacent sends and receives as one batch.

        It may first wait for an earlier batch. That cannot deadlock: ``validate`` proves schedules even if every batch waits.
        """
        if len(self._sent) == _MOST_BATCHES:
            self._wait_for_oldest()
        self._sent.append([])
        with self.group.world.batch():
            for kind, stage, j in actions:
                if kind is Kind.SEND_F:
                    self._send(Kind.F, stage, j, to=stage + 1)
                elif kind is Kind.SEND_B:
                    self._send(Kind.B, stage, j, to=stage - 1)
                elif kind is Kind.RECV_F:
                    self._receive(Kind.F, stage, j, source=stage - 1, like=self.boundaries[j][stage - 1].onward)
                else:
                    self._receive(Kind.B, stage, j, source=stage + 1, like=self.boundaries[j][stage].back)

    def wait(self) -> None:
        """Waits until everything that was sent has arrived."""
        while self._sent:
            self._wait_for_oldest()

    def _send(self, kind: Kind, stage: int, j: int, *, to: int) -> None:
        sent = Action(Kind.SEND_F if kind is Kind.F else Kind.SEND_B, stage, j)
        pending = comm.start(comm.send, self._outgoing.pop((kind, stage, j)), self.placement[to], self.group)
        self._sent[-1].append((sent, self.placement[to], pending))

    def _receive(self, kind: Kind, stage: int, j: int, *, source: int, like: list[Tensor]) -> None:
        self._incoming[kind, stage, j] = comm.start(comm.recv, like, self.placement[source], self.group)

    def _wait_for_oldest(self) -> None:
        for action, to, pending in self._sent.popleft():
            self._waited(action, to, pending)

    def _waited(self, action: Action, rank: int, pending: comm.Pending[Any]) -> Any:
        """The result of a message from or to a rank."""
        if self.recorder is None:
            return pending.wait()
        with self.recorder.waiting(action, rank):
            return pending.wait()
