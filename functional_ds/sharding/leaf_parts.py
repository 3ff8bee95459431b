"""A rank's parts of leaves, and update rules on them that use sums over whole leaves."""

import functools
from collections.abc import Generator, Sequence
from typing import Any

import attrs
import torch
from torch import Tensor

from .leaf_map import LeafMap, checked_sum


@attrs.frozen
class LeafParts:
    """This rank's parts of all leaves; for leaves that it does not have, empty parts."""

    leaf_map: LeafMap
    leaves: tuple[int, ...]

    @staticmethod
    def of(leaf_map: LeafMap) -> "LeafParts":
        """The parts of a leaf map."""
        here = [shard.leaf for shard in leaf_map.shards]
        return LeafParts(leaf_map, (*here, *(i for i in range(len(leaf_map.leaves)) if i not in here)))

    def views(self, params: Sequence[Tensor], tensors: Sequence[Tensor]) -> list[Tensor]:
        """The parts of tensors with the params' layout; complex tensors as pairs of reals."""
        pairs = zip(params, tensors, strict=True)
        alike = [torch.view_as_complex(x) if p.is_complex() and not x.is_complex() else x for p, x in pairs]
        views, group = self.leaf_map.views(alike), self.leaf_map.group
        device = params[0].device if params else None if group is None else group.world.device
        dtypes = [self.leaf_map.leaves[leaf].dtype for leaf in self.leaves[len(views) :]]
        return _reals([*views, *(torch.empty(0, dtype=dtype, device=device) for dtype in dtypes)])

    def finished(self, runs: Sequence[Any], what: str) -> list[Any]:
        """Runs rules to their results; the sums that they yield are reduced over their leaves' parts, one collective each."""
        results = [*runs]
        told: dict[int, Any] = {place: None for place, run in enumerate(runs) if isinstance(run, Generator)}
        while told:
            asked: dict[int, Any] = {}
            for place, total in told.items():
                try:
                    asked[place] = runs[place].send(total)
                except StopIteration as end:
                    results[place] = end.value
            if asked and (len(asked) < len(told) or len({_count(sums) for sums in asked.values()}) > 1):
                raise ValueError(f"{what}: it must yield equally often, and equally many sums, for all leaves")
            told = self._totals(asked, what) if asked else {}
        return results

    def _totals(self, asked: dict[int, Any], what: str) -> dict[int, Any]:
        sums: dict[int, Tensor] = {}
        shape: torch.Size | None = None  # of each sum
        for place, yielded in asked.items():
            several, path = isinstance(yielded, tuple), self.leaf_map.leaves[self.leaves[place]].path
            found = []
            for value in yielded if several and yielded else [yielded]:
                found.append(checked_sum(value, what, path, shape))
                shape = found[-1].shape
            sums[place] = torch.stack(found) if several else found[0]
        wide = functools.reduce(torch.promote_types, (leaf_sums.dtype for leaf_sums in sums.values()), torch.float32)
        zero = torch.zeros_like(sums[min(sums)], dtype=wide)
        rows = [zero for _ in self.leaf_map.leaves]
        for place, leaf_sums in sums.items():
            rows[self.leaves[place]] = rows[self.leaves[place]] + leaf_sums.to(wide)
        total = self.leaf_map.total(torch.stack(rows))
        return {
            p: total[self.leaves[p]].unbind() if isinstance(yielded, tuple) else total[self.leaves[p]]
            for p, yielded in asked.items()
        }


def _count(sums: Any) -> int:
    """How many sums a rule has yielded at once."""
    return len(sums) if isinstance(sums, tuple) else -1


def _reals(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [torch.view_as_real(x) if x.is_complex() else x for x in tensors]
