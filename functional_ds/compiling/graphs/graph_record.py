"""A step's graph: inputs, outputs, memory at each node, and its text form."""

import operator
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from os import PathLike
from typing import TYPE_CHECKING, Any

import attrs
import optree
import torch
from torch import Tensor, fx

from functional_ds.base import tree
from functional_ds.base.marks import like_marked
from functional_ds.comm.algorithms.cost import Link
from functional_ds.comm.record.graph_notes import GraphLeaf, TracedLeaf, TraceNotes
from functional_ds.comm.record.notebook import html_table, html_text
from functional_ds.step.state.state import State

from .eager_calls import RUN, eager_site
from .graph_collectives import START, WAIT, CallSite, carrying_out, site_of
from .graph_cost import GraphCost, InMemory, graph_cost
from .graph_draw import draw_cost
from .graph_nodes import PHASE, RECOMPUTED, UNIT, JoinedUnits, root_of
from .host_calls import HOST, carried, carrier

if TYPE_CHECKING:
    from functional_ds.scaling.machine import Machine


@attrs.frozen(eq=False)
class UnitGather:
    """The nodes that gather a unit of params: starts and waits of its levels, casts and decoding.

    Attributes:
        nodes: in order.
    """

    nodes: Sequence[fx.Node]

    @property
    def units(self) -> int:
        """How many units they are: several if gathers were joined."""
        number = self.nodes[0].meta[UNIT]
        return len(number.units) if isinstance(number, JoinedUnits) else 1

    @property
    def start(self) -> fx.Node:
        """Where the first collective starts; without one, the first read of a file."""
        return next(node for target in (START, HOST) for node in self.nodes if node.target is target)

    @property
    def wait(self) -> fx.Node:
        """Where the last one is waited for."""
        return next(node for target in (WAIT, HOST) for node in reversed(self.nodes) if node.target is target)

    @property
    def outputs(self) -> list[fx.Node]:
        """The nodes whose values are used elsewhere; if there are none, the wait."""
        inside = {*self.nodes}
        used = [node for node in self.nodes if any(user not in inside for user in node.users) and node.target is not START]
        return used or [self.wait]


@attrs.frozen(eq=False)
class CollectiveCall:
    """The nodes of one collective.

    Attributes:
        start: where it starts.
        wait: where it is waited for.
        site: the collective, its options, and its group.
    """

    start: fx.Node
    wait: fx.Node
    site: CallSite

    @property
    def name(self) -> str:
        """The collective's name."""
        return self.site.name

    @property
    def inputs(self) -> list[fx.Node]:
        """The nodes whose tensors it takes."""
        given: Any = self.start.args[0]
        return [*given]

    @property
    def results(self) -> list[fx.Node]:
        """The nodes of its results, in their order."""
        items = {node.args[1]: node for node in self.wait.users if _is_item(node)}
        return [items[place] for place in sorted(items)]  # type: ignore[type-var]

    @property
    def bytes(self) -> int:
        """The bytes of its inputs."""
        return sum(int(node.meta["val"].nbytes) for node in self.inputs)


