"""What forward passes set on modules and the tree of a state cannot hold: strings, members of enums, objects, modes."""

from collections.abc import Mapping
from typing import Any

import attrs

__all__ = ["OtherAttribute", "OtherAttributes"]


@attrs.frozen(eq=False)
class OtherAttribute:
    """An attribute of a module.

    Attributes:
        value: what the next pass finds.
        version: how many changes of ``Apply.module`` the pass knew that set it; a later one of this attribute counts more.
        passing: whether the value itself belonged to one pass, so that the next ones cannot use it.
    """

    value: Any
    version: int
    passing: bool


@attrs.define(eq=False)
class OtherAttributes:
    """Those of all modules. They go on from step to step with the state; no checkpoint has them.

    Attributes:
        by_key: for each module by the names of the attributes.
    """

    by_key: Mapping[str, Mapping[str, OtherAttribute]] = attrs.field(factory=dict)

    def __eq__(self, other: object) -> bool:
        """They are no part of a state's structure."""
        return isinstance(other, OtherAttributes)

    __hash__ = None  # type: ignore[assignment]
