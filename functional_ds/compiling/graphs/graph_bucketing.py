"""Joins small collectives on one group."""

import math
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import attrs
from torch import fx

from .graph_collectives import START, WAIT, CallSite, site_of
from .graph_nodes import UNIT, GraphWrites, JoinedUnits, is_view
from .graph_passes import copied, finished
from .graph_record import StepGraph


def bucketing(size: int = 1 << 20) -> Callable[[StepGraph], StepGraph]:
    """Joins consecutive collectives on a group, up to ``size`` bytes together.

    Law: no value changes; the ranks send equally many bytes in fewer calls, in the same order on all ranks. The joined call
    starts where its last part did, and is waited for before the first use of a result. It costs memory: all units of a bucket's
    gathers are whole at once. Run it last, after ``regather`` and ``schedule``. Sums over all ranks are not joined, since a
    backend may add the elements of a longer message in another order.

    Source: buckets of DistributedDataParallel (Li and others, 2020).

    Args:
        size: bytes that this rank sends in one call; larger collectives stay single.

    Raises:
        ValueError: ``size`` is below 1.
    """
    if size < 1:
        raise ValueError(f"size={size} is a number of bytes, so at least 1")

    def run(graph: StepGraph) -> StepGraph:
        new = copied(graph)
        writes = GraphWrites.of(new.module.graph)
        for bucket in [*_buckets(new, writes, size)]:
            _join(new, writes.order, bucket)
        return finished(new)

    return run


def _buckets(graph: StepGraph, writes: GraphWrites, size: int) -> Iterator[list[fx.Node]]:
    """Starts that can be one: the same call on the same group, with no other start on it in between."""
    now: dict[Any, list[fx.Node]] = {}
    for node in graph.module.graph.nodes:
        if node.target is START:
            site = graph.sites[site_of(node)]
            bucket = now.setdefault((site.group.name, site.group.ranks), [])
            if bucket and not _fits(graph, writes, bucket, node, size):
                yield [*bucket]
                bucket.clear()
            bucket.append(node)
    yield from now.values()


def _fits(graph: StepGraph, writes: GraphWrites, bucket: Sequence[fx.Node], node: fx.Node, size: int) -> bool:
    sites = [graph.sites[site_of(each)] for each in (bucket[0], node)]
    if not sites[0].call.collective.joins or _kind(sites[0], bucket[0]) != _kind(sites[1], node):
        return False
    if sum(map(_bytes, (*bucket, node))) > size:
        return False
    return all(_first_use(writes.order, _wait_of(each))[0] > writes.order[node] for each in bucket) and not any(
        writes.any([each], each, node) for each in bucket
    )


def _kind(site: CallSite, start: fx.Node) -> Any:
    given = {(x.meta["val"].dtype, x.meta["val"].device) for x in _inputs(start)}
    return site.call.collective, site.call.options, site.beside, site.early, given, len(given)


def _inputs(start: fx.Node) -> list[fx.Node]:
    given: Any = start.args[0]
    return [*given]


def _bytes(start: fx.Node) -> int:
    return sum(int(x.meta["val"].nbytes) for x in _inputs(start))


def _wait_of(start: fx.Node) -> fx.Node:
    return next(user for user in start.users if user.target is WAIT)


def _results(wait: fx.Node) -> tuple[list[fx.Node], list[fx.Node]]:
    """The items of a wait with all views of them, and the nodes that compute with those."""
    views, users = [*wait.users], list[fx.Node]()
    for each in views:
        for user in each.users:
            found = views if is_view(user) else users
            if user not in found:
                found.append(user)
    return views, users


def _first_use(order: dict[fx.Node, float], wait: fx.Node) -> tuple[float, fx.Node]:
    """Where a result is first used, and by which node; if unused, by the wait itself, at the end."""
    return min(((order[user], user) for user in _results(wait)[1]), key=lambda one: one[0], default=(math.inf, wait))


def _join(graph: StepGraph, order: dict[fx.Node, float], bucket: Sequence[fx.Node]) -> None:
    """Replaces several starts and waits by one of each."""
    if len(bucket) < 2:
        return
    nodes, last = graph.module.graph, bucket[-1]
    waits = [_wait_of(start) for start in bucket]
    sites = [graph.sites[site_of(start)] for start in bucket]
    graph.sites.append(attrs.evolve(sites[0], label="+".join(site.label for site in sites if site.label)))
    xs = [x for start in bucket for x in _inputs(start)]
    with nodes.inserting_before(last):
        joined = nodes.call_function(START, (xs, len(graph.sites) - 1))
    place = min((_first_use(order, wait) for wait in waits), key=lambda one: one[0])[1]
    views = dict.fromkeys(view for wait in waits for view in _results(wait)[0] if view not in wait.users)
    late = sorted((view for view in views if order[view] < order[place]), key=order.__getitem__)
    with nodes.inserting_before(place):
        wait = nodes.call_function(WAIT, (joined, xs, len(graph.sites) - 1))
        joined.meta.update(last.meta)
        wait.meta.update(waits[-1].meta)
        wait.meta["val"] = [value for each in waits for value in each.meta["val"]]
        order[joined], order[wait] = order[last], order[place] - 0.5
        _share_unit(graph, [joined, wait], bucket)
        number = 0
        for each in waits:
            for item in [*each.users]:
                place_of: Any = item.args[1]
                new = nodes.call_function(operator.getitem, (wait, number + place_of))
                new.meta.update(item.meta)
                order[new] = order[wait]
                item.replace_all_uses_with(new)
                nodes.erase_node(item)
            number += len(each.meta["val"])
    for view in late:
        place.prepend(view)
        order[view] = order[wait]
    for each in (*waits, *bucket):
        nodes.erase_node(each)


def _share_unit(graph: StepGraph, joined: Sequence[fx.Node], bucket: Sequence[fx.Node]) -> None:
    """Marks joined gathers, so that all their units count as whole."""
    units = tuple(start.meta[UNIT] for start in bucket if UNIT in start.meta)
    if units:
        both = JoinedUnits(units)
        for node in [*graph.module.graph.nodes]:
            if node.meta.get(UNIT) in units:
                node.meta[UNIT] = both
        for node in joined:
            node.meta[UNIT] = both
