"""Performance model: time, memory, traffic and bubble of a transformer on any mesh, by formulas checked in tests."""

from .machine import MACHINES, Machine
from .mesh_plan import RECOMPUTE, MeshPlan, RankShare, rank_share
from .predict_run import PredictedRun, predict_run
from .transformer import Transformer

__all__ = [
    "MACHINES",
    "RECOMPUTE",
    "Machine",
    "MeshPlan",
    "PredictedRun",
    "RankShare",
    "Transformer",
    "predict_run",
    "rank_share",
]
