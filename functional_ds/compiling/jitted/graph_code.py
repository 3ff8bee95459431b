"""Graphs as Python functions with little overhead between kernels: no lookups, and one view instead of a chain."""

import functools
import operator
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any

import attrs
import torch
from torch import Tensor, fx, nn

from functional_ds.base.torch_private import quick_call_of
from functional_ds.compiling.graphs.eager_calls import RUN, RUN_BACKWARD
from functional_ds.compiling.graphs.graph_collectives import (
    START,
    WAIT,
    CallSite,
    batch_starter_of,
    site_of,
    starter_of,
    waiter_of,
)
from functional_ds.compiling.graphs.graph_nodes import OPERATOR, base_of, is_view, written_by
from functional_ds.compiling.graphs.host_calls import HOST

_QUICK: dict[Any, Callable[..., Any]] = {  # the same operators by torch's own parser of arguments, which is faster
    torch.ops.aten.add.Tensor: torch.add,
    torch.ops.aten.addmm.default: torch.addmm,
    torch.ops.aten.bmm.default: torch.bmm,
    torch.ops.aten.div.Tensor: torch.div,
    torch.ops.aten.mm.default: torch.mm,
    torch.ops.aten.mul.Tensor: torch.mul,
    torch.ops.aten.sub.Tensor: torch.sub,
    torch.ops.aten.tanh.default: torch.tanh,
}
_WRITTEN_AS_SIGNS = (operator.add, operator.getitem)  # by fx, so they take no call


@attrs.define(eq=False)
class GraphCode:
    """A graph as a function of its inputs.

    Law: bitwise equal results, by the same kernels in the same order, and no tensor is held longer. Views of a tensor are made
    directly from it by ``as_strided``, equal ones once. That requires the tensor's layout of the trace, so the first run goes
    node by node and checks it; views of tensors with other layouts stay as they are.

    Attributes:
        graph: of operators, collectives and calls of other functions.
        owner: has the attributes and modules that nodes refer to.
        sites: the collectives, to which nodes refer by index.
        runs: how often it ran.
    """

    graph: fx.Graph
    owner: nn.Module
    sites: Sequence[CallSite]
    runs: int = attrs.field(default=0, init=False)
    _run: Callable[..., Sequence[Any]] | None = attrs.field(default=None, init=False)

    def __call__(self, leaves: Sequence[Any]) -> Sequence[Any]:
        """Runs the graph."""
        self.runs += 1
        with torch.no_grad(), without_autocast():
            if self._run is not None:
                return self._run(*leaves)
            graph = _carried_out(self.graph, self.sites)
            first = _FirstRun(self.owner, graph)
            outputs: Sequence[Any] = first.run(*leaves)
            self._run = functools.partial(_DirectViews(first.plain).function(graph), self.owner)
            return outputs


def without_autocast() -> AbstractContextManager[Any]:
    """A context in which operators compute in the dtypes of their inputs: casts are nodes."""
    kinds = [device_type for device_type in ("cpu", "cuda") if torch.is_autocast_enabled(device_type)]
    if not kinds:
        return nullcontext()
    stack = ExitStack()
    for device_type in kinds:
        stack.enter_context(torch.autocast(device_type, enabled=False))
    return stack


def _carried_out(graph: fx.Graph, sites: Sequence[CallSite]) -> fx.Graph:
    """The graph with calls of its sites' operations instead of their numbers."""
    new, known, batches = fx.Graph(), dict[fx.Node, fx.Node](), _batches(graph, sites)
    for node in graph.nodes:
        if starts := batches.get(node):
            if node is starts[-1]:
                given = [fx.map_arg(start.args[0], known.__getitem__) for start in starts]
                handles = new.call_function(batch_starter_of([sites[site_of(start)] for start in starts]), (given,))
                known.update({start: new.call_function(operator.getitem, (handles, i)) for i, start in enumerate(starts)})
            continue
        copy = known[node] = new.node_copy(node, known.__getitem__)
        if node.target is START:
            copy.target, copy.args = starter_of(sites[site_of(node)]), copy.args[:1]
        elif node.target is WAIT:
            copy.target, copy.args = waiter_of(sites[site_of(node)]), copy.args[:2]
        elif node.target in (RUN, RUN_BACKWARD, HOST):
            site: Any = sites[int(str(node.args[-1]))]
            copy.target, copy.args = site.run_backward if node.target is RUN_BACKWARD else site.run, copy.args[:-1]
    return new


def _batches(graph: fx.Graph, sites: Sequence[CallSite]) -> dict[fx.Node, list[fx.Node]]:
    """By start of a message: the starts of its batch, with no other call of ranks or write between them."""
    by_start, batch, now = dict[fx.Node, list[fx.Node]](), list[fx.Node](), 0
    for node in graph.nodes:
        number = sites[site_of(node)].batch if node.target is START else 0
        if number != now and (node.target in (START, WAIT, RUN, RUN_BACKWARD) or written_by(node)):
            batch, now = [], number
        if number:
            by_start[node] = batch
            batch.append(node)
    return by_start


