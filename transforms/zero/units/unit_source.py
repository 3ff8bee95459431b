"""Sources of a view's whole units."""

from collections.abc import Callable, Sequence
from typing import Protocol

import attrs
from torch import Tensor

from functional_ds.sharding.layout import Layout

from .prefetch import FetchPlan, FetchTrace


class UnitSource(Protocol):
    """A source of whole units.

    Attributes:
        frees: whether it may free a unit and fetch it again.
    """

    @property
    def frees(self) -> bool: ...

    def begin(self, trace: FetchTrace) -> None:
        """Starts a pass over the units."""

    def resume(self, on_drop: Callable[[int], None], on_fetch: Callable[[FetchPlan, int], None]) -> None:
        """Continues a pass whose loss runs again."""

    def fetch(self, unit: int) -> Sequence[Tensor]:
        """The unit's flat tensors, ``[segment.size]``, one per segment."""
        ...

    def finish(self, *, reshard: bool, note: bool = False) -> bool:
        """Ends a pass; ``reshard`` frees all units. Returns whether any rank set ``note``."""
        ...

    def release(self, unit: int) -> None:
        """Signals that the unit is no longer referred to."""


@attrs.frozen(eq=False)
class WholeParams:
    """The source of units that are always whole."""

    layout: Layout
    flats: Sequence[Tensor]
    frees = False

    def begin(self, trace: FetchTrace) -> None:
        """Does nothing."""

    def resume(self, on_drop: Callable[[int], None], on_fetch: Callable[[FetchPlan, int], None]) -> None:
        """Does nothing."""

    def fetch(self, unit: int) -> Sequence[Tensor]:
        """The unit's flat tensors."""
        return [*map(self.flats.__getitem__, self.layout.units[unit].segments)]

    def finish(self, *, reshard: bool, note: bool = False) -> bool:
        """Does nothing."""
        return note

    def release(self, unit: int) -> None:
        """Does nothing."""
