"""``Runner``: carries out one rank's row of a lowered schedule. It knows actions, and no schedule by name."""

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import attrs
import torch
from torch import Tensor

from functional_ds import comm
from functional_ds.base import tree
from functional_ds.base.weighted import Weighted
from functional_ds.pipelining.schedules.action import ALL, MESSAGES, Action, Kind
from functional_ds.pipelining.stages.stages import Stages, Visit
from functional_ds.step.state import State
from functional_ds.step.step import Step
from functional_ds.step.tape import wide_dtype

from .boundary import Boundary, Crossing
from .gathered import Room
from .in_flight import Flight
from .recorder import Recorder

__all__ = ["Micro", "Runner"]

_UNDER_WAY = 8  # steps of messages whose values are kept until they are received


@attrs.frozen(eq=False)
class Micro:
    """A micro-batch.

    Attributes:
        state: the step's, its key at this micro-batch's rows.
        weight: what a plain mean of it weighs; None for one.
    """

    batch: Any
    state: State
    weight: float | None
    crossing: Crossing


@attrs.define(eq=False)
class Runner:
    """One pass over a rank's row.

    Attributes:
        rooms: the params of this rank's parts, by name.
        parts: which of them each of its stages uses.
        records: whether gradients are wanted; a tape that says so is open.
        losses: the last stage's, by micro-batch, and its metrics.
    """

    step: Step
    stages: Stages
    placement: Sequence[int]
    group: comm.Group
    micros: Sequence[Micro]
    rooms: Mapping[str, Room]
    parts: Mapping[int, Sequence[str]]
    records: bool
    recorder: Recorder | None = None
    losses: dict[int, tuple[Weighted, dict[str, Weighted]]] = attrs.field(factory=dict)
    _flights: dict[tuple[int, int], Flight] = attrs.field(factory=dict)
    _here: dict[tuple[Kind, int, int], list[Tensor]] = attrs.field(factory=dict)  # for a stage, from its neighbour on this rank
    _coming: "dict[tuple[Kind, int, int], comm.Pending[list[Tensor]]]" = attrs.field(factory=dict)
    _leaving: dict[tuple[Kind, int, int], list[Tensor]] = attrs.field(factory=dict)
    _sent: "deque[list[comm.Pending[Any]]]" = attrs.field(factory=deque)
    _params: dict[int, dict[str, Tensor]] = attrs.field(factory=dict)
    _weights: dict[int, list[Tensor]] = attrs.field(factory=dict)

    def run(self, steps: Iterable[tuple[Action, ...]]) -> None:
        """All actions in order; then every message has arrived."""
        acts: dict[Kind, Callable[[int, int], None]] = {
            Kind.F: self.forward,
            Kind.B: self.backward,
            Kind.I: self.backward_inputs,
            Kind.W: self.backward_weights,
            Kind.GATHER: self.gather,
            Kind.EVICT: self.evict,
            Kind.REDUCE: self.reduce,
        }
        for actions in steps:
            first = actions[0]
            if first.kind in MESSAGES:
                self.exchange(actions)
            else:
                with self._noted(first):
                    acts[first.kind](first.stage, first.microbatch)
        while self._sent:
            self._wait_for_sent()

    # -- compute -------------------------------------------------------------------------------------------------------

    def forward(self, stage: int, j: int) -> None:
        """A stage's outputs, or at the end the loss."""
        micro, params = self.micros[j], self.params(stage)
        x, inputs = (None, []) if not stage else micro.crossing.boundaries[stage - 1].value(self._arrived(Kind.F, stage, j))
        if stage == len(self.stages) - 1:
            loss, metrics = self.step.loss(micro.state, params, Visit(micro.batch, x, micro.weight))
            outputs = [loss.sum] if loss.sum.requires_grad else []
            self.losses[j] = tree.map(lambda x: self._lasting(stage, x.detach()), (loss, metrics))
        else:
            key, function, boundary = micro.state.key, self.stages[stage].run, micro.crossing.boundaries[stage]
            y = self.step.forward(micro.state, lambda batch: function(params, x, batch, key), micro.batch)
            tensors = self._checked(boundary, y, stage)
            outputs = boundary.smooth(tensors)
            self._give(Kind.F, stage, stage + 1, j, [tensor.detach() for tensor in tensors])
        if self.records:
            self._flights[stage, j] = Flight.of(inputs, outputs)

    def backward(self, stage: int, j: int) -> None:
        """The gradients of a stage's inputs and weights."""
        weights, flight = self.weights(stage), self._flights.pop((stage, j))
        back = flight.backward(self._seeds(stage, j, flight), weights)
        self._give(Kind.B, stage, stage - 1, j, back)

    def backward_inputs(self, stage: int, j: int) -> None:
        """The gradients of a stage's inputs."""
        weights, flight = self.weights(stage), self._flights[stage, j]
        back = flight.backward_inputs(self._seeds(stage, j, flight), weights)
        self._give(Kind.B, stage, stage - 1, j, back)

    def backward_weights(self, stage: int, j: int) -> None:
        """The gradients of a stage's weights, after those of its inputs."""
        self._flights.pop((stage, j)).backward_weights()

    # -- params --------------------------------------------------------------------------------------------------------

    def params(self, stage: int) -> dict[str, Tensor]:
        """A stage's leaves, whole: its own, though other stages may see the same memory, so that each sums its gradients."""
        for name in self.parts[stage]:
            self.rooms[name].fill()
        if stage not in self._params:
            held = ((path, leaf) for name in self.parts[stage] for path, leaf in self.rooms[name].leaves.items())
            self._params[stage] = {path: self._leaf(leaf) for path, leaf in held}
            self._weights[stage] = [leaf for leaf in self._params[stage].values() if leaf.requires_grad]
        return self._params[stage]

    def weights(self, stage: int) -> list[Tensor]:
        """Those of its leaves that gradients are wanted of."""
        self.params(stage)
        return self._weights[stage]

    def _leaf(self, leaf: Tensor) -> Tensor:
        own = leaf.detach().requires_grad_(leaf.requires_grad)
        if own.requires_grad and len(self.micros) > 1:
            own.grad_dtype = wide_dtype(own.dtype)  # what sums grow in
        return own

    def gather(self, stage: int, j: int = ALL) -> None:
        """Makes a stage's params whole."""
        self.params(stage)

    def evict(self, stage: int, j: int = ALL) -> None:
        """Lets them go."""
        self.rooms[self.parts[stage][0]].empty()

    def reduce(self, stage: int, j: int = ALL) -> None:
        """Starts the reduction of a stage's own gradients and lets go of them; those of leaves that it shares come later."""
        own, grads = self.rooms[self.parts[stage][0]], dict[str, Tensor]()
        for path, leaf in self._params.get(stage, {}).items():
            if leaf.grad is not None and path in own.leaves:
                grads[path], leaf.grad = leaf.grad, None
        own.push(grads)

    def grads(self, stage: int) -> dict[str, Tensor]:
        """The sums of a stage's gradients by path."""
        return {path: leaf.grad for path, leaf in self._params.get(stage, {}).items() if leaf.grad is not None}

    # -- messages ------------------------------------------------------------------------------------------------------

    def exchange(self, actions: Sequence[Action]) -> None:
        """Starts the messages of a step.

        Waiting for those of an earlier step cannot block for ever: the schedule is proved even if each step waits.
        """
        if len(self._sent) == _UNDER_WAY:
            self._wait_for_sent()
        self._sent.append([])
        with self.group.world.batch():
            for kind, stage, j in actions:
                self._message(kind, stage, j)

    def _wait_for_sent(self) -> None:
        for pending in self._sent.popleft():
            pending.wait()

    def _message(self, kind: Kind, stage: int, j: int) -> None:
        boundaries, place = self.micros[j].crossing.boundaries, self.placement
        if kind is Kind.SEND_F:
            self._sent[-1].append(comm.isend(self._leaving.pop((Kind.F, stage, j)), place[stage + 1], self.group))
        elif kind is Kind.SEND_B:
            self._sent[-1].append(comm.isend(self._leaving.pop((Kind.B, stage, j)), place[stage - 1], self.group))
        elif kind is Kind.RECV_F:
            like = boundaries[stage - 1].onward
            self._coming[Kind.F, stage, j] = comm.irecv(like, place[stage - 1], self.group)
        else:
            like = boundaries[stage].back
            self._coming[Kind.B, stage, j] = comm.irecv(like, place[stage + 1], self.group)

    def _give(self, kind: Kind, stage: int, to: int, j: int, values: list[Tensor]) -> None:
        if 0 <= to < len(self.stages):
            values = [self._lasting(stage, value) for value in values]
            if self.placement[to] == self.placement[stage]:
                self._here[kind, to, j] = values
            else:
                self._leaving[kind, stage, j] = values

    def _lasting(self, stage: int, value: Tensor) -> Tensor:
        """A stage may hand on a param, whose memory is given back when it is let go."""
        for name in self.parts[stage]:
            value = self.rooms[name].lasting(value)
        return value

    def _arrived(self, kind: Kind, stage: int, j: int) -> list[Tensor]:
        key = kind, stage, j
        return self._here.pop(key) if key in self._here else self._coming.pop(key).wait()

    def _seeds(self, stage: int, j: int, flight: Flight) -> list[Tensor]:
        """The gradients of what a stage has given."""
        if stage < len(self.stages) - 1:
            return self._arrived(Kind.B, stage, j)
        return [torch.ones_like(self.losses[j][0].sum)] * len(flight.edges)

    # -- bookkeeping ---------------------------------------------------------------------------------------------------

    def _noted(self, action: Action) -> AbstractContextManager[None]:
        if self.recorder is None:
            return nullcontext()

        def apart() -> list[Tensor]:
            """The batch, the params, and what draws depend on."""
            micro = self.micros[action.microbatch]
            held = [*self.params(action.stage).values(), *tree.leaves((micro.batch, micro.state.key))]
            return [leaf for leaf in held if isinstance(leaf, Tensor)]

        return self.recorder.action(action, apart)

    def _checked(self, boundary: Boundary, y: Any, stage: int) -> list[Tensor]:
        try:
            return boundary.tensors(y)
        except ValueError as error:
            raise ValueError(f"stage {stage} ({self.stages[stage].name}): {error}") from None
