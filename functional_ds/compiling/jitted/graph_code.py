"""Graphs as Python functions with as little between kernels as can be: no lookups, and one view where a graph has a chain."""

import operator
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any

import attrs
import torch
from torch import Tensor, fx, nn

from functional_ds.base.torch_private import quick_call_of
from functional_ds.compiling.graphs.eager_calls import RUN, RUN_BACKWARD
from functional_ds.compiling.graphs.graph_collectives import START, WAIT, CallSite, results_of, site_of, starter_of
from functional_ds.compiling.graphs.graph_nodes import OPERATOR, base_of, is_view

__all__ = ["GraphCode", "without_autocast"]

_QUICK: dict[Any, Callable[..., Any]] = {  # the same operators by torch's own parser of arguments, which is faster
    torch.ops.aten.add.Tensor: torch.add,
    torch.ops.aten.addmm.default: torch.addmm,
    torch.ops.aten.bmm.default: torch.bmm,
    torch.ops.aten.div.Tensor: torch.div,
    torch.ops.aten.mm.default: torch.mm,
    torch.ops.aten.mul.Tensor: torch.mul,
    torch.ops.aten.sub.Tensor: torch.sub,
    torch.ops.aten.tanh.default: torch.tanh,
}
_WRITTEN_OUT = (int, bool, str, type(None))


@attrs.define(eq=False)
class GraphCode:
    """A graph as a function of its inputs.

    Law: it gives what the graph gives, bit for bit, by the same kernels in the same order, and holds no tensor longer. Views
    of a tensor are made directly from it by ``as_strided``, equal ones once. For that the tensor must lie in memory as the
    trace has said, so the first run goes node by node and looks; views of tensors that lie otherwise stay as they are.

    Attributes:
        graph: of operators, collectives and calls of other functions.
        owner: has the attributes and modules that nodes name.
        sites: the collectives that nodes name by number.
        runs: how often it ran.
    """

    graph: fx.Graph
    owner: nn.Module
    sites: Sequence[CallSite]
    runs: int = attrs.field(default=0, init=False)
    _run: Callable[[list[Any]], list[Any]] | None = attrs.field(default=None, init=False)

    def __call__(self, leaves: Sequence[Any]) -> list[Any]:
        """Runs the graph."""
        self.runs += 1
        with torch.no_grad(), without_autocast():
            if self._run is None:
                found, plain = self._first(leaves)
                self._run = self._function(plain)
                return found
            return self._run([*leaves])

    # -- the first run -------------------------------------------------------------------------------------------------

    def _first(self, leaves: Sequence[Any]) -> tuple[list[Any], set[fx.Node]]:
        """What a run node by node gives; the nodes whose views do not lie in memory as in the trace."""
        given, values, plain = iter(leaves), dict[fx.Node, Any](), set[fx.Node]()
        found: list[Any] = []
        last = _last_uses(self.graph)
        for node in self.graph.nodes:
            if node.op == "output":
                results: Any = fx.map_arg(node.args[0], values.__getitem__)
                found = [*results]
                break
            values[node] = next(given) if node.op == "placeholder" else self._value(node, values)
            base = base_of(node)
            if base is not node and not _is_as_traced(node, values[node], base, values[base]):
                plain.add(base)
            for each in last.get(node, ()):
                del values[each]
        return found, plain

    def _value(self, node: fx.Node, values: dict[fx.Node, Any]) -> Any:
        if node.op == "get_attr":
            return _attribute(self.owner, str(node.target))
        args: Any = fx.map_arg(node.args, values.__getitem__)
        kwargs: Any = fx.map_arg(node.kwargs, values.__getitem__)
        if node.target is START:
            return starter_of(self.sites[site_of(node)])([*args[0]])
        if node.target is WAIT:
            return results_of(args[0], [*args[1]])
        if node.target in (RUN, RUN_BACKWARD):
            return self._inner(node)(*args[:-1])
        return self._called(node)(*args, **kwargs)

    def _inner(self, node: fx.Node) -> Callable[..., Any]:
        site: Any = self.sites[int(str(node.args[-1]))]
        return site.run if node.target is RUN else site.run_backward  # type: ignore[no-any-return]

    def _called(self, node: fx.Node) -> Callable[..., Any]:
        if node.op == "call_module":
            return self.owner.get_submodule(str(node.target))
        if node.op == "call_method":
            name = str(node.target)
            return lambda this, *args, **kwargs: getattr(this, name)(*args, **kwargs)
        called: Any = node.target
        return called  # type: ignore[no-any-return]

    # -- its function --------------------------------------------------------------------------------------------------

    def _function(self, plain: set[fx.Node]) -> Callable[[list[Any]], list[Any]]:
        writer = _Writer(plain)
        inputs: list[str] = []
        for node in self.graph.nodes:
            if node.op == "placeholder":
                inputs.append(writer.name_of(node))
            elif node.op == "output":
                writer.line("return {}", None, [*node.args[0]])
            elif not writer.is_direct(node):
                self._write(writer, node)
        source = writer.source(inputs)
        exec(compile(source, "<fds.jit>", "exec"), writer.names)  # names, numbers and our own words
        run: Callable[[list[Any]], list[Any]] = writer.names["run"]
        return run

    def _write(self, writer: "_Writer", node: fx.Node) -> None:
        args: list[Any] = [*node.args]
        if node.op == "get_attr":
            writer.line(writer.constant(_attribute(self.owner, str(node.target))), node)
        elif node.target is START:
            writer.line(f"{writer.constant(starter_of(self.sites[site_of(node)]))}({{}})", node, [*args[0]])
        elif node.target is WAIT:
            writer.line(f"{writer.constant(results_of)}({{}}, {{}})", node, args[0], [*args[1]])
        elif node.target in (RUN, RUN_BACKWARD):
            *args, _ = args
            writer.line(f"{writer.constant(self._inner(node))}({', '.join('{}' for _ in args)})", node, *args)
        elif node.target is operator.getitem:
            writer.line("{}[{}]", node, *args)
        else:
            named = ", ".join(f"{name}={{}}" for name in node.kwargs)
            form = ", ".join([*("{}" for _ in args), *filter(None, [named])])
            writer.line(f"{writer.constant(_quick(node) or self._called(node))}({form})", node, *args, *node.kwargs.values())


