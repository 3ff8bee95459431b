"""Meshes: named axes over a world's ranks."""

import itertools
import math
import re
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import attrs
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from functional_ds import comm, tree
from functional_ds.testing import ADDABLE, Inputs, assert_same, inputs

# -- single axes ------------------------------------------------------------------------------------------------------

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


def test_groups_say_what_they_are() -> None:
    def program() -> str:
        return repr(comm.mesh(dp=2, tp=2)["dp"])

    assert comm.simulate(program, world_size=4)[3] == "Group('dp', rank 1 of 2, ranks [1, 3])"


# -- several axes -----------------------------------------------------------------------------------------------------


@attrs.frozen
class Grid:
    """A mesh's axes, and some of them in any order."""

    axes: dict[str, int]
    named: tuple[str, ...]

    @property
    def size(self) -> int:
        return math.prod(self.axes.values())

    def rows(self) -> list[list[int]]:
        """The groups over the named axes: the ranks' array with these axes last, in their order."""
        others = [axis for axis in self.axes if axis not in self.named]
        order = [list(self.axes).index(axis) for axis in (*others, *self.named)]
        array = torch.arange(self.size).view(*self.axes.values())
        return array.permute(order).reshape(-1, math.prod(self.axes[axis] for axis in self.named)).tolist()


@st.composite
def grids(draw: st.DrawFn) -> Grid:
    """Meshes of one to three axes."""
    sizes = draw(SIZES)
    axes = dict(zip(NAMES, sizes, strict=False))
    order = draw(st.permutations(list(axes)))
    return Grid(axes, tuple(order[: draw(st.integers(1, len(order)))]))


@given(grids())
def test_several_axes_make_a_group(grid: Grid) -> None:
    """Its ranks differ along the named axes only and are numbered row by row in the order of the names; the groups partition
    the world, and their size is the product of the axes'."""
    rows = grid.rows()
    assert sorted(itertools.chain(*rows)) == list(range(grid.size))

    def program() -> None:
        mesh, rank = comm.mesh(**grid.axes), comm.world().rank
        group = mesh[grid.named]
        assert list(group.ranks) == next(row for row in rows if rank in row)
        assert group.ranks[group.rank] == rank
        assert group.size == math.prod(mesh[axis].size for axis in grid.named)
        assert group.name == ",".join(grid.named)

    comm.simulate(program, world_size=grid.size)


@given(grids())
def test_a_sub_mesh_keeps_places_and_groups(grid: Grid) -> None:
    """sub(a, b)[a] = mesh[a], with the same coordinates; all axes in their order are the mesh."""

    def program() -> None:
        mesh = comm.mesh(**grid.axes)
        sub = mesh.sub(*grid.named)
        assert list(sub.axes.items()) == [(axis, grid.axes[axis]) for axis in grid.named]
        assert sub.coordinates == {axis: mesh.coordinates[axis] for axis in grid.named}
        assert list(sub.coordinates) == list(grid.named)
        assert (sub.ranks, sub.rank) == (mesh[grid.named].ranks, mesh[grid.named].rank)
        for axis in grid.named:
            assert sub[axis] == mesh[axis]
        assert sub[grid.named] == mesh[grid.named]
        assert mesh.sub(*grid.axes) == mesh

    comm.simulate(program, world_size=grid.size)


def test_the_order_of_axes_counts() -> None:
    """Two meshes of the same axes in different orders are different."""

    def program() -> None:
        one, other = comm.mesh(a=2, b=2), comm.mesh(b=2, a=2)
        assert one == comm.mesh(a=2, b=2)
        assert one != other
        assert hash(one) == hash(comm.mesh(a=2, b=2))
        assert one.sub("b", "a") != one

    comm.simulate(program, world_size=4)


@st.composite
def grids_with_inputs(draw: st.DrawFn) -> tuple[Grid, Inputs]:
    grid = draw(grids())
    case = draw(inputs(sizes=st.just(grid.size), dtypes=ADDABLE, cut=True, max_leaves=3))
    return grid, case


