"""Passes over a step's graph: pure functions from graph to graph that change no value."""

from collections.abc import Callable
from functools import cached_property

import attrs
from torch import fx

from functional_ds.transforms.zero.units.prefetch import plan_fetches

from .graph_collectives import START, WAIT, CallSite, site_of
from .graph_nodes import PHASE, UNIT, GraphWrites, inputs_of, root_of, views_of, written_by
from .graph_record import StepGraph, UnitGather


def copied(graph: StepGraph) -> StepGraph:
    """A copy, whose nodes and sites a pass may change.

    >>> import functional_ds as fds
    >>> def my_pass(graph):
    ...     new = copied(graph)  # a pass changes new.module.graph and new.sites
    ...     return finished(new)
    >>> step = fds.jit(fds.train_step(lambda params, x: (params["w"] * x).sum(), fds.sgd(0.5)), passes=[my_pass])
    >>> state, _ = step(step.init({"w": torch.ones(2)}), torch.tensor([1.0, 2.0]))
    >>> step.params(state)["w"].tolist()
    [0.5, 0.0]
    """
    new, known = fx.Graph(), dict[fx.Node, fx.Node]()
    new.output(new.graph_copy(graph.module.graph, known))
    return attrs.evolve(graph, module=fx.GraphModule(graph.module, new), sites=list(graph.sites))


def finished(graph: StepGraph) -> StepGraph:
    """The graph, checked and ready to be called."""
    graph.module.graph.eliminate_dead_code()  # unread results keep their inputs in memory
    graph.module.graph.lint()
    graph.module.recompile()
    return graph


def regather(*, live: int = 2, reshard: bool = False) -> Callable[[StepGraph], StepGraph]:
    """Gathers units of params again where they are reused, so that at most ``live`` are whole at once.

    Law: no value changes. The gathers of each forward and each backward pass are the fewest possible (Belady 1966), as ZeRO-3
    plans them in an eager step. More units are whole only if one operation needs more.

    Args:
        live: how many units are whole.
        reshard: whether a backward pass regathers the units with which its forward pass ended.

    Raises:
        ValueError: ``live`` is below 1.
    """
    if live < 1:
        raise ValueError(f"live={live} is a number of whole units, so at least 1")

    def run(graph: StepGraph) -> StepGraph:
        new = copied(graph)
        gathers, writes = new.gathers(), GraphWrites.of(new.module.graph)
        views = [views_of([node for node in gather.outputs if root_of(node) in gather.nodes]) for gather in gathers]
        unit_of = {view: unit for unit, unit_views in enumerate(views) for view in unit_views}
        now = [0] * len(gathers)  # the newest copy of each
        copies = [_Copy(new, writes, gather, unit_views) for gather, unit_views in zip(gathers, views, strict=True)]
        whole: tuple[int, ...] = ()
        for backward, uses in _uses_by_pass(new, unit_of):
            whole = whole if backward and not reshard else ()
            plan = plan_fetches(tuple(unit for _, unit in uses), live, whole)
            there, fetches = {*whole}, iter(plan.fetches)
            for node, unit in uses:
                if unit not in there:
                    there = (there - {*next(fetches).evict}) | {unit}
                    now[unit] = copies[unit].fetched_for(node)
                copies[unit].give(node, now[unit])
            whole = plan.end
        return finished(new)

    return run


def _uses_by_pass(graph: StepGraph, unit_of: dict[fx.Node, int]) -> list[tuple[bool, list[tuple[fx.Node, int]]]]:
    """The users of each unit, in order, in each forward and each backward pass (True); micro-batches have several."""
    passes = [(False, list[tuple[fx.Node, int]]())]
    phase, making = None, {node for gather in graph.gathers() for node in gather.nodes}
    for node in graph.module.graph.nodes:
        now = node.meta.get(PHASE)
        if now in ("forward", "backward") and now != phase:
            phase = now
            passes.append((phase == "backward", []))
        if node.op == "call_function" and node not in unit_of and node not in making:
            units = dict.fromkeys(unit_of[operand] for operand in node.all_input_nodes if operand in unit_of)
            passes[-1][1].extend((node, unit) for unit in units)
    return passes


