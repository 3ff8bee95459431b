"""Passes over a step's graph: pure functions from graph to graph that change no value."""

from collections.abc import Callable, Sequence

import attrs
from torch import fx

from .graph_collectives import START, WAIT, CallSite, site_of
from .graph_nodes import PHASE, UNIT, inputs_of, root_of, views_of, written_by
from .graph_record import StepGraph, UnitGather

__all__ = ["copied", "finished", "regather", "schedule"]


def copied(graph: StepGraph) -> StepGraph:
    """A copy, whose nodes and sites a pass may change."""
    new, known = fx.Graph(), dict[fx.Node, fx.Node]()
    new.output(new.graph_copy(graph.module.graph, known))
    return attrs.evolve(graph, module=fx.GraphModule(graph.module, new), sites=list(graph.sites))


def finished(graph: StepGraph) -> StepGraph:
    """The graph, checked and ready to be called."""
    graph.module.graph.eliminate_dead_code()  # what nobody reads keeps its inputs in memory
    graph.module.graph.lint()
    graph.module.recompile()
    return graph


def regather(*, keep: int = 2) -> Callable[[StepGraph], StepGraph]:
    """Gathers units of params again for the backward pass, so that they are freed after their forward.

    Law: no value changes, and beside the kept ones no unit is whole between its forward and its backward. Units that the
    backward pass does not use are not gathered again.

    Args:
        keep: how many units stay whole from the forward pass on: those that are gathered last, which the backward needs first.

    Raises:
        ValueError: ``keep`` is negative.
    """
    if keep < 0:
        raise ValueError(f"keep={keep} is a number of units, so at least 0")

    def run(graph: StepGraph) -> StepGraph:
        new = copied(graph)
        order = {node: place for place, node in enumerate(new.module.graph.nodes)}
        for gathers in _by_pass(new):
            for gather in gathers[: max(0, len(gathers) - keep)]:
                _gather_again(new, gather, order)
        return finished(new)

    return run


def _by_pass(graph: StepGraph) -> list[list[UnitGather]]:
    """The gathers of units, of each forward and each backward pass alone: micro-batches have several."""
    found, phase = list[list[UnitGather]]([[]]), None
    gathers = {gather.wait: gather for gather in graph.gathers()}
    for node in graph.module.graph.nodes:
        now = node.meta.get(PHASE)
        if now in ("forward", "backward") and now != phase:
            phase = now
            found.append([])
        if node in gathers:
            found[-1].append(gathers[node])
    return found


def _gather_again(graph: StepGraph, gather: UnitGather, order: dict[fx.Node, int]) -> None:
    views = views_of([node for node in gather.outputs if root_of(node) in gather.nodes])
    users = [user for view in views for user in view.users if user not in views and user not in gather.nodes]
    late = [user for user in users if user.op != "output" and user.meta.get(PHASE) == "backward"]
    if not late:
        return
    first = min(late, key=order.__getitem__)
    anew = {*gather.nodes, *views}
    if graph.notes.get("zero", {}).get("hpz"):
        anew -= {*inputs_of(next(node for node in gather.nodes if node.target is WAIT))}
    if _is_written([*anew], gather.wait, first):
        return
    nodes, again = graph.module.graph, dict[fx.Node, fx.Node]()
    number: dict[int, int] = {}  # an old site -> the new one
    unit = 1 + max(node.meta.get(UNIT, 0) for node in nodes.nodes)

    def copy(node: fx.Node) -> fx.Node:
        if node not in again:
            for before in node.all_input_nodes:
                if before in anew:
                    copy(before)
            made = again[node] = nodes.node_copy(node, lambda old: again.get(old, old))
            made.meta[PHASE] = "backward"
            if UNIT in made.meta:
                made.meta[UNIT] = unit
            if node.target in (START, WAIT):
                _renumber(graph.sites, made, number)
        return again[node]

    with nodes.inserting_before(first):
        for user in late:
            for view in [each for each in user.all_input_nodes if each in views]:
                user.replace_input_with(view, copy(view))


def _renumber(sites: list[CallSite], node: fx.Node, number: dict[int, int]) -> None:
    old = site_of(node)
    if old not in number:
        number[old] = len(sites)
        sites.append(sites[old])
    node.args = (*node.args[:-1], number[old])


def schedule(*, ahead: int = 1) -> Callable[[StepGraph], StepGraph]:
    """Starts each gather of a unit before the wait for the one ``ahead`` gathers earlier, in forward and backward alike.

    Law: no value changes, nor what is sent; the ranks start gathers in the order in which they did.

    Args:
        ahead: how many gathers may be under way beside the one that is waited for.

    Raises:
        ValueError: ``ahead`` is negative.
    """
    if ahead < 0:
        raise ValueError(f"ahead={ahead} is a number of gathers, so at least 0")

    def run(graph: StepGraph) -> StepGraph:
        new = copied(graph)
        for gathers in _by_pass(new):
            for place, gather in enumerate(gathers[1:], 1):
                _start_before(gather.start, gathers[max(0, place - ahead)].wait if ahead else gather.wait)
        return finished(new)

    return run


def _start_before(start: fx.Node, place: fx.Node) -> None:
    """Moves the start of a gather, and what it is computed from, before a node, unless a kernel between writes into that."""
    order = {node: n for n, node in enumerate(start.graph.nodes)}
    moved = [node for node in inputs_of(start) if order[node] > order[place]]
    if any(node.target is WAIT or written_by(node) for node in moved) or _is_written(moved, place, start):
        return
    for node in moved:
        place.prepend(node)


def _is_written(reading: Sequence[fx.Node], start: fx.Node, end: fx.Node) -> bool:
    """Whether a kernel from one node on until before another one writes into memory that nodes read."""
    read = {root_of(each) for node in reading for each in node.all_input_nodes}
    node = start
    while node is not end:
        if node not in reading and any(root_of(each) in read for each in written_by(node)):
            return True
        node = node.next
    return False


def _first_level(moved: Sequence[fx.Node]) -> list[fx.Node]:
    first = next(place for place, node in enumerate(moved) if node.target is START)
    return list(moved[: first + 1])
