"""Device meshes: named axes over the ranks of a world."""

import itertools
import math

import attrs
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from functional_ds.comm.record.group import Group, World
from functional_ds.comm.worlds.current import world
from functional_ds.comm.worlds.process import ProcessWorld

_SHOWN_ROWS = 32


def _listed(axes: dict[str, int]) -> str:
    return ", ".join(map(repr, axes))


def _sized(axes: dict[str, int]) -> str:
    return ", ".join(f"{axis}={size}" for axis, size in axes.items()) or "no axes"


def _multiply_to(sizes: dict[str, int], whole: int) -> bool:
    return bool(sizes) and all(size >= 1 for size in sizes.values()) and math.prod(sizes.values()) == whole


@attrs.frozen(repr=False)
class Mesh:
    """A grid of ranks with named axes, as seen by one rank; ``mesh["dp"]`` is this rank's group along the axis dp.

    ``mesh["dp", "tp"]`` is the group of all ranks with this rank's coordinates along all other axes. Its ranks are in row-major
    order of the axes as named, the last one fastest; ``mesh.sub("dp", "tp")`` is a mesh of these axes.

    Law: over ``mesh["a", "b"]``, an all_reduce is one over a and one over b, in any order, and sharding is sharding over a,
    then over b.

    Meshes and groups cost nothing until they are used. Over NCCL the members of a group connect at its first use.

    Attributes:
        axes: the sizes by name, outermost first.
        ranks: the members as ranks of the world, in row-major order.
        rank: this rank's index among them.
        world: performs the collectives of its groups.

    >>> from functional_ds import comm
    >>> comm.simulate(lambda: comm.mesh(pp=2, dp=2, tp=2)["dp", "tp"].ranks, world_size=8)[5]
    (4, 5, 6, 7)
    >>> comm.simulate(lambda: comm.mesh(pp=2, dp=2, tp=2)["tp", "dp"].ranks, world_size=8)[5]
    (4, 6, 5, 7)
    """

    axes: dict[str, int] = attrs.field(eq=lambda axes: tuple(axes.items()))  # two dicts are equal in any order
    ranks: tuple[int, ...]
    rank: int
    world: World = attrs.field(eq=id)

    def __getitem__(self, axes: str | tuple[str, ...]) -> Group:
        names = axes if isinstance(axes, tuple) else (axes,)
        return self.world.group(self.sub(*names).ranks, ",".join(names))

    @property
    def coordinates(self) -> dict[str, int]:
        """This rank's index along each axis."""
        return {axis: self.rank // stride % self.axes[axis] for axis, stride in self._strides().items()}

    def _strides(self) -> dict[str, int]:
        """The distance between neighbours along each axis, as indices into ``ranks``."""
        sizes = list(self.axes.values())
        return {axis: math.prod(sizes[i + 1 :]) for i, axis in enumerate(self.axes)}

    def sub(self, *axes: str) -> "Mesh":
        """The submesh of these axes, in this order: the ranks with this rank's coordinates along all other axes.

        Law: ``mesh.sub("a", "b")["a"] = mesh["a"]``.

        Raises:
            KeyError: the mesh has no such axis.
            ValueError: no axis is named, or one is named twice.

        >>> from functional_ds import comm
        >>> comm.simulate(lambda: comm.mesh(pp=2, dp=2, tp=2).sub("pp", "dp"), world_size=8)[3]
        Mesh(pp=2, dp=2; rank 1 of 4, ranks [1, 3, 5, 7])
        """
        for axis in axes:
            if axis not in self.axes:
                raise KeyError(f"the mesh has no axis {axis!r}; its axes are {_listed(self.axes)}")
            if axes.count(axis) > 1:
                raise ValueError(f"axes {axes}: {axis!r} is named twice; name each axis once")
        if not axes:
            raise ValueError(f"axes (): name at least one; the mesh has {_listed(self.axes)}")
        strides, here = self._strides(), self.coordinates
        first = self.rank - sum(here[axis] * strides[axis] for axis in axes)
        along = [range(0, self.axes[axis] * strides[axis], strides[axis]) for axis in axes]
        places = [first + sum(steps) for steps in itertools.product(*along)]
        ranks = tuple(self.ranks[place] for place in places)
        return attrs.evolve(self, axes={axis: self.axes[axis] for axis in axes}, ranks=ranks, rank=places.index(self.rank))

    def split(self, axis: str, /, **sizes: int) -> "Mesh":
        """Replaces one axis by several, outermost first, whose sizes multiply to its size.

        Expert parallelism splits the data axis: the experts are divided over the ``ep`` ranks, between which tokens are
        exchanged, and the ``edp`` ranks hold the same experts and reduce their gradients. All other gradients are reduced
        over the whole data axis.

        Law: ``mesh.split("a", b=m, c=n)["b", "c"]`` has the ranks of ``mesh["a"]``, in the same order.

        Raises:
            KeyError: the mesh has no such axis.
            ValueError: the sizes do not multiply to the axis's size, or another axis has one of the names.

        >>> from functional_ds import comm
        >>> def program():
        ...     experts = comm.mesh(dp=4, tp=2).split("dp", edp=2, ep=2)
        ...     return experts["ep"].ranks, experts["edp"].ranks
        >>> comm.simulate(program, world_size=8)[0]
        ((0, 2), (0, 4))
        """
        if axis not in self.axes:
            raise KeyError(f"the mesh has no axis {axis!r}; its axes are {_listed(self.axes)}")
        call = f"split({axis!r}, {_sized(sizes)})"
        if not _multiply_to(sizes, self.axes[axis]):
            raise ValueError(f"{call}: the sizes must be positive and multiply to the axis's, {self.axes[axis]}")
        for taken in sizes.keys() & (self.axes.keys() - {axis}):
            raise ValueError(f"{call}: the mesh has an axis {taken!r} already; its axes are {_listed(self.axes)}")
        axes: dict[str, int] = {}
        for name, size in self.axes.items():
            axes.update(sizes if name == axis else {name: size})
        return attrs.evolve(self, axes=axes)

    def _repr_html_(self) -> str:
        from functional_ds.comm.record.notebook import html_table

        *outer, last = self.axes
        wide, places = self.axes[last], itertools.product(*(range(self.axes[axis]) for axis in outer))
        names = [f"[{rank}]" if place == self.rank else rank for place, rank in enumerate(self.ranks)]
        rows = [(*at, *names[row * wide : (row + 1) * wide]) for row, at in enumerate(places)]
        return html_table([*outer, *(f"{last} {place}" for place in range(wide))], rows[:_SHOWN_ROWS], caption=repr(self))

    def device_mesh(self, device_type: str | None = None) -> DeviceMesh:
        """Converts to a torch ``DeviceMesh``; ``device_type=None`` is "cuda" if the world uses NCCL for CUDA, else "cpu".

        Each call creates a torch process group per axis, so all ranks of the world must make the same calls.

        Law: ``mesh(m.device_mesh()) = m``.

        Raises:
            ValueError: the world is a simulation or a single rank.
        """
        if not isinstance(self.world, ProcessWorld):
            raise ValueError("device_mesh(): a DeviceMesh needs processes; start them with comm.spawn or torchrun")
        if device_type is None:
            device_type = "cuda" if "cuda:nccl" in dist.get_backend_config() else "cpu"
        process_groups = [self.world.process_group(self[axis].ranks, axis) for axis in self.axes]
        grid = torch.tensor(self.ranks, dtype=torch.int).view(*self.axes.values())
        return DeviceMesh.from_group(process_groups, device_type, grid, mesh_dim_names=tuple(self.axes))

    def __repr__(self) -> str:
        return f"Mesh({_sized(self.axes)}; rank {self.rank} of {len(self.ranks)}, ranks {list(self.ranks)})"


def mesh(device_mesh: DeviceMesh | None = None, /, **axes: int) -> Mesh:
    """Makes a mesh of the current world, from named axes (outermost first) or from a torch ``DeviceMesh``.

    A ``DeviceMesh`` keeps its order of ranks. Over NCCL its process groups are reused along axes with ascending ranks; torch
    orders the ranks of a process group as the world does, so the other axes get new groups.

    Law: the product of the sizes is the world's size, and each rank has one position.

    Raises:
        ValueError: the sizes do not multiply to the world's size; a ``DeviceMesh`` is given in a simulation, has no distinct
            names for its axes, or does not contain this rank.

    >>> from functional_ds import comm
    >>> comm.simulate(lambda: comm.mesh(dp=2, tp=2)["tp"].ranks, world_size=4)
    [(0, 1), (0, 1), (2, 3), (2, 3)]
    """
    everyone = world()
    if device_mesh is not None:
        if axes:
            raise ValueError(f"mesh(device_mesh, {_sized(axes)}): the axes are the device_mesh's; pass it alone")
        return _from_device_mesh(device_mesh, everyone)
    if not _multiply_to(axes, everyone.size):
        raise ValueError(f"mesh({_sized(axes)}): the axes must be positive and multiply to the world's size, {everyone.size}")
    return Mesh(axes, everyone.ranks, everyone.rank, everyone.world)


def _from_device_mesh(device_mesh: DeviceMesh, everyone: Group) -> Mesh:
    if not isinstance(everyone.world, ProcessWorld):
        raise ValueError("device_mesh: a DeviceMesh needs processes; in a simulation pass the axes by name")
    names = device_mesh.mesh_dim_names
    if names is None:
        raise ValueError("device_mesh has no mesh_dim_names; a mesh here needs a name for each axis")
    if len(set(names)) != len(names) or len(names) != device_mesh.ndim:
        raise ValueError(f"device_mesh has {device_mesh.ndim} axes and the names {names}; each axis needs a name of its own")
    if device_mesh.get_coordinate() is None:
        raise ValueError(f"device_mesh is without rank {everyone.rank}; call mesh(device_mesh) on its own ranks only")
    grid = device_mesh.mesh
    ranks = tuple(grid.flatten().tolist())
    taken = Mesh(dict(zip(names, grid.shape, strict=True)), ranks, ranks.index(everyone.rank), everyone.world)
    for dim, name in enumerate(names):
        # torch numbers a process group by the order of the world. All rows decide: over NCCL, all ranks connect or none.
        if bool((grid.diff(dim=dim) > 0).all()):
            everyone.world.adopt(device_mesh.get_group(dim), name)
    return taken
