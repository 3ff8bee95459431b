"""What a value is along a group of ranks, and what its gradient is then."""

from enum import Enum

__all__ = ["Variance"]


class Variance(Enum):
    """What the ranks of a group hold of one value.

    | the value | the ranks hold | their gradients of it |
    |---|---|---|
    | replicated | equal bits; each rank uses it in its own way | partial: their sum is the gradient |
    | invariant | equal bits; all ranks use it alike | invariant: each rank has the whole gradient |
    | varying | each its own part | varying: each that of its own part |
    | partial | terms, whose sum is the value | replicated: all terms have one gradient |
    """

    REPLICATED = "replicated"
    INVARIANT = "invariant"
    VARYING = "varying"
    PARTIAL = "partial"

    @property
    def dual(self) -> "Variance":
        """What the gradient of such a value is.

        Law: ``v.dual.dual = v``; a collective from ``a`` to ``b`` has a transpose from ``b.dual`` to ``a.dual``.
        """
        return _DUAL.get(self, self)

    @property
    def equal(self) -> bool:
        """Whether the ranks hold equal bits."""
        return self in (Variance.REPLICATED, Variance.INVARIANT)


_DUAL = {Variance.REPLICATED: Variance.PARTIAL, Variance.PARTIAL: Variance.REPLICATED}
