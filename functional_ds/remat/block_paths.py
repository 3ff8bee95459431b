"""Which submodules a pattern matches: blocks that transforms run differently."""

import fnmatch
from collections.abc import Iterable
from typing import Any

from torch import nn

from functional_ds.base import tree
from functional_ds.sharding.path_patterns import nearest


def check_pattern(blocks: Any) -> None:
    """Raises an error unless the value is a pattern or None.

    Raises:
        TypeError: it is something else.
    """
    if blocks is not None and not isinstance(blocks, str):
        raise TypeError(
            f"blocks={blocks!r} is not a path: give a pattern such as 'blocks.*', None, or '' for the whole function"
        )


def find_blocks(module: nn.Module, blocks: str | None) -> list[str]:
    """The paths of the modules that a pattern matches; a list of modules stands for its members."""
    paths: list[str] = []
    for path, inner in module.named_modules():
        if fits(path, blocks):
            members = isinstance(inner, (nn.ModuleList, nn.ModuleDict))
            paths += [f"{path}.{name}" for name, _ in inner.named_children()] if members else [path]
    return list(dict.fromkeys(paths))


def check_blocks(transform: str, params: Any, blocks: str | None) -> None:
    """Raises an error for a pattern that matches no module with params.

    Raises:
        ValueError: it matches none.
    """
    paths = dict.fromkeys(tail for path, _ in tree.named(params) for tail in _above(path))
    if not any(fits(path, blocks) for path in paths):
        raise no_such_block(transform, blocks, paths)


def no_such_block(transform: str, blocks: str | None, paths: Iterable[str]) -> ValueError:
    """The error for a pattern that matches none of these paths."""
    known = sorted({path for path in paths if path})
    if blocks is None:
        return ValueError(
            f"{transform}: no path has a number, so there are no repeated blocks; name some: {', '.join(known[:20])}"
        )
    return ValueError(f"blocks={blocks!r} matches no module; {nearest(blocks, known)}")


def _above(path: str) -> list[str]:
    """The paths of the modules that hold a leaf, also relative to others: for ``a.b.w`` a, a.b and b."""
    parts = path.split(".")[:-1]
    return [".".join(parts[i:j]) for i in range(len(parts)) for j in range(i + 1, len(parts) + 1)]


def fits(path: str, blocks: str | None) -> bool:
    """Whether a module's path matches; the whole module's path, which is empty, never does."""
    parts = path.split(".")
    if blocks is None:
        return parts[-1].isdecimal() and not any(part.isdecimal() for part in parts[:-1])
    wanted = blocks.split(".")
    return bool(path) and len(parts) == len(wanted) and all(map(fnmatch.fnmatchcase, parts, wanted))