@pytest.mark.law(13)
@given(grids_with_inputs())
def test_all_reduce_over_several_axes_goes_axis_by_axis(drawn: tuple[Grid, Inputs]) -> None:
    """AR over G×H = AR_G ∘ AR_H = AR_H ∘ AR_G, with the group mesh[g, h]."""
    grid, case = drawn

    def program(x: Any) -> Any:
        mesh = comm.mesh(**grid.axes)
        one = other = x
        for axis in grid.named:
            one = comm.all_reduce(one, mesh[axis])
        for axis in reversed(grid.named):
            other = comm.all_reduce(other, mesh[axis])
        return comm.all_reduce(x, mesh[grid.named]), one, other

    for whole, one, other in case.simulate(program):
        assert_same(one, whole, bits=False)
        assert_same(other, whole, bits=False)


@pytest.mark.law(15)
@given(grids_with_inputs())
def test_sharding_over_several_axes_goes_axis_by_axis(drawn: tuple[Grid, Inputs]) -> None:
    """Sharding over (a, b) = sharding over b of the sharding over a, and so for RS; AG over (a, b) = AG_a ∘ AG_b."""
    grid, case = drawn
    dim = case.dim

    def shard(x: Any, group: comm.Group) -> Any:
        return tree.map(lambda leaf: leaf.tensor_split(group.size, dim)[group.rank], x)

    def program(x: Any) -> Any:
        mesh = comm.mesh(**grid.axes)
        sharded = scattered = gathered = x
        for axis in grid.named:
            sharded = shard(sharded, mesh[axis])
            scattered = comm.reduce_scatter(scattered, mesh[axis], dim=dim)
        for axis in reversed(grid.named):
            gathered = comm.all_gather(gathered, mesh[axis], dim=dim)
        group = mesh[grid.named]
        at_once = shard(x, group), comm.reduce_scatter(x, group, dim=dim), comm.all_gather(x, group, dim=dim)
        return (sharded, scattered, gathered), at_once

    for (sharded, scattered, gathered), at_once in case.simulate(program):
        assert_same(sharded, at_once[0])
        assert_same(scattered, at_once[1], bits=False)
        assert_same(gathered, at_once[2])


# -- splitting an axis ------------------------------------------------------------------------------------------------


@given(SIZES, st.integers(1, 2), st.integers(1, 2))
def test_a_split_axis_keeps_its_ranks(sizes: list[int], before: int, after: int) -> None:
    """The new axes flatten to the old one, whatever stands before and after it, and the other axes stay as they are."""
    parts = dict(zip(NAMES, sizes, strict=False))

    def program() -> None:
        mesh = comm.mesh(outer=before, whole=math.prod(sizes), inner=after)
        split = mesh.split("whole", **parts)
        assert list(split.axes.items()) == [("outer", before), *parts.items(), ("inner", after)]
        assert split[tuple(parts)].ranks == mesh["whole"].ranks
        assert (split["outer"], split["inner"]) == (mesh["outer"], mesh["inner"])
        assert (split.ranks, split.rank) == (mesh.ranks, mesh.rank)
        assert split.split(NAMES[0], again=sizes[0])["again"].ranks == split[NAMES[0]].ranks

    comm.simulate(program, world_size=before * math.prod(sizes) * after)


def test_experts_from_one_call() -> None:
    """Neighbours along the data axis hold different experts; every ep-th rank holds the same ones."""

    def program() -> tuple[Any, ...]:
        experts = comm.mesh(dp=4, tp=2).split("dp", edp=2, ep=2)
        return experts["ep"].ranks, experts["edp"].ranks, experts["tp"].ranks, experts["ep", "tp"].ranks

    assert comm.simulate(program, world_size=8)[5] == ((5, 7), (1, 5), (4, 5), (4, 5, 6, 7))


def test_a_name_may_stay() -> None:
    """One of the new axes may have the old one's name."""
    found = comm.simulate(lambda: comm.mesh(dp=4).split("dp", dp=2, ep=2)["dp"].ranks, world_size=4)
    assert found == [(0, 2), (1, 3), (0, 2), (1, 3)]


