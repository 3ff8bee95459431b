"""Mutation testing: plants bugs in a method, one at a time, and checks whether the laws detect them."""

import ast
import copy
import inspect
import random
import textwrap
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from types import CodeType, FunctionType
from typing import Any

import attrs

from functional_ds.comm.record.notebook import html_text

from .holds import BoundLaw, laws
from .recipe import axes_of, factory_of, name_of

_SLOW = ("processes", "interleavings", "jit", "variance", "bytes")

# (pattern, bug, description): one-letter names in a pattern match any expression.
_BUGS = (
    ("step.norm(a, b)", "torch.stack([x.norm() for x in b]).norm()", "this rank's norm"),
    ("step.sum_over_ranks(a, b)", "b", "this rank's part of a sum"),
    ("step.reduce(a, b)", "(a, b)", "gradients that are not reduced"),
    ("step.trained(a)", "[torch.zeros_like(x) for x in step.trained(a)]", "no params"),
    ("fds.innermost(a)", "a", "another place"),
    ("fds.outermost(a)", "a", "another place"),
    ("a.weight", "torch.ones_like(a.weight)", "no weight"),
    ("a + b", "a - b", "another sign"),
    ("a - b", "a + b", "another sign"),
    ("a * b", "a / b", "the inverse factor"),
    ("a / b", "a * b", "the inverse factor"),
    ("a > b", "a < b", "the other way round"),
    ("a < b", "a > b", "the other way round"),
    ("a == b", "a != b", "the other way round"),
    ("torch.where(a, b, c)", "torch.where(a, c, b)", "the other choice"),
    ("torch.lerp(a, b, c)", "torch.lerp(b, a, c)", "the other end"),
    ("a.lerp(b, c)", "b.lerp(a, c)", "the other end"),
    ("a if b else c", "c if b else a", "the other choice"),
)


@attrs.frozen
class Mutant:
    """A planted bug.

    Attributes:
        line: its line in the file.
        old: the original code.
        new: the code with the bug.
        words: a description of the bug.
        caught: the law that detected it; empty if none did.
    """

    line: int
    old: str
    new: str
    words: str
    caught: str = ""

    def __str__(self) -> str:
        return f"line {self.line:<4} {self.old} -> {self.new}: {f'caught by {self.caught}' if self.caught else 'SURVIVES'}"


@attrs.frozen(repr=False)
class MutantTable:
    """The planted bugs, and the laws that detected them."""

    title: str
    rows: Sequence[Mutant]

    @property
    def survivors(self) -> list[Mutant]:
        """The bugs that no law detected."""
        return [row for row in self.rows if not row.caught]

    def __str__(self) -> str:
        return "\n".join([f"{self.title}: {len(self.survivors)} of {len(self.rows)} bugs survive", *map(str, self.rows)])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return html_text(self)


def mutants(transform: Callable[..., Any], *, most: int = 20, seed: int = 0, **options: Any) -> MutantTable:
    """Mutation testing: plants bugs in the function that makes a transform, and lists those that no law detects.

    The laws are those that the method passes, except the slowest ones. A bug that gives another method, with equal results on
    any number of ranks, is detected only with an ``oracle``.

    Args:
        transform: a Python function without arguments, or a ``partial`` of one, that makes the transform. Bugs are planted in
            its body, including nested functions.
        most: the maximal number of bugs; if there are more, ``seed`` selects them.
        seed: selects the bugs.
        options: as for ``laws``.

    Raises:
        ValueError: the source cannot be read; the method passes no law.
        TypeError: ``transform`` is not a function that makes a transform.
    """
    make = factory_of(transform, axes_of(options.get("axis")))
    inner = make.func if isinstance(make, partial) else make
    if not isinstance(inner, FunctionType) or make is not transform:
        raise TypeError(f"transform={transform!r}: bugs are planted into a Python function that makes the transform; give that")
    try:
        lines, begin = inspect.getsourcelines(inner)
    except OSError as error:
        raise ValueError(f"transform: the source of {inner.__name__} cannot be read, and bugs are planted there") from error
    module = ast.parse(textwrap.dedent("".join(lines)))
    good = [bound for bound in laws(transform, **options) if bound.law.name not in _SLOW and bound.result().outcome == "ok"]
    if not good:
        raise ValueError(f"{name_of(make)} itself passes no law, so that no bug could break one")
    chosen = options | {"order": good[0].plan.method.order, "only": [bound.law.name for bound in good]}
    planted = list(_planted(module))
    if len(planted) > most:
        planted = [planted[place] for place in sorted(random.Random(seed).sample(range(len(planted)), most))]
    tested = []
    for mutant, tree in planted:
        changed = _compiled(inner, tree)
        method = partial(changed, *make.args, **make.keywords) if isinstance(make, partial) else changed
        caught = _caught(laws(method, **chosen))
        tested.append(attrs.evolve(mutant, line=mutant.line + begin - 1, caught=caught))
    return MutantTable(name_of(make), sorted(tested, key=lambda bug: bug.line))


