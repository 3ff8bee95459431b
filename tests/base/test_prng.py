"""``Key``: a draw depends on where an element stands in the global tensor, not on how it is cut (laws 29 and 49)."""

import zlib
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import functional_ds as fds
from functional_ds import Key

MASK = (1 << 64) - 1


def mixed(x: int) -> int:
    """splitmix64's finalizer in Python's integers."""
    x &= MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    return x ^ (x >> 31)


def test_draws_are_the_published_hash() -> None:
    """Bits of (seed, step, name, row, position in the row), computed again in Python's integers."""
    golden, seed, step, row = 0x9E3779B97F4A7C15, 5, 3, 7
    key = Key(torch.tensor(seed), torch.tensor(step), torch.tensor(row))
    run = mixed(mixed(seed + golden) + step * golden + zlib.crc32(b"mlp"))
    expected = [[(mixed(mixed(run + (row + r) * golden) + c * golden) >> 40) * 2.0**-24 for c in range(6)] for r in range(2)]
    assert key.uniform(torch.empty(2, 3, 2), "mlp").flatten(1).tolist() == expected


@st.composite
def slices(draw: st.DrawFn) -> tuple[tuple[int, ...], dict[int, Tensor]]:
    """A shape, and for some of its dims which indices are here, in any order."""
    shape = tuple(draw(st.lists(st.integers(1, 5), min_size=1, max_size=4)))
    dims = draw(st.sets(st.integers(0, len(shape) - 1)))
    some = {dim: draw(st.permutations(range(shape[dim])))[: draw(st.integers(0, shape[dim]))] for dim in sorted(dims)}
    return shape, {dim: torch.tensor(at, dtype=torch.int64) for dim, at in some.items()}


@pytest.mark.law(49)
@given(cut=slices(), row=st.integers(0, 3), carried=st.booleans())
def test_slices_draw_what_the_whole_tensor_draws(
    cut: tuple[tuple[int, ...], dict[int, Tensor]], row: int, carried: bool
) -> None:
    """Along any dims, contiguous or not, whether the call or the key says where the slice lies."""
    shape, parts = cut
    key, whole = Key.of(1).at(rows=row), torch.ones(shape)
    expected, part = key.uniform(whole, "a"), whole
    for dim, at in parts.items():
        expected, part = expected.index_select(dim, at), part.index_select(dim, at)
    places = {dim: (at + row if dim == 0 else at, shape[dim]) for dim, at in parts.items()}
    found = key.at(places=places).uniform(part, "a") if carried else key.uniform(part, "a", places=places)
    assert torch.equal(found, expected)


def test_rows_may_have_places_of_their_own() -> None:
    """Positions [rows, n]: each row has another part of the sequence."""
    key, whole = Key.of(2), torch.ones(3, 4, 2)
    at = torch.tensor([[0, 1], [3, 0], [2, 1]])
    expected = key.uniform(whole, "a").gather(1, at[:, :, None].expand(-1, -1, 2))
    assert torch.equal(key.uniform(torch.empty(3, 2, 2), "a", places={1: (at, 4)}), expected)


def test_ranges_and_dropout() -> None:
    """A range needs no tensor; ``dropout`` and ``at`` hand places on, and a call's count over the key's."""
    key, whole = Key.of(3), torch.ones(2, 6, 4)
    features, positions = (range(2, 4), 4), (torch.tensor([5, 0, 1]), 6)
    expected = key.dropout(whole, 0.5, "a")
    assert torch.equal(key.dropout(whole[:, :, 2:4], 0.5, "a", places={2: features}), expected[:, :, 2:4])
    here = key.at(places={1: positions}).at(rows=0)
    assert torch.equal(here.dropout(whole[:, :3, 2:4], 0.5, "a", places={2: features}), expected[:, [5, 0, 1], 2:4])
    assert torch.equal(here.dropout(whole, 0.5, "a", places={1: None}), expected)
    assert torch.equal(here.uniform(whole[:, 0, 0], "b", places={1: None}), key.uniform(whole[:, 0, 0], "b"))


def test_a_key_without_places_has_the_leaves_it_had() -> None:
    """Places add leaves to a state only where there are any, so checkpoints stay what they were."""
    key = Key.of(4)
    assert [path for path, _ in fds.tree.named(key)] == ["seed", "step", "row"]


@pytest.mark.parametrize(
    ("places", "words"),
    [
        ({2: (range(3), 3)}, "has dim 2, which it lacks"),
        ({-1: (range(3), 3)}, "has dim -1, which it lacks"),
        ({1: (range(2), 3)}, r"places\[1\] are \[2\] global indices of 3, and dim 1 has 3 elements"),
        ({0: (torch.zeros(2, 2, dtype=torch.int64), 3)}, "dim 0 has 2 elements"),
        ({1: (torch.zeros(3), 3)}, "torch.float32 on cpu; give integers"),
        ({1: (torch.zeros(3, dtype=torch.int64, device="meta"), 3)}, "torch.int64 on meta; give integers on cpu"),
    ],
)
def test_places_that_do_not_fit_are_refused(places: Any, words: str) -> None:
    """By the draw's name, the dim and the sizes."""
    with pytest.raises(ValueError, match=f"the draw 'mlp' for a tensor of shape .*{words}"):
        Key.of(0).uniform(torch.empty(2, 3), "mlp", places=places)
