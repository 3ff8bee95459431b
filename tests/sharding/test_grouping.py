"""Partitions into units: by block, by bytes, by path."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import functional_ds as fds
from functional_ds import Layout, units

PATHS = ["wte", "h.0.attn.w", "h.0.mlp.w", "h.1.attn.w", "h.1.mlp.w", "h.11.attn.w", "head"]


def model() -> dict[str, torch.Tensor]:
    return {path: torch.ones(4) for path in PATHS}


def names(unit_of: Any) -> dict[str, list[str]]:
    layout = Layout.of(model(), 2, unit_of)
    return {
        unit.name: [layout.paths[slot.leaf] for i in unit.segments for slot in layout.segments[i].slots]
        for unit in layout.units
    }


def test_by_path() -> None:
    """The first pattern that matches names the unit, with what its groups found; the rest goes by block."""
    found = names(units.by_path({r"^h\.[01]\.(\w+)": r"all \1", r"^w": "ends", r"head": "ends"}))
    assert found == {
        "ends": ["wte", "head"],
        "all attn": ["h.0.attn.w", "h.1.attn.w"],
        "all mlp": ["h.0.mlp.w", "h.1.mlp.w"],
        "h.11": ["h.11.attn.w"],
    }
    assert set(names(units.by_path({"^h": "h"}, others=units.single_unit))) == {"all", "h"}


@given(sizes=st.lists(st.integers(0, 20), min_size=1), limit=st.integers(1, 100))
def test_by_bytes(sizes: list[int], limit: int) -> None:
    """Neighbours, in order, as many as fit; a unit above the limit is one leaf; no leaf would have fitted before."""
    params = {f"p{i}": torch.ones(size) for i, size in enumerate(sizes)}
    found: dict[str, int] = {}
    members: dict[str, list[str]] = {}
    for path, name in units.by_bytes(limit).units(params).items():
        found[name] = found.get(name, 0) + params[path].nbytes
        members.setdefault(name, []).append(path)
    assert [path for unit in members.values() for path in unit] == [*params]
    assert all(size <= limit or len(members[name]) == 1 for name, size in found.items())
    for before, after in zip(members, [*members][1:], strict=False):
        assert found[before] + params[members[after][0]].nbytes > limit


def test_leaves_and_all() -> None:
    assert names(units.by_leaf) == {path: [path] for path in PATHS}
    assert [*names(units.single_unit)] == ["all"]
    assert names(None) == names(units.by_block)


def test_a_pattern_that_matches_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match=r"'h.0.atn' matches no path; the nearest is 'h.0.attn.w'"):
        names(units.by_path({"h.0.atn": "x"}))
    with pytest.raises(ValueError, match=r"'\(' is not a regular expression"):
        units.by_path({"(": "x"})


@pytest.mark.parametrize(("unit_of", "said"), [(3, "not a function"), (lambda path: 3, "gives 3 for 'wte'")])
def test_what_names_no_unit_is_refused(unit_of: Any, said: str) -> None:
    with pytest.raises(TypeError, match=said):
        names(unit_of)


def test_a_unit_has_bytes() -> None:
    with pytest.raises(ValueError, match="limit=0"):
        fds.units.by_bytes(0)
