"""What the passes of one optimizer step have left so far, for loops of a user's own."""

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import attrs
import optree
import torch

from functional_ds.base import tree
from functional_ds.base.prng import Key
from functional_ds.base.weighted import Weighted

from .phase_signatures import Phase
from .phases import Layer, Trait
from .state.state import State, Summing, refuse_open
from .view import View, wide

__all__ = ["Gradients", "RunsPasses"]


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
        """The state that a closed pass has left."""


@attrs.define(eq=False)
class Gradients:
    """What the passes of one optimizer step have left so far. ``OpenPass.backward`` adds to it, ``Step.finish`` takes it.

    It can be used once, as its sums grow in place.

    Attributes:
        state: what the passes were opened with.
        batch: the structure of the batches.
        metrics: the sums of the losses and of further metrics on this rank.
        carry: sums that the next pass adds to.
        final: those of passes that were the last: they are summed over the ranks.
        last_pass: the pass that has added to it last and may be open.
    """

    state: State
    batch: optree.PyTreeSpec | None
    metrics: dict[str, Weighted] = attrs.field(factory=dict)
    carry: Weighted | None = None
    final: Weighted | None = None
    last_pass: "Closes | None" = None
    _after: State | None = None  # with what the passes have written, but for that one's buffers
    _key: Key | None = None  # at this rank's first row
    _rows: int = 0  # of the passes so far
    _summed: int = 0  # how many backward passes are in ``carry``
    _used: bool = False

    def __repr__(self) -> str:
        return f"Gradients({self._rows} rows, {'used' if self._used else ', '.join(self.metrics) or 'none yet'})"

    def check(self, state: State) -> None:
        """Refuses a value that is of another state, or was used.

        Raises:
            ValueError: it is.
        """
        if self.state is not state:
            raise ValueError(
                "grads: they are of another state; the passes of a step, and finish, get the state that it begins with"
            )
        if self._used:
            raise ValueError(
                "grads: they were used already, and their sums have grown since; go on with what the latest backward returned"
            )

    def taken(self) -> "Gradients":
        """The same, as a new value, which others are added to; this one cannot be used any more."""
        self.check(self.state)
        new = attrs.evolve(self)
        self._use_up()
        return new

    def _use_up(self) -> None:
        """Lets go of the tensors, which this value may outlive in a custom loop."""
        self._used, self.carry, self.final, self._after, self.last_pass = True, None, None, None, None

    def add(self, total: Weighted, metrics: Mapping[str, Weighted], after: State, rows: int, *, last: bool) -> None:
        """Takes what a backward pass over so many rows has left: gradients, ``carry`` included, metrics and the state."""
        self.carry, self.final = (None, _sum(self.final, total)) if last else (total, self.final)
        self._summed = 0 if last else self._summed + 1
        known = self.metrics
        self.metrics = known | {n: tree.map(torch.add, known[n], m) if n in known else m for n, m in metrics.items()}
        self._after, self._rows = after, self._rows + rows

    def after(self) -> State:
        """The state with what the passes have written; the last one is closed."""
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

    def total(self, step: RunsPasses, state: State, *, donate: bool) -> tuple[State, Weighted, dict[str, Weighted]]:
        """The gradients of all passes, reduced as the step wants them, with the state that they leave and their metrics."""
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
    """The sums of passes of which none was the last, reduced over the ranks if that was put off."""
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
