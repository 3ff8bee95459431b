"""The tensor arguments of a call of an operator, and those of them that it writes into."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor

from functional_ds.base.torch_private import schema_of


def tensors_given(values: Iterable[Any]) -> list[Tensor]:
    """The tensors among an operator's arguments, also within lists."""
    flat = (x for value in values for x in (value if isinstance(value, (list, tuple)) else (value,)))
    return [x for x in flat if isinstance(x, Tensor)]


def written(operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """The arguments that a call of an operator writes into, by its schema: tensors, lists of them, or nodes of a graph.

    >>> import torch
    >>> x = torch.ones(2)
    >>> written(torch.ops.aten.add_.Tensor, (x, x), {})
    [tensor([1., 1.])]
    """
    schema = schema_of(operator)
    if not schema.is_mutable:
        return []
    places = enumerate(schema.arguments)
    return [args[i] if i < len(args) else kwargs.get(a.name) for i, a in places if a.alias_info and a.alias_info.is_write]


def tensors_written(operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Tensor]:
    """The tensors that a call of an operator writes into."""
    return tensors_given(written(operator, args, kwargs))
