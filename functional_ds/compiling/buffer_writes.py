"""Buffers that a block writes in place and then computes with: torch 2.13 gives wrong gradients for them.

Its partitioner saves the buffer for the backward pass, an input that costs nothing, and computes again there what was written.
By then the buffer has the new value, so the write is done twice (``aot_eager`` and ``inductor``; no error says so).
"""

import operator
from typing import Any

import torch
from torch import Tensor, fx

__all__ = ["written_and_used"]

_OPERATORS = {getattr(operator, name) for name in dir(operator) if name.startswith("i") and f"__{name}__" in dir(operator)}


def written_and_used(graph: fx.Graph) -> str | None:
    """The name of an input without a gradient that is written in place, and that a differentiated result depends on afterwards.

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
        used = [tainted.get(each) or written.get(_memory(each)) for each in node.all_input_nodes]
        name = next((each for each in used if each), None)
        if name is not None:
            if _differentiated(node):
                return name
            tainted[node] = name
        target = node.args[0] if node.args else None
        if _writes(node) and isinstance(target, fx.Node) and _memory(target) in inputs:
            written[_memory(target)] = inputs[_memory(target)]
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
    return any(isinstance(each, Tensor) and each.requires_grad for each in values)


def _writes(node: fx.Node) -> bool:
    """Whether it writes into its first argument."""
    if node.op == "call_function" and (node.target is operator.setitem or node.target in _OPERATORS):
        return True
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    return name.endswith("_") and not name.endswith("__")
