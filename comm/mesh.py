"""Named axes over the ranks of a world."""

import math

import attrs
from torch.distributed.device_mesh import DeviceMesh

from .group import Group
from .process import ProcessWorld
from .world import world

__all__ = ["Mesh", "mesh"]


@attrs.frozen
class Mesh:
    """A grid of ranks with a name for each axis; ``mesh["dp"]`` is this rank's group along dp.

    Attributes:
        axes: the sizes by name, outermost first; ranks are numbered row by row.
        groups: this rank's group along each axis.
    """

    axes: dict[str, int]
    groups: dict[str, Group] = attrs.field(repr=False)

    def __getitem__(self, axis: str) -> Group:
        if axis not in self.groups:
            raise KeyError(f"the mesh has no axis {axis!r}; its axes are {', '.join(map(repr, self.axes))}")
        return self.groups[axis]

    @property
    def coordinates(self) -> dict[str, int]:
        """This rank's place along each axis."""
        return {axis: group.rank for axis, group in self.groups.items()}


def mesh(device_mesh: DeviceMesh | None = None, /, **axes: int) -> Mesh:
    """Lays the current world out along named axes, outermost first; or takes a torch ``DeviceMesh`` as it is.

    Law: the sizes' product is the world's size, and every rank has one place.

    Raises:
        ValueError: the sizes do not multiply to the world's size.

    >>> from functional_ds import comm
    >>> comm.simulate(lambda: comm.mesh(dp=2, tp=2)["tp"].ranks, world_size=4)
    [(0, 1), (0, 1), (2, 3), (2, 3)]
    """
    everyone = world()
    if device_mesh is not None:
        return _from_device_mesh(device_mesh, everyone)
    if not axes or any(size < 1 for size in axes.values()) or math.prod(axes.values()) != everyone.size:
        sizes = ", ".join(f"{axis}={size}" for axis, size in axes.items()) or "no axes"
        raise ValueError(f"mesh({sizes}): the axes must be positive and multiply to the world's size, {everyone.size}")
    groups, stride = {}, everyone.size
    for axis, size in axes.items():
        stride //= size
        place = everyone.rank // stride % size
        first = everyone.rank - place * stride
        groups[axis] = everyone.world.group([first + i * stride for i in range(size)], axis)
    return Mesh(dict(axes), groups)


def _from_device_mesh(device_mesh: DeviceMesh, everyone: Group) -> Mesh:
    names = device_mesh.mesh_dim_names
    if names is None:
        raise ValueError("device_mesh has no mesh_dim_names; a mesh here needs a name for each axis")
    if not isinstance(everyone.world, ProcessWorld):
        raise ValueError("device_mesh: a DeviceMesh needs processes; in a simulation pass the axes by name")
    process_world = everyone.world
    groups = {name: process_world.adopt(device_mesh.get_group(name), name) for name in names}
    return Mesh(dict(zip(names, device_mesh.mesh.shape, strict=True)), groups)
