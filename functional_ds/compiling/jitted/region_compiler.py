"""Regions of graphs (the kernels between collectives, writes and draws) as functions compiled by a torch backend."""

import functools
import operator
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import attrs
import torch
from torch import Tensor, fx

from functional_ds.base.torch_private import FakeTensorMode, schema_of
from functional_ds.compiling.compile_log import BlockClass, Compilation
from functional_ds.compiling.graphs.eager_calls import RUN, RUN_BACKWARD
from functional_ds.compiling.graphs.graph_collectives import START, WAIT
from functional_ds.compiling.graphs.graph_nodes import OPERATOR, PHASE, RECOMPUTED, base_of, is_view, root_of, written_by
from functional_ds.compiling.graphs.graph_record import StepGraph
from functional_ds.compiling.torch_compiler import compiler_backend

from .graph_code import GraphCode, without_autocast

_FEWEST = 2  # kernels that are worth a call of compiled code
_aten = torch.ops.aten
_WRITES_UNDECLARED = {_aten.native_batch_norm.default, _aten.cudnn_batch_norm.default, _aten.miopen_batch_norm.default}


@attrs.define(eq=False)
class GraphRegion:
    """Kernels that write into nothing, as one function of tensors.

    Attributes:
        module: the kernels, as a graph.
        inputs: the tensors that it takes, without values.
        outputs: those that it returns; each has separate memory.
        phase: in which it begins.
        name: the phase and the region's number in its graph.
    """

    module: fx.GraphModule
    inputs: Sequence[Tensor]
    outputs: Sequence[Tensor]
    phase: str
    name: str

    @property
    def kernels(self) -> int:
        """How many it has."""
        return sum(_is_kernel(node) and not _is_constant(node) for node in self.module.graph.nodes)

    @property
    def key(self) -> str:
        """Equal for regions that compute the same from tensors of the same shapes, whichever blocks they belong to."""
        numbers: dict[fx.Node, int] = {}
        lines = []
        for node in self.module.graph.nodes:
            args, kwargs = (fx.map_arg(operands, lambda used: f"%{numbers[used]}") for operands in (node.args, node.kwargs))
            numbers[node] = len(numbers)
            lines.append(f"{node.op} {'' if node.op == 'placeholder' else node.target} {args} {kwargs}")
        return "\n".join([*lines, *map(_shown, (*self.inputs, *self.outputs))])


def _shown(value: Tensor) -> str:
    return f"{value.dtype} {tuple(value.shape)} {value.stride()} {value.storage_offset()} {value.device}"


def in_regions(graph: fx.Graph, function_of: Callable[[GraphRegion], Callable[..., Any]]) -> tuple[fx.Graph, list[GraphRegion]]:
    """The graph with regions as calls of functions, and the regions in order.

    Law: collectives, writes, draws and calls of non-operators keep their order; each kernel runs between the same two of them.
    Each recomputation begins a region, so that no compiler merges it with what it recomputes. Results of a region have separate
    memory, and what is written elsewhere is never computed in one. So in-place writes stay in place, and no more gathered units
    are whole at a collective than in the graph.

    Args:
        graph: stays unchanged.
        function_of: the function for a region; it returns a tuple or list of the region's outputs.
    """
    builder = _Builder(graph, function_of)
    for node in graph.nodes:
        builder.add(node)
    builder.graph.eliminate_dead_code()  # views that regions make inside
    builder.graph.lint()
    return builder.graph, builder.regions


def _is_kernel(node: fx.Node) -> bool:
    """Whether a node only computes."""
    if node.op != "call_function" or not isinstance(node.target, OPERATOR) or node.target in (START, WAIT, RUN, RUN_BACKWARD):
        return False
    seeded = torch.Tag.nondeterministic_seeded in node.target.tags
    return not (seeded or schema_of(node.target).is_mutable or node.target in _WRITES_UNDECLARED or is_view(node))


def _is_constant(node: fx.Node) -> bool:
    """Whether a node makes a tensor from numbers, so that it can be duplicated."""
    return _is_kernel(node) and not node.all_input_nodes


