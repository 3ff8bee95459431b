"""``Costs``: the seconds and bytes of a pipeline's stages."""

from collections.abc import Sequence
from typing import Any

import attrs
import numpy as np

from functional_ds.comm.algorithms.cost import Link
from functional_ds.pipelining.schedules.action import Kind
from functional_ds.pipelining.schedules.graph import Floats

PerStage = float | Sequence[float]


def _per_stage(value: Any) -> Any:
    if value is None or isinstance(value, (int, float)):
        return value
    return tuple(float(cost) for cost in value)


def _not_negative(_: Any, attribute: Any, value: Any) -> None:
    for cost in (value,) if isinstance(value, (int, float)) else value or ():
        if not 0 <= cost < float("inf"):
            raise ValueError(f"{attribute.name}={value!r}: {cost} is not a cost; use finite numbers of at least 0")


@attrs.frozen(kw_only=True, repr=False)
class Costs:
    """Times and sizes: one number for all stages, or a sequence with one for each.

    The defaults are the papers' units: F, I and W take one unit of time, B two, messages none; a forward keeps one unit of
    memory for its backward.

    Attributes:
        forward, inputs, weights: seconds of F, I and W.
        backward: seconds of B; by default those of I and W.
        link: between neighbouring ranks, not shared between messages.
        message: bytes that a stage sends to the next, and of the gradient that comes back.
        activations: bytes that a forward keeps for its backward.
        kept: of these, the bytes that W still needs after I; by default all.
        shared: of these, the bytes that the previous stage keeps too, as its output. They count once if both stages are on one
            rank.
        gather, reduce: seconds of a stage's gather and reduce.

    >>> Costs(forward=[1, 2], weights=0.5).seconds(2).tolist()  # of F, I, W, B; a row for each stage
    [[1.0, 1.0, 0.5, 1.5], [2.0, 1.0, 0.5, 1.5]]
    >>> Costs(forward=[1, 2], weights=0.5)
    Costs(forward=(1.0, 2.0), weights=0.5)
    """

    forward: PerStage = attrs.field(default=1.0, converter=_per_stage, validator=_not_negative)
    inputs: PerStage = attrs.field(default=1.0, converter=_per_stage, validator=_not_negative)
    weights: PerStage = attrs.field(default=1.0, converter=_per_stage, validator=_not_negative)
    backward: PerStage | None = attrs.field(default=None, converter=_per_stage, validator=_not_negative)
    link: Link = attrs.field(factory=lambda: Link(latency=0.0, bandwidth=float("inf")))
    message: PerStage = attrs.field(default=0.0, converter=_per_stage, validator=_not_negative)
    activations: PerStage = attrs.field(default=1.0, converter=_per_stage, validator=_not_negative)
    kept: PerStage | None = attrs.field(default=None, converter=_per_stage, validator=_not_negative)
    shared: PerStage = attrs.field(default=0.0, converter=_per_stage, validator=_not_negative)
    gather: PerStage = attrs.field(default=0.0, converter=_per_stage, validator=_not_negative)
    reduce: PerStage = attrs.field(default=0.0, converter=_per_stage, validator=_not_negative)

    def __repr__(self) -> str:
        default, given = attrs.asdict(Costs(), recurse=False), attrs.asdict(self, recurse=False)
        return f"Costs({', '.join(f'{name}={value!r}' for name, value in given.items() if value != default[name])})"

    def of(self, name: str, stages: int) -> Floats:
        """A field's values, by stage.

        Raises:
            ValueError: the field has another number of values.
        """
        value = getattr(self, name)
        if isinstance(value, tuple) and len(value) != stages:
            raise ValueError(
                f"costs.{name} has {len(value)} values for {stages} stages; give one for each, or one number for all"
            )
        return np.broadcast_to(np.asarray(value, np.float64), (stages,))

    def seconds(self, stages: int) -> Floats:
        """[stage, kind]: seconds of F, I, W and B."""
        forward, inputs, weights = (self.of(name, stages) for name in ("forward", "inputs", "weights"))
        backward = inputs + weights if self.backward is None else self.of("backward", stages)
        return np.stack([forward, inputs, weights, backward], axis=1)

    def crossing(self, stages: int) -> Floats:
        """[stage]: seconds of a message between the stage and the next."""
        return self.link.latency + self.of("message", stages) / self.link.bandwidth

    def shared_on(self, placement: Sequence[int]) -> Floats:
        """[stage]: bytes that a stage's forward need not allocate, because the previous stage on its rank has."""
        count = len(placement)
        least = self.freed(count)[:, Kind.W]
        beside = [stage > 0 and placement[stage - 1] == rank for stage, rank in enumerate(placement)]
        return np.where(beside, np.minimum(self.of("shared", count), np.minimum(least, np.roll(least, 1))), 0.0)

    def freed(self, stages: int) -> Floats:
        """[stage, kind]: bytes that are freed at the end of F, I, W and B."""
        activations = self.of("activations", stages)
        kept = activations if self.kept is None else np.minimum(self.of("kept", stages), activations)
        return np.stack([np.zeros(stages), activations - kept, kept, activations], axis=1)
