"""The axes of a candidate's mesh: their sizes, their groups, and the lines of Python that make them."""

from typing import Any

import attrs

from functional_ds import comm
from functional_ds.cli.words.errors_in_one_line import CommandError
from functional_ds.jobs.job_model import pipeline_schedule

__all__ = ["MeshAxes"]


@attrs.frozen
class MeshAxes:
    """Sizes by axis; neighbouring ranks are those of tp, then sp, then pp, then dp.

    Attributes:
        dp: data-parallel ranks; ep is within them.
        pp: ranks of a pipeline.
        sp: ranks that share sequences.
        tp: tensor-parallel ranks.
        ep: ranks over which experts lie.
        schedule: of the pipeline, by its name.

    >>> MeshAxes(dp=4, sp=2, ep=2).ranks, MeshAxes(dp=4, sp=2, ep=2).data
    (8, ('edp', 'ep', 'sp'))
    """

    dp: int = 1
    pp: int = 1
    sp: int = 1
    tp: int = 1
    ep: int = 1
    schedule: str = "one_f_one_b"

    def __attrs_post_init__(self) -> None:
        if self.dp % self.ep:
            fits = ", ".join(str(each) for each in range(1, self.dp + 1) if self.dp % each == 0)
            raise CommandError(f"--ep {self.ep} does not divide the {self.dp} ranks of dp, among which experts lie; use {fits}")

    @property
    def ranks(self) -> int:
        """All of them."""
        return self.dp * self.pp * self.sp * self.tp

    @property
    def several(self) -> frozenset[str]:
        """The axes beside dp that have several ranks."""
        return frozenset(name for name in ("pp", "sp", "tp", "ep") if getattr(self, name) > 1)

    @property
    def sizes(self) -> dict[str, int]:
        """Of the axes that the mesh has: dp, and those of several ranks."""
        return {name: getattr(self, name) for name in ("dp", "pp", "sp", "tp") if name == "dp" or getattr(self, name) > 1}

    @property
    def data(self) -> tuple[str, ...]:
        """The axes over which gradients are summed."""
        return (*(("edp", "ep") if self.ep > 1 else ("dp",)), *(("sp",) if self.sp > 1 else ()))

    @property
    def sharers(self) -> tuple[str, ...]:
        """The axes whose ranks hold the same experts."""
        return ("edp", "sp") if self.sp > 1 else ("edp",)

    def mesh(self) -> comm.Mesh | None:
        """The mesh; None where all ranks are of dp."""
        if not self.several:
            return None
        found = comm.mesh(**self.sizes)
        return found.split("dp", edp=self.dp // self.ep, ep=self.ep) if self.ep > 1 else found

    def mesh_line(self) -> str:
        """The same as a line of Python; empty where there is none."""
        if not self.several:
            return ""
        within = f'.split("dp", edp={self.dp // self.ep}, ep={self.ep})' if self.ep > 1 else ""
        return f"mesh = comm.mesh({', '.join(f'{name}={size}' for name, size in self.sizes.items())}){within}"

    def first_ranks(self) -> tuple[int, ...]:
        """For each place of the pipeline, the rank there that is the first of all other axes: others do the same."""
        return tuple(place * self.sp * self.tp for place in range(self.pp))

    def pipeline(self, micro_batches: int) -> Any:
        """The pipeline's schedule.

        Raises:
            CommandError: its name is unknown, or it cannot have so few micro-batches.
        """
        try:
            return pipeline_schedule(self.schedule, micro_batches, ranks=self.pp)
        except ValueError as error:
            raise CommandError(f"--schedule {self.schedule}: {error}") from error

    def words(self) -> list[str]:
        """Of a candidate's name, for the axes beside dp."""
        words = [f"{name} {getattr(self, name)}" for name in ("tp", "sp", "pp", "ep") if getattr(self, name) > 1]
        return words + [self.schedule] * (self.pp > 1 and self.schedule != "one_f_one_b")
