"""The predicted cost of a graph: when each node runs, with computation and collectives overlapped, and the step's time."""

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import attrs
from torch import Tensor, fx

from functional_ds.comm.algorithms.cost import Link
from functional_ds.comm.debug.page import Arrow, Chart
from functional_ds.comm.debug.trace import Slice
from functional_ds.comm.record.ledger import LedgerCall, Row
from functional_ds.comm.table.collective import CallContext
from functional_ds.dry_run.events import Events, row_of
from functional_ds.dry_run.operations import SizedOperation, operation_of

from .eager_calls import RUN_BACKWARD, InnerCall, eager_site
from .graph_collectives import START, WAIT, CallSite, site_of
from .graph_nodes import OPERATOR, PHASE
from .host_calls import HOST

if TYPE_CHECKING:
    from functional_ds.scaling.machine import Machine

COMPUTE = "compute"


@attrs.frozen
class InMemory:
    """What is in memory while a node runs, including its results; without the state and the batch, which the caller holds.

    Attributes:
        bytes: of all tensors that the graph has made.
        units: how many gathered units are whole or in flight.
    """

    bytes: int
    units: int


@attrs.frozen
class NodeSpan:
    """When a node runs.

    Attributes:
        node: its name.
        does: the operator, or the collective and what it carries.
        lane: ``"compute"``, or the name of the collective's group.
        phase: of the step; may be empty.
        begin: seconds from the step's start.
        end: the same.
        flops: of an operator.
        bytes: that an operator reads and writes, or that this rank sends.
        before: the place of the span whose end this one's begin is; None where it waits for the host alone.
        role: a collective's, as its row says; empty of an operator.
    """

    node: str
    does: str
    lane: str
    phase: str
    begin: float
    end: float
    flops: int = 0
    bytes: int = 0
    before: int | None = None
    role: str = ""

    @property
    def seconds(self) -> float:
        """How long it takes."""
        return self.end - self.begin


@attrs.frozen(eq=False, repr=False, slots=False)
class GraphCost:
    """A step's predicted time on one rank, node by node.

    Laws: ``seconds == compute + host + sum(exposed.values())``, and the critical path has no gaps.

    Attributes:
        spans: of operators and collectives, in the graph's order.
        waits: what the rank waits for.
        seconds: of the whole step.
        compute: seconds in which the device computes.
        host: seconds in which it waits for the host, which starts operations.
        sent: the ledger's rows of this rank.
        memory: seconds from the step's start, and what is in memory from then on.
    """

    spans: Sequence[NodeSpan]
    waits: Sequence[NodeSpan]
    seconds: float
    compute: float
    host: float
    sent: Sequence[Row]
    memory: Sequence[tuple[float, InMemory]]

    @property
    def flops(self) -> int:
        """Floating-point operations of the step on this rank."""
        return sum(span.flops for span in self.spans)

    @cached_property
    def exposed(self) -> Mapping[str, float]:
        """Seconds in which the rank waits, by collective and what it carries; the longest first."""
        return _summed((wait.does, wait.seconds) for wait in self.waits)

    @cached_property
    def channels(self) -> Mapping[str, float]:
        """Seconds in which a channel is busy, by its group's name."""
        return _summed((span.lane, span.seconds) for span in self.spans if span.lane != COMPUTE)

    @cached_property
    def phases(self) -> Mapping[str, float]:
        """Seconds until the last operator of a phase, since that of the phase before, waits included; by phase, in order."""
        seconds, last = dict[str, float](), 0.0
        for span in self.spans:
            if span.lane == COMPUTE:
                seconds[span.phase] = seconds.get(span.phase, 0.0) + span.end - last
                last = span.end
        return seconds

    @cached_property
    def critical_path(self) -> tuple[NodeSpan, ...]:
        """The chain of spans that takes the whole step: each begins where the one before it ends."""
        place = max(range(len(self.spans)), key=lambda i: self.spans[i].end, default=None)
        spans: list[NodeSpan] = []
        while place is not None:
            spans.append(self.spans[place])
            place = self.spans[place].before
        return tuple(reversed(spans))

    def chart(self) -> Chart:
        """The spans by lane, the critical path where it goes from one to another, and the bytes in memory below."""
        lanes: dict[str, list[Slice]] = {COMPUTE: []}
        for span in self.spans:
            lanes.setdefault(span.lane, []).append(Slice(span.lane, span.does, span.begin, span.end, {"bytes": span.bytes}))
        path = pairwise(self.critical_path)
        arrows = [Arrow(one.lane, one.end, two.lane, two.begin) for one, two in path if one.lane != two.lane]
        memory = [(time, float(held.bytes)) for time, held in self.memory]
        return Chart(repr(self), lanes, arrows, memory)

    def _repr_html_(self) -> str:
        return self.chart()._repr_html_()

    def __str__(self) -> str:
        """A breakdown of the time."""
        rows = [("step", self.seconds), ("  compute", self.compute), ("  host", self.host)]
        rows += [(f"  waits for {does}", seconds) for does, seconds in self.exposed.items()]
        rows += [(f"channel {name}", seconds) for name, seconds in self.channels.items()]
        path = _summed((span.lane, span.seconds) for span in self.critical_path)
        rows += [(f"critical path: {lane}", seconds) for lane, seconds in path.items()]
        wide = max(len(name) for name, _ in rows)
        return "\n".join(f"{name:<{wide}} {seconds * 1e3:>12.3f} ms" for name, seconds in rows)

    def __repr__(self) -> str:
        waits = sum(self.exposed.values())
        return f"GraphCost({self.seconds:.3g} s: {self.compute:.3g} compute, {waits:.3g} exposed communication)"


