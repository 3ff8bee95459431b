"""The inner update of one piece, with norms and finiteness of the whole state."""

from collections.abc import Callable
from typing import Any

import attrs
import torch
from torch import Tensor

from functional_ds.base import tree
from functional_ds.base.weighted import Weighted
from functional_ds.sharding.leaf_map import LeafMap
from functional_ds.step.phase_signatures import Metrics
from functional_ds.step.state.state import State
from functional_ds.step.step import Step

from .leaf_states import assembled, beside_params, content, flat, on_device, without_leaves
from .plan import OffloadPlan, cut


@attrs.define(eq=False, repr=False)
class PieceUpdate:
    """Runs the inner update on states of one piece.

    The inner update must be elementwise, except for what it asks of the step: ``norm`` and ``finite`` cover all gradients, and
    ``leaf_map`` tells which elements the piece has. Shared values, such as a loss scale, are passed to every piece as they were
    before the update; the first piece's results are kept.
    """

    inner: Any
    step: Step
    state: State
    grads: Weighted
    plan: OffloadPlan
    device: torch.device
    _answers: dict[str, Tensor] = attrs.field(factory=dict)
    _first: list[tuple[State, Metrics]] = attrs.field(factory=list)  # of the first piece, once it has run

    def run(
        self, piece: Any, grads: list[Tensor], *, device: torch.device, leaf_map: Callable[[LeafMap], LeafMap]
    ) -> list[Any]:
        """Updates a piece's content on a device and returns its leaves; ``leaf_map`` restricts a leaf map to the piece."""
        answers = {name: lambda *_, name=name: self._ask(name).to(device) for name in ("norm", "finite")}
        step = attrs.evolve(self.step, over_ranks={**self.step.over_ranks, **answers})
        step = step.wrapped("piece", leaf_map=lambda *_: leaf_map(self.step.leaf_map(self.state)))
        rest = on_device(piece["rest"], device)
        state = tree.replace(
            self.state,
            params=piece["params"],
            optimizer=rest["optimizer"],
            step=self.state.step.to(device),
            slots={**self.state.slots, **rest["slots"]},
            skip=on_device(self.state.skip, device),
            finite=on_device(self.state.finite, device),
        )
        after, metrics = self.inner(step, state, Weighted(grads, on_device(self.grads.weight, device)))
        self._first = self._first or [(after, metrics)]
        return flat(content(after, self.plan.slots))[0]

    def first(self) -> tuple[State, Metrics]:
        """The first piece's result. A rank without pieces runs an empty one, so that it takes part in the collectives."""
        if not self._first:
            empty = {"params": [], "rest": without_leaves(beside_params(self.state, self.plan.slots))}
            self.run(empty, [], device=self.device, leaf_map=lambda parts: cut(parts, None, 0, 0))
        return self._first[0]

    def whole(self, leaves: list[list[Any]]) -> tuple[State, Metrics]:
        """The state after the update, and the metrics, from the leaves of each unit's content."""
        first, metrics = self.first()
        contents = [tree.unflatten(unit.spec, values) for unit, values in zip(self.plan.units, leaves, strict=True)]
        spec = flat(self.state.params)[1]
        state = assembled(self.state, first, contents, params=spec, slots=self.plan.slots, device=self.device)
        return state, on_device(metrics, self.device)

    def _ask(self, name: str) -> Tensor:
        """The step's answer for all gradients: computed by the first piece, before any gradient is overwritten."""
        if name not in self._answers:
            self._answers[name] = self.step.over_ranks[name](self.step, self.state, self.grads.sum)
        return self._answers[name]
