"""Gradients accumulated over the passes of one optimizer step, for custom training loops."""

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import attrs
import optree
import torch

from functional_ds.base import tree
from functional_ds.base.prng import Key
from functional_ds.base.weighted import Weighted

from .phase_signatures import Passed, Phase
from .phases import Layer, Trait
from .state.state import State, Summing, refuse_open
from .views.view import View, wide


class RunsPasses(Summing, Protocol):
    """The part of a step that a pass runs."""

    @property
    def base(self) -> Mapping[str, Phase]: ...

    @property
    def layers(self) -> tuple[Layer, ...]: ...

    @property
    def guarded(self) -> bool: ...

    def has(self, trait: Trait) -> str | None: ...

    def view(self, state: State, *, trains: bool = True, whole: bool = False) -> View: ...

    def loss(self, state: State, params: Any, batch: Any) -> tuple[Weighted, dict[str, Weighted]]: ...

    def forward(self, state: State, function: Callable[[Any], Any], batch: Any) -> Any: ...

    def micro_batches(self, state: State) -> int: ...

    def at_rows(self, state: State, rows: int) -> State: ...


class Closes(Protocol):
    """The part of a pass that gradients use."""

    def close(self) -> None: ...

    def written(self) -> State:
        """The state after a closed pass."""


@attrs.define(eq=False)
class Gradients:
    """Gradients of the passes of one optimizer step so far. ``OpenPass.backward`` adds to it, ``Step.finish`` consumes it.

    It can be used only once, because its sums grow in place.

    Attributes:
        state: what the passes were opened with.
        batch: the structure of the batches.
        metrics: the sums of the losses and of further metrics on this rank.
        carry: sums that the next pass adds to.
        final: sums of passes marked as last, reduced over the ranks.
        last_pass: the last pass that was added, which may still be open.
    """

    state: State
    batch: optree.PyTreeSpec | None
    metrics: dict[str, Weighted] = attrs.field(factory=dict)
    carry: Weighted | None = None
    final: Weighted | None = None
    last_pass: "Closes | None" = None
    _after: State | None = None  # with what the passes have written, except that one's buffers
    _key: Key | None = None  # at this rank's first row
    _rows: int = 0  # of the passes so far
    _summed: int = 0  # how many backward passes are in ``carry``
    _used: bool = False

    def __repr__(self) -> str:
        return f"Gradients({self._rows} rows, {'used' if self._used else ', '.join(self.metrics) or 'none yet'})"

    def check(self, state: State) -> None:
        """Raises an error for gradients that belong to another state, or were used already.

        Raises:
            ValueError: they do.
        """
        if self.state is not state:
            raise ValueError(
                "grads: they are of another state; the passes of a step, and finish, get the state that it begins with"
            )
        if self._used:
            raise ValueError(
                "grads: they were used already, and their sums have grown since; continue with what the latest backward "
                "returned"
            )

    def taken(self) -> "Gradients":
        """The same as a new value; this one cannot be used any more."""
        self.check(self.state)
        new = attrs.evolve(self)
        self._use_up()
        return new

    def _use_up(self) -> None:
        """Drops the tensors, which this value may outlive in a custom loop."""
        self._used, self.carry, self.final, self._after, self.last_pass = True, None, None, None, None

    def add(self, total: Weighted, metrics: Mapping[str, Weighted], after: State, rows: int, *, last: bool) -> None:
        """Adds what a backward pass over so many rows returned: gradients, ``carry`` included, metrics and the state."""
        self.carry, self.final = (None, _sum(self.final, total)) if last else (total, self.final)
        self._summed = 0 if last else self._summed + 1
        known = self.metrics
        self.metrics = known | {n: tree.map(torch.add, known[n], m) if n in known else m for n, m in metrics.items()}
        self._after, self._rows = after, self._rows + rows

    def after(self) -> State:
        """The state with what the passes have written; closes the last one."""
        if self.last_pass is not None:
            self.last_pass.close()
            self._after, self.last_pass = self.last_pass.written(), None
        return self.state if self._after is None else self._after

    def key_at(self, step: RunsPasses, state: State, rows: int) -> Key | None:
        """The key for the next pass, of so many rows."""
        if state.key is None:
            return None
        if self._key is None:
            self._key = step.at_rows(state, rows * step.micro_batches(state)).key
        return self._key.at(step=state.step, rows=self._rows) if self._key is not None and self._rows else self._key

    def total(self, step: RunsPasses, state: State, *, donate: bool) -> Passed:
        """The reduced gradients of all passes, with the state after them and their metrics."""
        self.check(state)
        after, carry, final = tree.replace(self.after(), key=state.key), self.carry, self.final
        if carry is None and final is None:
            raise ValueError("grads: there are none; call backward on a pass first")
        if donate:
            refuse_open(state)
        self._use_up()
        if carry is not None:
            final = _sum(final, _flushed(step, after, carry, self._summed))
        return after, final, self.metrics  # type: ignore[return-value]


def _flushed(step: RunsPasses, state: State, carry: Weighted, count: int) -> Weighted:
    """The sums of passes none of which was the last, reduced over the ranks if that was deferred."""
    if not step.has(Trait.SUMS_LAST):
        return carry
    view = step.view(state)
    try:
        return Weighted(view.pull((), carry.sum, True, passes=count).wait().sums, carry.weight)
    finally:
        view.close()


def _sum(one: Weighted | None, other: Weighted) -> Weighted:
    if one is None:
        return other
    sums = [(a if a.element_size() > 2 else wide(a)).add_(b) for a, b in zip(one.sum, other.sum, strict=True)]
    return Weighted(sums, one.weight + other.weight)
