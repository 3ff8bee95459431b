"""Policies that group leaves into units, as FSDP's wrap policies: each unit is gathered and reduced as one."""

import re
from collections.abc import Callable, Mapping
from typing import Protocol, runtime_checkable

import attrs
from torch import Tensor

from .path_patterns import check_expression, nearest

__all__ = [
    "ByBytes",
    "ByPath",
    "UnitOf",
    "UnitPolicy",
    "by_block",
    "by_bytes",
    "by_leaf",
    "by_path",
    "single_unit",
    "unit_names",
]


@runtime_checkable
class UnitPolicy(Protocol):
    """A policy that groups all leaves at once."""

    def units(self, leaves: Mapping[str, Tensor]) -> Mapping[str, str]:
        """Maps each leaf's path to its unit's name; ``leaves`` are in the order of the tree."""
        ...


UnitOf = Callable[[str], str] | UnitPolicy


def unit_names(unit_of: UnitOf | None, leaves: Mapping[str, Tensor]) -> dict[str, str]:
    """The name of each path's unit; None means ``by_block``.

    Raises:
        TypeError: a name is not a string, or ``unit_of`` is neither a function nor a policy.
        ValueError: a pattern matches no path.

    >>> unit_names(by_block, {path: torch.ones(1) for path in ("blocks.0.weight", "blocks.0.bias", "norm.bias")})
    {'blocks.0.weight': 'blocks.0', 'blocks.0.bias': 'blocks.0', 'norm.bias': 'rest'}
    """
    if isinstance(unit_of, UnitPolicy):
        names = dict(unit_of.units(leaves))
    elif unit_of is None or callable(unit_of):
        names = {path: (unit_of or by_block)(path) for path in leaves}
    else:
        raise TypeError(f"unit_of={unit_of!r} is not a function from a path to a name; see fds.units for ready ones")
    for path in leaves:
        if not isinstance(names.get(path), str):
            raise TypeError(f"unit_of={unit_of!r} gives {names.get(path)!r} for {path!r}; a unit's name is a string")
    return names


def by_block(path: str) -> str:
    """A unit for each repeated block: the path up to its first number, or "rest" if it has none.

    >>> by_block("transformer.h.3.attn.weight"), by_block("wte.weight")
    ('transformer.h.3', 'rest')
    """
    parts = path.split(".")
    for i, part in enumerate(parts):
        if part.isdecimal():
            return ".".join(parts[: i + 1])
    return "rest"


def by_leaf(path: str) -> str:
    """A unit for each leaf.

    >>> by_leaf("blocks.0.weight")
    'blocks.0.weight'
    """
    return path


def single_unit(path: str) -> str:
    """One unit for all leaves.

    >>> single_unit("blocks.0.weight"), single_unit("norm.bias")
    ('all', 'all')
    """
    return "all"


@attrs.frozen
class ByBytes:
    """See ``by_bytes``."""

    limit: int

    def units(self, leaves: Mapping[str, Tensor]) -> Mapping[str, str]:
        """Adds consecutive leaves to a unit until the next one would exceed the limit."""
        units: dict[str, str] = {}
        first, size = "", self.limit + 1
        for path, leaf in leaves.items():
            more = leaf.numel() * leaf.element_size()
            if size + more > self.limit:
                first, size = path, 0
            size += more
            units[path] = f"from {first}"
        return units


def by_bytes(limit: int) -> ByBytes:
    """Units of consecutive leaves, of at most ``limit`` bytes each; a larger leaf is a unit by itself.

    Bytes are counted in the dtypes of the params given to ``init``, usually fp32, also under mixed precision.

    Raises:
        ValueError: the limit is not positive.

    >>> import torch
    >>> leaves = {name: torch.ones(4) for name in "abc"}
    >>> by_bytes(32).units(leaves)
    {'a': 'from a', 'b': 'from a', 'c': 'from c'}
    """
    if limit < 1:
        raise ValueError(f"limit={limit}: a unit has at least one byte")
    return ByBytes(limit)


@attrs.frozen
class ByPath:
    """See ``by_path``."""

    rules: tuple[tuple[str, str], ...]
    others: UnitOf

    def units(self, leaves: Mapping[str, Tensor]) -> Mapping[str, str]:
        """Names each unit by the first rule that matches."""
        units: dict[str, str] = {}
        used: set[str] = set()
        for path in leaves:
            hits = [(pattern, match, name) for pattern, name in self.rules if (match := re.search(pattern, path))]
            used.update(pattern for pattern, _, _ in hits)
            if hits:
                units[path] = hits[0][1].expand(hits[0][2])
        for pattern, _ in self.rules:
            if pattern not in used:
                raise ValueError(f"by_path: {pattern!r} matches no path; {nearest(pattern, leaves)}")
        rest = unit_names(self.others, {path: leaf for path, leaf in leaves.items() if path not in units})
        return {**units, **rest}


def by_path(rules: Mapping[str, str], *, others: UnitOf = by_block) -> ByPath:
    """Units by regular expressions, which are searched in the paths; the first match names the unit.

    Args:
        rules: from an expression to a unit's name, which may refer to the expression's groups.
        others: names the units of the leaves that match no expression.

    Raises:
        ValueError: an expression is invalid; later, when the tree is known: one matches no path (names the nearest path).

    >>> import torch
    >>> leaves = dict.fromkeys(["wte", "h.0.a", "h.1.a", "h.2.a"], torch.ones(1))
    >>> dict(by_path({r"^h\\.[01]": "first blocks", r"^w(.*)": r"embed \\1"}).units(leaves))
    {'wte': 'embed te', 'h.0.a': 'first blocks', 'h.1.a': 'first blocks', 'h.2.a': 'h.2'}
    """
    for pattern in rules:
        check_expression("by_path: ", pattern)
    return ByPath(tuple(rules.items()), others)