# -- errors -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("axes", "shown"),
    [({"dp": 2}, "dp=2"), ({"dp": 2, "tp": 3}, "dp=2, tp=3"), ({"dp": -2, "tp": -2}, "dp=-2, tp=-2"), ({}, "no axes")],
)
def test_the_axes_must_make_up_the_world(axes: dict[str, int], shown: str) -> None:
    message = f"mesh({shown}): the axes must be positive and multiply to the world's size, 4"
    with pytest.raises(ValueError, match=re.escape(message)):
        comm.simulate(lambda: comm.mesh(**axes), world_size=4)


REFUSED: list[tuple[Callable[[comm.Mesh], Any], type[Exception], str]] = [
    (lambda mesh: mesh["pp"], KeyError, "the mesh has no axis 'pp'; its axes are 'dp', 'tp'"),
    (lambda mesh: mesh["dp", "pp"], KeyError, "the mesh has no axis 'pp'; its axes are 'dp', 'tp'"),
    (lambda mesh: mesh[0], KeyError, "the mesh has no axis 0; its axes are 'dp', 'tp'"),  # type: ignore[index]
    (lambda mesh: mesh.sub("dp").sub("tp"), KeyError, "the mesh has no axis 'tp'; its axes are 'dp'"),
    (lambda mesh: mesh["tp", "dp", "tp"], ValueError, "axes ('tp', 'dp', 'tp'): 'tp' is named twice; name each axis once"),
    (lambda mesh: mesh.sub("dp", "dp"), ValueError, "axes ('dp', 'dp'): 'dp' is named twice; name each axis once"),
    (lambda mesh: mesh[()], ValueError, "axes (): name at least one; the mesh has 'dp', 'tp'"),
    (lambda mesh: mesh.split("pp", a=2, b=2), KeyError, "the mesh has no axis 'pp'; its axes are 'dp', 'tp'"),
    (
        lambda mesh: mesh.split("dp", edp=2, ep=3),
        ValueError,
        "split('dp', edp=2, ep=3): the sizes must be positive and multiply to the axis's, 4",
    ),
    (
        lambda mesh: mesh.split("dp", edp=-2, ep=-2),
        ValueError,
        "split('dp', edp=-2, ep=-2): the sizes must be positive and multiply to the axis's, 4",
    ),
    (
        lambda mesh: mesh.split("dp"),
        ValueError,
        "split('dp', no axes): the sizes must be positive and multiply to the axis's, 4",
    ),
    (
        lambda mesh: mesh.split("dp", tp=2, ep=2),
        ValueError,
        "split('dp', tp=2, ep=2): the mesh has an axis 'tp' already; its axes are 'dp', 'tp'",
    ),
    (
        lambda mesh: mesh.device_mesh(),
        ValueError,
        "device_mesh(): a DeviceMesh needs processes; start them with comm.spawn or torchrun",
    ),
]


@pytest.mark.parametrize(("ask", "error", "message"), REFUSED)
def test_what_a_mesh_refuses(ask: Callable[[comm.Mesh], Any], error: type[Exception], message: str) -> None:
    """The argument, its value, and what would do."""
    with pytest.raises(error) as caught:
        comm.simulate(lambda: ask(comm.mesh(dp=4, tp=1)), world_size=4)
    assert caught.value.args == (message,)


def test_alone_there_is_no_device_mesh() -> None:
    with pytest.raises(ValueError, match=r"a DeviceMesh needs processes; start them with comm.spawn or torchrun"):
        comm.mesh(dp=1).device_mesh()


class FakeMesh:
    """As much of a DeviceMesh as is looked at before it is refused: a real one needs process groups."""

    mesh_dim_names = ("dp",)


def test_a_device_mesh_needs_processes() -> None:
    with pytest.raises(ValueError, match=r"a DeviceMesh needs processes; in a simulation pass the axes by name"):
        comm.simulate(lambda: comm.mesh(FakeMesh()), world_size=2)