@attrs.define(eq=False)
class _Builder:
    """Builds the graph of regions. ``_segment``: the nodes since the last one that cannot move."""

    old: fx.Graph
    function_of: Callable[[GraphRegion], Callable[..., Any]]
    graph: fx.Graph = attrs.field(factory=fx.Graph)
    regions: list[GraphRegion] = attrs.field(factory=list)
    _now: dict[fx.Node, fx.Node] = attrs.field(factory=dict)
    _segment: dict[fx.Node, None] = attrs.field(factory=dict)
    _again: int = 0  # which recomputation it has come to
    _written: set[fx.Node] = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        self._written = {root_of(target) for node in self.old.nodes for target in written_by(node)}

    def add(self, node: fx.Node) -> None:
        """The next node of the old graph."""
        again = node.meta.get(RECOMPUTED, self._again)
        if again != self._again:
            self._end_segment()
            self._again = again
        if is_view(node) or _is_constant(node) or (_is_kernel(node) and node not in self._written):
            self._segment[node] = None
            return
        if node.op not in ("placeholder", "get_attr"):
            self._end_segment()
        self._get(node)

    def _get(self, node: fx.Node) -> fx.Node:
        """The node in the new graph."""
        if node not in self._now:
            for operand in node.all_input_nodes:
                self._get(operand)
            self._now[node] = self.graph.node_copy(node, self._now.__getitem__)
        return self._now[node]

    def _end_segment(self) -> None:
        segment, self._segment = self._segment, {}
        inside = {node: None for node in segment if _is_kernel(node) and not _is_constant(node)}
        if len(inside) >= _FEWEST:
            self._call(inside)
        for node in segment:
            if node not in inside and any(user not in segment for user in node.users):
                self._get(node)
        for node in inside:
            if len(inside) < _FEWEST:
                self._get(node)

    def _call(self, inside: dict[fx.Node, None]) -> None:
        """Replaces kernels by one node, and items for those of their results that others use."""
        phase = next(iter(inside)).meta.get(PHASE)
        order, bases = self._needed(inside)
        part, copies = fx.Graph(), dict[fx.Node, fx.Node]()
        for place, base in enumerate(bases):
            copies[base] = part.placeholder(f"x{place}")
        for node in order:
            copies[node] = part.node_copy(node, copies.__getitem__)
        results = [node for node in _values(inside) if _is_used(node, inside)]
        for node in results:
            if node not in copies:  # one of several results, which no kernel inside reads
                copies[node] = part.node_copy(node, copies.__getitem__)
        part.output([copies[node] for node in results])
        module = fx.GraphModule(torch.nn.Module(), part)
        inputs, outputs = ([node.meta["val"] for node in nodes] for nodes in (bases, results))
        self.regions.append(GraphRegion(module, inputs, outputs, phase or "step", f"{phase or 'step'} {len(self.regions)}"))
        function, given = self.function_of(self.regions[-1]), tuple(self._get(base) for base in bases)
        call = self.graph.create_node("call_function", function, given, name=f"region_{len(self.regions)}")
        call.meta.update({PHASE: phase, "val": outputs})
        for place, node in enumerate(results):
            self._now[node] = self.graph.call_function(operator.getitem, (call, place))
            self._now[node].meta.update(node.meta)

    def _needed(self, inside: dict[fx.Node, None]) -> tuple[list[fx.Node], list[fx.Node]]:
        """The kernels with the views, items and constants that they use, in order; and what all this is computed from."""
        order, bases, todo = dict[fx.Node, None](), dict[fx.Node, None](), list(reversed(inside))
        while todo:
            node = todo[-1]
            waiting = [] if node in order or node in bases or not self._is_part(node, inside) else node.all_input_nodes
            waiting = [operand for operand in waiting if operand not in order and operand not in bases]
            todo.extend(reversed(waiting))
            if not waiting:
                todo.pop()
                (order if self._is_part(node, inside) else bases).setdefault(node)
        return list(order), list(bases)

    def _is_part(self, node: fx.Node, inside: dict[fx.Node, None]) -> bool:
        """Whether a region with these kernels makes the node itself."""
        if node in inside:
            return True
        if is_view(node):  # also of nodes outside, except items of a collective's or another region's results
            return base_of(node) is not node or node.all_input_nodes[0] in inside
        return _is_constant(node) and node not in self._written


def _values(inside: dict[fx.Node, None]) -> Iterator[fx.Node]:
    """The tensors that kernels compute: themselves, or the items of their results."""
    for node in inside:
        if isinstance(node.meta.get("val"), Tensor):
            yield node
        else:
            yield from (user for user in node.users if user.target is operator.getitem)


def _is_used(node: fx.Node, inside: dict[fx.Node, None]) -> bool:
    """Whether something outside needs the node's memory."""
    waiting = list(node.users)
    for user in waiting:
        if user not in inside:
            if not is_view(user):
                return True
            waiting.extend(user.users)
    return False


_BACKENDS = ("fx", "aot_eager", "inductor")
_COMPILING = threading.Lock()  # torch's compiler is at work in one thread at a time


class RegionError(RuntimeError):
    """A region that a back end cannot compile."""


