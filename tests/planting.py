"""Bugs as data, planted alone into the library as it runs.

A bug is a text in a module's source and what stands there instead. Planting compiles the changed source and swaps the code
of the functions that differ, so classes, records and names imported elsewhere stay the objects that they are.
"""

import gc
import importlib
import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from types import CodeType, FunctionType, ModuleType

import attrs

__all__ = ["Bug", "planted"]


@attrs.frozen
class Bug:
    """One bug.

    Attributes:
        name: what is wrong.
        module: where, within functional_ds.
        old: a text that the module's source has exactly once.
        new: what stands there instead.
        shows: how a law breaks: it does not hold, or there is an error that says so.
    """

    name: str
    module: str
    old: str
    new: str
    shows: type[Exception] = AssertionError


def _codes(code: CodeType) -> list[CodeType]:
    """The code of a module's functions and methods, in order; functions inside of functions belong to those."""
    found = []
    for const in code.co_consts:
        if isinstance(const, CodeType):
            found += [const] if const.co_flags & inspect.CO_OPTIMIZED else _codes(const)  # else a class body
    return found


def _changes(bug: Bug, module: ModuleType) -> dict[CodeType, CodeType]:
    source = inspect.getsource(module)
    if source.count(bug.old) != 1:
        raise LookupError(f"{bug.name}: {module.__name__} has {source.count(bug.old)} times {bug.old!r}; once is needed")
    texts = source, source.replace(bug.old, bug.new)
    before, after = (_codes(compile(text, str(module.__file__), "exec", dont_inherit=True)) for text in texts)
    return {a: b for a, b in zip(before, after, strict=True) if a != b}


@cache
def _functions() -> list[FunctionType]:
    """All functions of the library, those made while it was imported."""
    gc.unfreeze()  # what tests/conftest.py sets aside is not listed
    found = [f for f in gc.get_objects() if type(f) is FunctionType]
    gc.freeze()
    return [f for f in found if str(f.__module__).partition(".")[0] == "functional_ds"]


@contextmanager
def planted(bug: Bug) -> Iterator[None]:
    """The library with a bug.

    Raises:
        LookupError: the module's source does not have the text once, or none of its functions runs that text.
    """
    module = importlib.import_module(f"functional_ds.{bug.module}")
    changes = _changes(bug, module)
    if all(f.__module__ != module.__name__ for f in _functions()):  # imported since
        _functions.cache_clear()
    swaps = {f: f.__code__ for f in _functions() if f.__code__ in changes}
    if not swaps:
        raise LookupError(f"{bug.name}: no function of {module.__name__} has the code to change")
    caches = [value for value in vars(module).values() if hasattr(value, "cache_clear")]
    try:
        for function, code in swaps.items():
            function.__code__ = changes[code]
        for found in caches:
            found.cache_clear()
        yield
    finally:
        for function, code in swaps.items():
            function.__code__ = code
        for found in caches:
            found.cache_clear()