class _FirstRun(fx.Interpreter):
    """A run node by node.

    Attributes:
        plain: the nodes whose views do not have the trace's layout.
    """

    def __init__(self, owner: nn.Module, graph: fx.Graph) -> None:
        super().__init__(owner, graph=graph)
        self.extra_traceback = False
        self.plain: set[fx.Node] = set()
        ends: dict[fx.Node, fx.Node] = {}
        for node in graph.nodes:  # keeps tensors for the checks of their views
            ends.update(dict.fromkeys((node, base_of(node), *node.all_input_nodes), node))
        self.user_to_last_uses = {}
        for used, end in ends.items():
            if end.op != "output":
                self.user_to_last_uses.setdefault(end, []).append(used)

    def run_node(self, n: fx.Node) -> Any:
        """Computes a node's value, and checks a view's layout."""
        value, base = super().run_node(n), base_of(n)
        if base is not n and not _is_as_traced(n, value, base, self.env[base]):
            self.plain.add(base)
        return value


def _layout(value: Tensor) -> tuple[Any, ...]:
    return value.dtype, tuple(value.shape), value.stride()


def _is_as_traced(node: fx.Node, value: Any, base: fx.Node, held: Any) -> bool:
    """Whether a view and its base have the trace's layout."""
    model, root = node.meta.get("val"), base.meta.get("val")
    if not (isinstance(model, Tensor) and isinstance(root, Tensor) and isinstance(value, Tensor) and isinstance(held, Tensor)):
        return True  # a list of views
    if held.layout is not torch.strided or (_layout(value), _layout(held)) != (_layout(model), _layout(root)):
        return False
    shared = value.untyped_storage().data_ptr() == held.untyped_storage().data_ptr()
    return shared and value.storage_offset() - held.storage_offset() == model.storage_offset() - root.storage_offset()


@attrs.define(eq=False)
class _DirectViews:
    """Rewrites a graph as the function that runs.

    Attributes:
        plain: the nodes whose views are made as in the graph.
    """

    plain: set[fx.Node]
    _graph: fx.Graph = attrs.field(factory=fx.Graph)
    _now: dict[fx.Node, fx.Node] = attrs.field(factory=dict)
    _views: dict[Any, fx.Node] = attrs.field(factory=dict)
    _functions: dict[Any, Callable[..., Any]] = attrs.field(
        factory=dict
    )  # by classes that stand for them, whose names fx takes

    def function(self, graph: fx.Graph) -> Callable[..., Sequence[Any]]:
        """The function, of the graph's owner and inputs, as fx writes it: a variable is dropped behind its last use."""
        for node in graph.nodes:
            if not self._is_direct(node):
                copy = self._now[node] = self._graph.node_copy(node, self._get)
                if node.op == "call_function" and node.target not in _WRITTEN_AS_SIGNS:
                    called: Any = node.target
                    copy.target = type(f"f{len(self._functions)}", (), {})
                    self._functions[copy.target] = _quick(node) or called
        code = self._graph.python_code("self")
        names = {name: self._functions.get(value, value) for name, value in code.globals.items()}
        exec(compile(code.src, "<fds.jit>", "exec"), names)  # names, numbers and fx's own words
        run: Callable[..., Sequence[Any]] = names["forward"]
        return run

    def _get(self, node: fx.Node) -> fx.Node:
        """The node with a node's value here: for a view, one made at its first use."""
        if not self._is_direct(node):
            return self._now[node]
        base = base_of(node)
        value, held, owner = node.meta["val"], base.meta["val"], self._now[base]
        offset = value.storage_offset() - held.storage_offset()
        if not offset and _layout(value) == _layout(held):
            return owner
        key = (base, _layout(value), offset)
        if key not in self._views:
            args: tuple[Any, ...] = owner, tuple(value.shape), value.stride()
            if offset:
                begin = self._graph.call_method("storage_offset", (owner,))
                args = *args, self._graph.call_function(operator.add, (begin, offset))
            self._views[key] = self._graph.call_method("as_strided", args)
        return self._views[key]

    def _is_direct(self, node: fx.Node) -> bool:
        """Whether a node is a view that is made directly from its base, where it is used."""
        base = base_of(node)
        if base is node or base in self.plain or not is_view(node):
            return False
        value, held = node.meta.get("val"), base.meta.get("val")
        views = value if isinstance(value, (list, tuple)) else [value]
        if views is value and any(user.target is not operator.getitem for user in node.users):
            return False
        if not isinstance(held, Tensor) or held.layout is not torch.strided or held.is_complex():
            return False
        return all(isinstance(view, Tensor) and view.dtype == held.dtype for view in views)


def _quick(node: fx.Node) -> Callable[..., Any] | None:
    """A faster function for the same operator."""
    if not isinstance(node.target, OPERATOR):
        return None
    by_torch = _QUICK.get(node.target)
    return by_torch if by_torch is not None and not node.kwargs and _takes_tensors(node) else quick_call_of(node.target)


def _takes_tensors(node: fx.Node) -> bool:
    return all(isinstance(argument, fx.Node) and isinstance(argument.meta.get("val"), Tensor) for argument in node.args)
