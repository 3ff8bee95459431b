"""Ranks as coordinates: axes by name, the last one the fastest."""

import itertools
import math
from collections import namedtuple
from collections.abc import Sequence
from typing import Any

__all__ = ["PipeDataParallelTopology", "PipeModelDataParallelTopology", "ProcessTopology"]


class ProcessTopology:
    """The ranks of a grid.

    >>> grid = ProcessTopology(["pipe", "data"], [2, 3])
    >>> grid.get_rank(pipe=1, data=0), grid.get_coord(4), grid.get_axis_comm_lists("data")
    (3, ProcessCoord(pipe=1, data=1), [[0, 1, 2], [3, 4, 5]])
    """

    def __init__(self, axes: Sequence[str], dims: Sequence[int]) -> None:
        if len(axes) != len(dims) or not all(dim >= 1 for dim in dims):
            raise ValueError(f"axes={list(axes)}, dims={list(dims)}: a number above 0 for each axis")
        self.axes, self.dims = list(axes), list(dims)
        self.ProcessCoord: Any = namedtuple("ProcessCoord", self.axes)  # type: ignore[misc]
        self._coords = list(itertools.product(*map(range, self.dims)))

    def world_size(self) -> int:
        """The number of ranks."""
        return math.prod(self.dims)

    def get_axis_names(self) -> list[str]:
        """The axes."""
        return self.axes

    def get_dim(self, axis: str) -> int:
        """The size of an axis; 0 where there is none of this name."""
        return self.dims[self.axes.index(axis)] if axis in self.axes else 0

    def get_rank(self, **coord_kwargs: int) -> int:
        """The rank at a place, which names every axis.

        Raises:
            ValueError: there is no such place.
        """
        place = tuple(coord_kwargs.get(axis, -1) for axis in self.axes)
        if len(coord_kwargs) != len(self.axes) or place not in self._coords:
            raise ValueError(f"get_rank({coord_kwargs}): the axes are {dict(zip(self.axes, self.dims, strict=True))}")
        return self._coords.index(place)

    def get_coord(self, rank: int) -> tuple[int, ...]:
        """A rank's place, with the axes as fields."""
        found: tuple[int, ...] = self.ProcessCoord(*self._coords[rank])
        return found

    def filter_match(self, **filter_kwargs: int) -> list[int]:
        """The ranks at these values of some axes."""
        return [
            rank
            for rank, place in enumerate(self._coords)
            if all(place[self.axes.index(axis)] == value for axis, value in filter_kwargs.items())
        ]

    def get_axis_list(self, axis: str, idx: int) -> list[int]:
        """The ranks at one value of an axis."""
        return self.filter_match(**{axis: idx})

    def get_axis_comm_lists(self, axis: str) -> list[list[int]]:
        """The groups of ranks that differ along one axis alone."""
        if axis not in self.axes:
            return []
        others = [name for name in self.axes if name != axis]
        places = itertools.product(*(range(self.get_dim(name)) for name in others))
        return [self.filter_match(**dict(zip(others, place, strict=True))) for place in places]

    def __str__(self) -> str:
        return ", ".join(f"{axis}={dim}" for axis, dim in zip(self.axes, self.dims, strict=True))


class PipeDataParallelTopology(ProcessTopology):
    """Stages, and data parallelism within a stage: neighbours have the same stage."""

    def __init__(self, num_pp: int, num_dp: int) -> None:
        super().__init__(["pipe", "data"], [num_pp, num_dp])


class PipeModelDataParallelTopology(ProcessTopology):
    """Stages, data parallelism, and tensor parallelism among neighbours."""

    def __init__(self, num_pp: int, num_mp: int, num_dp: int) -> None:
        super().__init__(["pipe", "data", "model"], [num_pp, num_dp, num_mp])
