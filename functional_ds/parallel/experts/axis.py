"""What a step's ranks let a mixture of experts know: the group over which its experts lie."""

import attrs

from functional_ds import comm

__all__ = ["ExpertAxis"]


@attrs.frozen(eq=False)
class ExpertAxis:
    """The expert-parallel axis of a running step, which ``axis("ep")`` gives (``functional_ds.step.axes``).

    Attributes:
        group: the ranks over which the experts are cut along their first dim; rank r of n holds the experts from ``r E/n`` on.
    """

    group: comm.Group
