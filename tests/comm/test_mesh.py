"""Meshes: named axes over a world's ranks."""

import itertools
import math
import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from functional_ds import comm

SIZES = st.lists(st.integers(1, 3), min_size=1, max_size=3).filter(lambda sizes: math.prod(sizes) <= 12)
NAMES = "abc"


@given(SIZES)
def test_ranks_are_numbered_row_by_row(sizes: list[int]) -> None:
    """Rank r stands at the r-th place of the grid, the last axis fastest, and a group holds all places that differ from it
    along one axis only."""
    places = list(itertools.product(*(range(size) for size in sizes)))
    axes = dict(zip(NAMES, sizes, strict=False))

    def program() -> None:
        mesh, rank = comm.mesh(**axes), comm.world().rank
        assert mesh.axes == axes
        assert tuple(mesh.coordinates.values()) == places[rank]
        for i, axis in enumerate(axes):
            along = [r for r, place in enumerate(places) if _without(place, i) == _without(places[rank], i)]
            group = mesh[axis]
            assert (group.ranks, group.name, group.size) == (tuple(along), axis, sizes[i])
            assert group.ranks[group.rank] == rank
            assert group.rank == mesh.coordinates[axis]

    comm.simulate(program, world_size=math.prod(sizes))


def _without(place: tuple[int, ...], axis: int) -> tuple[int, ...]:
    return place[:axis] + place[axis + 1 :]


@given(SIZES)
def test_the_groups_along_an_axis_cover_the_world(sizes: list[int]) -> None:
    """Along each axis every rank is in one group."""
    axes = dict(zip(NAMES, sizes, strict=False))
    world_size = math.prod(sizes)
    for axis in axes:
        groups = comm.simulate(lambda axis=axis: comm.mesh(**axes)[axis].ranks, world_size=world_size)
        assert sorted(itertools.chain(*set(groups))) == list(range(world_size))


def test_a_mesh_of_one() -> None:
    """A script that runs plainly has its meshes, too."""
    mesh = comm.mesh(dp=1, tp=1)
    assert mesh.coordinates == {"dp": 0, "tp": 0}
    assert comm.all_reduce(torch.tensor(2), mesh["dp"]).item() == 2


@pytest.mark.parametrize(
    ("axes", "shown"),
    [({"dp": 2}, "dp=2"), ({"dp": 2, "tp": 3}, "dp=2, tp=3"), ({"dp": -2, "tp": -2}, "dp=-2, tp=-2"), ({}, "no axes")],
)
def test_the_axes_must_make_up_the_world(axes: dict[str, int], shown: str) -> None:
    message = f"mesh({shown}): the axes must be positive and multiply to the world's size, 4"
    with pytest.raises(ValueError, match=re.escape(message)):
        comm.simulate(lambda: comm.mesh(**axes), world_size=4)


def test_an_unknown_axis_names_the_known_ones() -> None:
    with pytest.raises(KeyError, match=r"the mesh has no axis 'pp'; its axes are 'dp', 'tp'"):
        comm.simulate(lambda: comm.mesh(dp=2, tp=2)["pp"], world_size=4)


class FakeMesh:
    """As much of a DeviceMesh as is looked at before it is refused: a real one needs process groups."""

    mesh_dim_names = ("dp",)


def test_a_device_mesh_needs_processes() -> None:
    with pytest.raises(ValueError, match=r"a DeviceMesh needs processes; in a simulation pass the axes by name"):
        comm.simulate(lambda: comm.mesh(FakeMesh()), world_size=2)


def test_groups_say_what_they_are() -> None:
    def program() -> str:
        return repr(comm.mesh(dp=2, tp=2)["dp"])

    assert comm.simulate(program, world_size=4)[3] == "Group('dp', rank 1 of 2, ranks [1, 3])"
