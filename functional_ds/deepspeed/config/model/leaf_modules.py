"""DeepSpeed's leaf modules, whose params stage 3 gathers together."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import attrs
from torch import nn

from functional_ds.sharding.grouping import by_block

__all__ = [
    "get_z3_leaf_modules",
    "set_z3_leaf_module",
    "set_z3_leaf_modules",
    "set_z3_leaf_modules_by_name",
    "set_z3_leaf_modules_by_suffix",
    "unset_z3_leaf_modules",
    "z3_leaf_module",
    "z3_leaf_parameter",
]

_FLAG, _OF_PARAMETER = "_z3_leaf", "ds_z3_leaf_module"  # DeepSpeed's own names


def z3_leaf_module(model: nn.Module) -> bool:
    """Whether a module is marked as a leaf."""
    return bool(getattr(model, _FLAG, False))


def z3_leaf_parameter(model: nn.Parameter) -> bool:
    """Whether a parameter of an engine of stage 3 is in a leaf module."""
    return hasattr(model, _OF_PARAMETER)


def get_z3_leaf_modules(model: nn.Module) -> list[nn.Module]:
    """The marked modules."""
    return [module for module in model.modules() if z3_leaf_module(module)]


def set_z3_leaf_module(model: nn.Module, flag: bool) -> None:
    """Marks one module, before ``initialize``: its params and those below it are one unit of ``T.zero(3)``."""
    setattr(model, _FLAG, flag)


def set_z3_leaf_modules(
    model: nn.Module, leaf_module_classes: Sequence[type | str], raise_if_not_found: bool = True
) -> list[nn.Module]:
    """Marks the modules of these classes, and returns them.

    Args:
        model: the whole model, before ``initialize``.
        leaf_module_classes: classes, or their names, also with their modules'.
        raise_if_not_found: whether it is an error if there are none.

    Raises:
        TypeError: something other than a class or a name.
        ValueError: there are none.

    >>> model = nn.Sequential(nn.Sequential(nn.Linear(2, 2), nn.Tanh()), nn.Linear(2, 1))
    >>> len(set_z3_leaf_modules(model, [nn.Linear])), len(unset_z3_leaf_modules(model, ["Linear"]))
    (2, 2)
    """
    return _marked(model, leaf_module_classes, flag=True, needed=raise_if_not_found)


def unset_z3_leaf_modules(
    model: nn.Module, leaf_module_classes: Sequence[type | str], raise_if_not_found: bool = True
) -> list[nn.Module]:
    """The inverse of ``set_z3_leaf_modules``."""
    return _marked(model, leaf_module_classes, flag=False, needed=raise_if_not_found)


def set_z3_leaf_modules_by_name(
    model: nn.Module, module_names: Sequence[str], flag: bool = True, raise_if_not_found: bool = True
) -> tuple[list[nn.Module], list[str]]:
    """Marks modules by their names in ``named_modules``; returns them and the names that do not exist.

    Args:
        model: the whole model, before ``initialize``.
        module_names: the names.
        flag: False removes the marks.
        raise_if_not_found: whether a missing name is an error.
    """
    return _marked_where(model, module_names, str.__eq__, flag=flag, needed=raise_if_not_found)


def set_z3_leaf_modules_by_suffix(
    model: nn.Module, module_name_suffixes: Sequence[str], flag: bool = True, raise_if_not_found: bool = True
) -> tuple[list[nn.Module], list[str]]:
    """``set_z3_leaf_modules_by_name`` for all names with these ends."""
    return _marked_where(model, module_name_suffixes, str.endswith, flag=flag, needed=raise_if_not_found)


def _marked(model: nn.Module, classes: Sequence[type | str], *, flag: bool, needed: bool) -> list[nn.Module]:
    if not all(isinstance(cls, type | str) for cls in classes):
        raise TypeError(f"leaf_module_classes={classes!r}: a list of classes or of their names is needed")
    modules = [module for module in model.modules() if any(_is(module, cls) for cls in classes)]
    for module in modules:
        set_z3_leaf_module(module, flag)
    if needed and not modules:
        raise ValueError(f"leaf_module_classes: the model has no module of {', '.join(map(_name_of, classes))}")
    return modules


def _name_of(wanted: type | str) -> str:
    return wanted if isinstance(wanted, str) else f"{wanted.__module__}.{wanted.__qualname__}"


def _is(module: nn.Module, wanted: type | str) -> bool:
    cls = type(module)
    return isinstance(module, wanted) if isinstance(wanted, type) else wanted in (cls.__name__, _name_of(cls))


def _marked_where(
    model: nn.Module, names: Sequence[str], fits: Callable[[str, str], bool], *, flag: bool, needed: bool
) -> tuple[list[nn.Module], list[str]]:
    modules: dict[nn.Module, None] = {}
    missing = []
    for name in names:
        hits = [module for path, module in model.named_modules() if fits(path, name)]
        modules.update(dict.fromkeys(hits))
        missing += [] if hits else [name]
    for module in modules:
        set_z3_leaf_module(module, flag)
    if needed and missing:
        raise ValueError(f"the model has no module named {', '.join(missing)}")
    return list(modules), missing


@attrs.frozen
class LeafUnits:
    """A unit for each leaf module, and one for each block of the rest; for ``unit_of=`` of ``T.zero``.

    Attributes:
        names: of the outermost leaf modules.
    """

    names: tuple[str, ...]

    def __call__(self, path: str) -> str:
        """The unit of a path.

        >>> units = LeafUnits(("layers.0.experts",))
        >>> units("layers.0.experts.7.w1"), units("layers.0.norm.weight")
        ('leaf layers.0.experts', 'layers.0')
        """
        return next((f"leaf {name}" for name in self.names if not name or path.startswith(f"{name}.")), by_block(path))


def leaf_units(model: Any, given: Mapping[str, Any] | None) -> LeafUnits | None:
    """The units of a model with leaf modules; None if there are none.

    Args:
        model: a module; anything else has none.
        given: the config's ``zero_optimization.leaf_module``: lists ``classes``, ``names``, ``name_suffixes``. They are marked.

    Raises:
        ValueError: another key; a value that is not a list of strings.
    """
    lists = {name: _strings(name, value) for name, value in (given or {}).items()}
    if not isinstance(model, nn.Module):
        return None
    set_z3_leaf_modules(model, lists.get("classes", []), raise_if_not_found=False)
    set_z3_leaf_modules_by_name(model, lists.get("names", []), raise_if_not_found=False)
    set_z3_leaf_modules_by_suffix(model, lists.get("name_suffixes", []), raise_if_not_found=False)
    paths: list[str] = []
    for name, module in model.named_modules():
        inside = any(not outer or name.startswith(f"{outer}.") for outer in paths)
        if z3_leaf_module(module) and not inside and any(True for _ in module.parameters()):
            paths.append(name)
    return LeafUnits(tuple(paths)) if paths else None


def _strings(name: str, value: Any) -> list[str]:
    if name not in ("classes", "names", "name_suffixes"):
        raise ValueError(f"leaf_module has classes, names and name_suffixes, and no {name!r}")
    strings = [value] if isinstance(value, str) else value
    if not isinstance(strings, list) or not all(isinstance(string, str) for string in strings):
        raise ValueError(f"{name}={value!r}: a list of strings is needed")
    return strings


def mark_leaf_parameters(modules: Iterable[nn.Module]) -> None:
    """Marks the parameters of leaf modules, for ``z3_leaf_parameter``."""
    for module in modules:
        for parameter in module.parameters():
            setattr(parameter, _OF_PARAMETER, module)
