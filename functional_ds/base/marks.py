"""Marks on leaves: whether they are trained, their storage dtype, their part of the model, slices and sharers."""

import re
import sys
import weakref
from typing import Any

import torch
from torch import Tensor, nn

from . import tree
from .torch_private import in_dual_level, is_transformed


def is_trainable(leaf: Tensor) -> bool:
    """Whether a leaf is trained: floating or complex, and not an ``nn.Parameter`` that does not require grad."""
    if not (leaf.is_floating_point() or leaf.is_complex()):
        return False
    return type(leaf) is Tensor or leaf.requires_grad or not isinstance(leaf, nn.Parameter)  # the cheapest first


def is_compiled(function: object) -> bool:
    """Whether it is what ``torch.compile`` returned."""
    function = getattr(function, "__func__", function)
    held = getattr(function, "__dict__", {})
    if isinstance(function, nn.Module):
        return "_orig_mod" in held.get("_modules", {})
    # functools.wraps copies the id of the wrapped function; torch.compiler.disable leaves one more mark.
    return held.get("_torchdynamo_wrapper_id") == id(function) and "_torchdynamo_disable" not in held


def is_dtensor(leaf: Tensor) -> bool:
    """Whether a tensor is a DTensor."""
    if type(leaf) in (Tensor, nn.Parameter):
        return False
    tensors = sys.modules.get("torch.distributed.tensor")  # slow to import, and already imported if there is a DTensor
    return tensors is not None and isinstance(leaf, tensors.DTensor)


def trainable(params: Any) -> list[Tensor]:
    """The trained leaves of a pytree, in order; gradients are lists like this."""
    return [leaf for leaf in tree.leaves(params) if is_trainable(leaf)]


def like_marked(value: Tensor, model: Tensor) -> Tensor:
    """``value`` with the marks of ``model``."""
    frozen = isinstance(model, nn.Parameter) and not model.requires_grad
    marked = nn.Parameter(value, requires_grad=False) if frozen else value
    if not frozen and not vars(model):  # the usual case: no marks
        return value
    names = (_STORED_IN, _PART, _SLICES, _SHARERS, _MODULE, *((ORIGIN,) if value.is_meta else ()))  # values need no origin
    marks = {name: getattr(model, name) for name in names if getattr(model, name, None) is not None}
    return _marked(marked, marks) if marks else marked


def without_values(held: Any) -> Any:
    """The pytree on the meta device, with its marks.

    >>> without_values({"w": torch.ones(2, 3)})["w"]
    tensor(..., device='meta', size=(2, 3))
    """
    return tree.map(lambda x: like_marked(torch.empty_like(x, device="meta"), x) if isinstance(x, Tensor) else x, held)


def mark_stored(leaf: Tensor, dtype: torch.dtype | None) -> Tensor:
    """A new tensor of the leaf's values, marked to be stored in ``dtype``; None removes the mark.

    Leaves with different marks are in different segments, like trained and frozen ones.
    """
    return _marked(like_marked(leaf.detach(), leaf), {_STORED_IN: dtype})


def stored_in(leaf: Tensor) -> torch.dtype | None:
    """The storage dtype that a leaf is marked with; None without a mark."""
    return getattr(leaf, _STORED_IN, None)


def mark_part(leaf: Tensor, part: str | None) -> Tensor:
    """A new tensor of the leaf's values, marked with a part of the model; leaves of two parts are in different units."""
    return _marked(like_marked(leaf.detach(), leaf), {_PART: part})


def part_of(leaf: Tensor) -> str | None:
    """The part of the model that a leaf is marked with; None without a mark."""
    return getattr(leaf, _PART, None)


def mark_slices(leaf: Tensor, slices: tuple[Any, ...]) -> Tensor:
    """A new tensor of the leaf's values, marked as a slice of a whole leaf, along one dim or several."""
    return _marked(like_marked(leaf.detach(), leaf), {_SLICES: slices})


