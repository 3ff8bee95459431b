"""Joins small collectives on one group: by size, or by a rule of your own."""

import math
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import attrs
from torch import fx

from .graph_collectives import START, WAIT
from .graph_nodes import UNIT, GraphWrites, JoinedUnits, is_view
from .graph_passes import copied, finished
from .graph_record import CollectiveCall, StepGraph


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

    def fits(calls: Sequence[CollectiveCall]) -> bool:
        return calls[0].site.call.collective.joins and sum(call.bytes for call in calls) <= size

    return merge(fits)


def merge(fits: Callable[[Sequence[CollectiveCall]], bool]) -> Callable[[StepGraph], StepGraph]:
    """Joins collectives that follow each other on a group, as long as ``fits`` says so: a pass for buckets of your own.

    Law: no value changes, if the backend adds the elements of a longer message in the same order; the ranks send equally many
    bytes in fewer calls. Collectives of other options, dtypes or devices are never joined, nor where a result is used, or an
    input is written, before the last one starts. The joined call is as in ``bucketing``.

    Args:
        fits: whether calls, in the order in which they start, may be one; ``fits(calls)`` must be equal on all ranks.

    >>> import torch, functional_ds as fds
    >>> from functional_ds import comm, transforms as T
    >>> def calls(*passes):
    ...     step = T.zero(0, unit_of=fds.units.by_leaf)(
    ...         fds.train_step(lambda p, x: ((x @ p["w"]) + p["b"]).sum(), fds.sgd(1.0))
    ...     )
    ...     step = fds.jit(step, passes=passes)
    ...     state, x = step.init({"w": torch.ones(2, 2), "b": torch.ones(2)}), torch.ones(3, 2)
    ...     state, _ = step(state, x)
    ...     return [call.bytes for call in step.graph(state, x).collectives("all_reduce") if call.site.early]
    >>> comm.simulate(calls, world_size=2)[0], comm.simulate(calls, merge(lambda calls: len(calls) <= 2), world_size=2)[0]
    ([8, 16], [24])
    """

    def run(graph: StepGraph) -> StepGraph:
        new = copied(graph)
        writes = GraphWrites.of(new.module.graph)
        for bucket in [*_buckets(new, writes, fits)]:
            _join(new, writes.order, bucket)
        return finished(new)

    return run


def _buckets(
    graph: StepGraph, writes: GraphWrites, fits: Callable[[Sequence[CollectiveCall]], bool]
) -> Iterator[list[CollectiveCall]]:
    """Calls that can be one: the same collective on the same group, with no other start on it in between."""
    now: dict[Any, list[CollectiveCall]] = {}
    for call in graph.collectives():
        bucket = now.setdefault((call.site.group.name, call.site.group.ranks), [])
        if bucket and not (_alike(writes, bucket, call) and fits([*bucket, call])):
            yield [*bucket]
            bucket.clear()
        bucket.append(call)
    yield from now.values()


def _alike(writes: GraphWrites, bucket: Sequence[CollectiveCall], call: CollectiveCall) -> bool:
    """Whether calls are of one kind, and what they take and give is the same if all start with the last."""
    if _kind(bucket[0]) != _kind(call):
        return False
    return all(_first_use(writes.order, member.wait)[0] > writes.order[call.start] for member in bucket) and not any(
        writes.any([member.start], member.start, call.start) for member in bucket
    )


def _kind(call: CollectiveCall) -> Any:
    given, site = {(x.meta["val"].dtype, x.meta["val"].device) for x in call.inputs}, call.site
    return site.call.collective, site.call.options, site.beside, site.early, given, len(given)


def _results(wait: fx.Node) -> tuple[list[fx.Node], list[fx.Node]]:
    """The items of a wait with all views of them, and the nodes that compute with those."""
    views, users = [*wait.users], list[fx.Node]()
    for view in views:
        for user in view.users:
            nodes = views if is_view(user) else users
            if user not in nodes:
                nodes.append(user)
    return views, users


def _first_use(order: dict[fx.Node, float], wait: fx.Node) -> tuple[float, fx.Node]:
    """Where a result is first used, and by which node; if unused, by the wait itself, at the end."""
    return min(((order[user], user) for user in _results(wait)[1]), key=lambda one: one[0], default=(math.inf, wait))


def _join(graph: StepGraph, order: dict[fx.Node, float], bucket: Sequence[CollectiveCall]) -> None:
    """Replaces several starts and waits by one of each."""
    if len(bucket) < 2:
        return
    nodes, last = graph.module.graph, bucket[-1].start
    starts, waits, sites = ([getattr(call, name) for call in bucket] for name in ("start", "wait", "site"))
    graph.sites.append(attrs.evolve(sites[0], label="+".join(site.label for site in sites if site.label)))
    xs = [x for call in bucket for x in call.inputs]
    with nodes.inserting_before(last):
        joined = nodes.call_function(START, (xs, len(graph.sites) - 1))
    place = min((_first_use(order, wait) for wait in waits), key=lambda one: one[0])[1]
    views = dict.fromkeys(view for wait in waits for view in _results(wait)[0] if view not in wait.users)
    late = sorted((view for view in views if order[view] < order[place]), key=order.__getitem__)
    with nodes.inserting_before(place):
        wait = nodes.call_function(WAIT, (joined, xs, len(graph.sites) - 1))
        joined.meta.update(last.meta)
        wait.meta.update(waits[-1].meta)
        wait.meta["val"] = [value for old_wait in waits for value in old_wait.meta["val"]]
        order[joined], order[wait] = order[last], order[place] - 0.5
        _share_unit(graph, [joined, wait], starts)
        number = 0
        for old_wait in waits:
            for item in [*old_wait.users]:
                place_of: Any = item.args[1]
                new = nodes.call_function(operator.getitem, (wait, number + place_of))
                new.meta.update(item.meta)
                order[new] = order[wait]
                item.replace_all_uses_with(new)
                nodes.erase_node(item)
            number += len(old_wait.meta["val"])
    for view in late:
        place.prepend(view)
        order[view] = order[wait]
    for old_wait in (*waits, *starts):
        nodes.erase_node(old_wait)


def _share_unit(graph: StepGraph, joined: Sequence[fx.Node], starts: Sequence[fx.Node]) -> None:
    """Marks joined gathers, so that all their units count as whole."""
    units = tuple(start.meta[UNIT] for start in starts if UNIT in start.meta)
    if units:
        both = JoinedUnits(units)
        for node in [*graph.module.graph.nodes]:
            if node.meta.get(UNIT) in units:
                node.meta[UNIT] = both
        for node in joined:
            node.meta[UNIT] = both