def test_a_device_mesh_has_its_own_axes() -> None:
    with pytest.raises(ValueError, match=re.escape("mesh(device_mesh, dp=2): the axes are the device_mesh's; pass it alone")):
        comm.mesh(FakeMesh(), dp=2)


# -- on processes -----------------------------------------------------------------------------------------------------


def rank_here() -> torch.Tensor:
    return torch.tensor([comm.world().rank])


def ranks_along(mesh: comm.Mesh, *axes: str) -> list[int]:
    """The ranks of a group as its collectives meet them: by gathering, and by scattering a sum."""
    group = mesh[axes]
    assert group.ranks[group.rank] == comm.world().rank
    slots = comm.reduce_scatter(comm.all_gather(rank_here(), group), group)  # the sum of what each thinks stands at my place
    assert slots.tolist() == [group.size * comm.world().rank]
    return comm.all_gather(rank_here(), group).tolist()


def flattened() -> Any:
    mesh = comm.mesh(a=2, b=1, c=2)
    orders = [("a", "b", "c"), ("c", "a"), ("a", "c"), ("b", "a"), ("c", "b")]
    channel = mesh["c", "a"].channel("gather")
    return [ranks_along(mesh, *order) for order in orders], comm.all_gather(rank_here(), channel)


def part_of_it() -> Any:
    sub = comm.mesh(a=2, b=2).sub("b", "a")
    return sub.axes, sub.coordinates, [ranks_along(sub, *order) for order in [("b",), ("b", "a"), ("a", "b")]]


def with_experts() -> Any:
    mesh = comm.mesh(dp=4).split("dp", edp=2, ep=2)
    return mesh.coordinates, [ranks_along(mesh, *order) for order in [("edp",), ("ep",), ("ep", "edp")]]


SAME = (flattened, part_of_it, with_experts)


def everything_of(mesh: comm.Mesh) -> Any:
    first, second = mesh.axes
    orders = [(first,), (second,), (first, second), (second, first)]
    return mesh.coordinates, mesh.ranks, [ranks_along(mesh, *order) for order in orders]


def device_mesh_in() -> Any:
    """One in the order of the world, a slice of it, and two in orders of their own."""
    plain = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    mesh = comm.mesh(plain)
    adopted = mesh.world.adopted  # type: ignore[attr-defined]
    kept = adopted[mesh["tp"].ranks, "tp"] is plain.get_group("tp")
    odd = comm.mesh(DeviceMesh("cpu", [[0, 1], [3, 2]], mesh_dim_names=("x", "y")))
    assert {name for _, name in adopted} == {"world", "dp", "tp", "x"}  # along y one row ascends and one does not
    backwards = comm.mesh(DeviceMesh("cpu", [3, 2, 1, 0], mesh_dim_names=("all",)))
    split = backwards.split("all", a=2, b=2)
    part = comm.mesh(plain["tp"])
    return (
        (everything_of(mesh), kept),
        everything_of(odd),
        (ranks_along(backwards, "all"), everything_of(split)),
        (part.axes, part.coordinates, ranks_along(part, "tp")),
    )


def gathered_by_torch(device_mesh: DeviceMesh, axis: str) -> list[int]:
    group = device_mesh.get_group(axis)
    pieces = [torch.zeros(1, dtype=torch.int64) for _ in range(dist.get_world_size(group))]
    dist.all_gather(pieces, rank_here(), group=group)
    return torch.cat(pieces).tolist()


def device_mesh_out() -> Any:
    """torch's view of a mesh, of one in another order, of a part of one, of one that came in; and each of them back in."""
    mesh = comm.mesh(dp=2, tp=2)
    odd = comm.mesh(DeviceMesh("cpu", [[3, 1], [0, 2]], mesh_dim_names=("x", "y")))
    assert mesh.device_mesh("cpu") == init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    found = []
    for one in (mesh, mesh.sub("tp", "dp"), mesh.split("tp", a=2, b=1), mesh.sub("tp"), odd):
        out = one.device_mesh()
        names = out.mesh_dim_names or ()
        assert comm.mesh(out) == one
        assert one.coordinates == dict(zip(names, out.get_coordinate() or (), strict=True))
        for axis in one.axes:
            assert gathered_by_torch(out, axis) == ranks_along(one, axis) == list(one[axis].ranks)
        found.append((out.device_type, names, out.mesh.tolist()))
    return found, mesh.device_mesh("meta").device_type


