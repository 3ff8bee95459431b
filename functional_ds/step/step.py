"""``Step``: a training step as a record of phases."""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import attrs
import optree
import torch
from torch import Tensor

from functional_ds import comm
from functional_ds.base import tree
from functional_ds.base.batch import rows_of
from functional_ds.base.containers import register_containers
from functional_ds.base.marks import trainable
from functional_ds.base.weighted import Weighted, check_constant
from functional_ds.sharding.leaf_map import LeafMap

from .buffer_sync import agreed_anew, unagreed
from .buffers import BUFFERS, Buffers, Modules
from .checks import (
    check_batch,
    check_params,
    check_same_step,
    check_state,
    name_sum,
    noting_first_step,
    refuse_inference,
    refuse_other_names,
    warn_of_lone_ranks,
)
from .forward_pass import Gradients, Pass, refuse_open
from .phases import Layer, Phase, check_phases, compose_phase, kept_slots, unaware
from .state import State, UpdateError, mark_donated
from .tape import Tape
from .traits import Trait
from .unused import summed_over_ranks, with_idle

__all__ = ["Metrics", "Step", "Transform"]

Metrics = dict[str, Tensor]
Transform = Callable[["Step"], "Step"]


@attrs.frozen(eq=False, repr=False)
class Step:
    """``state, metrics = step(state, batch)``: one optimizer step.

    Each phase is a function whose first argument is the finished step, so that a phase sees every other phase as finally
    composed (open recursion). Hence transforms that wrap different phases commute, and only those that wrap the same
    phase have an order (law 30).

    | phase | signature | base meaning |
    |---|---|---|
    | prepare | params -> params | identity; marks leaves, before any transform cuts the tree up |
    | init | params -> State | params and optimizer state |
    | view | state, tape -> params that the loss sees | the stored params |
    | loss | state, params, batch -> Weighted, {name: Weighted} | the user's function |
    | forward | state, function, batch -> function(batch) | how that function is run: casts, contexts, recomputation |
    | measure | state, batch -> {name: Weighted} | loss ∘ view without gradients, this rank's share |
    | gradients | state, batch, carry, last -> State, Weighted list, metrics | autograd through loss ∘ view, plus carry |
    | sync_buffers | state -> State | identity; which rank's module buffers are kept |
    | reduce | state, Weighted list -> State, Weighted list | identity |
    | comm_dtype | state, dtype -> dtype | identity; in which dtype gradients of a dtype travel between ranks |
    | sum_over_ranks | state, tree of scalars -> tree of scalars | identity; sums over the ranks that share a batch |
    | scatter | state -> State | identity; the stored params become those that the optimizer holds |
    | update | state, Weighted list -> State, metrics | the optimizer |
    | publish | state -> State | identity; the inverse of scatter |
    | norm | state, list -> scalar | the 2-norm of the gradients |
    | finite | state, list -> bool scalar | whether all gradients are finite |
    | rate | state -> factor | 1; what multiplies the learning rate |
    | params | state -> the user's tree | the stored params |
    | batch_shard | state -> (index, count) | (0, 1); which part of the global batch this rank has |
    | micro_batches | state -> count | 1; into how many parts a rank's batch is cut |
    | leaf_map | state -> LeafMap | each leaf alone and whole; what lies where in the tensors that the optimizer gets |
    | select | state, paths -> State, places | restricts a state to some leaves; returns their gradients' indices |

    Gradients are a ``Weighted`` list: a sum for each trained stored leaf, and one weight. ``gradients`` adds to ``carry``,
    the Weighted list of earlier micro-batches (or None), and ``last`` says that no further one follows. The state that it
    returns has the module buffers that the forward pass has written, and whatever else a transform keeps of a batch.

    Attributes:
        base: the phases' meaning on one device.
        name: of the step without transforms.
        layers: what each transform added, in the order of composition.
        buffers: which rank's module buffers data-parallel transforms keep: "first", "mean" or "own".
        draws: whether the loss function draws random numbers, so that ranks must know how many rows come before theirs.
        skips_unused: whether the optimizer leaves leaves alone that no rank's loss has used; else their gradients are zeros.
        options: what else all ranks must give it alike: the optimizer and the seed.
    """

    base: Mapping[str, Phase]
    name: str
    layers: tuple[Layer, ...] = ()
    buffers: str = "first"
    draws: bool = True
    skips_unused: bool = True
    options: Mapping[str, Any] = attrs.field(factory=dict)
    phases: Mapping[str, Phase] = attrs.field(init=False)

    @phases.default
    def _composed(self) -> Mapping[str, Phase]:
        return {phase: compose_phase(phase, function, self.layers) for phase, function in self.base.items()}

    # -- what users call -----------------------------------------------------------------------------------------------

    def init(self, params: Any, *, modules: Any = None) -> State:
        """The state before the first update. ``params`` is copied, never changed.

        The buffers of the modules whose parameters these are, as ``fds.functional`` gave them, become part of the state.

        Ranks that train together compare their steps first: optimizer, transforms with their options, seed and versions.

        Cost: one all-reduce of 16 bytes over each group that the transforms were given, beyond what these send.

        Args:
            params: a tree of tensors.
            modules: an ``apply`` of ``fds.functional``, or a dict of several by name, where ``params`` has other tensors than
                those that ``fds.functional`` gave.

        Raises:
            ValueError: another rank has another step; names what differs, and the ranks.
        """
        refuse_inference("init")
        check_params(params)
        check_same_step(self)
        held = Modules.of(params, modules)
        state: State = self.phases["init"](self, self.phases["prepare"](self, params))
        undeclared = state.slots.keys() - {layer.slot for layer in self.layers}
        if undeclared:
            raise ValueError(
                f"init: the slots {sorted(undeclared)} belong to no transform of this step ({self}); a transform that keeps "
                "state names its slot: wrap(name, slot=..., init=...)"
            )
        buffers = Buffers.fresh(held, self.buffers, state.step.device)
        return state if buffers is None else state.put(**{BUFFERS: buffers})

    def __call__(self, state: State, batch: Any, *, donate: bool = True) -> tuple[State, Metrics]:
        """One update: the new state, and metrics as tensors (nothing is read back to the host).

        ``donate=True`` takes the state's memory once the gradients are there, and using it again raises
        DonatedStateError; an error before that leaves it intact. ``donate=False`` keeps it, at the price of a copy. Both
        give the same result (law 31).

        Raises:
            ValueError: the batch has another structure than the last, the loss is no scalar, the params have no values, or the
                state is another strategy's.
            RuntimeError: the loss has no graph, or inference mode is on.
            UpdateError: the update failed and changed nothing; the state is as it was.
            CommError: the step before failed on this rank alone, within collectives in which the other ranks still wait.
        """
        with comm.world().world.step():
            refuse_inference("step")
            check_state(self, state)
            structure = check_batch(self, state, batch)
            if donate:
                refuse_open(state)
            with noting_first_step(self, is_first=state.batch is None) as sent:
                found = self.gradients(self.at_rows(state, rows_of(batch)), batch, None, True)
                result = self._updated(state, found, structure, donate)
        warn_of_lone_ranks(self, sent)
        return result

    def open(self, state: State, batch: Any = None, so_far: Gradients | None = None, *, trains: bool = True) -> Pass:
        """One forward pass, whose ``backward`` gives gradients for ``finish``: the first half of a step, for loops of your own.

        Law 57: ``step.finish(state, step.open(state, batch).backward()) = step(state, batch)``, bit for bit; and a loop over
        micro-batches, ``grads = step.open(state, micro, grads).backward(last=...)``, is the step with ``T.accumulate(k)``. Put
        that into the step, if the loss draws by ``key`` or is a mean in fp16: both depend on how many micro-batches there are.

        Nothing is computed before the pass is used, and one that is closed without ``backward`` leaves no trace. The ranks send
        what ``step(state, batch)`` sends; each backward that wrongly claims to be the last sends the gradients once more.

        Args:
            state: stays as it is until ``finish``.
            batch: a micro-batch of this rank; None where the calls of the pass get what they need.
            so_far: the gradients of earlier passes of this step, to which those of this pass are added.
            trains: False for an evaluation: no gradients, and buffers stay as they are.

        Raises:
            ValueError: a transform of the step needs the whole batch, such as ``pipeline``; ``so_far`` is of another state, or
                was used already.

        >>> import functional_ds as fds
        >>> step = fds.train_step(lambda params, x: (params["w"] * x).sum(), fds.sgd(0.5))
        >>> state, x = step.init({"w": torch.ones(2)}), torch.tensor([1.0, 2.0])
        >>> run = step.open(state)
        >>> y = run(lambda params, x: params["w"] * x, x)
        >>> state, metrics = step.finish(state, run.backward(y.sum()))
        >>> step.params(state)["w"].tolist(), metrics["loss"].item()
        ([0.5, 0.0], 3.0)
        """
        if trains:
            refuse_inference("open")
        check_state(self, state)
        structure = state.batch if batch is None else check_batch(self, state, batch)
        return Pass.opened(self, state, batch, so_far, structure, trains=trains)

    def finish(self, state: State, grads: Gradients, *, donate: bool = True) -> tuple[State, Metrics]:
        """The second half of a step: reduces gradients, if no pass was the last, and updates, as ``step(state, batch)`` does.

        Args:
            state: that the passes were opened with.
            grads: what the last ``backward`` has returned.
            donate: as for a call of the step.

        Raises:
            ValueError: the gradients are of another state, or were used already; another pass of the state is open, and its
                memory is to be donated.
            UpdateError: the update failed and changed nothing; the state is as it was.
        """
        with comm.world().world.step():
            refuse_inference("finish")
            check_state(self, state)
            found = grads.total(self, state, donate=donate)
            return self._updated(state, found, grads.batch, donate)

    def evaluate(self, state: State, batch: Any) -> Tensor:
        """The loss over all ranks' batches, without gradients; the params are viewed as in training."""
        return self.measure(state, batch)["loss"]

    def measure(self, state: State, batch: Any) -> Metrics:
        """``evaluate`` with all metrics of the loss function."""
        check_state(self, state)
        register_containers(batch)
        with comm.world().world.step():
            found = self.phases["measure"](self, state, batch)
            metrics, names = self.sum_over_ranks(state, (found, name_sum(self, state, found)))
            refuse_other_names(metrics, names)
        return _means(metrics)

    def params(self, state: State) -> Any:
        """The user's tree again, whole; collective where the params are sharded."""
        check_state(self, state)
        return self.phases["params"](self, state)

    def module_buffers(self, state: State) -> Any:
        """The buffers of the step's modules: a dict by name, or a dict of such dicts where there are several modules.

        ``apply(step.params(state) | step.module_buffers(state), x)`` runs a module as the state has it.
        """
        held = state.slots.get(BUFFERS)
        return held.named() if isinstance(held, Buffers) else {}

    def trained(self, state: State) -> list[Tensor]:
        """The trained tensors as the optimizer holds them: they line up with the gradients, and have the dtype of updates.

        Under ZeRO 1 to 3 they are this rank's shards; with mixed precision they are the masters. A phase may ask for them at
        any place among the transforms: in an inner ``init`` or ``update``, which has this form already, too.
        """
        return trainable(self.scatter(state).params)

    def _updated(
        self,
        state: State,
        found: tuple[State, Weighted, dict[str, Weighted]],
        structure: optree.PyTreeSpec | None,
        donate: bool,
    ) -> tuple[State, Metrics]:
        after, grads, metrics = found
        after, grads = self.reduce(tree.replace(after, key=state.key, batch=structure), grads)
        after = kept_slots(state, after, unaware(self.layers))
        names = name_sum(self, state, metrics)
        weight, metrics, news, names, unused = summed_over_ranks(self, after, (grads.weight, metrics, unagreed(after), names))
        refuse_other_names(metrics, names)
        after = self.sync_buffers(agreed_anew(after, news))
        empty = torch.where(metrics["loss"].sum.detach() == 0, 1.0, float("nan")).to(weight.dtype)  # or sum / 0, as in torch
        weight = torch.where(weight == 0, empty, weight)
        after, before = tree.replace(after, unused=unused), tree.replace(state)
        own = state.donate(after) if donate else after.clone()
        try:
            own, more = self.update(own, Weighted(grads.sum, weight))
        except UpdateError:
            state.restore(before)
            raise
        own = tree.replace(own, skip=None, finite=None, reduced=None)
        if donate:
            own = tree.replace(own, step=own.step.detach()) if own.step is before.step else own  # an update that counted none
            mark_donated(before)
        return with_idle(own, unused, before.step), {**_means(metrics), **more}

    # -- the phases, as finally composed -------------------------------------------------------------------------------

    def view(self, state: State, tape: Tape) -> Any:
        """The params that the loss sees."""
        return self.phases["view"](self, state, tape)

    def loss(self, state: State, params: Any, batch: Any) -> tuple[Weighted, dict[str, Weighted]]:
        """The loss of a batch and further metrics."""
        loss, metrics = self.phases["loss"](self, state, params, batch)
        check_constant(loss.weight, "the loss")
        return loss, metrics

    def forward(self, state: State, function: Callable[[Any], Any], batch: Any) -> Any:
        """``function(batch)``, run as the user's function is."""
        return self.phases["forward"](self, state, function, batch)

    def gradients(
        self, state: State, batch: Any, carry: Weighted | None, last: bool
    ) -> tuple[State, Weighted, dict[str, Weighted]]:
        """The state after the forward and backward passes, ``carry`` plus a batch's gradients, and the batch's metrics.

        Sums may be this rank's alone: ``reduce`` gives those over all ranks. The state is not donated yet: a phase puts new
        tensors into the one that it returns and changes none in place.
        """
        state = tree.replace(state, reduced=False)
        return self.phases["gradients"](self, state, batch, carry, last)  # type: ignore[no-any-return]

    def sync_buffers(self, state: State) -> State:
        """The state with the module buffers that ranks with other rows agree on."""
        return self.phases["sync_buffers"](self, state)  # type: ignore[no-any-return]

    def reduce(self, state: State, grads: Weighted) -> tuple[State, Weighted]:
        """The gradients after the last micro-batch, as the update wants them: over all ranks; and what this leaves behind.

        The state is not donated yet: a phase puts new tensors into the one that it returns and changes none in place.
        """
        after, grads = self.phases["reduce"](self, state, grads)
        return tree.replace(after, reduced=True), grads

    def comm_dtype(self, state: State, dtype: torch.dtype) -> torch.dtype:
        """The dtype in which gradients of a dtype travel between ranks."""
        return self.phases["comm_dtype"](self, state, dtype)  # type: ignore[no-any-return]

    def sum_over_ranks(self, state: State, scalars: Any) -> Any:
        """Scalars, summed over the ranks that share a batch."""
        if self.wraps("sum_over_ranks"):
            comm.varying(scalars)  # what all ranks have counts n times, and so does its weight
        return self.phases["sum_over_ranks"](self, state, scalars)

    def scatter(self, state: State) -> State:
        """The state with the params that the optimizer holds: shards in ZeRO 1 to 3, masters with mixed precision."""
        return self.phases["scatter"](self, state)  # type: ignore[no-any-return]

    def update(self, state: State, grads: Weighted) -> tuple[State, Metrics]:
        """The state after the optimizer; owns the state that it is given."""
        return self.phases["update"](self, state, grads)  # type: ignore[no-any-return]

    def publish(self, state: State) -> State:
        """The inverse of ``scatter``: what is stored, made of what the optimizer holds. Collective in ZeRO 1 and 2."""
        return self.phases["publish"](self, state)  # type: ignore[no-any-return]

    def norm(self, state: State, grads: list[Tensor]) -> Tensor:
        """The 2-norm of the whole gradient, replicas counted once."""
        return self.phases["norm"](self, state, grads)  # type: ignore[no-any-return]

    def finite(self, state: State, grads: list[Tensor]) -> Tensor:
        """Whether the whole gradient is finite, the same on every rank."""
        return self.phases["finite"](self, state, grads)  # type: ignore[no-any-return]

    def rate(self, state: State) -> float | Tensor:
        """What multiplies the learning rate in this step."""
        return self.phases["rate"](self, state)  # type: ignore[no-any-return]

    def batch_shard(self, state: State) -> tuple[int, int]:
        """Which of how many equal parts of the global batch this rank has."""
        return self.phases["batch_shard"](self, state)  # type: ignore[no-any-return]

    def micro_batches(self, state: State) -> int:
        """Into how many micro-batches this step cuts a rank's batch."""
        return self.phases["micro_batches"](self, state)  # type: ignore[no-any-return]

    def leaf_map(self, state: State) -> LeafMap:
        """Which leaf's elements lie where in the tensors that the optimizer gets, on every rank."""
        return self.phases["leaf_map"](self, state)  # type: ignore[no-any-return]

    def select(self, state: State, paths: Collection[str]) -> tuple[State, tuple[int, ...]]:
        """A state restricted to the leaves of these paths, a dict of them once viewed, and their gradients' indices."""
        return self.phases["select"](self, state, paths)  # type: ignore[no-any-return]

    # -- how it is put together ----------------------------------------------------------------------------------------

    @property
    def names(self) -> tuple[str, ...]:
        """The base step and its transforms, in the order of composition."""
        return (self.name, *(layer.name for layer in self.layers))

    def has(self, trait: Trait, *, after: str | None = None) -> str | None:
        """The name of the first transform with a trait, or None; ``after``: only of those composed after that one."""
        layers = self.layers if after is None else self.layers[self.names.index(after) :]
        return next((layer.name for layer in layers if trait in layer.traits), None)

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
        groups: Sequence[comm.Group | None] = (),
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
        return attrs.evolve(self, layers=(*self.layers, Layer(name, phases, frozenset(traits), slot, options, tuple(groups))))

    def __str__(self) -> str:
        return " -> ".join(self.names)

    def __repr__(self) -> str:
        return f"Step({self})"

    def _repr_html_(self) -> str:
        from html import escape

        rows = [(self.name, "all", "")]
        rows += [(layer.name, ", ".join(layer.phases), layer.slot or "") for layer in self.layers]
        cells = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in rows)
        return f"<table><tr><th>transform</th><th>wraps</th><th>slot</th></tr>{cells}</table>"

    def at_rows(self, state: State, rows: int) -> State:
        """The state as the gradients of so many rows a rank see it: its key at this step and at this rank's rows."""
        if state.key is None:
            return state
        index, count = self.batch_shard(state)
        before: Tensor | int = index * rows
        if self.draws and count > 1 and self.wraps("sum_over_ranks"):  # ranks may have different numbers of rows
            told = torch.zeros(2, count, dtype=torch.int64, device=state.step.device)  # rows of each part, ranks that have it
            told[:, index] = torch.tensor([rows, 1])
            shared, ranks = self.sum_over_ranks(state, told)
            before = (shared[:index] // ranks[:index]).sum()
        return tree.replace(state, key=state.key.at(step=state.step, rows=before))


def _means(metrics: Mapping[str, Weighted]) -> Metrics:
    return {name: value.mean() for name, value in metrics.items()}
