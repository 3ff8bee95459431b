"""The places of a module's parameters, buffers, and attributes that calls may write into."""

from collections.abc import Iterator
from typing import Any

from torch import nn

from functional_ds.base.torch_private import buffers_of, parameters_of

from .attributes import is_mutable

Place = tuple[str, str]  # a module's path and an attribute
OF_EVERY_MODULE = frozenset(vars(nn.Module()))  # the attributes that every module has


def joined(path: str, key: str) -> str:
    """The full name of ``key`` in a module."""
    return f"{path}.{key}" if path else key


def parted(name: str) -> Place:
    """The inverse of ``joined``."""
    path, _, key = name.rpartition(".")
    return path, key


def parameter_places(module: nn.Module) -> tuple[dict[str, list[Place]], dict[str, nn.Parameter]]:
    """The places of each parameter, several if it is tied, and the parameters under the name of their first place."""
    first: dict[int, str] = {}
    places: dict[str, list[Place]] = {}
    params: dict[str, nn.Parameter] = {}
    for path, owner in module.named_modules():
        for key, parameter in parameters_of(owner).items():
            if parameter is not None:
                name = first.setdefault(id(parameter), joined(path, key))
                places.setdefault(name, []).append((path, key))
                params.setdefault(name, parameter)
    return places, params


def buffer_names(module: nn.Module) -> dict[Place, str]:
    """The name of the buffer at each place: a buffer with several places has the name of the first."""
    first: dict[int, str] = {}
    return {
        (path, key): first.setdefault(id(buffer), joined(path, key))
        for path, owner in module.named_modules()
        for key, buffer in buffers_of(owner).items()
        if buffer is not None
    }


def mutable_attributes(module: nn.Module) -> Iterator[tuple[Place, Any]]:
    """The attributes that calls may write into."""
    for path, owner in module.named_modules():
        for key, value in vars(owner).items():
            if key not in OF_EVERY_MODULE and is_mutable(value):
                yield (path, key), value
