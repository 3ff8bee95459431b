"""Traces all of ``step(state, batch)`` into one graph: view, loss, backward, reductions, norm and update."""

from collections.abc import Callable, Sequence
from typing import Any

import attrs
import optree
import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import get_proxy_mode, make_fx

from functional_ds.base import tree
from functional_ds.base.marks import like_marked
from functional_ds.comm.record.recorder import recording
from functional_ds.step.state import State
from functional_ds.step.step import Step

from .graph_collectives import GraphRecorder, Site, carrying_out

__all__ = ["PHASE", "StepGraph", "UntraceableError", "trace"]

PHASE = "fds_phase"  # in a node's meta: the phase of the step that it belongs to
_PHASES = {
    "view": "view",
    "loss": "forward",
    "gradients": "backward",
    "reduce": "reduce",
    "norm": "norm",
    "finite": "finite",
    "sync_buffers": "sync_buffers",
    "update": "update",
}


class UntraceableError(RuntimeError):
    """A step cannot be one graph; the text says why."""


@attrs.frozen(eq=False)
class StepGraph:
    """A step as a graph: a function from the leaves of (state, batch) to those of (state, metrics).

    Nodes are ATen operators, and ``functional_ds::start`` and ``::wait`` for collectives. The update writes into the
    state's tensors, as a donating step does.

    Attributes:
        module: the graph, which can be called.
        sites: the collectives that its nodes name by number.
        takes: the structure of (state, batch).
        gives: the structure of (state, metrics).
        outputs: the results' leaves without values, with their marks.
        notes: what transforms say of the step for passes.
    """

    module: fx.GraphModule
    sites: list[Site]
    takes: optree.PyTreeSpec
    gives: optree.PyTreeSpec
    outputs: Sequence[Any]
    notes: dict[str, Any]

    def __call__(self, leaves: Sequence[Any]) -> tuple[State, dict[str, Tensor]]:
        """Runs the graph on the leaves of a state, which it writes into, and of a batch."""
        with torch.no_grad(), carrying_out(self.sites):
            found = self.module(*leaves)
        marked = [like_marked(x, model) if isinstance(x, Tensor) else x for x, model in zip(found, self.outputs, strict=True)]
        result: tuple[State, dict[str, Tensor]] = tree.unflatten(self.gives, marked)
        return result


def _tagged(phase: str, inner: Callable[..., Any], step: Step, *args: Any) -> Any:
    mode = get_proxy_mode()
    if mode is None:
        return inner(step, *args)
    graph: fx.Graph = mode.tracer.graph
    before = next(iter(reversed(graph.nodes)))
    try:
        return inner(step, *args)
    finally:
        node = before.next
        while node.op != "root":
            node.meta.setdefault(PHASE, _PHASES[phase])
            node = node.next


def _marking(phase: str) -> Callable[..., Any]:
    return lambda inner, step, *args: _tagged(phase, inner, step, *args)


def trace(step: Step, state: State, batch: Any) -> StepGraph:
    """The graph of a step that has run eagerly before; nothing is computed or sent, and the state is not donated.

    Raises:
        UntraceableError: with the reason.
    """
    leaves, takes = tree.flatten((state, batch))
    marked = step.wrapped("jit", **{phase: _marking(phase) for phase in _PHASES})
    recorder, gives, outputs = GraphRecorder(), list[optree.PyTreeSpec](), list[list[Any]]()

    def function(*given: Any) -> list[Any]:
        own = [like_marked(x, leaf) if isinstance(leaf, Tensor) else leaf for x, leaf in zip(given, leaves, strict=True)]
        found, spec = tree.flatten(Step.__call__(marked, *tree.unflatten(takes, own)))
        gives.append(spec)
        outputs.append(found)
        return [x.detach() if isinstance(x, Tensor) else x for x in found]

    try:
        with recording(recorder), carrying_out(recorder.sites):
            module = make_fx(function, tracing_mode="fake")(*leaves)
    except Exception as error:
        raise UntraceableError(_reason(error)) from error
    _tidy(module.graph)
    _refuse_late_draws(module.graph)
    module.recompile()
    return StepGraph(module, recorder.sites, takes, gives[0], outputs[0], recorder.notes)


def _tidy(graph: fx.Graph) -> None:
    """Without nodes that change nothing."""
    for node in list(graph.nodes):
        if node.target is torch.ops.aten.detach.default:
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)
    graph.eliminate_dead_code()
    graph.lint()


def _refuse_late_draws(graph: fx.Graph) -> None:
    """A backward pass that draws recomputes a forward pass, for which it sets generators back, and no node does that."""
    for node in graph.nodes:
        tags = getattr(node.target, "tags", ())
        if node.meta.get(PHASE) == "backward" and torch.Tag.nondeterministic_seeded in tags:
            raise UntraceableError(
                f"the backward pass draws random numbers anew ({node.target}), as recomputation does, and a graph does not set "
                "generators back: draw by a key, fds.Key, or leave rematerialisation out"
            )


def _reason(error: BaseException) -> str:
    text = str(error).strip().splitlines() or [""]
    name = type(error).__name__
    if "data-dependent" in str(error) or "DataDependent" in name or "get value out of a tracing tensor" in str(error):
        return (
            "the step reads a value on the host (by item(), bool(), tolist() or a shape that depends on values), and goes on as "
            f"that says: compute with the tensor instead, such as by torch.where ({name}: {text[0]})"
        )
    if "Please convert all Tensors to FakeTensors" in str(error):
        return (
            "the loss uses a tensor that is neither in the state nor in the batch; pass it in the batch, or register it as a "
            f"buffer of the module ({name}: {text[0]})"
        )
    return f"{name}: {text[0]}"
