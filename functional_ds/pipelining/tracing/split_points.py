"""Which modules begin stages: names looked up, and numbers of stages turned into names."""

import difflib
import fnmatch
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import Any

from torch import nn

from functional_ds.pipelining.stages.balance import balanced, uniformly

from .program import Program

__all__ = ["Begin", "by_name", "by_number", "candidates", "opened"]

Begin = tuple[str, int]  # a module's path, and how many of its calls come before


def candidates(module: nn.Module, at: Any, blocks: str | None) -> list[list[Begin]]:
    """The calls that each entry of ``at`` may mean; for a number of stages, the first calls of all blocks.

    Raises:
        ValueError: an entry names no module; it gives the nearest names.
    """
    paths = {path for path, _ in module.named_modules(remove_duplicate=False) if path}
    if isinstance(at, int):
        return [_blocks(module, at) if blocks is None else _found(paths, blocks, "blocks")]
    if isinstance(at, str) or not isinstance(at, Iterable):
        raise TypeError(f"at={at!r}: give a number of stages, or a list of modules' paths")
    entries = [(each, 0) if isinstance(each, str) else each for each in at]
    return [[(path, times) for path, _ in _found(paths, name, "at")] for name, times in entries]


def _found(paths: set[str], name: str, argument: str) -> list[Begin]:
    if name in paths:
        return [(name, 0)]
    found = sorted(fnmatch.filter(paths, name)) if "*" in name or "[" in name else []
    if not found:
        near = difflib.get_close_matches(name, paths, n=3, cutoff=0.3)
        raise ValueError(f"{argument}: {name!r} is no module of this one; the nearest are {', '.join(near) or sorted(paths)}")
    return [(path, 0) for path in found]


def _blocks(module: nn.Module, stages: int) -> list[Begin]:
    """The entries of the ModuleList or Sequential with the most parameters that has enough of them."""
    rows = [(path, part) for path, part in module.named_modules() if isinstance(part, (nn.ModuleList, nn.Sequential))]
    fitting = [(path, part) for path, part in rows if len(part) >= stages]
    if not fitting:
        longest = max((len(part) for _, part in rows), default=0)
        raise ValueError(
            f"at={stages}: the longest ModuleList or Sequential has {longest} entries; name the blocks: blocks='pattern'"
        )
    path, part = max(fitting, key=lambda each: sum(p.numel() for p in each[1].parameters()))
    return [(f"{path}.{name}" if path else name, 0) for name, _ in part.named_children()]


def opened(begins: Sequence[Sequence[Begin]]) -> frozenset[str]:
    """The modules whose forward must be looked into, because modules that they hold begin stages."""
    paths = [path for each in begins for path, _ in each]
    return frozenset(path[:end] for path in paths for end in _ends(path)) | {""}


def _ends(path: str) -> list[int]:
    return [place for place, letter in enumerate(path) if letter == "."]


def by_name(program: Program, begins: Sequence[Sequence[Begin]]) -> tuple[Begin, ...]:
    """The calls that begin stages, in order.

    Raises:
        ValueError: a module is not called (so often), begins the model, or is called before one that is named earlier.
    """
    found: list[Begin] = []
    for several in begins:
        called = [begin for begin in several if begin in program.begins]
        if not called:
            path, times = several[0]
            raise ValueError(f"at: {path!r} is not called {'' if not times else f'{times + 1} times '}with this example")
        found.extend(sorted(called, key=lambda begin: program.begins[begin]))
    last: Begin = ("", 0)
    for begin in found:
        if program.begins[begin] == 0:
            raise ValueError(f"at: nothing is computed before {begin[0]!r}; leave it out, as the first stage needs no name")
        if found.count(begin) > 1:
            raise ValueError(f"at: {begin[0]!r} is there twice; a call of a module begins one stage")
        if program.begins[begin] < program.begins[last]:
            raise ValueError(
                f"at: {last[0]!r} stands before {begin[0]!r}, but is called after it; cuts are in the order of calls"
            )
        last = begin
    return tuple(found)


def by_number(
    program: Program,
    module: nn.Module,
    blocks: Sequence[Begin],
    *,
    stages: int,
    by: Any,
    timed: Callable[[Sequence[Begin]], Sequence[float]],
) -> tuple[Begin, ...]:
    """The calls of blocks that begin stages of equal cost; what is around the blocks counts with its neighbours.

    Raises:
        ValueError: too few blocks are called, or ``by`` has another number of costs.
    """
    paths = {path for path, _ in blocks}
    rows = sorted((begin for begin in program.begins if begin[0] in paths), key=lambda begin: program.begins[begin])
    if len(rows) < stages:
        raise ValueError(f"at={stages}: only {len(rows)} blocks are called with this example; each stage needs one")
    if isinstance(by, str) and by == "blocks":
        return tuple(rows[start] for start in uniformly(len(rows), stages)[1:])
    costs = _costs(program, module, rows, by, timed)
    if len(costs) != len(rows):
        raise ValueError(f"by has {len(costs)} costs for {len(rows)} blocks: {', '.join(path for path, _ in rows)}")
    return tuple(rows[start] for start in balanced(costs, stages)[1:])


def _costs(program: Program, module: nn.Module, rows: Sequence[Begin], by: Any, timed: Callable[..., Any]) -> list[float]:
    if by == "parameters":
        sizes = {path: parameter.numel() for path, parameter in module.named_parameters()}
        return [float(sum(sizes[path] for path in paths)) for paths in _params(program, rows)]
    if by == "measured":
        return list(timed(rows))
    if callable(by):
        return [float(by(path, module.get_submodule(path))) for path, _ in rows]
    if isinstance(by, (list, tuple)):
        return [float(cost) for cost in by]
    raise ValueError(f"by={by!r} is unknown; use 'blocks', 'parameters', 'measured', a list of costs or a function")


def _params(program: Program, rows: Sequence[Begin]) -> list[set[str]]:
    """The parameters of each block's stretch of the program."""
    bounds = [0, *(program.begins[begin] for begin in rows[1:]), len(program.instructions)]
    stretches = [program.instructions[begin:end] for begin, end in pairwise(bounds)]
    return [{path for each in stretch for path in program.params(each)} for stretch in stretches]
