"""Buffers that a block writes in place and then computes with: torch 2.13 gives wrong gradients for them.

Its partitioner saves the buffer for the backward pass, as an input that costs nothing, and recomputes there what was written.
By then the buffer has the new value, so the write happens twice, silently (``aot_eager`` and ``inductor``).
"""

import inspect
import operator
import types
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, fx

_NAMES = [name for name in dir(operator) if name.startswith("i") and f"__{name[1:]}__" in dir(operator)]  # iadd, and no invert
_OPERATORS = {operator.setitem, *(getattr(operator, name) for name in _NAMES)}
_METHODS = {"__setitem__", *(f"__{name}__" for name in _NAMES)}


def written_and_used(graph: fx.Graph) -> str | None:
    """The name of an input without gradient that is written in place and then used by a differentiated result.

    >>> def block(x, buffer):
    ...     buffer.mul_(2)
    ...     return x * buffer
    >>> found = []
    >>> def backend(graph, inputs):
    ...     found.append(written_and_used(graph.graph))
    ...     return graph.forward
    >>> y = torch.compile(block, backend=backend)(torch.ones(2, requires_grad=True), torch.ones(2))
    >>> found
    ['l_buffer_']
    """
    inputs = {_memory(node): node.name for node in graph.nodes if node.op == "placeholder" and not _differentiated(node)}
    inputs.pop(None, None)
    written: dict[Any, str] = {}  # memory of such inputs, once they are written
    tainted: dict[fx.Node, str] = {}  # what was computed from them then
    for node in graph.nodes:
        if node.op in ("placeholder", "output", "get_attr"):
            continue
        used = [tainted.get(operand) or written.get(_memory(operand)) for operand in node.all_input_nodes]
        name = next((input_name for input_name in used if input_name), None)
        if name is not None:
            if _differentiated(node):
                return name
            tainted[node] = name
        for memory in filter(inputs.__contains__, map(_memory, _targets(node))):
            written[memory] = inputs[memory]
    return None


def _value(node: fx.Node) -> Any:
    return node.meta.get("example_value")


def _memory(node: fx.Node) -> Any:
    """The storage of a tensor, the same object for its views; None for anything else."""
    value = _value(node)
    return value.untyped_storage() if isinstance(value, Tensor) and value.layout is torch.strided else None


def _differentiated(node: fx.Node) -> bool:
    value = _value(node)
    values = value if isinstance(value, (tuple, list)) else [value]
    return any(isinstance(item, Tensor) and item.requires_grad for item in values)


def _targets(node: fx.Node) -> list[fx.Node]:
    """What it writes into: its first argument, by its name or with ``inplace=True``, and ``out=``."""
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    in_place = node.target in _OPERATORS or name in _METHODS or (name.endswith("_") and not name.endswith("__"))
    given = _arguments(node)
    first = next(iter(given.values()), None) if in_place or given.get("inplace") is True else None
    targets = [item for value in (first, given.get("out")) for item in (value if isinstance(value, (list, tuple)) else [value])]
    return [item for item in targets if isinstance(item, fx.Node)]


def _arguments(node: fx.Node) -> dict[str, Any]:
    """All arguments, by name if the function has names."""
    unnamed = {str(place): argument for place, argument in enumerate(node.args)} | node.kwargs
    if not node.kwargs.keys() & {"inplace", "out"} and isinstance(node.target, types.FunctionType):
        with suppress(TypeError):
            return dict(inspect.signature(node.target).bind(*node.args, **node.kwargs).arguments)
    return unnamed
