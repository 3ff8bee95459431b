"""zero's knobs: whatever is chosen, it is the single-device step, and sends what the plan says, to the byte."""

from collections import Counter
from functools import cache
from typing import Any

import attrs
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import functional_ds as fds
from functional_ds import comm, transforms, units
from functional_ds.testing import assert_same
from tests.transforms.models import CASES, own_rows, run

TOLERANCE = 2e-5  # as in test_zero: rounding of sums in other orders


@attrs.frozen
class Grid:
    """How the ranks of a world lie: blocks of ``inside`` ranks, ``across`` of them, ``replicas`` times."""

    replicas: int
    across: int
    inside: int

    @property
    def size(self) -> int:
        return self.replicas * self.across * self.inside

    def groups(self, *, blocks: bool, numbers: bool = False) -> dict[str, Any]:
        """zero's groups, in the world of this size."""
        mesh = comm.mesh(replica=self.replicas, inter=self.across, intra=self.inside)
        found: dict[str, Any] = {"group": mesh["inter", "intra"]}
        if blocks:
            found["inside"] = self.inside if numbers else mesh["intra"]
        if self.replicas > 1:
            found["replicate"] = mesh["replica"]
        return found


GRIDS = [Grid(r, a, i) for r in (1, 2, 3) for a in (1, 2, 3) for i in (1, 2, 3) if r * a * i <= 6]
UNITS = (None, units.each_leaf, units.together, units.by_bytes(300))


@st.composite
def knobs(draw: st.DrawFn, stages: tuple[int, ...] = (0, 1, 2, 3)) -> dict[str, Any]:
    """What ``zero`` takes beside groups; ``blocks`` says whether the ranks are taken in blocks."""
    stage = draw(st.sampled_from(stages))
    found: dict[str, Any] = {"stage": stage, "blocks": False, "unit_of": draw(st.sampled_from(UNITS))}
    found["predivide"] = draw(st.sampled_from((1.0, 4.0)))
    if stage:
        found["aggregate"] = draw(st.sampled_from(("reduce_scatter", "all_reduce", "owner")))
        found["blocks"] = found["aggregate"] != "owner" and draw(st.booleans())
    if stage == 3:
        found["keep"] = draw(st.booleans())
        found["prefetch"] = draw(st.integers(0, 3))
        found["live"] = draw(st.integers(1, 3))
        found["persist"] = draw(st.sampled_from((0, 8, 64, 10**6)))
        found["secondary"] = found["blocks"] and draw(st.booleans())
    return found


def strategy(grid: Grid, chosen: dict[str, Any]) -> transforms.Zero:
    """In the world of the grid's size."""
    groups = grid.groups(blocks=chosen["blocks"], numbers=chosen.get("predivide") == 4.0)
    return transforms.zero(**{name: value for name, value in chosen.items() if name != "blocks"}, **groups)


@cache
def alone(name: str, rows: int) -> tuple[list[float], list[float], Any]:
    return run(CASES[name], (), rows=rows)


# -- nothing changes --------------------------------------------------------------------------------------------------


@pytest.mark.law(19)
@given(
    name=st.sampled_from(sorted(CASES)),
    grid=st.sampled_from(GRIDS),
    chosen=knobs(),
    k=st.sampled_from((1, 2)),
    seed=st.integers(0, 99),
)
def test_any_knobs_are_the_single_device_step(name: str, grid: Grid, chosen: dict[str, Any], k: int, seed: int) -> None:
    """zero with any knobs on any grid of ranks = the step on the concatenated batch."""
    rows = 2 * grid.size

    def program() -> Any:
        return run(CASES[name], (strategy(grid, chosen), transforms.accumulate(k)), rows=rows)

    expected = alone(name, rows)
    results = comm.simulate(program, world_size=grid.size, seed=seed)
    for losses, evaluated, params in results:
        torch.testing.assert_close([losses, evaluated], list(expected[:2]), rtol=TOLERANCE, atol=TOLERANCE, equal_nan=True)
        for leaf, other in zip(fds.tree.leaves(params), fds.tree.leaves(expected[2]), strict=True):
            torch.testing.assert_close(leaf, other, rtol=TOLERANCE, atol=TOLERANCE, equal_nan=True)
        assert_same(params, results[0][2])
