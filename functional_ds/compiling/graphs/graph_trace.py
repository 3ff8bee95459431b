"""Traces all of ``step(state, batch)`` into one graph: view, loss, backward, reductions, norm and update."""

import operator
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import attrs
import optree
import torch
from torch import Tensor, fx, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode

from functional_ds.base import tree
from functional_ds.base.marks import like_marked
from functional_ds.base.torch_private import FakeTensorMode, buffers_of, schema_of
from functional_ds.comm.record.graph_notes import GraphLeaf, Outside, TracedLeaf
from functional_ds.comm.record.group import Group
from functional_ds.comm.worlds.current import recording
from functional_ds.step.phases import Trait
from functional_ds.step.state.buffers import BUFFERS, Buffers
from functional_ds.step.state.state import State
from functional_ds.step.step import Step

from .eager_calls import RUN, RUN_BACKWARD, StepRecorder
from .graph_collectives import carrying_out
from .graph_nodes import PHASE, RECOMPUTED, tagged
from .graph_record import StepGraph
from .host_calls import carrier
from .known_indices import KnownIndices

_PHASES = {"loss": "forward", "gradients": "backward", **{name: name for name in ("view", "forward", "reduce", "update")}}
_OVER_RANKS = ("norm", "finite", "sync_buffers")


class UntraceableError(RuntimeError):
    """A step cannot be traced into one graph; the message says why."""


def _marking(tag: str) -> Callable[..., Any]:
    def run(inner: Callable[..., Any], step: Step, *args: Any) -> Any:
        with tagged(PHASE, tag):
            return inner(step, *args)

    return run


class _NoAddresses(TorchFunctionMode):
    """Raises an error for queries of addresses, as tensors without values all have address 0, and for reads past operators."""

    def __init__(self, known: KnownIndices) -> None:
        super().__init__()
        self.known = known

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.known.stale(func, args[0] if args else None):
            raise UntraceableError(f"the step reads a value on the host by {func.__name__}(), of memory that a graph may write")
        if func in (Tensor.data_ptr, Tensor.__dlpack__):
            raise UntraceableError(f"the step reads a tensor's address ({func.__name__}), which differs from step to step")
        return func(*args, **(kwargs or {}))


def trace(step: Step, state: State, batch: Any) -> StepGraph:
    """The graph of a step that has run eagerly before; nothing is computed or sent, and the state is not donated.

    Raises:
        UntraceableError: with the reason.
    """
    leaves, takes = tree.flatten((state, batch))
    marks: dict[str, Any] = {phase: _marking(tag) for phase, tag in _PHASES.items()}
    marked = step.wrapped("jit", traits=[Trait.HEEDS_SKIPS, Trait.MARKS], **marks)  # they change nothing
    over_ranks = {name: partial(_marking(name), step.over_ranks[name]) for name in _OVER_RANKS}
    marked = attrs.evolve(marked, over_ranks={**step.over_ranks, **over_ranks})
    recorder, gives, outputs = StepRecorder(), list[optree.PyTreeSpec](), list[list[Any]]()

    passing, known = _passing_buffers(state), KnownIndices()

    def function(*inputs: Any) -> list[Any]:
        given = inputs[: len(leaves)]
        recorder.notes.buffers = dict(zip(passing, inputs[len(leaves) :], strict=True))
        marked_leaves = [_as_traced(x, leaf) for x, leaf in zip(given, leaves, strict=True)]
        with known:
            results, spec = tree.flatten(Step.__call__(marked, *tree.unflatten(takes, marked_leaves)))
        results = [known.traced(x) for x in results]
        gives.append(spec)
        outputs.append(results)
        results = [x.token if isinstance(x, TracedLeaf) else x for x in results]
        return [x.detach() if isinstance(x, Tensor) else x for x in results]

    mode = FakeTensorMode()  # knows no symbols, so a value that is read on the host is an error
    held = [store[key] for store, key in passing.values()]
    inputs = _at_places([*(carrier(x) if isinstance(x, GraphLeaf) else x for x in leaves), *held])
    fakes = [mode.from_tensor(x) if isinstance(x, Tensor) else x for x in inputs]
    try:
        with _caches_as_before(state), recording(recorder), carrying_out(recorder.sites), mode, _NoAddresses(known):
            module = make_fx(function)(*fakes)
    except Exception as error:
        raise UntraceableError(_reason(error)) from error
    _refuse_attributes(tree.unflatten(gives[0], outputs[0])[0])
    _tidy(module.graph)
    _refuse_late_draws(module.graph)
    _refuse_recomputed_calls(module.graph)
    module.recompile()
    recorder.notes.buffers = {}
    return StepGraph(module, recorder.sites, takes, gives[0], outputs[0], recorder.notes, [*passing.values()])


def _as_traced(x: Any, leaf: Any) -> Any:
    """A graph's input as the leaf that it stands for."""
    if isinstance(leaf, GraphLeaf):
        return leaf.in_graph(x)
    return like_marked(x, leaf) if isinstance(leaf, Tensor) else leaf


