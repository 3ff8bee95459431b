"""Refuses what a loss writes into units whose memory comes and goes: it would be lost with that memory."""

from collections.abc import Mapping, Sequence

import attrs
import torch
from torch import Tensor

from functional_ds.base.torch_private import is_fake, version_of
from functional_ds.modules.write_watch import bit_sums

__all__ = ["WriteGuard"]


@attrs.frozen(eq=False)
class _LeafVersion:
    """What a write into a leaf changes: its version, and in the first pass sums of its bits."""

    leaf: Tensor
    number: int
    sums: tuple[Tensor, ...] | None

    @staticmethod
    def of(leaf: Tensor, *, sums: bool) -> "_LeafVersion":
        return _LeafVersion(leaf, version_of(leaf), bit_sums(leaf) if sums and not (leaf.is_meta or is_fake(leaf)) else None)

    @property
    def changed(self) -> bool:
        same = self.sums is None or all(map(torch.equal, self.sums, bit_sums(self.leaf)))
        return version_of(self.leaf) != self.number or not same


@attrs.frozen(eq=False)
class WriteGuard:
    """Compares the leaves of a unit when it is freed with what they were when it was fetched.

    Attributes:
        paths: of the leaves.
        sums: whether values are compared, too: a write by NumPy leaves no version behind.
    """

    paths: Sequence[str]
    sums: bool = attrs.field(kw_only=True)
    _units: dict[int, dict[int, _LeafVersion]] = attrs.field(factory=dict)  # unit -> leaf -> as it was

    def note(self, unit: int, leaves: Mapping[int, Tensor]) -> None:
        """The leaves of a unit that was fetched."""
        self._units[unit] = {place: _LeafVersion.of(leaf, sums=self.sums) for place, leaf in leaves.items()}

    def check(self, unit: int) -> None:
        """Looks at the leaves of a unit that is to be freed.

        Raises:
            RuntimeError: with the leaf's path.
        """
        for place, version in self._units.pop(unit, {}).items():
            if version.changed:
                raise RuntimeError(
                    f"the loss wrote into the parameter {self.paths[place]!r} in place, and a forward pass may write "
                    "buffers alone: compute the weight from the parameter instead, or change params after the update, in a "
                    "transform: fds.wrap(..., update=...)"
                )

    def check_all(self) -> None:
        """Looks at those of all units, at the end of a forward pass."""
        for unit in [*self._units]:
            self.check(unit)