def without_autocast() -> AbstractContextManager[Any]:
    """Operators within the block compute in the types of their inputs: casts are nodes."""
    kinds = [kind for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind)]
    if not kinds:
        return nullcontext()
    stack = ExitStack()
    for kind in kinds:
        stack.enter_context(torch.autocast(kind, enabled=False))
    return stack


def _attribute(owner: nn.Module, path: str) -> Any:
    found: Any = owner
    for name in path.split("."):
        found = getattr(found, name)
    return found


def _quick(node: fx.Node) -> Callable[..., Any] | None:
    """A faster function for the same operator."""
    if node.op != "call_function" or not isinstance(node.target, OPERATOR):
        return None
    by_torch = _QUICK.get(node.target)
    return by_torch if by_torch is not None and not node.kwargs and _takes_tensors(node) else quick_call_of(node.target)


def _takes_tensors(node: fx.Node) -> bool:
    return all(isinstance(each, fx.Node) and isinstance(each.meta.get("val"), Tensor) for each in node.args)


def _last_uses(graph: fx.Graph) -> dict[fx.Node, list[fx.Node]]:
    """For each node what is not needed after it; tensors are kept for the views of them that are looked at."""
    ends: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        for used in (node, base_of(node), *node.all_input_nodes):
            ends[used] = node
    found: dict[fx.Node, list[fx.Node]] = {}
    for used, end in ends.items():
        found.setdefault(end, []).append(used)
    return found


def _layout(value: Tensor) -> tuple[Any, ...]:
    return value.dtype, tuple(value.shape), value.stride()


def _is_as_traced(node: fx.Node, value: Any, base: fx.Node, held: Any) -> bool:
    """Whether a view and its base lie in memory as in the trace."""
    model, root = node.meta.get("val"), base.meta.get("val")
    if not (isinstance(model, Tensor) and isinstance(root, Tensor) and isinstance(value, Tensor) and isinstance(held, Tensor)):
        return True  # a list of views
    if held.layout is not torch.strided or (_layout(value), _layout(held)) != (_layout(model), _layout(root)):
        return False
    shared = value.untyped_storage().data_ptr() == held.untyped_storage().data_ptr()
    return shared and value.storage_offset() - held.storage_offset() == model.storage_offset() - root.storage_offset()


