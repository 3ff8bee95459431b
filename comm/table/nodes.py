"""Volumes of hierarchical collectives, whose option ``ranks_per_node`` is the number of consecutive ranks on a node."""

import math
from collections.abc import Mapping, Sequence

from torch import Tensor

from functional_ds.comm.backends.reduction import chunk_bounds

from .collective import CallContext


def _own_chunk(numel: int, rank: int, n: int) -> int:
    bounds = chunk_bounds(numel, n)
    return bounds[rank + 1] - bounds[rank]


def all_reduce_volume(leaf: Tensor, here: CallContext) -> int:
    """Elements that this rank sends in an all-reduce."""
    per_node: int = here.options.get("ranks_per_node", 1)
    node, place = divmod(here.rank, per_node)
    nodes, inside, sent = here.n // per_node, leaf.numel(), 0
    if per_node > 1:
        inside = _own_chunk(leaf.numel(), place, per_node)
        sent = (leaf.numel() - inside) + (per_node - 1) * inside
    chunk = _own_chunk(inside, node, nodes)
    return sent + (inside - chunk) + (nodes - 1) * chunk


def shares_by_node(here: CallContext) -> Mapping[int, int] | None:
    """Weights by receiver: each other rank of this node gets one part per node, and this rank's peer on each other node one."""
    per_node = here.options.get("ranks_per_node", 1)
    if per_node == 1:
        return None
    node, place = divmod(here.rank, per_node)
    nodes = {other * per_node + place: 1 for other in range(here.n // per_node) if other != node}
    return nodes | {node * per_node + other: here.n // per_node for other in range(per_node) if other != place}


def all_gather_volume(leaf: Tensor, here: CallContext) -> int:
    """Elements that this rank sends in an all-gather."""
    per_node: int = here.options.get("ranks_per_node", 1)
    sizes: Sequence[int] | None = here.options.get("sizes")
    if per_node == 1 or sizes is None:
        return (here.n - 1) * leaf.numel()
    rows: int = leaf.shape[here["dim"]]
    column = sizes[here.rank % per_node :: per_node]  # the sizes of the ranks at this place of their nodes
    width = math.prod(leaf.shape[: here["dim"]] + leaf.shape[here["dim"] + 1 :])
    return ((here.n // per_node - 1) * rows + (per_node - 1) * sum(column)) * width
