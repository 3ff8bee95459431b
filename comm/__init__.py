"""Collective communication: collectives, process groups, meshes, a simulator of ranks, and a ledger of traffic."""

from typing import TYPE_CHECKING

from functional_ds.base.package_index import lazy_index

if TYPE_CHECKING:
    from functional_ds.comm.agreement.agree import agree
    from functional_ds.comm.debug.trace import ledger
    from functional_ds.comm.record.group import Group
    from functional_ds.comm.record.ledger import Ledger, Row
    from functional_ds.comm.record.pending import Pending
    from functional_ds.comm.simulation.simulate import simulate
    from functional_ds.comm.table import errors
    from functional_ds.comm.table.permutation import Permutation
    from functional_ds.comm.worlds.current import world
    from functional_ds.comm.worlds.shapes import is_symmetric, symmetric

    from . import algorithms, codecs, debug, table
    from .api import all_gather, all_reduce, barrier, broadcast, reduce_scatter, repeat
    from .calls.dispatch import start
    from .declare import invariant, partial, replicated, varying
    from .exchange import all_to_all, permute
    from .megatron import copy_to, gather_from, reduce_from, scatter_to
    from .mesh import Mesh, mesh
    from .objects import all_gather_object, broadcast_object
    from .p2p import Recv, Send, batch_p2p, recv, send
    from .rooted import gather, reduce, scatter
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
    "Group",
    "Ledger",
    "Mesh",
    "Pending",
    "Permutation",
    "Recv",
    "Row",
    "Send",
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
    "codecs",
    "copy_to",
    "debug",
    "destroy_process_group",
    "errors",
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
    "start",
    "symmetric",
    "table",
    "varying",
    "world",
]

lazy_index(__name__)
