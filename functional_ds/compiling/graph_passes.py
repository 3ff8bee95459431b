"""Passes over a step's graph: pure functions from graph to graph that change no value."""

from collections.abc import Callable, Sequence

import attrs
from torch import fx

from .graph_collectives import START, WAIT, CallSite, site_of
from .graph_nodes import PHASE, inputs_of, root_of, views_of, written_by
from .graph_record import StepGraph

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
        forward = [node for node in new.gathers() if node.meta.get(PHASE) != "backward"]
        for wait in forward[: len(forward) - keep] if keep else forward:
            _gather_again(new, wait, order)
        return finished(new)

    return run


def _gather_again(graph: StepGraph, wait: fx.Node, order: dict[fx.Node, int]) -> None:
    views = views_of(wait)
    late = [
        user
        for view in views
        for user in view.users
        if user not in views and user.op != "output" and user.meta.get(PHASE) == "backward"
    ]
    if not late:
        return
    nodes, again = graph.module.graph, dict[fx.Node, fx.Node]()
    number: dict[int, int] = {}  # an old site -> the new one

    def copy(node: fx.Node) -> fx.Node:
        if node not in again:
            for before in node.all_input_nodes:
                if before in wanted:
                    copy(before)
            made = again[node] = nodes.node_copy(node, lambda old: again.get(old, old))
            made.meta[PHASE] = "backward"
            if node.target in (START, WAIT):
                _renumber(graph.sites, made, number)
        return again[node]

    with nodes.inserting_before(min(late, key=order.__getitem__)):
        wanted = {*inputs_of(wait), *views}
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
        waits = new.gathers()
        for pass_ in (False, True):
            own = [wait for wait in waits if (wait.meta.get(PHASE) == "backward") == pass_]
            for place, wait in enumerate(own[1:], 1):
                _start_before(wait, own[max(0, place - ahead)] if ahead else wait)
        return finished(new)

    return run


def _start_before(wait: fx.Node, place: fx.Node) -> None:
    """Moves the start of a gather, and what it is computed from, before a node, unless something there may write into that."""
    moved = inputs_of(wait)[:-1]
    if any(node.target is WAIT for node in moved):  # a later level starts when the first has arrived
        moved = _first_level(moved)
    nodes = list(wait.graph.nodes)
    order = {node: n for n, node in enumerate(nodes)}
    read = {root_of(each) for node in moved for each in node.all_input_nodes}
    between = nodes[order[place] : order[wait]]
    if any(read & {root_of(each) for each in written_by(node)} for node in between if node not in moved):
        return
    for node in moved:
        if order[node] > order[place]:
            place.prepend(node)


def _first_level(moved: Sequence[fx.Node]) -> list[fx.Node]:
    first = next(place for place, node in enumerate(moved) if node.target is START)
    return list(moved[: first + 1])
