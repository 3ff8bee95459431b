"""Candidates for tests: a model by name on a mesh."""

from typing import Any

from functional_ds.cli.planning.candidate import candidate
from functional_ds.cli.planning.subject import job_of
from functional_ds.jobs.job import Job

__all__ = ["on_mesh"]


def on_mesh(
    model: str, dp: int = 1, *, seq: int = 8, tp: int = 1, sp: int = 1, pp: int = 1, ep: int = 1, **changes: Any
) -> Job:
    """The job of a model on a mesh, with what else ``candidate`` changes."""
    return candidate(job_of(model, seq=seq), {"dp": dp, "pp": pp, "sp": sp, "tp": tp, "ep": ep}, **changes)