def slices_of(leaf: Tensor) -> tuple[Any, ...]:
    """The slices (``LeafSlice``) that a leaf is marked with, one for each split dim."""
    return getattr(leaf, _SLICES, ())


def mark_sharers(leaf: Tensor, blocks: tuple[tuple[int, ...], ...] | None) -> Tensor:
    """A new tensor of the leaf's values, marked as shared by some of the data-parallel ranks only, as experts are.

    Args:
        leaf: this rank's leaf.
        blocks: the data-parallel ranks, as ranks of the world, in blocks of equal size that hold the same leaf. None removes
            the mark.
    """
    return _marked(like_marked(leaf.detach(), leaf), {_SHARERS: blocks})


def sharers_of(leaf: Tensor) -> tuple[tuple[int, ...], ...] | None:
    """The blocks of data-parallel ranks that hold the same leaf; None if all do."""
    return getattr(leaf, _SHARERS, None)


class ModuleRef:
    """A weak reference to a module's function, so that params can be copied and saved without the module."""

    def __init__(self, module: Any = None) -> None:
        self._ref = None if module is None else weakref.ref(module)

    def get(self) -> Any:
        """The module's function; None if it was deleted, or the params come from another process."""
        return None if self._ref is None else self._ref()

    def __deepcopy__(self, memo: Any) -> "ModuleRef":
        return self

    def __reduce__(self) -> Any:
        return ModuleRef, ()


def mark_module(leaf: Tensor, module: ModuleRef, name: str) -> Tensor:
    """Marks a leaf, in place, as the parameter ``name`` of a module."""
    leaf.__dict__[_MODULE] = (module, name)
    return leaf


def module_of(leaf: Tensor) -> tuple[Any, str] | None:
    """The function of the module that a leaf is a parameter of, and its name there; None without a mark."""
    mark = getattr(leaf, _MODULE, None)
    if mark is None or mark[0].get() is None:
        return None
    return mark[0].get(), mark[1]


# Marks are attributes of tensors, as pytrees have no place for them.
_STORED_IN, _PART, _SLICES, _MODULE = "_fds_stored_in", "_fds_part", "_fds_slices", "_fds_module"
_SHARERS = "_fds_sharers"
ORIGIN = "_fds_origin"  # the mark of deferred leaves (``sharding.sources``)


def _marked(leaf: Tensor, marks: dict[str, Any]) -> Tensor:
    frozen = isinstance(leaf, nn.Parameter) and not leaf.requires_grad
    tracked = leaf.requires_grad or in_dual_level() or is_transformed(leaf)  # in a differentiable step
    marked = nn.Parameter(leaf.detach(), requires_grad=False) if frozen else leaf.view_as(leaf) if tracked else leaf.detach()
    marked.__dict__.update({**leaf.__dict__, **marks})
    return marked


def freeze(params: Any, pattern: str = "") -> Any:
    """Freezes the leaves whose path matches a regular expression: they get no gradients and no optimizer state.

    Raises:
        ValueError: no path matches.

    >>> import torch
    >>> params = {"base.w": torch.ones(2), "lora.a": torch.ones(2)}
    >>> [is_trainable(leaf) for leaf in freeze(params, "^base").values()]
    [False, True]
    """
    paths = [path for path, _ in tree.named(params)]
    hits = [re.search(pattern, path) is not None for path in paths]
    if not any(hits):
        raise ValueError(f"pattern={pattern!r} matches no path; the paths are {', '.join(paths)}")
    leaves, spec = tree.flatten(params)
    return tree.unflatten(spec, [_frozen(x) if hit else x for x, hit in zip(leaves, hits, strict=True)])


def _frozen(leaf: Tensor) -> Tensor:
    marked = nn.Parameter(leaf.detach(), requires_grad=False)
    marked.__dict__.update(leaf.__dict__)
    return marked
