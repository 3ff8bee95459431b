"""Ranks as coordinates: axes by name, the last one the fastest."""

import itertools
import math
from collections import namedtuple
from collections.abc import Callable, Sequence
from typing import Any

from functional_ds import comm


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
        """The size of an axis; 0 if there is none of this name."""
        return self.dims[self.axes.index(axis)] if axis in self.axes else 0

    def get_rank(self, **coord_kwargs: int) -> int:
        """The rank at coordinates, which include every axis.

        Raises:
            ValueError: there is no such rank.
        """
        place = tuple(coord_kwargs.get(axis, -1) for axis in self.axes)
        if len(coord_kwargs) != len(self.axes) or place not in self._coords:
            raise ValueError(f"get_rank({coord_kwargs}): the axes are {dict(zip(self.axes, self.dims, strict=True))}")
        return self._coords.index(place)

    def get_coord(self, rank: int) -> tuple[int, ...]:
        """A rank's coordinates, with the axes as fields."""
        coordinate: tuple[int, ...] = self.ProcessCoord(*self._coords[rank])
        return coordinate

    def get_rank_repr(
        self, rank: int, omit_axes: Sequence[str] = ("data", "pipe"), inner_sep: str = "_", outer_sep: str = "-"
    ) -> str:
        """A rank's place as text, without some axes.

        >>> ProcessTopology(["pipe", "model"], [2, 2]).get_rank_repr(3, omit_axes=[])
        'pipe_01-model_01'
        """
        held = zip(self.axes, self._coords[rank], strict=True)
        return outer_sep.join(f"{axis}{inner_sep}{place:02d}" for axis, place in held if axis not in omit_axes)

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
        """The groups of ranks that differ only along one axis."""
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


def _gives(attribute: str) -> Callable[[Any], Any]:
    """A method that returns an attribute."""

    def get(self: Any) -> Any:
        return getattr(self, attribute)

    get.__doc__ = f"``{attribute}``."
    return get


class PipelineParallelGrid:
    """``PipelineEngine.grid``: a topology as seen from this rank, with the groups of ranks that share something.

    Attributes:
        global_rank: this rank's number.
        world_size: the number of ranks.
        stage_id: this rank's stage.
        data_parallel_id: which of the pipelines this rank is in.
        pipe_parallel_size: the number of stages.
        data_parallel_size: the number of pipelines.
        slice_parallel_size: the number of slices of a layer.

    Args:
        topology: of all ranks; its axes "pipe" and "data", and "model" where layers are cut.
        process_group: whose ranks these are; by default all.

    Raises:
        ValueError: the topology has another number of ranks than there are.

    >>> from functional_ds import comm
    >>> def place():
    ...     grid = PipelineParallelGrid(PipeDataParallelTopology(2, 1))
    ...     return grid.get_stage_id(), grid.get_data_parallel_world_size(), grid.get_pipe_parallel_group().size
    >>> comm.simulate(place, world_size=2)
    [(0, 1, 2), (1, 1, 2)]
    """

    def __init__(self, topology: ProcessTopology, process_group: comm.Group | None = None) -> None:
        here = comm.world() if process_group is None else process_group
        if topology.world_size() != here.size:
            raise ValueError(f"topology: {topology} are {topology.world_size()} ranks, and there are {here.size}")
        self._topo, self._here = topology, here
        self.global_rank, self.world_size = here.rank, here.size
        self._place: dict[str, int] = dict(zip(topology.axes, topology.get_coord(here.rank), strict=True))
        self.stage_id, self.data_parallel_id = self._place.get("pipe", 0), self._place.get("data", 0)
        self.pipe_parallel_size, self.data_parallel_size = (max(topology.get_dim(axis), 1) for axis in ("pipe", "data"))
        self.model_parallel_size = self.slice_parallel_size = max(topology.get_dim("model"), 1)
        self.is_first_stage, self.is_last_stage = self.stage_id == 0, self.stage_id == self.pipe_parallel_size - 1
        self.pp_group, self.dp_group, self.slice_group = (self._along(axis) for axis in ("pipe", "data", "model"))
        self.pipe_groups, self.dp_groups = (topology.get_axis_comm_lists(axis) for axis in ("pipe", "data"))
        self._model = topology.get_axis_list("data", self.data_parallel_id)

    def _along(self, *axes: str) -> list[int]:
        return self._topo.filter_match(**{axis: place for axis, place in self._place.items() if axis not in axes})

    def _group(self, ranks: list[int], name: str) -> comm.Group:
        return comm.new_group([self._here.ranks[rank] for rank in ranks], name)

    def topology(self) -> ProcessTopology:
        """The topology."""
        return self._topo

    def stage_to_global(self, stage_id: int, **places: int) -> int:
        """The rank of a stage in this rank's pipeline, or at other places of other axes."""
        return self._topo.get_rank(**{**self._place, "pipe": stage_id, **places})

    get_global_rank = _gives("global_rank")
    get_stage_id = get_pipe_parallel_rank = get_pipeline_model_parallel_rank = _gives("stage_id")
    get_pipe_parallel_world_size = get_pipeline_model_parallel_world_size = _gives("pipe_parallel_size")
    get_data_parallel_id = get_data_parallel_rank = _gives("data_parallel_id")
    get_data_parallel_world_size = _gives("data_parallel_size")
    get_data_parallel_group_ranks = _gives("dp_group")
    get_slice_parallel_world_size = get_tensor_model_parallel_world_size = _gives("slice_parallel_size")

    def get_pipe_parallel_group(self) -> comm.Group:
        """The ranks of this rank's pipeline."""
        return self._group(self.pp_group, "pipe")

    def get_data_parallel_group(self) -> comm.Group:
        """The ranks with this rank's stage, one a pipeline."""
        return self._group(self.dp_group, "data")

    def get_model_parallel_rank(self) -> int:
        """This rank's place among the ranks that have one copy of the model: all stages, with all their slices."""
        return self._model.index(self.global_rank)

    def get_model_parallel_world_size(self) -> int:
        """The number of these."""
        return len(self._model)

    def get_model_parallel_group(self) -> comm.Group:
        """These."""
        return self._group(self._model, "model")

    def get_slice_parallel_rank(self) -> int:
        """This rank's slice of its layers; 0 where they are whole."""
        return self._place.get("model", 0)

    get_tensor_model_parallel_rank = get_slice_parallel_rank

    def get_slice_parallel_group(self) -> comm.Group:
        """The ranks with the slices of this rank's layers; this rank alone where they are whole."""
        return self._group(self.slice_group, "slice")
