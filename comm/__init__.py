"""Collectives as records, and the worlds that run them: groups, meshes, simulated ranks, processes, ledgers."""

from typing import TYPE_CHECKING

from functional_ds.base.package_index import lazy_index

if TYPE_CHECKING:
    from functional_ds.comm.algorithms import cost
    from functional_ds.comm.compression.codecs import Blocks, Cast, Codec, OneBit, TopK
    from functional_ds.comm.compression.compressed import compressed
    from functional_ds.comm.compression.error_feedback import ErrorFeedback, Residual
    from functional_ds.comm.debug.checked import checked, monitored_barrier
    from functional_ds.comm.debug.clock import Offsets, clock_offsets
    from functional_ds.comm.debug.explore import explore
    from functional_ds.comm.debug.trace import Spread, ledger, spreads, write_trace
    from functional_ds.comm.debug.traffic import draw_traffic, traffic
    from functional_ds.comm.record.errors import (
        CommError,
        DeadlockError,
        DivergenceError,
        MismatchError,
        RankFailedError,
        TimedOutError,
        UnmatchedError,
        VarianceError,
        WrittenError,
    )
    from functional_ds.comm.record.group import Group
    from functional_ds.comm.record.ledger import Ledger, Row
    from functional_ds.comm.record.pending import Pending
    from functional_ds.comm.record.permutation import Permutation
    from functional_ds.comm.record.variance import Variance
    from functional_ds.comm.simulation.simulator import simulate
    from functional_ds.comm.worlds.current import world
    from functional_ds.comm.worlds.symmetric import is_symmetric, symmetric

    from . import algorithms, table
    from .agree import agree
    from .api import (
        all_gather,
        all_reduce,
        barrier,
        broadcast,
        gather,
        reduce,
        reduce_scatter,
        repeat,
        scatter,
    )
    from .declare import invariant, partial, replicated, varying
    from .dispatch import start
    from .exchange import all_to_all, permute
    from .megatron import copy_to, gather_from, reduce_from, scatter_to
    from .mesh import Mesh, mesh
    from .objects import all_gather_object, broadcast_object
    from .p2p import Recv, Send, batch_p2p, recv, send
    from .setup import (
        destroy_process_group,
        get_local_rank,
        get_rank,
        get_world_size,
        init_distributed,
        is_initialized,
        new_group,
    )
    from .spawn import spawn

__all__ = [
    "Blocks",
    "Cast",
    "Codec",
    "CommError",
    "DeadlockError",
    "DivergenceError",
    "ErrorFeedback",
    "Group",
    "Ledger",
    "Mesh",
    "MismatchError",
    "Offsets",
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
    "Variance",
    "VarianceError",
    "WrittenError",
    "agree",
    "algorithms",
    "all_gather",
    "all_gather_object",
    "all_reduce",
    "all_to_all",
    "barrier",
    "batch_p2p",
    "broadcast",
    "broadcast_object",
    "checked",
    "clock_offsets",
    "compressed",
    "copy_to",
    "cost",
    "destroy_process_group",
    "draw_traffic",
    "explore",
    "gather",
    "gather_from",
    "get_local_rank",
    "get_rank",
    "get_world_size",
    "init_distributed",
    "invariant",
    "is_initialized",
    "is_symmetric",
    "ledger",
    "mesh",
    "monitored_barrier",
    "new_group",
    "partial",
    "permute",
    "recv",
    "reduce",
    "reduce_from",
    "reduce_scatter",
    "repeat",
    "replicated",
    "scatter",
    "scatter_to",
    "send",
    "simulate",
    "spawn",
    "spreads",
    "start",
    "symmetric",
    "table",
    "traffic",
    "varying",
    "world",
    "write_trace",
]

lazy_index(__name__)