def _summed(pairs: Iterable[tuple[str, float]]) -> dict[str, float]:
    sums: dict[str, float] = {}
    for name, seconds in pairs:
        sums[name] = sums.get(name, 0.0) + seconds
    return dict(sorted(sums.items(), key=lambda pair: -pair[1]))


@attrs.define(eq=False)
class _RankTimeline:
    """The resources of a rank: a host, a device that computes, and a channel for each group.

    Attributes:
        machine: the rates.
        links: of groups, by name.
        host: seconds at which the host is free.
        device: seconds at which the device is.
        busy: seconds in which the device computes.
        idle: seconds in which it waits for the host.
        last: the span whose end the device has waited for.
        calls: of collectives.
    """

    machine: "Machine"
    links: Mapping[str, Link]
    host: float = 0.0
    device: float = 0.0
    busy: float = 0.0
    idle: float = 0.0
    last: int | None = None
    spans: list[NodeSpan] = attrs.field(factory=list)
    waits: list[NodeSpan] = attrs.field(factory=list)
    calls: Events = attrs.field(factory=Events)
    _channels: dict[Any, int] = attrs.field(factory=dict)  # of each group, and of the link between nodes: its last span
    _under_way: dict[int, int] = attrs.field(factory=dict)  # of each site: its span

    def compute(self, node: fx.Node, operation: SizedOperation, name: str) -> None:
        """An operation: the host starts it, and the device runs it after what it has run before."""
        seconds = self.machine.operation_seconds(operation)
        self.host += self.machine.node_seconds
        begin, before = self.device, self.last
        if self.host > self.device:
            self.idle += self.host - self.device
            self.device = self.host
            if not self.machine.host_computes:  # otherwise its start is a part of it
                begin, before = self.device, None
        self.busy += seconds
        self.device += seconds
        self.last = len(self.spans)
        self.host = self.device if self.machine.host_computes else self.host
        span = _span(node, name, COMPUTE, begin, self.device)
        self.spans.append(attrs.evolve(span, flops=operation.flops, bytes=operation.bytes, before=before))

    def start(self, node: fx.Node, site: CallSite | InnerCall, xs: Sequence[Tensor]) -> int:
        """A collective: it begins when its inputs are computed, and its channel and link are free. Returns its span."""
        here = CallContext(site.call.options, site.group.rank, site.group.size)
        row = row_of(LedgerCall(site.call, xs, here, site.group.name, site.group.ranks))
        self.calls.append(row)
        link = self.links.get(site.group.name.partition("/")[0])
        keys = [(site.group.name, site.group.ranks), *["nodes"] * (link is None and self.machine.crosses(row))]
        earlier = [self._channels[key] for key in keys if key in self._channels]
        last = max(earlier, key=lambda place: self.spans[place].end, default=None)
        begin, before = max(self.device, self.host), self.last
        if last is not None and self.spans[last].end > begin:
            begin, before = self.spans[last].end, last
        elif begin > self.device:
            before = None
        seconds = self.machine.collective_seconds(row, link)
        place = len(self.spans)
        self._channels.update(dict.fromkeys(keys, place))
        span = _span(node, _carries(site), site.group.name, begin, begin + seconds)
        self.spans.append(attrs.evolve(span, bytes=row.bytes, before=before, role=row.traffic.role))
        if self.machine.overlaps < 1:
            self._hold(node, site, self.machine.held_seconds(row, link))
        if isinstance(site, InnerCall) or (self.machine.host_computes and not site.beside):  # the host carries it out
            self._until(place, node)
        return place

    def _hold(self, node: fx.Node, site: CallSite | InnerCall, seconds: float) -> None:
        """The device waits for a part of a collective."""
        begin = max(self.device, self.host)
        self.idle += begin - self.device
        before = self.last if begin == self.device else None
        self.device, self.last = begin + seconds, len(self.spans)
        self.host = self.device if self.machine.host_computes else self.host
        self.waits.append(_span(node, _carries(site), COMPUTE, begin, self.device))
        self.spans.append(attrs.evolve(self.waits[-1], before=before))

    def begin(self, node: fx.Node, site: CallSite, xs: Sequence[Tensor]) -> None:
        """A collective that another node waits for."""
        self._under_way[site_of(node)] = self.start(node, site, xs)

    def wait(self, node: fx.Node) -> None:
        """The device continues when the collective is over."""
        self._until(self._under_way.pop(site_of(node)), node)

    def finish(self, node: fx.Node) -> None:
        """The step is over when all collectives are."""
        for place in self._under_way.values():
            self._until(place, node)

    def _until(self, place: int, node: fx.Node) -> None:
        span = self.spans[place]
        if span.end > self.device:
            self.waits.append(_span(node, span.does, COMPUTE, self.device, span.end))
            self.device, self.last = span.end, place
            self.host = self.device if self.machine.host_computes else self.host