@attrs.frozen(eq=False, repr=False)
class StepGraph:
    """A step as a graph: a function from the leaves of (state, batch) to those of (state, metrics).

    Nodes are ATen operators, and ``functional_ds::start`` and ``::wait`` for collectives. The update writes into the state's
    tensors, as a donating step does.

    Attributes:
        module: the callable graph.
        sites: the collectives, to which its nodes refer by index.
        takes: the structure of (state, batch).
        gives: the structure of (state, metrics).
        outputs: the results' leaves without values, with their marks.
        notes: what the step reports about itself.
        buffers: the places of module buffers that are not in the state; the graph takes them after the leaves.
    """

    module: fx.GraphModule
    sites: list[CallSite]
    takes: optree.PyTreeSpec
    gives: optree.PyTreeSpec
    outputs: Sequence[Any]
    notes: TraceNotes
    buffers: Sequence[tuple[Mapping[str, Any], str]] = ()

    def __call__(self, leaves: Sequence[Any]) -> tuple[State, dict[str, Tensor]]:
        """Runs the graph on the leaves of a state, which it writes into, and of a batch."""
        with torch.no_grad(), carrying_out(self.sites):
            return self.given(self.module(*self.taken(leaves)))

    def taken(self, leaves: Sequence[Any]) -> list[Any]:
        """The graph's inputs: the leaves of a state and of a batch, and the modules' present buffers."""
        given = (carrier(leaf) if isinstance(leaf, GraphLeaf) else leaf for leaf in leaves)
        return [*given, *(store.get(key) for store, key in self.buffers)]

    def given(self, leaves: Sequence[Any]) -> tuple[State, dict[str, Tensor]]:
        """A result's leaves as the result, with their marks."""
        marked = [_as_result(x, model) for x, model in zip(leaves, self.outputs, strict=True)]
        result: tuple[State, dict[str, Tensor]] = tree.unflatten(self.gives, marked)
        return result

    def collectives(self, name: str | None = None) -> list[CollectiveCall]:
        """The collectives, or those of a name, such as "all_reduce", in the order in which they start."""
        starts = [node for node in self.module.graph.nodes if node.target is START]
        calls = [
            CollectiveCall(node, next(user for user in node.users if user.target is WAIT), self.sites[site_of(node)])
            for node in starts
        ]
        return [call for call in calls if name in (None, call.name)]

    def gathers(self) -> list[UnitGather]:
        """The gathers of units of params, in the order in which they are waited for."""
        nodes: dict[Any, list[fx.Node]] = {}
        for node in self.module.graph.nodes:
            if UNIT in node.meta:
                nodes.setdefault(node.meta[UNIT], []).append(node)
        gathers = [UnitGather(members) for members in nodes.values() if any(self._gathers(node) for node in members)]
        order = {node: place for place, node in enumerate(self.module.graph.nodes)}
        return sorted(gathers, key=lambda gather: order[gather.wait])

    def _gathers(self, node: fx.Node) -> bool:
        if node.target is HOST:  # which reads a shard, or carries something
            return self.sites[int(str(node.args[-1]))].like is not None  # type: ignore[attr-defined]
        return node.target is WAIT and self.sites[site_of(node)].call.collective.traffic.role == "gather"

    def live(self) -> dict[fx.Node, InMemory]:
        """What is in memory while each node runs. A tensor lives until the last use of it, or of a view of it.

        The result of a collective has memory from its start on. Saved tensors of an expert exchange count as for even routing.
        """
        nodes = list(self.module.graph.nodes)
        places = {node: place for place, node in enumerate(nodes)}
        ends = _last_uses(nodes)
        changes, counts = [0] * (len(nodes) + 1), [0] * (len(nodes) + 1)
        for node in nodes:
            if node.op != "call_function" or _is_item(node) or root_of(node) is not node:
                continue
            begin = places[node.args[0] if node.target is WAIT else node]
            for size, end in _sizes(node, ends, self.sites):
                changes[begin] += size
                changes[end + 1] -= size
        for gather in self.gathers():
            counts[places[gather.start]] += gather.units
            last = places[gather.wait]
            whole = [output for output in gather.outputs if places[output] >= last]  # an earlier level's may stay
            counts[1 + max(ends[_root(kept)] for kept in (gather.wait, *whole))] -= gather.units
        by_node, size, count = {}, 0, 0
        for place, node in enumerate(nodes):
            size, count = size + changes[place], count + counts[place]
            by_node[node] = InMemory(size, count)
        return by_node

    def cost(self, machine: "Machine", *, links: Mapping[str, Link] | None = None) -> GraphCost:
        """The predicted time of this rank's step, node by node, if all ranks start together and are equally fast.

        Operators run one after another on the device; each takes the machine's time for its floating-point operations (torch's
        formulas) and bytes. Each group's channel carries one collective after another, concurrently with the device; a
        collective begins when its inputs are computed and its channel is free, and its wait blocks the device. Channels share
        the machine's link between nodes and no other. So passes that start collectives earlier reduce the predicted time.

        Laws: with infinitely fast links the step takes its compute time; with an infinitely fast device, at least as long as
        any channel is busy, and at most as long as all are; names change nothing. The bytes are those that a ledger counts in a
        run, with even routing to experts.

        Args:
            machine: ``fds.scaling.Machine``.
            links: of groups, by the name of their axis; others have the machine's.

        >>> import torch, functional_ds as fds
        >>> step = fds.jit(fds.train_step(lambda w, x: (x @ w).sum(), fds.sgd(0.5)))
        >>> state, x = step.init(torch.ones(8, 8)), torch.ones(4, 8)
        >>> state, _ = step(state, x)
        >>> machine = fds.scaling.Machine("mine", flops=1e12, flops_fp32=1e6, memory_bandwidth=1e12, link_bandwidth=1e9)
        >>> cost = step.graph(state, x).cost(machine)
        >>> cost.flops, round(cost.seconds, 3)  # forward, and backward for the params
        (1024, 0.001)
        """
        return graph_cost(list(self.module.graph.nodes), self.sites, self.live(), machine, links)

    def draw(
        self,
        machine: "Machine",
        path: str | PathLike[str] | None = None,
        *,
        links: Mapping[str, Link] | None = None,
        title: str = "",
    ) -> Any:
        """Plots the predicted step: computation, each channel's collectives, and memory over time.

        Args:
            machine: the rates, as for ``cost``.
            path: a file to write; the suffix is the format: .svg, .png, .pdf.
            links: of groups, as for ``cost``.
            title: the figure's title; by default the step's time and its breakdown.

        Returns:
            The matplotlib figure.

        Raises:
            ImportError: matplotlib is not installed (the extra ``train``).
        """
        return draw_cost(self.cost(machine, links=links), path, title=title)

    def _repr_html_(self) -> str:
        calls = Counter((call.name, call.site.group.name) for call in self.collectives())
        table = html_table(
            ["collective", "group", "calls"], [(*what, count) for what, count in calls.items()], caption=repr(self)
        )
        return f"{table}<details><summary>nodes</summary>{html_text(self)}</details>"

    def __str__(self) -> str:
        """A line per node: its phase where one begins, memory, the operator, and what a collective carries."""
        return "\n".join(_lines(self))

    def __repr__(self) -> str:
        nodes, peak = len(self.module.graph.nodes), max(now.bytes for now in self.live().values())
        return f"StepGraph({nodes} nodes, {len(self.collectives())} collectives, at most {peak:,} bytes besides the state)"


