"""``Step``: a training step as a record of phases."""

import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import nullcontext
from types import MappingProxyType
from typing import Any

import attrs
import optree
import torch
from torch import Tensor

from functional_ds import comm
from functional_ds.base import tree
from functional_ds.base.containers import register_containers
from functional_ds.base.tree import rows_of
from functional_ds.base.weighted import Weighted, check_constant

from .at_params import AtParams
from .axes import with_axis
from .checks import name_sum, refuse_other_names, refuse_shared, structure_of, warning_of_lone_ranks, with_own_memory
from .guards import GUARDS
from .open_pass import OpenPass
from .over_ranks.gradient_sums import GRADIENT_SUMS
from .over_ranks.mesh_axes import OVER_RANKS, Axis, AxisRole
from .pass_gradients import Gradients
from .phase_signatures import Metrics, Passed, Phase
from .phases import Layer, Trait, check_phases, compose_phase
from .state.buffer_sync import agreed_anew, unagreed
from .state.buffers import BUFFERS, Buffers, Modules
from .state.skipped import kept_slots
from .state.state import State, UpdateError, mark_donated, refuse_open, summed_over_ranks, with_idle

Transform = Callable[["Step"], "Step"]


@attrs.frozen(eq=False, repr=False)
class Step(AtParams):
    """A training step: ``state, metrics = step(state, batch)`` is one optimizer step.

    A step consists of phases, each a function whose first argument is the finished step, so that a phase calls every other
    phase as finally composed (open recursion). Hence transforms that wrap different phases commute; only those that wrap the
    same phase have an order. ``Phases`` documents each phase; docs/steps.md has the table.

    Gradients are a ``Weighted`` list: a sum for each trained stored leaf, and one weight. ``gradients`` adds to ``carry``, the
    ``Weighted`` list of earlier micro-batches (or None); ``last`` means that no further one follows. It returns the state with
    the module buffers that the forward pass has written.

    Attributes:
        base: the phases of the single-device step.
        name: of the step without transforms.
        layers: what each transform added, in the order of composition.
        buffers: which rank's module buffers data-parallel transforms keep: "first", "mean" or "own".
        draws: whether the loss function draws random numbers, so that ranks must know how many rows come before theirs.
        skips_unused: whether the optimizer skips leaves that no rank's loss has used; else their gradients are zeros.
        options: further values that must be equal on all ranks: the optimizer and the seed.
        guarded: whether misuse is checked; ``without_guards`` gives a step without checks.
        keeps_graph: whether gradients flow through what it returns, as for ``fds.differentiable``.
        over_ranks: what it computes over all its ranks from the axes of its transforms, by the name of the method; no transform
            wraps it.
    """

    base: Mapping[str, Phase]
    name: str
    layers: tuple[Layer, ...] = ()
    buffers: str = "first"
    draws: bool = True
    skips_unused: bool = True
    options: Mapping[str, Any] = attrs.field(factory=dict)
    guarded: bool = True
    keeps_graph: bool = False
    over_ranks: Mapping[str, Callable[..., Any]] = attrs.field(factory=lambda: {**OVER_RANKS, **GRADIENT_SUMS})
    phases: Mapping[str, Phase] = attrs.field(init=False)
    _acting: dict[tuple[bool, ...], "Step"] = attrs.field(factory=dict, init=False)  # by the layers that are due

    @phases.default
    def _composed(self) -> Mapping[str, Phase]:
        guarded = self.guarded
        return {phase: compose_phase(phase, base, self.layers, guarded=guarded) for phase, base in self.base.items()}

    # -- what users call -----------------------------------------------------------------------------------------------

    def init(self, params: Any, *, modules: Any = None) -> State:
        """The state before the first update. ``params`` is copied, never changed.

        The buffers of modules whose parameters came from ``fds.functional`` become part of the state. Ranks that train together
        first compare their steps: optimizer, transforms with their options, seed and versions.

        Cost: one all-reduce of 16 bytes over each group of the transforms, in addition to what these send.

        Args:
            params: a tree of tensors.
            modules: an ``apply`` of ``fds.functional``, or a dict of several by name, if ``params`` has other tensors than
                those that ``fds.functional`` returned.

        Raises:
            TypeError: ``params`` is a module, or a leaf is not a tensor.
            ValueError: another rank has another step; names what differs, and the ranks.
        """
        self._guard("init", params)
        held = Modules.of(params, modules)
        host = comm.world().world.host
        with nullcontext() if host is None else host.mapped():
            state: State = self.phases["init"](self, self.phases["prepare"](self, params))
        undeclared = state.slots.keys() - {layer.slot for layer in self.layers}
        if undeclared:
            raise ValueError(
                f"init: the slots {sorted(undeclared)} belong to no transform of this step ({self}); a transform that keeps "
                "state names its slot: wrap(name, slot=..., init=...)"
            )
        state = state if self.keeps_graph else with_own_memory(state)
        buffers = Buffers.fresh(held, self.buffers, state.step.device)
        return state if buffers is None else state.put(**{BUFFERS: buffers})

    def __call__(self, state: State, batch: Any, *, donate: bool = True) -> tuple[State, Metrics]:
        """One update: returns the new state, and metrics as tensors, without waiting for the device.

        ``donate=True`` reuses the state's memory once the gradients are computed, and using the state again raises
        DonatedStateError; an error before that leaves it intact. ``donate=False`` keeps it, at the cost of a copy. Both give
        the same result.

        Raises:
            ValueError: the batch has another structure than the last, the loss is not a scalar, the params have no values, or
                the state belongs to other transforms.
            RuntimeError: the loss has no graph, or inference mode is on.
            UpdateError: the update failed and changed nothing; the state stays valid.
            CommError: the step before failed on this rank only, within collectives in which the other ranks still wait.
        """
        donate = donate and not self.keeps_graph
        with comm.world().world.step():
            self._guard("step", state, batch)
            _release_before_first(state)
            if donate:
                refuse_open(state)
            with warning_of_lone_ranks(self, state) if self.guarded else nullcontext():
                acting = self.acting(state)
                computed = acting.gradients(acting.at_rows(state, rows_of(batch)), batch, None, True)
                return acting._updated(state, computed, self._structure(state, batch), donate)

    def open(self, state: State, batch: Any = None, so_far: Gradients | None = None, *, trains: bool = True) -> OpenPass:
        """Opens a forward pass, whose ``backward`` gives gradients for ``finish``: the first half of a step, in custom loops.

        ``step.finish(state, step.open(state, batch).backward()) = step(state, batch)``, bitwise; a loop over
        micro-batches, ``grads = step.open(state, micro, grads).backward(last=...)``, equals the step with ``T.accumulate(k)``.
        If the loss draws by ``key`` or is a mean in fp16, use ``T.accumulate`` instead, since both depend on the number of
        micro-batches.

        Nothing is computed before the pass is used; a pass closed without ``backward`` has no effect. Cost: that of
        ``step(state, batch)``; each backward that is wrongly marked as last reduces the gradients once more.

        Args:
            state: stays valid until ``finish``.
            batch: a micro-batch of this rank; None if the calls of the pass are given what they need.
            so_far: the gradients of earlier passes of this step, to which those of this pass are added.
            trains: False for an evaluation: no gradients, and buffers stay unchanged.

        Raises:
            ValueError: a transform of the step needs the whole batch, such as ``pipeline``; ``so_far`` belongs to another
                state, or was used already.

        >>> import functional_ds as fds
        >>> step = fds.train_step(lambda params, x: (params["w"] * x).sum(), fds.sgd(0.5))
        >>> state, x = step.init({"w": torch.ones(2)}), torch.tensor([1.0, 2.0])
        >>> run = step.open(state)
        >>> y = run(lambda params, x: params["w"] * x, x)
        >>> state, metrics = step.finish(state, run.backward(y.sum()))
        >>> step.params(state)["w"].tolist(), metrics["loss"].item()
        ([0.5, 0.0], 3.0)
        """
        self._guard("open" if trains else "evaluate", state, batch)
        _release_before_first(state)
        structure = state.batch if batch is None else self._structure(state, batch)
        return OpenPass.opened(self.acting(state), state, batch, so_far, structure, trains=trains)

    def finish(self, state: State, grads: Gradients, *, donate: bool = True) -> tuple[State, Metrics]:
        """The second half of a step: reduces gradients, if no pass was the last, and updates, as ``step(state, batch)`` does.

        Args:
            state: that the passes were opened with.
            grads: what the last ``backward`` returned.
            donate: as for a call of the step.

        Raises:
            ValueError: the gradients belong to another state, or were used already; another pass of the state is open, and its
                memory would be donated.
            UpdateError: the update failed and changed nothing; the state stays valid.
        """
        with comm.world().world.step():
            self._guard("finish", state, None)
            acting = self.acting(state)
            return acting._updated(state, grads.total(acting, state, donate=donate), grads.batch, donate)

    def evaluate(self, state: State, batch: Any) -> Tensor:
        """The mean loss over all ranks' batches, without gradients; params are cast and gathered as in training."""
        return self.measure(state, batch)["loss"]

    def measure(self, state: State, batch: Any) -> Metrics:
        """``evaluate`` with all metrics of the loss function."""
        self._guard("evaluate", state, None)
        register_containers(batch)
        with comm.world().world.step():
            measured = self.phases["measure"](self, state, batch)
            names = name_sum(self, state, measured, "measure") if self.guarded else None
            metrics, names = self.sum_over_ranks(state, (measured, names))
            refuse_other_names(metrics, names)
        return _means(metrics)

    def params(self, state: State) -> Any:
        """The params as the user's tree, unsharded; collective if they are sharded."""
        self._guard("params", state, None)
        return self.phases["params"](self, state)

    def module_buffers(self, state: State) -> Any:
        """The buffers of the step's modules: a dict by name, or a dict of such dicts if there are several modules.

        ``apply(step.params(state) | step.module_buffers(state), x)`` runs a module as it is in the state.
        """
        held = state.slots.get(BUFFERS)
        return held.named() if isinstance(held, Buffers) else {}

    def _structure(self, state: State, batch: Any) -> optree.PyTreeSpec:
        known = state.batch if self.guarded else None  # a guard has compared them
        return structure_of(batch) if known is None else known

    def _guard(self, call: str, *args: Any) -> None:
        for guard in GUARDS[call] if self.guarded else ():
            guard(self, *args)

    def _updated(
        self,
        state: State,
        computed: Passed,
        structure: optree.PyTreeSpec | None,
        donate: bool,
    ) -> tuple[State, Metrics]:
        after, grads, metrics = computed
        after, grads = self.reduce(tree.replace(after, key=state.key, batch=structure), grads)
        if after.skip is not None:
            after = kept_slots(state, after, [layer.slot for layer in self.layers if Trait.HEEDS_SKIPS not in layer.traits])
        names = name_sum(self, state, metrics, "step") if self.guarded else None
        news = unagreed(after) if BUFFERS in after.slots else None
        weight, metrics, news, names, unused = summed_over_ranks(self, after, (grads.weight, metrics, news, names))
        refuse_other_names(metrics, names)
        after = self.sync_buffers(agreed_anew(after, news)) if BUFFERS in after.slots else after
        total = metrics["loss"].sum.detach() if "loss" in metrics else weight.new_zeros(())
        empty = torch.where(total == 0, 1.0, float("nan")).to(weight.dtype)  # or sum / 0, as in torch
        weight = torch.where(weight == 0, empty, weight)
        after, before = tree.replace(after, unused=unused), tree.replace(state)
        updated = state.donate(after) if donate else after.clone(keeps_graph=self.keeps_graph)
        try:
            updated, more = self.update(updated, Weighted(grads.sum, weight))
        except UpdateError:
            state.restore(before)
            raise
        updated = tree.replace(updated, skip=None, finite=None, reduced=None)
        if self.guarded and before.batch is None and not self.keeps_graph:
            refuse_shared(updated)
        if donate:
            if updated.step is before.step:  # an update without weight
                updated = tree.replace(updated, step=updated.step.detach())
            mark_donated(before)
        return with_idle(updated, unused, before.step), {**_means(metrics), **more}

    # -- phases that have more to do ----------------------------------------------------------------------------------

    def loss(self, state: State, params: Any, batch: Any) -> tuple[Weighted, dict[str, Weighted]]:
        """The loss of a batch and further metrics."""
        loss, metrics = self.phases["loss"](self, state, params, batch)
        check_constant(loss.weight, "the loss")
        return loss, metrics

    def forward(self, state: State, function: Callable[[Any], Any], batch: Any) -> Any:
        """As ``Phases.forward``, with the named axes set."""
        for layer in self.layers:
            for axis in layer.axes:
                if axis.name is not None:
                    function = with_axis(axis.name, axis.value or axis.ranks(), function)
        return self.phases["forward"](self, state, function, batch)

    def gradients(self, state: State, batch: Any, carry: Weighted | None, last: bool) -> Passed:
        """Sums of gradients over this rank's batch and ``carry``, those of earlier micro-batches; not reduced yet."""
        return super().gradients(tree.replace(state, reduced=False), batch, carry, last)

    def reduce(self, state: State, grads: Weighted) -> tuple[State, Weighted]:
        """As ``Phases.reduce``."""
        after, grads = super().reduce(state, grads)
        return tree.replace(after, reduced=True), grads

    # -- how it is put together ----------------------------------------------------------------------------------------

    @property
    def names(self) -> tuple[str, ...]:
        """The base step and its transforms, in the order of composition."""
        return (self.name, *(layer.name for layer in self.layers))

    def has(self, what: Trait | AxisRole, *, after: str | None = None) -> str | None:
        """The name of the first transform with a trait or an axis of a role; ``after``: of those composed after that one."""
        layers = self.layers if after is None else self.layers[self.names.index(after) :]
        return next((layer.name for layer in layers if layer.has(what)), None)

    def wraps(self, phase: str, *, without: Trait | None = None) -> bool:
        """Whether a transform wraps this phase; ``without``: one that does not have this trait."""
        return any(phase in layer.phases and without not in layer.traits for layer in self.layers)

    def wrapped(
        self,
        name: str,
        *,
        slot: str | None = None,
        traits: Collection[Trait] = (),
        options: Mapping[str, Any] | None = None,
        axes: Sequence[Axis] = (),
        micro_batches: int = 1,
        guards: Mapping[str, Callable[..., Any]] = MappingProxyType({}),
        **phases: Callable[..., Any],
    ) -> "Step":
        """This step with phases replaced by ``phase(inner, step, ...)``, where ``inner`` is the phase so far."""
        owner = next((layer.name for layer in self.layers if slot is not None and layer.slot == slot), None)
        if owner is not None or slot == BUFFERS:
            raise ValueError(
                f"{name}: the slot {slot!r} belongs to {owner or 'the buffers of modules'} already ({self}); use one of the "
                "two, or give the slot another name"
            )
        check_phases(name, phases)
        layer = Layer(name, phases, frozenset(traits), slot, options, tuple(axes), micro_batches, guards)
        return attrs.evolve(self, layers=(*self.layers, layer))

    def acting(self, state: State) -> "Step":
        """The step for a state: without the transforms that are not due in it (``T.every``)."""
        if all(layer.due is None for layer in self.layers):
            return self
        due = tuple(layer.due is None or layer.due(state) for layer in self.layers)
        if due not in self._acting:
            layers = (layer.acting(runs) for layer, runs in zip(self.layers, due, strict=True))
            self._acting[due] = attrs.evolve(self, layers=tuple(layers))
        return self._acting[due]

    def without_guards(self) -> "Step":
        """The step without checks for misuse: the same values for correct programs.

        Results are bitwise equal, and so is communication from the third step on; ``guards`` lists what is no longer
        checked.
        """
        return attrs.evolve(self, guarded=False)

    def guards(self) -> dict[str, list[str]]:
        """What this step checks, one line each: by call of the step, and by phase and transform.

        >>> import functional_ds as fds
        >>> fds.train_step(lambda params, x: x.sum(), fds.sgd(0.1)).guards()["norm"]
        ['Refuses a norm, a product or sums by leaf of gradients that are not reduced yet.']
        """
        by_call = {call: [_summary(guard) for guard in guards] for call, guards in GUARDS.items()}
        for layer in self.layers:
            by_call |= {f"{phase} of {layer.name}": [_summary(guard)] for phase, guard in layer.guards.items()}
        return by_call

    def __str__(self) -> str:
        return " -> ".join(self.names)

    def __repr__(self) -> str:
        return f"Step({self})"

    def _repr_html_(self) -> str:
        from functional_ds.comm.record.notebook import html_table

        rows = [(layer.name, ", ".join(layer.phases), layer.slot or "") for layer in self.layers]
        return html_table(["transform", "wraps", "slot"], [(self.name, "all", ""), *rows])

    def at_rows(self, state: State, rows: int) -> State:
        """The state as the gradients of so many rows per rank see it: its key at this step and at this rank's rows."""
        if state.key is None:
            return state
        index, count = self.batch_shard(state)
        before: Tensor | int = index * rows
        if self.draws and count > 1 and self.sums:  # ranks may have different numbers of rows
            told = torch.zeros(2, count, dtype=torch.int64, device=state.step.device)  # rows of each part, ranks that have it
            told[:, index] = torch.tensor([rows, 1])
            shared, ranks = self.sum_over_ranks(state, told)
            before = (shared[:index] // ranks[:index]).sum()
        return tree.replace(state, key=state.key.at(step=state.step, rows=before))


def _release_before_first(state: State) -> None:
    """Before the first step: drops references to what its params were copied from."""
    if state.batch is None and (host := comm.world().world.host) is not None:
        host.release()


def _summary(guard: Callable[..., Any]) -> str:
    return (inspect.getdoc(guard) or "").partition("\n")[0]


def _means(metrics: Mapping[str, Weighted]) -> Metrics:
    return {name: value.mean() for name, value in metrics.items()}