def _at_places(leaves: Sequence[Any]) -> list[Any]:
    """The leaves, with aliases of a tensor that occurs again: each place is an input of the graph."""
    first = {id(leaf): place for place, leaf in reversed([*enumerate(leaves)])}
    return [
        leaf.detach().requires_grad_(leaf.requires_grad) if isinstance(leaf, Tensor) and first[id(leaf)] != place else leaf
        for place, leaf in enumerate(leaves)
    ]


def _passing_buffers(state: State) -> dict[tuple[Any, str], tuple[dict[str, Any], str]]:
    """The places of buffers that ``state_dict`` omits and no pass has written, by module and name."""
    slot, places = state.slots.get(BUFFERS), dict[tuple[Any, str], tuple[Any, str]]()
    if isinstance(slot, Buffers):
        for module, key in slot.known.keys.items():
            for name, _ in module.module.named_buffers():
                if name not in slot.values[key]:
                    path, _, last = name.rpartition(".")
                    places[module, name] = buffers_of(module.module.get_submodule(path)), last
    return places


def _refuse_attributes(state: State) -> None:
    """Raises an error for attributes that no tree can hold: they would keep their values from the trace."""
    held = state.slots.get(BUFFERS)
    names = [name for other in held.others.by_key.values() for name in other] if isinstance(held, Buffers) else []
    if names:
        raise UntraceableError(
            f"the forward pass sets the attribute {names[0]!r} of a module to what is not a tensor or number"
        )


def _tidy(graph: fx.Graph) -> None:
    """Removes nodes without effect."""
    for node in list(graph.nodes):
        if node.target is torch.ops.aten.detach.default:
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)
    graph.eliminate_dead_code()
    graph.lint()


def _refuse_late_draws(graph: fx.Graph) -> None:
    """Raises an error for a backward pass that draws: it recomputes a forward pass, and no node resets generators."""
    for node in graph.nodes:
        if node.meta.get(PHASE) == "backward" and _draws(node):
            raise UntraceableError(
                f"the backward pass draws random numbers anew ({node.target}), as recomputation does, and a graph does not set "
                "generators back: draw by a key, fds.Key, or leave rematerialisation out"
            )


def _refuse_recomputed_calls(graph: fx.Graph) -> None:
    """Raises an error for a recomputed call, and for a backward pass in two parts: it needs, once, what its forward saved."""
    for node in graph.nodes:
        token = node.args[0] if node.target is RUN_BACKWARD else None
        kept = token is None or (token.target is operator.getitem and token.args[0].target is RUN)
        if token is not None and sum(user.target is RUN_BACKWARD for user in token.users) > 1:
            raise UntraceableError("a schedule splits the backward pass of an exchange of experts' rows, which no graph does")
        if not kept or (node.target is RUN and RECOMPUTED in node.meta):
            raise UntraceableError("an exchange of experts' rows is recomputed or offloaded, which no graph holds")


def _draws(node: fx.Node) -> bool:
    """Whether a node draws from torch's generator; attention without dropout does not."""
    if torch.Tag.nondeterministic_seeded not in getattr(node.target, "tags", ()):
        return False
    names = [argument.name for argument in schema_of(node.target).arguments]
    given = dict(zip(names, node.args, strict=False)) | node.kwargs
    return "dropout_p" not in names or given.get("dropout_p", 0.0) != 0.0


def _reason(error: BaseException) -> str:
    if isinstance(error, UntraceableError):
        return str(error)
    text = str(error).strip().splitlines() or [""]
    name = type(error).__name__
    if "data-dependent" in str(error) or "DataDependent" in name or "get value out of a tracing tensor" in str(error):
        return (
            "the step reads a value on the host (by item(), bool(), tolist() or a shape that depends on values), and goes on "
            f"as that says: compute with the tensor instead, such as by torch.where ({name}: {text[0]})"
        )
    if "Please convert all Tensors to FakeTensors" in str(error):
        return (
            "the loss uses a tensor that is neither in the state nor in the batch; pass it in the batch, or register it as a "
            f"buffer of the module ({name}: {text[0]})"
        )
    return f"{name}: {text[0]}"


@contextmanager
def _caches_as_before(state: State) -> Iterator[None]:
    """A context in which a step may run without values, and which restores the state's caches.

    Ranks update these together, in eager steps: changes from one rank's trace would desynchronise them.
    """
    caches: dict[int, tuple[Any, dict[str, Any]]] = {}
    _look(state, caches, set())
    try:
        yield
    finally:
        for cache, fields in caches.values():
            for name, value in fields.items():
                setattr(cache, name, value)


def _look(value: Any, caches: dict[int, tuple[Any, dict[str, Any]]], seen: set[int]) -> None:
    if id(value) in seen or isinstance(value, (Tensor, nn.Module, Group, Outside)):
        return
    seen.add(id(value))
    if attrs.has(type(value)):
        fields = {field.name: getattr(value, field.name) for field in attrs.fields(type(value))}
        if not _is_frozen(type(value)):
            caches[id(value)] = (
                value,
                {name: held.copy() if type(held) in (dict, list, set) else held for name, held in fields.items()},
            )
        for held in fields.values():
            _look(held, caches, seen)
    elif type(value) in (dict, list, tuple):
        for held in value.values() if isinstance(value, dict) else value:
            _look(held, caches, seen)


def _is_frozen(cls: type) -> bool:
    return getattr(cls.__setattr__, "__name__", "") == "_frozen_setattrs"
