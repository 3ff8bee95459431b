"""Collectives as values: groups, meshes, worlds and the ledger."""

from . import algorithms, cost
from .alike import alike, are_alike
from .api import (
    all_gather,
    all_reduce,
    all_to_all,
    barrier,
    broadcast,
    gather,
    permute,
    reduce,
    reduce_scatter,
    repeat,
    scatter,
)
from .booking import ledger
from .checking import checked, monitored_barrier
from .codecs import Blocks, Cast, Codec, OneBit, TopK
from .collective import Call, Collective, Here
from .compression import compressed
from .errors import CommError, DeadlockError, DivergenceError, MismatchError, RankFailedError, TimedOutError, UnmatchedError
from .exploring import explore
from .feedback import ErrorFeedback, Residual
from .group import Group
from .ledger import Ledger, Row
from .management import (
    destroy_process_group,
    get_local_rank,
    get_rank,
    get_world_size,
    init_distributed,
    is_initialized,
    new_group,
)
from .mesh import Mesh, mesh
from .objects import all_gather_object, broadcast_object
from .p2p import Recv, Send, batch_p2p, irecv, isend, recv, send
from .pending import Pending
from .permutation import Permutation
from .simulator import simulate
from .spawning import spawn
from .table import TABLE
from .tracing import Spread, spreads, write_trace
from .variance import copy_to, gather_from, reduce_from, scatter_to
from .world import world

__all__ = [
    "TABLE",
    "Blocks",
    "Call",
    "Cast",
    "Codec",
    "Collective",
    "CommError",
    "DeadlockError",
    "DivergenceError",
    "ErrorFeedback",
    "Group",
    "Here",
    "Ledger",
    "Mesh",
    "MismatchError",
    "OneBit",
    "Pending",
    "Permutation",
    "RankFailedError",
    "Recv",
    "Residual",
    "Row",
    "Send",
    "Spread",
    "TimedOutError",
    "TopK",
    "UnmatchedError",
    "algorithms",
    "alike",
    "all_gather",
    "all_gather_object",
    "all_reduce",
    "all_to_all",
    "are_alike",
    "barrier",
    "batch_p2p",
    "broadcast",
    "broadcast_object",
    "checked",
    "compressed",
    "copy_to",
    "cost",
    "destroy_process_group",
    "explore",
    "gather",
    "gather_from",
    "get_local_rank",
    "get_rank",
    "get_world_size",
    "init_distributed",
    "irecv",
    "is_initialized",
    "isend",
    "ledger",
    "mesh",
    "monitored_barrier",
    "new_group",
    "permute",
    "recv",
    "reduce",
    "reduce_from",
    "reduce_scatter",
    "repeat",
    "scatter",
    "scatter_to",
    "send",
    "simulate",
    "spawn",
    "spreads",
    "world",
    "write_trace",
]
