"""``Runner``: executes one rank's row of a lowered schedule, for any schedule; ``Mailbox``: what its stages exchange."""

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
from functional_ds.comm.worlds.current import recorder
from functional_ds.pipelining.schedules.action import ALL, MESSAGES, Action, Kind
from functional_ds.pipelining.stages.stages import LossInput, Stages
from functional_ds.step.state.state import State
from functional_ds.step.step import Step
from functional_ds.step.views.view import wide_dtype

from .boundary import Boundary, Crossing
from .gathered import GatheredParams
from .recorder import Recorder
from .split_backward import InFlightMicroBatch

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
        with recorder().batch(self.group.world):
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


@attrs.frozen(eq=False)
class MicroBatch:
    """A micro-batch.

    Attributes:
        batch: its rows of the batch.
        state: the step's state, its key at this micro-batch's rows.
        weight: the weight of a plain mean of it; None for one.
        crossing: what is sent between the stages.
    """

    batch: Any
    state: State
    weight: float | None
    crossing: Crossing


@attrs.define(eq=False)
class Runner:
    """One pass over a rank's row.

    Attributes:
        step: the finished step; its phases ``forward`` and ``loss`` run the stages.
        stages: the whole model's.
        placement: the rank that holds each stage.
        group: the pipeline's ranks.
        micros: the micro-batches.
        gathered: the params of this rank's stages, by the names of their parts.
        parts: for each stage of this rank the names of its parts, its own first.
        records: whether gradients are wanted, for which a pass must be open.
        recorder: records times and memory.
        losses: the last stage's loss and metrics, by micro-batch.
    """

    step: Step
    stages: Stages
    placement: Sequence[int]
    group: comm.Group
    micros: Sequence[MicroBatch]
    gathered: Mapping[str, GatheredParams]
    parts: Mapping[int, Sequence[str]]
    records: bool
    recorder: Recorder | None = None
    losses: dict[int, dict[str, Weighted]] = attrs.field(factory=dict)
    _mail: Mailbox = attrs.field(init=False)
    _in_flight: dict[tuple[int, int], InFlightMicroBatch] = attrs.field(factory=dict)
    _params: dict[int, dict[str, Tensor]] = attrs.field(factory=dict)
    _weights: dict[int, list[Tensor]] = attrs.field(factory=dict)

    def __attrs_post_init__(self) -> None:
        boundaries = [micro.crossing.boundaries for micro in self.micros]
        self._mail = Mailbox(self.group, self.placement, boundaries, self.recorder)

    def run(self, steps: Iterable[tuple[Action, ...]]) -> None:
        """Executes all actions in order; returns when every message has arrived."""
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
            elif self.recorder is None:
                acts[first.kind](first.stage, first.microbatch)
            else:
                with self._noted(self.recorder, first):
                    acts[first.kind](first.stage, first.microbatch)
        self._mail.wait()

    def exchange(self, actions: Sequence[Action]) -> None:
        """Starts adjacent sends and receives."""
        self._mail.post(actions)

    # -- compute -------------------------------------------------------------------------------------------------------

    def forward(self, stage: int, j: int) -> None:
        """Computes a stage's outputs; at the last stage the loss."""
        micro, params = self.micros[j], self.params(stage)
        x, inputs = (None, []) if not stage else micro.crossing.boundaries[stage - 1].value(self._mail.take(Kind.F, stage, j))
        if stage == len(self.placement) - 1:
            loss, metrics = self.step.loss(micro.state, params, LossInput(micro.batch, x, micro.weight))
            outputs = [loss.sum] if loss.sum.requires_grad else []
            self.losses[j] = {
                name: Weighted(self._durable(stage, value.sum.detach()), self._durable(stage, value.weight.detach()))
                for name, value in {"loss": loss, **metrics}.items()
            }
        else:
            key, function, boundary = micro.state.key, self.stages[stage].run, micro.crossing.boundaries[stage]
            y = self.step.forward(micro.state, lambda batch: function(params, x, batch, key), micro.batch)
            tensors = self._checked(boundary, y, stage)
            outputs = boundary.differentiable(tensors)
            self._give(Kind.F, stage, j, [tensor.detach() for tensor in tensors])
        if self.records:
            self._in_flight[stage, j] = InFlightMicroBatch.of(inputs, outputs)

    def backward(self, stage: int, j: int) -> None:
        """Computes the gradients of a stage's inputs and weights."""
        weights, in_flight = self.weights(stage), self._in_flight.pop((stage, j))
        self._give(Kind.B, stage, j, in_flight.backward(self._seeds(stage, j, in_flight), weights))

    def backward_inputs(self, stage: int, j: int) -> None:
        """Computes the gradients of a stage's inputs."""
        weights, in_flight = self.weights(stage), self._in_flight[stage, j]
        self._give(Kind.B, stage, j, in_flight.backward_inputs(self._seeds(stage, j, in_flight), weights))

    def backward_weights(self, stage: int, j: int) -> None:
        """Computes the gradients of a stage's weights, after those of its inputs."""
        self._in_flight.pop((stage, j)).backward_weights()

    def _seeds(self, stage: int, j: int, in_flight: InFlightMicroBatch) -> list[Tensor]:
        """The gradients of a stage's outputs."""
        if stage < len(self.placement) - 1:
            return self._mail.take(Kind.B, stage, j)
        return [torch.ones_like(self.losses[j]["loss"].sum)] * len(in_flight.edges)

    def _give(self, kind: Kind, stage: int, j: int, values: list[Tensor]) -> None:
        self._mail.put(kind, stage, j, [self._durable(stage, value) for value in values])

    def _durable(self, stage: int, value: Tensor) -> Tensor:
        """A copy if the value is in a param's memory, which is freed when the stage is evicted."""
        for name in self.parts[stage]:
            value = self.gathered[name].durable(value)
        return value

    def _checked(self, boundary: Boundary, y: Any, stage: int) -> list[Tensor]:
        try:
            return boundary.tensors(y)
        except ValueError as error:
            raise ValueError(f"stage {stage} ({self.stages[stage].name}): {error}") from None

    # -- params --------------------------------------------------------------------------------------------------------

    def params(self, stage: int) -> dict[str, Tensor]:
        """A stage's leaves by path, gathered. Stages may share memory, but not leaves, so that each sums its own gradients."""
        absent = [name for name in self.parts[stage] if not self.gathered[name].whole]
        if absent:
            with nullcontext() if self.recorder is None else self.recorder.waiting(Action(Kind.GATHER, stage, ALL)):
                for name in absent:
                    self.gathered[name].gather()
        if stage not in self._params:
            held = ((path, leaf) for name in self.parts[stage] for path, leaf in self.gathered[name].leaves.items())
            self._params[stage] = {path: self._leaf(leaf) for path, leaf in held}
            self._weights[stage] = [leaf for leaf in self._params[stage].values() if leaf.requires_grad]
        return self._params[stage]

    def weights(self, stage: int) -> list[Tensor]:
        """A stage's trained leaves."""
        self.params(stage)
        return self._weights[stage]

    def _leaf(self, leaf: Tensor) -> Tensor:
        detached = leaf.detach().requires_grad_(leaf.requires_grad)
        if detached.requires_grad and len(self.micros) > 1:
            detached.grad_dtype = wide_dtype(detached.dtype)  # of the sums over micro-batches
        return detached

    def gather(self, stage: int, j: int = ALL) -> None:
        """Gathers a stage's params."""
        self.params(stage)

    def evict(self, stage: int, j: int = ALL) -> None:
        """Frees the params that only this stage uses."""
        self.gathered[self.parts[stage][0]].free()

    def reduce(self, stage: int, j: int = ALL) -> None:
        """Starts the reduction of the gradients that only this stage has, and frees them. Those of shared leaves come later."""
        gathered, grads = self.gathered[self.parts[stage][0]], dict[str, Tensor]()
        for path, leaf in self._params.get(stage, {}).items():
            if leaf.grad is not None and path in gathered.leaves:
                grads[path], leaf.grad = leaf.grad, None
        gathered.push(grads)

    def grads(self, stage: int) -> dict[str, Tensor]:
        """The sums of a stage's gradients by path."""
        return {path: leaf.grad for path, leaf in self._params.get(stage, {}).items() if leaf.grad is not None}

    # -- notes ---------------------------------------------------------------------------------------------------------

    def _noted(self, recorder: Recorder, action: Action) -> AbstractContextManager[None]:
        def apart() -> list[Tensor]:
            """Tensors that are no activations: the batch, the params, the key."""
            micro = self.micros[action.microbatch]
            held = [*self.params(action.stage).values(), *tree.leaves((micro.batch, micro.state.key))]
            return [leaf for leaf in held if isinstance(leaf, Tensor)]

        return recorder.action(action, apart)


