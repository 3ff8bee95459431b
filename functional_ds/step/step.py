"""A training step as a record of phases, and how transforms wrap them."""

from collections.abc import Callable, Collection, Mapping
from typing import Any

import attrs
import torch
from torch import Tensor

from functional_ds.base import tree
from functional_ds.base.batch import rows_of
from functional_ds.base.marks import trainable
from functional_ds.base.weighted import Weighted
from functional_ds.sharding.leaf_map import LeafMap

from .state import State, UpdateError
from .tape import Tape

__all__ = ["Metrics", "Phase", "Step", "Transform", "compose", "wrap"]

Phase = Callable[..., Any]
Metrics = dict[str, Any]
Transform = Callable[["Step"], "Step"]


@attrs.frozen(eq=False)
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
    | gradients | state, batch, carry, last -> Weighted list, {name: Weighted} | autograd through loss ∘ view, plus carry |
    | reduce | state, Weighted list -> State, Weighted list | identity |
    | comm_dtype | state, dtype -> dtype | identity; in which dtype gradients of a dtype travel between ranks |
    | sum_over_ranks | state, tree of scalars -> tree of scalars | identity; sums over the ranks that share a batch |
    | update | state, Weighted list -> State, metrics | the optimizer |
    | norm | state, list -> scalar | the 2-norm of the gradients |
    | finite | state, list -> bool scalar | whether all gradients are finite |
    | rate | state -> factor | 1; what multiplies the learning rate |
    | params | state -> the user's tree | the stored params |
    | batch_shard | state -> (index, count) | (0, 1); which part of the global batch this rank has |
    | leaf_map | state -> LeafMap | each leaf alone and whole; what lies where in the tensors that the optimizer gets |
    | select | state, paths -> State, places | those leaves alone, and which of the gradients are theirs |

    Gradients are a ``Weighted`` list: a sum for each trained stored leaf, and one weight. ``gradients`` adds to ``carry``,
    the Weighted list of earlier micro-batches (or None), and ``last`` says that no further one follows.
    """

    phases: Mapping[str, Phase] = attrs.field(repr=False)
    names: tuple[str, ...] = ()

    # -- what users call -----------------------------------------------------------------------------------------------

    def init(self, params: Any) -> State:
        """The state before the first update. ``params`` is copied, never changed."""
        tree.tensors(params, "params")
        state: State = self.phases["init"](self, self.phases["prepare"](self, params))
        return state

    def __call__(self, state: State, batch: Any, *, donate: bool = True) -> tuple[State, Metrics]:
        """One update: the new state, and metrics as tensors (nothing is read back to the host).

        ``donate=True`` takes the state's buffers once the gradients are there, and using it again raises
        DonatedStateError; an error before that leaves it intact. ``donate=False`` keeps it, at the price of a copy. Both
        give the same result (law 31).

        Raises:
            ValueError: the batch has another structure than the last, the loss is no scalar, or the params have no values.
            UpdateError: the update failed and changed nothing; the state is as it was.
        """
        state = self._accept(state, batch)
        grads, metrics = self.gradients(self._placed(state, batch), batch, None, True)
        after, grads = self.reduce(state, grads)
        weight, metrics = self.sum_over_ranks(after, (grads.weight, metrics))
        weight = torch.where(weight == 0, torch.ones_like(weight), weight)  # nothing weighed: no gradient, not 0 / 0
        before = tree.replace(state)
        own = state.donate(after) if donate else after.clone()
        try:
            own, more = self.update(own, Weighted(grads.sum, weight))
        except UpdateError:
            state.restore(before)
            raise
        return own, {**_means(metrics), **more}

    def evaluate(self, state: State, batch: Any) -> Tensor:
        """The loss over all ranks' batches, without gradients; the params are viewed as in training."""
        return self.measure(state, batch)["loss"]  # type: ignore[no-any-return]

    def measure(self, state: State, batch: Any) -> Metrics:
        """``evaluate`` with all metrics of the loss function."""
        return _means(self.sum_over_ranks(state, self.phases["measure"](self, state, batch)))

    def params(self, state: State) -> Any:
        """The user's tree again, whole; collective where the params are sharded."""
        return self.phases["params"](self, state)

    # -- the phases, as finally composed -------------------------------------------------------------------------------

    def view(self, state: State, tape: Tape) -> Any:
        """The params that the loss sees."""
        return self.phases["view"](self, state, tape)

    def loss(self, state: State, params: Any, batch: Any) -> tuple[Weighted, dict[str, Weighted]]:
        """The loss of a batch and further metrics."""
        return self.phases["loss"](self, state, params, batch)  # type: ignore[no-any-return]

    def forward(self, state: State, function: Callable[[Any], Any], batch: Any) -> Any:
        """``function(batch)``, run as the user's function is."""
        return self.phases["forward"](self, state, function, batch)

    def gradients(self, state: State, batch: Any, carry: Weighted | None, last: bool) -> tuple[Weighted, dict[str, Weighted]]:
        """``carry`` plus the gradients of a batch, and the batch's metrics."""
        return self.phases["gradients"](self, state, batch, carry, last)  # type: ignore[no-any-return]

    def reduce(self, state: State, grads: Weighted) -> tuple[State, Weighted]:
        """The gradients after the last micro-batch, as the update wants them, and what this leaves behind.

        The state is not donated yet: a phase puts new tensors into the one that it returns and changes none in place.
        """
        return self.phases["reduce"](self, state, grads)  # type: ignore[no-any-return]

    def comm_dtype(self, state: State, dtype: torch.dtype) -> torch.dtype:
        """The dtype in which gradients of a dtype travel between ranks."""
        return self.phases["comm_dtype"](self, state, dtype)  # type: ignore[no-any-return]

    def sum_over_ranks(self, state: State, scalars: Any) -> Any:
        """Scalars, summed over the ranks that share a batch."""
        return self.phases["sum_over_ranks"](self, state, scalars)

    def update(self, state: State, grads: Weighted) -> tuple[State, Metrics]:
        """The state after the optimizer; owns the state that it is given."""
        return self.phases["update"](self, state, grads)  # type: ignore[no-any-return]

    def norm(self, state: State, grads: list[Tensor]) -> Tensor:
        """The 2-norm of the whole gradient, replicas counted once."""
        return self.phases["norm"](self, state, grads)  # type: ignore[no-any-return]

    def finite(self, state: State, grads: list[Tensor]) -> Tensor:
        """Whether the whole gradient is finite, on every rank alike."""
        return self.phases["finite"](self, state, grads)  # type: ignore[no-any-return]

    def rate(self, state: State) -> float | Tensor:
        """What multiplies the learning rate in this step."""
        return self.phases["rate"](self, state)  # type: ignore[no-any-return]

    def batch_shard(self, state: State) -> tuple[int, int]:
        """Which of how many equal parts of the global batch this rank has."""
        return self.phases["batch_shard"](self, state)  # type: ignore[no-any-return]

    def leaf_map(self, state: State) -> LeafMap:
        """Which leaf's elements lie where in the tensors that the optimizer gets, on every rank."""
        return self.phases["leaf_map"](self, state)  # type: ignore[no-any-return]

    def select(self, state: State, paths: Collection[str]) -> tuple[State, tuple[int, ...]]:
        """A state whose params are the leaves of these paths, as a dict of them once viewed, and their gradients' places."""
        return self.phases["select"](self, state, paths)  # type: ignore[no-any-return]

    # -- how it is put together ----------------------------------------------------------------------------------------

    def wrapped(self, name: str, **phases: Callable[..., Any]) -> "Step":
        """This step with phases replaced by ``phase(inner, step, ...)``, where ``inner`` is the phase so far."""
        unknown = phases.keys() - self.phases.keys()
        if unknown:
            raise ValueError(f"{name} wraps {sorted(unknown)}, which are no phases; the phases are {', '.join(self.phases)}")
        return Step({**self.phases, **{k: _bind(outer, self.phases[k]) for k, outer in phases.items()}}, (*self.names, name))

    def __str__(self) -> str:
        return " -> ".join(self.names)

    def _accept(self, state: State, batch: Any) -> State:
        found = tree.structure(batch)
        if state.batch is None:
            self._refuse_bare(state, batch)
            object.__setattr__(state, "batch", found)  # known from here on, also to whoever keeps this state
        elif state.batch != found:
            raise ValueError(f"batch: its structure is {found}, but the batches so far had {state.batch}")
        return state

    def _refuse_bare(self, state: State, batch: Any) -> None:
        """Params without values are for predictions, whose batches have none either."""
        if not _on_meta(state.params) or all(map(_on_meta, tree.leaves(batch))):
            return
        tensors, parts = trainable(state.params), self.leaf_map(state)
        trained = [parts.leaves[piece.leaf].path for piece in parts.shards if _on_meta(tensors[piece.tensor])]
        path = next(iter(trained), None) or next(path for path, leaf in tree.named(state.params) if _on_meta(leaf))
        raise ValueError(
            f"state: the leaf {path!r} of its params is on the device 'meta', without values, but the batch has some; a module "
            "without memory is built by fds.deferred(build), and fds.from_source(params, source) says where values are read"
        )

    def _placed(self, state: State, batch: Any) -> State:
        """The state as the gradients see it: its key at this step and at this rank's rows."""
        if state.key is None:
            return state
        index, _ = self.batch_shard(state)
        return tree.replace(state, key=state.key.at(step=state.step, rows=index * rows_of(batch)))


def _bind(outer: Callable[..., Any], inner: Phase) -> Phase:
    return lambda step, *args: outer(inner, step, *args)


def _on_meta(values: Any) -> bool:
    return any(isinstance(leaf, Tensor) and leaf.is_meta for leaf in tree.leaves(values))


def _means(metrics: dict[str, Weighted]) -> Metrics:
    return {name: value.mean() for name, value in metrics.items()}


def wrap(name: str, **phases: Callable[..., Any]) -> Transform:
    """The transform that replaces phases: ``wrap("half", rate=lambda inner, step, state: inner(step, state) / 2)``."""
    return lambda step: step.wrapped(name, **phases)


def compose(*transforms: Transform) -> Transform:
    """One transform from several, applied from left to right: from what is stored to what the loss sees.

    ``compose(mixed_precision("bf16"), zero(3))`` stores fp32, casts to bf16, gathers.

    Law: ``compose(f, g)(step) = g(f(step))``.
    """
    for transform in transforms:
        if not callable(transform):
            raise TypeError(f"compose: {transform!r} is no transform (a function from steps to steps)")

    def composed(step: Step) -> Step:
        for transform in transforms:
            step = transform(step)
        return step

    return composed