def _span(node: fx.Node, does: str, lane: str, begin: float, end: float) -> NodeSpan:
    return NodeSpan(node.name, does, lane, node.meta.get(PHASE) or "", begin, end)


def graph_cost(
    nodes: Sequence[fx.Node],
    sites: Sequence[CallSite],
    held: Mapping[fx.Node, InMemory],
    machine: "Machine",
    links: Mapping[str, Link] | None = None,
) -> GraphCost:
    """When each node runs.

    Args:
        nodes: in order, with values' shapes.
        sites: the collectives that they name by number.
        held: what is in memory at each.
        machine: the rates.
        links: of groups, by the name of their axis; others have the machine's.
    """
    clock = _RankTimeline(machine, links or {})
    memory: list[tuple[float, InMemory]] = []
    for node in nodes:
        memory.append((clock.device, held[node]))
        eager = eager_site(node, sites)
        if eager is not None:
            for item in eager.work[node.target is RUN_BACKWARD]:
                if isinstance(item, InnerCall):
                    clock.start(node, item, item.xs)
                else:
                    clock.compute(node, item, item.kind)
        elif node.target is START:
            site = sites[site_of(node)]
            if site.call.collective.is_message:
                raise ValueError(
                    f"the step sends messages on {site.group.name!r}, as a pipeline does, and the graph of one rank does not "
                    "say when other ranks send theirs: predict a pipeline by pipelining.timeline(schedule, costs)"
                )
            xs = [x.meta["val"] for x in node.args[0]]  # type: ignore[union-attr]
            clock.begin(node, site, xs)
        elif node.target is WAIT:
            clock.wait(node)
        elif node.target is HOST:
            raise ValueError("the step reads and writes files, and no machine says how fast its disk is: predict one without")
        elif node.op == "call_function" and isinstance(node.target, OPERATOR):
            clock.compute(node, _operation(node), _name(node))
        elif node.op == "output":
            clock.finish(node)
    return GraphCost(clock.spans, clock.waits, clock.device, clock.busy, clock.idle, clock.calls.sent, memory)


def _operation(node: fx.Node) -> SizedOperation:
    args = fx.map_arg(node.args, lambda arg: arg.meta.get("val"))
    kwargs = fx.map_arg(node.kwargs, lambda arg: arg.meta.get("val"))
    return operation_of(node.target, args, kwargs, node.meta.get("val"))


def _name(node: fx.Node) -> str:
    return str(node.target).removeprefix("aten.").partition(".")[0]


def _carries(site: CallSite | InnerCall) -> str:
    if isinstance(site, InnerCall):
        return f"{site.call.collective.name} of rows on {site.group.name}"
    return f"{site.name} of {site.label!r}" if site.label else f"{site.name} on {site.group.name}"