class Rehearsal(Runner):
    """Executes a row on the device "meta", on one rank: forwards gather, backwards make gradients, messages are not sent."""

    @staticmethod
    def fits(batch: Any, group: comm.Group) -> bool:
        """Whether other ranks do not run, and there is nothing to compute."""
        return not group.world.has_peers and tree.on_meta(batch)

    @staticmethod
    def of(spec: Any, step: Any, state: Any, gathered: dict[str, GatheredParams], parts: dict[int, list[str]]) -> "Rehearsal":
        """For a pipeline's rank.

        Args:
            spec: what runs where.
            step: the finished step.
            state: its state.
            gathered: the params of this rank's stages, by the names of their parts.
            parts: for each stage of this rank the names of its parts.
        """
        micros = [MicroBatch(None, state, None, Crossing((), {}))] * spec.schedule.microbatches
        made = Rehearsal(step, spec.stages, spec.schedule.placement, spec.group, micros, gathered, parts, records=True)
        zero = torch.zeros((), device="meta")
        made.losses[0] = {"loss": Weighted(zero, torch.ones_like(zero))}
        return made

    def exchange(self, actions: Sequence[Action]) -> None:
        """Sends nothing."""

    def forward(self, stage: int, j: int) -> None:
        """Gathers the stage's params."""
        self.params(stage)

    def backward(self, stage: int, j: int) -> None:
        """Gathers, and makes gradients of the sums' dtype."""
        for weight in self.weights(stage):
            weight.grad = torch.empty_like(weight, dtype=weight.grad_dtype or weight.dtype)

    def backward_inputs(self, stage: int, j: int) -> None:
        """Gathers the stage's params."""
        self.params(stage)

    def backward_weights(self, stage: int, j: int) -> None:
        """As a full backward."""
        self.backward(stage, j)
