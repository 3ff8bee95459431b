"""Modules by dotted paths; copies of tensors in containers."""

from functools import reduce
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["clone_tensors_for_torch_save", "recursive_getattr", "recursive_setattr"]


def recursive_getattr(model: nn.Module, module_name: str) -> Any:
    """The module, or its attribute, at a dotted path.

    >>> recursive_getattr(nn.Sequential(nn.Linear(2, 3)), "0.out_features")
    3
    """
    return reduce(getattr, module_name.split("."), model)


def recursive_setattr(model: nn.Module, module_name: str, module: Any) -> None:
    """Sets the value at a dotted path.

    Args:
        model: the module.
        module_name: the path.
        module: the new value.
    """
    owner, _, name = module_name.rpartition(".")
    setattr(recursive_getattr(model, owner) if owner else model, name, module)


def clone_tensors_for_torch_save(item: Any, device: torch.device | str = "cpu") -> Any:
    """A copy of nested lists, tuples and dicts whose tensors have separate memory, so that files contain only these.

    Args:
        item: tensors, nested or alone; anything else stays.
        device: of the copies.

    >>> clone_tensors_for_torch_save({"a": [torch.arange(6)[:2]]})["a"][0].untyped_storage().nbytes()
    16
    """
    if isinstance(item, Tensor):
        return item.detach().to(device, copy=True)
    if isinstance(item, list | tuple):
        return type(item)(clone_tensors_for_torch_save(part, device) for part in item)
    if isinstance(item, dict):
        return type(item)({key: clone_tensors_for_torch_save(value, device) for key, value in item.items()})
    return item
