"""Collectives as values: groups, meshes, worlds and the ledger."""

from .api import Pending, all_gather, all_reduce, barrier, broadcast, reduce, reduce_scatter
from .collective import Call, Collective
from .errors import CommError, DeadlockError, MismatchError, RankFailedError
from .group import Group
from .ledger import Ledger, Row, ledger
from .mesh import Mesh, mesh
from .process import init_distributed
from .simulator import simulate
from .spawning import spawn
from .table import TABLE
from .world import world

__all__ = [
    "TABLE",
    "Call",
    "Collective",
    "CommError",
    "DeadlockError",
    "Group",
    "Ledger",
    "Mesh",
    "MismatchError",
    "Pending",
    "RankFailedError",
    "Row",
    "all_gather",
    "all_reduce",
    "barrier",
    "broadcast",
    "init_distributed",
    "ledger",
    "mesh",
    "reduce",
    "reduce_scatter",
    "simulate",
    "spawn",
    "world",
]
