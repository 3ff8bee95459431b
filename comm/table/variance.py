"""How a value relates to a group of ranks: replicated, invariant, varying or a partial sum."""

from enum import Enum


class Variance(Enum):
    """How the ranks of a group hold a value, and its gradient.

    | the value | the ranks hold | their gradients of it |
    |---|---|---|
    | replicated | equal bits, used differently by each rank | partial: their sum is the gradient |
    | invariant | equal bits, used in the same way by all ranks | invariant: each rank has the whole gradient |
    | varying | different values | varying: each rank has the gradient of its value |
    | partial | terms whose sum is the value | replicated: all terms have the same gradient |
    """

    REPLICATED = "replicated"
    INVARIANT = "invariant"
    VARYING = "varying"
    PARTIAL = "partial"

    @property
    def dual(self) -> "Variance":
        """The variance of the gradient.

        Law: ``v.dual.dual = v``; a collective from ``a`` to ``b`` has a transpose from ``b.dual`` to ``a.dual``.
        """
        return _DUAL.get(self, self)

    @property
    def equal(self) -> bool:
        """Whether all ranks hold equal bits."""
        return self in (Variance.REPLICATED, Variance.INVARIANT)


_DUAL = {Variance.REPLICATED: Variance.PARTIAL, Variance.PARTIAL: Variance.REPLICATED}
