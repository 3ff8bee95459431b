"""Marks of parameters besides their values: being an ``nn.Parameter``, and attributes that users have set."""

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from functional_ds.base.torch_private import mark_parameter

_OF_TORCH = "_is_param"  # by which ``isinstance(tensor, nn.Parameter)`` is true, as torch documents it for custom tensors


def attributes_on(parameter: Tensor) -> dict[str, Any]:
    """What users have set on a parameter."""
    return {key: value for key, value in vars(parameter).items() if key != _OF_TORCH and not key.startswith("_fds")}


class ParameterMarks:
    """Makes tensors count as parameters while they are in place of a module's.

    Args:
        params: the module's, by name.
    """

    def __init__(self, params: Mapping[str, nn.Parameter]) -> None:
        self._attributes = {name: attributes for name, p in params.items() if (attributes := attributes_on(p))}

    def put(self, params: Mapping[str, Tensor]) -> list[tuple[Tensor, Collection[str]]]:
        """Marks tensors; returns what ``take`` must remove from each."""
        put: list[tuple[Tensor, Collection[str]]] = []
        for p in params.values():
            if type(p) is not nn.Parameter and not hasattr(p, _OF_TORCH):
                mark_parameter(p)
                put.append((p, (_OF_TORCH,)))
        for name, attributes in self._attributes.items():
            if name in params:
                held = vars(params[name])
                new = {key: value for key, value in attributes.items() if key not in held}
                held.update(new)
                put.append((params[name], new))
        return put

    @staticmethod
    def take(put: list[tuple[Tensor, Collection[str]]]) -> None:
        """Removes the marks."""
        for tensor, keys in put:
            for key in keys:
                vars(tensor).pop(key, None)
        put.clear()

    @contextmanager
    def on(self, params: Mapping[str, Tensor]) -> Iterator[None]:
        """A context in which the tensors are marked."""
        put = self.put(params)
        try:
            yield
        finally:
            self.take(put)