def check_backend(name: Any) -> None:
    """Raises an error for an unknown backend, or one that needs something missing on this machine.

    Raises:
        ValueError: with what to do instead.
    """
    if name not in _BACKENDS:
        raise ValueError(f"jit: there is no back end {name!r}; there are {', '.join(map(repr, _BACKENDS))}")
    if name == "inductor":
        compiler = os.environ.get("CXX") or {"darwin": "clang++", "win32": "cl"}.get(sys.platform, "g++")
        if shutil.which(compiler) is None:
            raise ValueError(
                f"jit: backend='inductor' writes C++ code, and its compiler {compiler!r} is not here: install it, name another "
                "one in the variable CXX, or use backend='fx', which needs none and gives the eager step's bits"
            )


@attrs.frozen
class _RegionKey:
    """Equal for regions that share one compilation."""

    backend: str
    text: str
    region: GraphRegion = attrs.field(eq=False)


@attrs.define(eq=False)
class _RegionFunction:
    """A region's function. Its first call checks that results have the trace's layout, in separate memory.

    Attributes:
        run: what the backend returned.
        outputs: the results as in the trace.
        compilations: one, for the first region that it was for.
    """

    run: Callable[..., Sequence[Tensor]]
    outputs: Sequence[Tensor]
    compilations: list[Compilation]
    _mended: list[int] | None = None

    def __call__(self, *inputs: Tensor) -> Sequence[Tensor]:
        outputs = self.run(*inputs)
        if self._mended is None:
            self._mended = self._looked_at(inputs, outputs)
        return outputs if not self._mended else [self._as_traced(place, x) for place, x in enumerate(outputs)]

    def _looked_at(self, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> list[int]:
        """The results that are views of others or of inputs, or laid out otherwise."""
        places, seen = list[int](), {x.untyped_storage().data_ptr() for x in inputs}
        for place, (x, model) in enumerate(zip(outputs, self.outputs, strict=True)):
            if (x.dtype, x.shape, x.device) != (model.dtype, model.shape, model.device):
                raise RegionError(
                    f"a result is a {x.dtype}{list(x.shape)} on {x.device}, and not {model.dtype}{list(model.shape)}"
                )
            memory = x.untyped_storage().data_ptr()
            if (memory in seen and x.numel()) or x.stride() != model.stride():
                places.append(place)
            seen.add(memory)
        return places

    def _as_traced(self, place: int, x: Tensor) -> Tensor:
        if place not in (self._mended or ()):
            return x
        model = self.outputs[place]
        return torch.empty_strided(model.shape, model.stride(), dtype=x.dtype, device=x.device).copy_(x)


@functools.lru_cache(maxsize=512)
def _compiled(key: _RegionKey) -> _RegionFunction:
    region, began = key.region, time.perf_counter()
    with FakeTensorMode():
        inputs = [torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device) for x in region.inputs]
    try:
        with torch.no_grad(), without_autocast():
            options = {"emulate_precision_casts": True} if key.backend == "inductor" else None  # so fp16 overflows where it did
            run = compiler_backend(key.backend, mode=None, options=options, dynamic=False)(region.module, inputs)
    except Exception as error:
        lines = str(error).strip().splitlines() or [""]
        raise RegionError(f"{key.backend} cannot compile a region of {region.kernels} kernels: {lines[0][:300]}") from error
    seconds = time.perf_counter() - began
    return _RegionFunction(run, region.outputs, [Compilation(region.name, 1, f"{region.kernels} kernels", seconds)])


@attrs.define(eq=False, init=False)
class RegionCode(GraphCode):
    """A graph whose regions are compiled. Equal regions share one function, on all ranks of the process.

    Args:
        graph: as its passes have left it.
        backend: "aot_eager" or "inductor".

    Raises:
        RegionError: the back end cannot compile a region.
    """

    regions: Sequence[GraphRegion]
    functions: Sequence[_RegionFunction]

    def __init__(self, graph: StepGraph, backend: str) -> None:
        functions: list[_RegionFunction] = []

        def function_of(region: GraphRegion) -> _RegionFunction:
            functions.append(_compiled(_RegionKey(backend, region.key, region)))
            return functions[-1]

        with _COMPILING:
            split, regions = in_regions(graph.module.graph, function_of)
        self.__attrs_init__(split, graph.module, graph.sites, regions, functions)

    @property
    def rows(self) -> list[BlockClass]:
        """The regions by the phase that they begin in, and what was compiled for them."""
        by_phase: dict[str, BlockClass] = {}
        for region, function in zip(self.regions, self.functions, strict=True):
            row = by_phase.setdefault(region.phase, BlockClass(f"regions of {region.phase}"))
            row.paths = (*row.paths, region.name)
            row.calls += self.runs
            row.follow(function.compilations)
        return list(by_phase.values())
