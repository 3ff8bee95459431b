"""The mesh axes that transforms add to a step, as data: which ranks, and what they divide."""

from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from typing import Any, Literal

import attrs
from torch import Tensor

from functional_ds import comm

from .state.state import State

__all__ = ["Axis", "AxisRole", "GradientParts"]


class AxisRole(Enum):
    """What the ranks of an axis divide; ``Step.has`` asks for it, as for a trait."""

    BATCH = "dp"  # rows: each rank has its own, as in data parallelism
    SEQUENCE = "sp"  # positions of the same rows; an axis of role BATCH has these ranks, too, and sums over them
    STAGES = "pp"  # the model's stages, of which the last alone has the loss
    EXPERTS = "ep"  # stacks of experts, and tokens by expert; the ranks are of an axis of role BATCH, too
    MODEL = "tp"  # leaves, or what functions exchange, of one batch or of one that another axis divides


@attrs.frozen(eq=False)
class GradientParts:
    """How a gradient is divided over the ranks of an axis.

    Attributes:
        holders: how many ranks have the same part as this one, by the place of a trained tensor; 0 where another of them counts
            it.
        others: the same of all other tensors; None where they are whole on all ranks.
        counts: which such numbers there are beside 0, on all ranks of the step alike.
    """

    holders: Mapping[int, int] = attrs.field(factory=dict)
    others: int | None = 1
    counts: Sequence[int | None] = (1,)

    def only(self, grads: Sequence[Tensor], count: int | None) -> list[Tensor]:
        """The gradients of which so many ranks have the same part; others are emptied."""
        places = enumerate(grads)
        return [grad if self.holders.get(place, self.others) == count else grad.new_empty(0) for place, grad in places]


@attrs.frozen(eq=False)
class Axis:
    """The ranks of one axis, and what a transform divides over them: ``wrap(..., axes=[Axis(group, AxisRole.BATCH)])``.

    From the axes of its transforms a step computes whatever concerns several ranks: ``norm``, ``finite``, ``sum_over_ranks``,
    ``batch_shard`` and ``sync_buffers``.

    Attributes:
        group: the ranks; None for the world in which the program runs. They compare the whole step at ``init``.
        role: what they divide.
        parts: (step, state) -> how the gradient that an update gets is divided; None, or a result of None, where it is the same
            on all ranks.
        summed_in: the phase that sums gradients over the ranks; "update" where the optimizer does.
        name: under which a model's functions find the axis, by ``axis(name)``; None where they need not.
        value: what they find there; None for the group.

    Raises:
        TypeError: ``group`` is no group.
    """

    group: comm.Group | None
    role: AxisRole = AxisRole.MODEL
    parts: Callable[[Any, State], GradientParts | None] | None = None
    summed_in: Literal["gradients", "reduce", "update"] = "gradients"
    name: str | None = None
    value: Any = None
    shards: dict[Any, tuple[int, int]] = attrs.field(factory=dict, init=False, repr=False)  # of SEQUENCE: shards of batches

    def __attrs_post_init__(self) -> None:
        if self.group is not None and not isinstance(self.group, comm.Group):
            raise TypeError(f"group={self.group!r} is no group: pass mesh[{self.role.value!r}], comm.world() or None")

    def __str__(self) -> str:
        return "world" if self.group is None else f"{self.group.name!r} of {self.group.size}"

    def ranks(self) -> comm.Group:
        """The group; the default is wherever the program runs."""
        return self.group or comm.world()

    @property
    def compares(self) -> bool:
        """Whether there are other ranks with values of their own, with which this one's can be compared."""
        group = self.ranks()
        return group.size > 1 and not comm.is_symmetric(group)

    @property
    def sums(self) -> bool:
        """Whether metrics and weights are sums over its ranks."""
        return self.role in (AxisRole.BATCH, AxisRole.STAGES)