def device_meshes_refused() -> list[str]:
    """Those that are no mesh; the last one is without ranks 2 and 3, whose groups torch counts apart from here on."""
    refused = [
        lambda: DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=("a", "b", "c")),
        lambda: DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=("a", "a")),
        lambda: DeviceMesh("cpu", [0, 1], mesh_dim_names=("a",)),
    ]
    messages = []
    for make in refused:
        try:
            messages.append(repr(comm.mesh(make())))
        except ValueError as error:
            messages.append(str(error))
    return messages


def on_processes() -> dict[str, Any]:
    return {program.__name__: program() for program in (*SAME, device_mesh_in, device_mesh_out, device_meshes_refused)}


@pytest.fixture(scope="module")
def four() -> list[dict[str, Any]]:
    """What each of four processes found."""
    return comm.spawn(on_processes, world_size=4, timeout=timedelta(seconds=60))


@pytest.mark.parametrize("program", SAME, ids=lambda program: program.__name__)
def test_processes_have_the_same_groups(program: Callable[[], Any], four: list[dict[str, Any]]) -> None:
    """spawn(program) = simulate(program)."""
    for real, model in zip(four, comm.simulate(program, world_size=4), strict=True):
        assert_same(real[program.__name__], model)


def test_a_device_mesh_keeps_its_order(four: list[dict[str, Any]]) -> None:
    """Groups of one axis and of several are numbered by the DeviceMesh, not by the world; its process groups are kept where
    they are, too."""
    plain, odd, backwards, part = four[3]["device_mesh_in"]
    assert plain == (({"dp": 1, "tp": 1}, (0, 1, 2, 3), [[1, 3], [2, 3], [0, 1, 2, 3], [0, 2, 1, 3]]), True)
    assert odd == ({"x": 1, "y": 0}, (0, 1, 3, 2), [[0, 3], [3, 2], [0, 1, 3, 2], [0, 3, 1, 2]])
    split = ({"a": 0, "b": 0}, (3, 2, 1, 0), [[3, 1], [3, 2], [3, 2, 1, 0], [3, 1, 2, 0]])
    assert backwards == ([3, 2, 1, 0], split)
    assert part == ({"tp": 2}, {"tp": 1}, [2, 3])


def test_a_mesh_is_a_device_mesh(four: list[dict[str, Any]]) -> None:
    """Names and layout; its groups, and the way back, are checked on the ranks."""
    for rank, result in enumerate(four):
        found, device_type = result["device_mesh_out"]
        assert found == [
            ("cpu", ("dp", "tp"), [[0, 1], [2, 3]]),
            ("cpu", ("tp", "dp"), [[0, 2], [1, 3]]),
            ("cpu", ("dp", "a", "b"), [[[0], [1]], [[2], [3]]]),
            ("cpu", ("tp",), [[0, 1], [0, 1], [2, 3], [2, 3]][rank]),
            ("cpu", ("x", "y"), [[3, 1], [0, 2]]),
        ]
        assert device_type == "meta"


def test_device_meshes_that_are_no_mesh(four: list[dict[str, Any]]) -> None:
    for rank, result in enumerate(four):
        names, twice, without = result["device_meshes_refused"]
        assert names == "device_mesh has 2 axes and the names ('a', 'b', 'c'); each axis needs a name of its own"
        assert twice == "device_mesh has 2 axes and the names ('a', 'a'); each axis needs a name of its own"
        if rank < 2:
            assert without == f"Mesh(a=2; rank {rank} of 2, ranks [0, 1])"
        else:
            assert without == f"device_mesh is without rank {rank}; call mesh(device_mesh) on its own ranks only"