@attrs.define(eq=False)
class _Copy:
    """A unit's gather and its copies; copy 0 is the gather itself."""

    graph: StepGraph
    writes: GraphWrites
    gather: UnitGather
    views: list[fx.Node]
    _made: list[dict[fx.Node, fx.Node]] = attrs.field(factory=list)  # of each copy: the node of the gather -> its copy

    def fetched_for(self, user: fx.Node) -> int:
        """The number of the gather that a node will use: the first one, and then a new one each time."""
        if not self._made or self.writes.any([*self._anew], self.gather.wait, user):
            self._made = self._made or [{}]
            return 0
        self._made.append({})
        return len(self._made) - 1

    def give(self, user: fx.Node, number: int) -> None:
        """Makes a node use a copy, which is before the first of its users."""
        if number:
            with self.graph.module.graph.inserting_before(user):
                sites: dict[int, int] = {}
                for view in [operand for operand in user.all_input_nodes if operand in self.views]:
                    user.replace_input_with(view, self._copied(view, number, sites, user))

    @cached_property
    def _anew(self) -> set[fx.Node]:
        """The nodes to copy: with hpZ without the first level, whose result is kept."""
        nodes = {*self.gather.nodes, *self.views}
        gathering = self.graph.notes.gathering
        if gathering is not None and gathering.keeps_first_level:
            nodes -= {*inputs_of(next(node for node in self.gather.nodes if node.target is WAIT))}
        return nodes

    def _copied(self, node: fx.Node, number: int, sites: dict[int, int], user: fx.Node) -> fx.Node:
        made, anew = self._made[number], self._anew
        if node not in made:
            for before in node.all_input_nodes:
                if before in anew:
                    self._copied(before, number, sites, user)
            copy = made[node] = self.graph.module.graph.node_copy(node, lambda old: made.get(old, old))
            copy.meta[PHASE] = user.meta.get(PHASE)
            if UNIT in copy.meta:
                copy.meta[UNIT] = (node.meta[UNIT], number)
            if node.target in (START, WAIT):
                _renumber(self.graph.sites, copy, sites)
        return made[node]


def _renumber(sites: list[CallSite], node: fx.Node, number: dict[int, int]) -> None:
    old = site_of(node)
    if old not in number:
        number[old] = len(sites)
        sites.append(sites[old])
    node.args = (*node.args[:-1], number[old])


def schedule(*, ahead: int = 1) -> Callable[[StepGraph], StepGraph]:
    """Starts each gather of a unit before the wait for the one ``ahead`` gathers earlier, also across passes.

    The first gathers of a backward pass, or of the next micro-batch, then overlap the end of the previous pass. Law: no value
    changes, nor what is sent; the ranks start gathers in the same order as before, and at most ``ahead`` more units are whole
    at once.

    Args:
        ahead: how many further gathers may be in flight.

    Raises:
        ValueError: ``ahead`` is negative.
    """
    if ahead < 0:
        raise ValueError(f"ahead={ahead} is a number of gathers, so at least 0")

    def run(graph: StepGraph) -> StepGraph:
        new = copied(graph)
        writes = GraphWrites.of(new.module.graph)
        gathers = new.gathers()
        for number, gather in enumerate(gathers[1:], 1):
            place = gathers[max(0, number - ahead)].wait
            if writes.order[gathers[number - 1].start] < writes.order[place]:  # else it would overtake that one
                _start_before(gather.start, place, writes)
        return finished(new)

    return run


def _start_before(start: fx.Node, place: fx.Node, writes: GraphWrites) -> None:
    """Moves the start of a gather, with its inputs, before a node, unless a kernel in between writes into them."""
    order = writes.order
    moved = [node for node in inputs_of(start) if order[node] > order[place]]
    if any(node.target is WAIT or written_by(node) for node in moved) or writes.any(moved, place, start):
        return
    for node in moved:
        place.prepend(node)
        order[node] = order[place] - 0.5
        node.meta[PHASE] = place.meta.get(PHASE)
