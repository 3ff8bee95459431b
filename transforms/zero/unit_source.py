"""Where a view's whole units come from."""

from collections.abc import Callable, Sequence
from typing import Protocol

import attrs
from torch import Tensor

from functional_ds.sharding.layout import Layout

from .prefetch import FetchPlan, FetchTrace

__all__ = ["UnitSource", "WholeParams"]


class UnitSource(Protocol):
    """Where whole units come from.

    Attributes:
        frees: whether it may free a unit and fetch it again.
    """

    @property
    def frees(self) -> bool: ...

    def begin(self, trace: FetchTrace) -> None:
        """Starts a pass over the units."""

    def resume(self, on_drop: Callable[[int], None], on_fetch: Callable[[FetchPlan, int], None]) -> None:
        """Goes on with a pass whose loss runs again."""

    def fetch(self, unit: int) -> Sequence[Tensor]:
        """The unit's flat tensors, ``[segment.size]``, one a segment."""
        ...

    def finish(self, *, reshard: bool, note: bool = False) -> bool:
        """Ends a pass; ``reshard`` frees all units. Whether any rank gave a note."""
        ...

    def release(self, unit: int) -> None:
        """Says that nothing refers to the unit any more."""


@attrs.frozen(eq=False)
class WholeParams:
    """The source of units that are whole all the time."""

    layout: Layout
    flats: Sequence[Tensor]
    frees = False

    def begin(self, trace: FetchTrace) -> None:
        """Does nothing."""

    def resume(self, on_drop: Callable[[int], None], on_fetch: Callable[[FetchPlan, int], None]) -> None:
        """Does nothing."""

    def fetch(self, unit: int) -> Sequence[Tensor]:
        """The unit's flat tensors."""
        return [self.flats[index].detach() for index in self.layout.units[unit].segments]

    def finish(self, *, reshard: bool, note: bool = False) -> bool:
        """Does nothing."""
        return note

    def release(self, unit: int) -> None:
        """Does nothing."""
