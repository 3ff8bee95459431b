"""Custom graph passes: checks their results, and recomputes shapes."""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from functional_ds.base import tree
from functional_ds.base.torch_private import is_fake
from functional_ds.compiling.graphs.graph_collectives import START, WAIT, carrying_out, site_of
from functional_ds.compiling.graphs.graph_nodes import OPERATOR
from functional_ds.compiling.graphs.graph_record import StepGraph
from functional_ds.remat.operator_arguments import tensors_given

GraphPass = Callable[[StepGraph], StepGraph]


def pass_name(change: Any) -> str:
    """A pass's name for messages."""
    name = getattr(change, "__qualname__", None) or getattr(type(change), "__qualname__", "")
    return str(name).replace(".<locals>", "")


def apply_passes(graph: StepGraph, passes: Sequence[GraphPass]) -> StepGraph:
    """The graph after custom passes, with recomputed shapes and dtypes of all nodes.

    Raises:
        TypeError: a pass does not return a ``StepGraph``.
        ValueError: a pass returns the graph of another function, a graph that cannot run, or one that starts a collective twice
            or does not wait for it.
    """
    for change in passes:
        changed = change(graph)
        if not isinstance(changed, StepGraph):
            raise TypeError(
                f"passes: {pass_name(change)} returned {type(changed).__name__}, and a pass returns the StepGraph that runs: "
                "the one that it is given, or compiling.copied(graph) with other nodes"
            )
        try:
            changed.module.graph.lint()
        except RuntimeError as error:
            raise ValueError(f"passes: {pass_name(change)} returned a graph that cannot run: {error}") from error
        _refuse_other_function(changed, graph, pass_name(change))
        _refuse_loose_collectives(changed, pass_name(change))
        _revalue(changed)
        _refuse_other_results(changed, pass_name(change))
        changed.module.recompile()
        graph = changed
    return graph


def _refuse_other_function(changed: StepGraph, graph: StepGraph, name: str) -> None:
    if changed.takes != graph.takes or changed.gives != graph.gives:
        raise ValueError(f"passes: {name} returned the graph of another step: it takes or gives another structure")
    counts = [sum(node.op == "placeholder" for node in version.module.graph.nodes) for version in (changed, graph)]
    if counts[0] != counts[1]:
        raise ValueError(f"passes: {name} returned a graph of {counts[0]} inputs, and the step has {counts[1]}")


def _refuse_loose_collectives(changed: StepGraph, name: str) -> None:
    """Raises an error unless each collective is started once, and waited for once with its start's token."""
    starts, waits = Counter[int](), Counter[int]()
    for node in changed.module.graph.nodes:
        if node.target is START:
            starts[site_of(node)] += 1
        if node.target is WAIT:
            waits[site_of(node)] += 1
            token = node.args[0]
            if not (isinstance(token, fx.Node) and token.target is START and site_of(token) == site_of(node)):
                raise ValueError(f"passes: {name}: {node} waits with {token}, which is not a start of its collective")
    for site in {*starts, *waits}:
        if not 0 <= site < len(changed.sites):
            raise ValueError(f"passes: {name}: a node names collective {site}, and graph.sites has {len(changed.sites)}")
        if (starts[site], waits[site]) != (1, 1):
            does = changed.sites[site]
            raise ValueError(
                f"passes: {name}: the {does.name} of {does.label or 'no label'!r} (site {site}) is started {starts[site]} "
                f"times and waited for {waits[site]} times; a copy of its nodes needs a number of its own in graph.sites"
            )


def _revalue(graph: StepGraph) -> None:
    """Recomputes the nodes' values without numbers from their inputs', because a pass may have changed them."""
    nodes = graph.module.graph.nodes
    values = [x for node in nodes for x in tensors_given([node.meta.get("val")]) if is_fake(x)]
    if not values:
        return
    mode: Any = values[0].fake_mode  # type: ignore[attr-defined]

    def value_of(node: fx.Node) -> Any:
        if "val" in node.meta:
            return node.meta["val"]
        return mode.from_tensor(getattr(graph.module, str(node.target)))  # a constant that a pass has added

    with carrying_out(graph.sites), mode, torch.no_grad():
        for node in nodes:
            if node.op == "call_function" and (isinstance(node.target, OPERATOR) or node.users):
                args, kwargs = fx.map_arg((node.args, node.kwargs), value_of)
                node.meta["val"] = node.target(*args, **kwargs)


def _refuse_other_results(changed: StepGraph, name: str) -> None:
    output = next(node for node in reversed(changed.module.graph.nodes) if node.op == "output")
    given = output.args[0]
    paths = [path for path, _ in tree.named(tree.unflatten(changed.gives, changed.outputs))]
    if not isinstance(given, (list, tuple)) or len(given) != len(paths):
        raise ValueError(f"passes: {name} returned a graph of other results than the step's {len(paths)}")
    for node, model, path in zip(given, changed.outputs, paths, strict=True):
        value = node.meta.get("val") if isinstance(node, fx.Node) else node
        if not isinstance(model, Tensor) or not isinstance(value, Tensor):
            continue
        if (value.dtype, value.shape) != (model.dtype, model.shape):
            raise ValueError(
                f"passes: {name}: the result {path!r} ({node}) is {value.dtype}{list(value.shape)}, and the step's is "
                f"{model.dtype}{list(model.shape)}"
            )
