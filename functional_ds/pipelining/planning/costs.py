"""``Costs``: what the stages of a pipeline take, in seconds and bytes."""

from collections.abc import Sequence
from typing import Any

import attrs
import numpy as np

from functional_ds.comm.algorithms.cost import Link
from functional_ds.pipelining.schedules.graph import Floats

__all__ = ["Costs", "PerStage"]

PerStage = float | Sequence[float]


def _per_stage(value: Any) -> Any:
    if value is None or isinstance(value, (int, float)):
        return value
    return tuple(float(each) for each in value)


def _not_negative(_: Any, attribute: Any, value: Any) -> None:
    for each in (value,) if isinstance(value, (int, float)) else value or ():
        if not 0 <= each < float("inf"):
            raise ValueError(f"{attribute.name}={value!r}: {each} is no cost; use finite numbers of at least 0")


@attrs.frozen(kw_only=True)
class Costs:
    """Times and sizes, each a number for all stages or a sequence with one for each.

    The defaults are the papers' units: F, I and W take one unit of time, B two, messages none, and what a forward leaves for
    its backward is one unit of memory.

    Attributes:
        forward, inputs, weights: seconds of F, I and W.
        backward: seconds of B; by default those of I and W.
        link: between neighbouring ranks; one for each message, none shared.
        message: bytes of what a stage sends to the next, and of the gradient that comes back.
        activations: bytes that a forward leaves for its backward.
        kept: bytes of those that W still needs after I; by default all.
        gather, reduce: seconds of a stage's gather and reduce.

    >>> Costs(forward=[1, 2], weights=0.5).seconds(2).tolist()  # of F, I, W, B; a row for each stage
    [[1.0, 1.0, 0.5, 1.5], [2.0, 1.0, 0.5, 1.5]]
    """

    forward: PerStage = attrs.field(default=1.0, converter=_per_stage, validator=_not_negative)
    inputs: PerStage = attrs.field(default=1.0, converter=_per_stage, validator=_not_negative)
    weights: PerStage = attrs.field(default=1.0, converter=_per_stage, validator=_not_negative)
    backward: PerStage | None = attrs.field(default=None, converter=_per_stage, validator=_not_negative)
    link: Link = attrs.field(factory=lambda: Link(latency=0.0, bandwidth=float("inf")))
    message: PerStage = attrs.field(default=0.0, converter=_per_stage, validator=_not_negative)
    activations: PerStage = attrs.field(default=1.0, converter=_per_stage, validator=_not_negative)
    kept: PerStage | None = attrs.field(default=None, converter=_per_stage, validator=_not_negative)
    gather: PerStage = attrs.field(default=0.0, converter=_per_stage, validator=_not_negative)
    reduce: PerStage = attrs.field(default=0.0, converter=_per_stage, validator=_not_negative)

    def of(self, name: str, stages: int) -> Floats:
        """A field's values, one for each stage.

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
        """[stage, kind]: of F, I, W and B."""
        forward, inputs, weights = (self.of(name, stages) for name in ("forward", "inputs", "weights"))
        backward = inputs + weights if self.backward is None else self.of("backward", stages)
        return np.stack([forward, inputs, weights, backward], axis=1)

    def crossing(self, stages: int) -> Floats:
        """Seconds of a message between a stage and the next."""
        return self.link.latency + self.of("message", stages) / self.link.bandwidth

    def freed(self, stages: int) -> Floats:
        """[stage, kind]: bytes that the end of F, I, W and B frees."""
        activations = self.of("activations", stages)
        kept = activations if self.kept is None else np.minimum(self.of("kept", stages), activations)
        return np.stack([np.zeros(stages), activations - kept, kept, activations], axis=1)