@attrs.define(eq=False)
class _Line:
    text: str
    makes: str | None
    uses: tuple[str, ...]


@attrs.define(eq=False)
class _Writer:
    """The lines of a function.

    Attributes:
        plain: the nodes whose views are made as the graph says.
        names: what the function's constants stand for.
    """

    plain: set[fx.Node]
    names: dict[str, Any] = attrs.field(factory=dict)
    _lines: list[_Line] = attrs.field(factory=list)
    _variables: dict[fx.Node, str] = attrs.field(factory=dict)
    _constants: dict[int, str] = attrs.field(factory=dict)
    _views: dict[Any, str] = attrs.field(factory=dict)
    _count: int = 0

    def name_of(self, node: fx.Node | None) -> str:
        """A node's variable; a new one for None."""
        if node is None or node not in self._variables:
            self._count += 1
            name = f"v{self._count}"
            if node is None:
                return name
            self._variables[node] = name
        return self._variables[node]

    def constant(self, value: Any) -> str:
        """The name of a value."""
        if id(value) not in self._constants:
            name = self._constants[id(value)] = f"c{len(self._constants)}"
            self.names[name] = value  # which also keeps its id its own
        return self._constants[id(value)]

    def is_direct(self, node: fx.Node) -> bool:
        """Whether a node is a view that is made directly from its base, where it is used."""
        base = base_of(node)
        if base is node or base in self.plain or not is_view(node):
            return False
        value, held = node.meta.get("val"), base.meta.get("val")
        views = value if isinstance(value, (list, tuple)) else [value]
        if views is value and any(user.target is not operator.getitem for user in node.users):
            return False
        if not isinstance(held, Tensor) or held.layout is not torch.strided or held.is_complex():
            return False
        return all(isinstance(view, Tensor) and view.dtype == held.dtype for view in views)

    def line(self, form: str, makes: fx.Node | None, *args: Any) -> None:
        """One more line; each ``{}`` in its text stands for an argument."""
        uses: list[str] = []
        text = form.format(*[self._written(arg, uses) for arg in args])
        name = None if makes is None else self.name_of(makes)
        self._lines.append(_Line(text if name is None else f"{name} = {text}", name, tuple(uses)))

    def source(self, inputs: Sequence[str]) -> str:
        """The function's text: a variable is deleted behind its last use."""
        used: set[str] = set()
        body: list[str] = []
        for line in reversed(self._lines):
            ends = [name for name in dict.fromkeys((*line.uses, *filter(None, [line.makes]))) if name not in used]
            used.update(ends)
            if ends and not line.text.startswith("return"):
                body.append(f"    del {', '.join(ends)}")
            body.append(f"    {line.text}")
        head = ["def run(given):", *([f"    {', '.join(inputs)}, = given"] if inputs else []), "    given.clear()"]
        idle = [name for name in inputs if name not in used]
        head += [f"    del {', '.join(idle)}"] if idle else []
        return "\n".join([*head, *reversed(body)])

    def _written(self, value: Any, uses: list[str]) -> str:
        if isinstance(value, fx.Node):
            name = self._view(value) if self.is_direct(value) else self.name_of(value)
            uses.append(name)
            return name
        if isinstance(value, (list, tuple)):
            parts = [self._written(each, uses) for each in value]
            return f"[{', '.join(parts)}]" if isinstance(value, list) else f"({', '.join(parts)}{',' * (len(parts) == 1)})"
        return repr(value) if type(value) in _WRITTEN_OUT else self.constant(value)

    def _view(self, node: fx.Node) -> str:
        base = base_of(node)
        value, held = node.meta["val"], base.meta["val"]
        offset = value.storage_offset() - held.storage_offset()
        if not offset and _layout(value) == _layout(held):
            return self.name_of(base)
        key = (base, _layout(value), offset)
        if key not in self._views:
            owner, name = self.name_of(base), self.name_of(None)
            place = f", {owner}.storage_offset() + {offset}" if offset else ""
            text = f"{name} = {owner}.as_strided({tuple(value.shape)}, {value.stride()}{place})"
            self._lines.append(_Line(text, name, (owner,)))
            self._views[key] = name
        return self._views[key]