def _as_result(x: Any, model: Any) -> Any:
    """A graph's output as the leaf that it stands for."""
    if isinstance(model, TracedLeaf):
        return carried(x)
    return like_marked(x, model) if isinstance(x, Tensor) else x


def _root(node: fx.Node) -> fx.Node:
    """The node whose memory a node returns, where each of several results is a node."""
    current = node
    while not _is_item(current) and current is not root_of(current):
        before = next(operand for operand in current.all_input_nodes if root_of(operand) is root_of(current))
        current = before
    return current


def _last_uses(nodes: Sequence[fx.Node]) -> dict[fx.Node, int]:
    """By node that makes memory, or item of one that makes several: the place of the last use of it, or of a view of it."""
    last_uses: dict[fx.Node, int] = {}
    for place, node in enumerate(nodes):
        for used in (node, *node.all_input_nodes):
            last_uses[_root(used)] = place
    return last_uses


def _sizes(node: fx.Node, ends: Mapping[fx.Node, int], sites: Sequence[Any]) -> Iterator[tuple[int, int]]:
    """The bytes of each of a node's results, and the place of its last use; unused results stay with the others' list."""
    value = node.meta.get("val")
    kept = 0 if node.target is not RUN else eager_site(node, sites).kept  # type: ignore[union-attr]
    for place, x in enumerate(value if isinstance(value, (list, tuple)) else [value]):
        if isinstance(x, Tensor):
            items = [user for user in node.users if _is_item(user) and user.args[1] == place]
            yield x.untyped_storage().nbytes() + (kept if place else 0), max(ends[used] for used in (node, *items))


def _is_item(node: fx.Node) -> bool:
    """Whether it is one of several results of a node."""
    return node.target is operator.getitem and isinstance(node.all_input_nodes[0].meta.get("val"), (list, tuple))


def _lines(graph: StepGraph) -> Iterator[str]:
    held, phase = graph.live(), None
    for node in graph.module.graph.nodes:
        if node.op != "call_function" or _is_item(node):
            continue
        if node.meta.get(PHASE) != phase:
            phase = node.meta.get(PHASE)
            yield f"{phase or 'step'}:"
        now = held[node]
        units = f" {now.units} units" if graph.notes.gathering is not None else ""
        yield f"  {now.bytes:>12,}{units}  {_shown(graph, node)}"


def _shown(graph: StepGraph, node: fx.Node) -> str:
    inputs = ", ".join(operand.name for operand in node.all_input_nodes)
    if node.target not in (START, WAIT):
        value = node.meta.get("val")
        shape = f": {tree.summary(value)}" if isinstance(value, Tensor) else ""
        again = ", again" if RECOMPUTED in node.meta else ""
        return f"{node.name} = {str(node.target).removeprefix('aten.')}({inputs}){shape}{again}"
    site = graph.sites[site_of(node)]
    verb, label = "start" if node.target is START else "wait", f" of {site.label!r}" if site.label else ""
    return f"{verb} {site.name}{label} on {site.group.name} ({inputs})"
