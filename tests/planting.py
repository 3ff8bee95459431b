"""Bugs as data, planted alone into the library as it runs.

A bug names a function and a change of its syntax tree: a piece of code, and the code that stands there instead. Layout and
comments do not matter, nor does the rest of the module. Planting compiles the changed tree and swaps the code of the functions
that differ, so classes, records and names imported elsewhere stay the objects that they are.
"""

import ast
import gc
import importlib
import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from types import CodeType, FunctionType, ModuleType

import attrs

__all__ = ["Bug", "planted", "planted_source"]


@attrs.frozen
class Bug:
    """One bug.

    Attributes:
        name: what is wrong.
        function: where, within functional_ds: ``module:name``, dotted for methods and functions inside of functions; for
            functions without a name the module's variable that has them; without a name, the whole module.
        old: the code to change, an expression or statements, which the function has exactly once. A body ``...`` of a
            compound statement (``if ready: ...``) is any body.
        new: the code instead, with ``...`` where that body goes; empty where statements are left out.
        shows: how a law breaks: it does not hold, or there is an error that says so.
    """

    name: str
    function: str
    old: str
    new: str
    shows: type[Exception] = AssertionError

    @property
    def module(self) -> str:
        """The module of the function."""
        return self.function.partition(":")[0]


def _codes(code: CodeType) -> list[CodeType]:
    """The code of a module's functions and methods, in order; functions inside of functions belong to those."""
    found = []
    for const in code.co_consts:
        if isinstance(const, CodeType):
            found += [const] if const.co_flags & inspect.CO_OPTIMIZED else _codes(const)  # else a class body
    return found


def _called(node: ast.AST, name: str) -> bool:
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        return node.name == name
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    return any(isinstance(target, ast.Name) and target.id == name for target in targets)


def _scopes(bug: Bug, module: ast.Module) -> list[ast.AST]:
    """The definitions of the bug's function: several where it is overloaded or conditional."""
    scopes: list[ast.AST] = [module]
    for name in filter(None, bug.function.partition(":")[2].split(".")):
        inner = [node for scope in scopes for node in ast.walk(scope) if node is not scope and _called(node, name)]
        scopes = [node for node in inner if not any(node is not other and node in ast.walk(other) for other in inner)]
    return scopes


def _is_any_body(body: object) -> bool:
    return isinstance(body, list) and len(body) == 1 and ast.dump(body[0]) == "Expr(value=Constant(value=Ellipsis))"


def _matches(pattern: object, node: object) -> bool:
    if isinstance(pattern, list):
        return isinstance(node, list) and len(pattern) == len(node) and all(map(_matches, pattern, node))
    if not isinstance(pattern, ast.AST):
        return type(pattern) is type(node) and pattern == node
    if type(pattern) is not type(node):
        return False
    open_body = _is_any_body(getattr(pattern, "body", None))
    fields = [field for field in pattern._fields if not (open_body and field in ("body", "orelse"))]
    return all(_matches(getattr(pattern, field, None), getattr(node, field, None)) for field in fields)


def _places(scope: ast.AST, pattern: list[ast.stmt] | ast.expr) -> Iterator[tuple[ast.AST, str, int | None]]:
    """Where the pattern matches: a node, its field, and the place in a list."""
    for node in ast.walk(scope):
        for field, value in ast.iter_fields(node):
            if isinstance(pattern, list):
                if isinstance(value, list) and value and isinstance(value[0], ast.stmt):
                    ends = range(len(value) - len(pattern) + 1)
                    yield from ((node, field, i) for i in ends if _matches(pattern, value[i : i + len(pattern)]))
            elif isinstance(value, list):
                yield from ((node, field, i) for i, item in enumerate(value) if _matches(pattern, item))
            elif _matches(pattern, value):
                yield node, field, None


def _parsed(bug: Bug) -> tuple[list[ast.stmt] | ast.expr, list[ast.stmt] | ast.expr]:
    """The old code and the new: two expressions, or two runs of statements."""
    old, new = ast.parse(bug.old).body, ast.parse(bug.new).body
    if len(old) == len(new) == 1 and isinstance(old[0], ast.Expr) and isinstance(new[0], ast.Expr):
        return old[0].value, new[0].value
    return old, new


def _planted_in(bug: Bug, source: str) -> ast.Module:
    module = ast.parse(source)
    old, new = _parsed(bug)
    places = [place for scope in _scopes(bug, module) for place in _places(scope, old)]
    if len(places) != 1:
        raise LookupError(f"{bug.name}: {bug.function} has {len(places)} times {bug.old!r}; once is needed")
    [(node, field, index)] = places
    if isinstance(new, ast.expr):
        before = getattr(node, field) if index is None else getattr(node, field)[index]
        _at(new, before)
        if index is None:
            setattr(node, field, new)
        else:
            getattr(node, field)[index] = new
        return module
    body, count = getattr(node, field), len(old) if isinstance(old, list) else 1
    first = body[index]
    for statement in new:
        _at(statement, first)
        if _is_any_body(getattr(statement, "body", None)):
            statement.body = first.body  # type: ignore[attr-defined]
            if hasattr(first, "orelse") and hasattr(statement, "orelse"):
                statement.orelse = first.orelse
    body[index : index + count] = new
    if not body:
        body.append(ast.copy_location(ast.Pass(), first))
    return module


def _at(new: ast.AST, old: ast.AST) -> None:
    """New code is on the line of the old."""
    for node in ast.walk(new):
        if "lineno" in node._attributes:
            ast.copy_location(node, old)


def _changes(bug: Bug, module: ModuleType) -> dict[CodeType, CodeType]:
    source = inspect.getsource(module)
    trees = ast.parse(source), _planted_in(bug, source)
    before, after = (_codes(compile(tree, str(module.__file__), "exec", dont_inherit=True)) for tree in trees)
    return {a: b for a, b in zip(before, after, strict=True) if a != b}


def planted_source(bug: Bug) -> str:
    """The source of the bug's module with the bug, for another process."""
    return ast.unparse(_planted_in(bug, inspect.getsource(importlib.import_module(f"functional_ds.{bug.module}"))))


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
