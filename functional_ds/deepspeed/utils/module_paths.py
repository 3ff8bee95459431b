"""Modules by dotted paths."""

from functools import reduce
from typing import Any

from torch import nn

__all__ = ["recursive_getattr", "recursive_setattr"]


def recursive_getattr(model: nn.Module, module_name: str) -> Any:
    """The module, or its attribute, at a dotted path.

    >>> recursive_getattr(nn.Sequential(nn.Linear(2, 3)), "0.out_features")
    3
    """
    return reduce(getattr, module_name.split("."), model)


def recursive_setattr(model: nn.Module, module_name: str, module: Any) -> None:
    """Sets what is at a dotted path.

    Args:
        model: the module.
        module_name: the path.
        module: what is to be there.
    """
    owner, _, name = module_name.rpartition(".")
    setattr(recursive_getattr(model, owner) if owner else model, name, module)