def _caught(bound: Sequence[BoundLaw]) -> str:
    for law in bound:
        try:
            outcome = law.result().outcome
        except Exception as error:  # the method does not run
            return f"{type(error).__name__}"
        if outcome in ("wrong", "refused"):
            return law.law.name
    return ""


def _planted(module: ast.Module) -> Iterator[tuple[Mutant, ast.Module]]:
    """Each bug, and the syntax tree with it."""
    patterns = [(ast.parse(old, mode="eval").body, ast.parse(new, mode="eval").body, words) for old, new, words in _BUGS]
    for index, node in enumerate(_expressions(module)):
        for old, new, words in patterns:
            bound: dict[str, ast.expr] = {}
            if not _fits(old, node, bound):
                continue
            tree = copy.deepcopy(module)
            spot = _expressions(tree)[index]
            bug = ast.copy_location(_Filled(bound).visit(copy.deepcopy(new)), spot)
            yield Mutant(node.lineno, ast.unparse(node), ast.unparse(bug), words), _Replaced(spot, bug).visit(tree)


def _expressions(module: ast.Module) -> list[ast.expr]:
    """Those of the function's body, without the defaults of its arguments."""
    [function] = module.body
    return [node for line in getattr(function, "body", []) for node in ast.walk(line) if isinstance(node, ast.expr)]


def _fits(pattern: Any, node: Any, bound: dict[str, ast.expr]) -> bool:
    if isinstance(pattern, ast.Name) and len(pattern.id) == 1 and isinstance(node, ast.expr):
        return ast.dump(bound.setdefault(pattern.id, node)) == ast.dump(node)
    if isinstance(pattern, list):
        return isinstance(node, list) and len(pattern) == len(node) and all(_fits(*pair, bound) for pair in zip(pattern, node))  # noqa: B905
    if not isinstance(pattern, ast.AST):
        return bool(pattern == node)
    return type(pattern) is type(node) and all(_fits(getattr(pattern, f), getattr(node, f), bound) for f in pattern._fields)


class _Filled(ast.NodeTransformer):
    """Replaces the names of a pattern by the expressions that they matched."""

    def __init__(self, bound: dict[str, ast.expr]) -> None:
        self.bound = bound

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return copy.deepcopy(self.bound[node.id]) if node.id in self.bound else node


class _Replaced(ast.NodeTransformer):
    """Replaces an expression by the bug."""

    def __init__(self, spot: ast.expr, bug: ast.expr) -> None:
        self.spot, self.bug = spot, bug

    def visit(self, node: ast.AST) -> Any:
        return self.bug if node is self.spot else super().generic_visit(node)


def _compiled(function: FunctionType, module: ast.Module) -> FunctionType:
    """Compiles a changed tree to a function with the globals, defaults and closure of ``function``."""
    free = function.__code__.co_freevars
    outer = ast.parse(f"def outer({', '.join(free)}): pass")
    outer.body[0].body = module.body  # type: ignore[attr-defined]
    module.body[0].decorator_list = []  # type: ignore[attr-defined]
    cells = dict(zip(free, function.__closure__ or (), strict=True))
    code = _code(compile(ast.fix_missing_locations(outer), f"<bug in {function.__name__}>", "exec"), function.__name__)
    closure = tuple(cells[name] for name in code.co_freevars)
    made = FunctionType(code, function.__globals__, function.__name__, function.__defaults__, closure)
    made.__kwdefaults__ = function.__kwdefaults__
    return made


def _code(code: CodeType, name: str) -> CodeType:
    [outer] = [const for const in code.co_consts if isinstance(const, CodeType)]
    return next(const for const in outer.co_consts if isinstance(const, CodeType) and const.co_name == name)
