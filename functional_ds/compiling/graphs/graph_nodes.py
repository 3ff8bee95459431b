"""Queries about nodes of a graph."""

import operator
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import attrs
import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import get_proxy_mode

from functional_ds.base.torch_private import UNDECLARED_VIEWS, schema_of
from functional_ds.remat.operator_arguments import written

PHASE = "fds_phase"  # in a node's meta: the phase of the step that it belongs to
OPERATOR = type(torch.ops.aten.add.Tensor)  # the class of an operator with its types of arguments
RECOMPUTED = "fds_recomputed"  # in a node's meta: a number that the nodes of one run of a function run again have in common
UNIT = "fds_unit"  # in a node's meta: a number that the nodes of one fetch of a unit have in common


@attrs.frozen
class JoinedUnits:
    """What the nodes of several joined fetches share."""

    units: tuple[Any, ...]


@contextmanager
def tagged(name: str, value: Any) -> Iterator[None]:
    """A context in which traced nodes get a value in their meta, unless they have one of that name already."""
    mode = get_proxy_mode()
    before = None if mode is None else next(iter(reversed(mode.tracer.graph.nodes)))
    try:
        yield
    finally:  # recomputation ends by an exception, once it has all that is needed
        node = None if before is None else before.next
        while node is not None and node.op != "root":
            node.meta.setdefault(name, value)
            node = node.next


def is_view(node: fx.Node) -> bool:
    """Whether a node returns memory of its input and writes nothing."""
    declared = isinstance(node.target, OPERATOR) and node.target.is_view
    return declared or node.target is operator.getitem or node.target in UNDECLARED_VIEWS


def root_of(node: fx.Node) -> fx.Node:
    """The node whose memory a node returns: for views, and for operators that write into their input and return it."""
    while node.all_input_nodes:
        if is_view(node):
            node = node.all_input_nodes[0]
        elif _gives_what_it_writes(node):
            node = written_by(node)[0]
        else:
            break
    return node


def _gives_what_it_writes(node: fx.Node) -> bool:
    if not isinstance(node.target, OPERATOR):
        return False
    gives = [result.alias_info for result in schema_of(node.target).returns]
    return len(gives) == 1 and gives[0] is not None and gives[0].is_write


def base_of(node: fx.Node) -> fx.Node:
    """The node of whose tensor a node returns a view: unlike its root, one item of several results."""
    while is_view(node) and node.all_input_nodes:
        before = node.all_input_nodes[0]
        if node.target is operator.getitem and not is_view(before):
            return node
        node = before
    return node


def views_of(nodes: Sequence[fx.Node]) -> list[fx.Node]:
    """The nodes and all that return their memory, in order."""
    views = [*nodes]
    for view in views:
        views += [user for user in view.users if is_view(user) and user not in views]
    return views


def inputs_of(node: fx.Node) -> list[fx.Node]:
    """All nodes except placeholders that a node is computed from, in order, itself the last."""
    order: dict[fx.Node, None] = {}

    def add(node: fx.Node) -> None:
        if node.op not in ("placeholder", "get_attr") and node not in order:
            for before in node.all_input_nodes:
                add(before)
            order[node] = None

    add(node)
    return list(order)


def written_by(node: fx.Node) -> list[fx.Node]:
    """The inputs that a node writes into."""
    inputs: list[fx.Node] = []
    if isinstance(node.target, OPERATOR):
        fx.map_arg(written(node.target, node.args, node.kwargs), inputs.append)
    return inputs


@attrs.define(eq=False)
class GraphWrites:
    """Which nodes of a graph write into which memory.

    Attributes:
        order: the places of all nodes. Code that moves a node that writes nothing updates its place here.
    """

    order: dict[fx.Node, float]
    _by_root: dict[fx.Node, list[tuple[float, fx.Node]]]

    @staticmethod
    def of(graph: fx.Graph) -> "GraphWrites":
        """The writes of a graph."""
        writes = GraphWrites({}, {})
        for place, node in enumerate(graph.nodes):
            writes.order[node] = place
            for target in written_by(node):
                writes._by_root.setdefault(root_of(target), []).append((place, node))
        return writes

    def any(self, reading: Sequence[fx.Node], start: fx.Node, end: fx.Node) -> bool:
        """Whether a kernel between two nodes, other than these, writes into memory that they read."""
        excluded, places = {*reading}, (self.order[start], self.order[end])
        roots = {root_of(operand) for node in reading for operand in node.all_input_nodes}
        writes = (one for root in roots & self._by_root.keys() for one in self._by_root[root])
        return any(places[0] <= place < places[1] and node not in excluded for place, node in writes)
