"""The expert-parallel axis of a running step."""

import attrs

from functional_ds import comm


@attrs.frozen(eq=False)
class ExpertAxis:
    """The expert-parallel axis of a running step, as ``axis("ep")`` returns it (``functional_ds.step.axes``).

    Attributes:
        group: the ranks over which experts are split along their first dim; rank r of n holds E/n experts from ``r E/n`` on.
    """

    group: comm.Group
