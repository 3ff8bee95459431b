"""``holds``: a transform or an optimizer against all laws, as a table."""

import html
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any

import attrs

from .laws import LAWS, Law
from .method import Method, NotApplicableError, WrongError, refuses
from .problem import Problem
from .recipe import Recipe, factory_of, imported

__all__ = ["BoundLaw", "LawResult", "LawTable", "holds", "laws"]

_LIBRARY = "functional_ds."


@attrs.frozen
class LawResult:
    """One row of the table.

    Attributes:
        law: its name.
        says: what must hold.
        outcome: "ok", "refused", "wrong" or "not applicable".
        words: how the law fails, the refusal's sentence, or why it does not apply.
        program: where it fails, a program that shows it.
        seconds: that it took.
    """

    law: str
    says: str
    outcome: str
    words: str = ""
    program: str = ""
    seconds: float = attrs.field(default=0.0, eq=False)

    def __str__(self) -> str:
        return f"{self.law:<18} {self.outcome}{': ' if self.words else ''}{self.words}"


@attrs.frozen(repr=False)
class LawTable:
    """What ``holds`` has found: a row for each law.

    Attributes:
        title: the method and its place in ``compose``.
        rows: in the order of the laws.
    """

    title: str
    rows: Sequence[LawResult]

    def __getitem__(self, law: str) -> LawResult:
        return next(row for row in self.rows if row.law == law)

    def outcomes(self) -> dict[str, str]:
        """The outcome of each law."""
        return {row.law: row.outcome for row in self.rows}

    def check(self, *, refusals: bool = True) -> "LawTable":
        """This table, if no law is broken.

        Args:
            refusals: whether a composition for which the library or the method raises an error counts as right.

        Raises:
            AssertionError: a law is broken; shows the table and a program for the first broken law.
        """
        bad = [row for row in self.rows if row.outcome == "wrong" or (row.outcome == "refused" and not refusals)]
        if bad:
            raise AssertionError("\n\n".join(filter(None, (str(self), bad[0].program))))
        return self

    def __str__(self) -> str:
        return "\n".join([self.title, *map(str, self.rows)])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        lines = [(row.law, row.outcome, row.words or row.says) for row in self.rows]
        cells = "".join(f"<tr>{''.join(f'<td>{html.escape(cell)}</td>' for cell in line)}</tr>" for line in lines)
        return f"<table><caption>{html.escape(self.title)}</caption>{cells}</table>"


@attrs.define(eq=False)
class _Plan:
    """A method that is placed when the first law is checked."""

    recipe: Recipe
    options: Mapping[str, Any]

    @cached_property
    def method(self) -> Method:
        return Method.of(self.recipe, **self.options)


@attrs.frozen(eq=False)
class BoundLaw:
    """One law for one method, for ``pytest.mark.parametrize``; ``law.check()`` raises where it is broken.

    Attributes:
        law: which one.
        plan: the method.
        excuse: why the law does not apply; empty where it does.
    """

    law: Law
    plan: _Plan = attrs.field(repr=False)
    excuse: str = ""

    @property
    def __name__(self) -> str:
        return self.law.name.replace(" ", "-")

    def result(self) -> LawResult:
        """The law's row.

        Raises:
            ValueError: the method cannot be placed, or its arguments are wrong.
        """
        method, begin = self.plan.method, time.perf_counter()
        outcome, words, program = self._outcome(method)
        return LawResult(self.law.name, self.law.says, outcome, words, program, time.perf_counter() - begin)

    def check(self) -> None:
        """Raises AssertionError if the law is broken."""
        LawTable(_title(self.plan.method), [self.result()]).check()

    def _outcome(self, method: Method) -> tuple[str, str, str]:
        if self.excuse:
            return "not applicable", self.excuse, ""
        try:
            return "ok", self.law.check(method) or "", ""
        except NotApplicableError as error:
            return "not applicable", str(error), ""
        except WrongError as error:
            return "wrong", str(error), _program(method, self.law, error)
        except ModuleNotFoundError as error:
            if not str(error.name).startswith(_LIBRARY):
                raise
            return "not applicable", f"this installation leaves out {error.name}", ""
        except Exception as error:
            words = f"{type(error).__name__}: {error}"
            return ("refused", words, "") if refuses(error) else ("wrong", words, _program(method, self.law, error))


def _title(method: Method) -> str:
    order = {"after": "listed after T.zero", "before": "listed before T.zero", "alone": "reduces gradients itself"}
    return f"{method.name}, {order[method.order]}" + (f" (after it: {method.elsewhere})" if method.elsewhere else "")


def _program(method: Method, law: Law, error: Exception) -> str:
    """A program that shows that a law is broken; comments name what no program can import."""
    recipe = method.recipe
    rule = "fds.sgd(0.1, momentum=0.5)" if recipe.optimizer is None else imported("optimizer", recipe.optimizer)
    lines = ["import torch", "import functional_ds as fds", "from functional_ds import comm, testing, transforms as T"]
    if recipe.is_optimizer:
        lines += ["method = fds.compose()", imported("optimizer", recipe.make)]
    else:
        lines += [imported("method", recipe.make), f"optimizer = {rule}" if recipe.optimizer is None else rule]
    lines += ["problem = testing.Problem()" if recipe.standard else "# problem = ..., as holds was given it", ""]
    setup, wanted = (error.setup, error.wanted) if isinstance(error, WrongError) else (None, None)
    if setup is None or wanted is None or setup.loss != "loss" or not isinstance(error, WrongError) or not error.amount:
        tested = "optimizer" if recipe.is_optimizer else "method"
        given = f"lambda: {tested}, optimizer=lambda: optimizer, problem=problem, order={method.order!r}, only=[{law.name!r}]"
        return "\n".join([*lines, f"testing.holds({given}).check()"])
    return "\n".join(
        [
            *lines,
            "def program(*strategy):",
            "    step = fds.compose(*strategy)(fds.train_step(problem.loss, optimizer))",
            "    state = step.init(problem.params)",
            f"    for index in range({setup.steps}):",
            "        state, metrics = step(state, problem.rows(index))",
            "    return step.params(state)",
            "",
            f"alone = program({', '.join(wanted.transforms)})",
            f"for params in comm.simulate(lambda: program({', '.join(setup.transforms)}), world_size={setup.ranks}):",
            f"    torch.testing.assert_close(params, alone, rtol=0, atol={error.amount / 2:.1e})",
        ]
    )


def holds(transform: Any, **options: Any) -> LawTable:
    """Checks a transform or an optimizer against the laws: a table with a row for each.

    A row is *ok*, *refused* (by the library or the method, with the sentence), *wrong* (by how much, in the smallest
    composition that was tried, with a program that shows it) or *not applicable* (with the reason). Most laws compare simulated
    ranks with one device: for any method, it must be the same everywhere. An ``oracle`` says which one it should be.

    It takes some ten seconds of CPU time.

    Args:
        transform: a transform, an optimizer, or better a function without arguments that makes one, such as
            ``partial(T.ema, 0.9)``: if it is a module's, it is run in new processes, too, and programs in the table import it.
        options: as for ``laws``.

    Raises:
        TypeError: ``transform`` is none.
        ValueError: the method runs neither before nor after ``T.zero``, as an optimizer that must be elementwise and is not;
            the oracle gives something else than params; there is no law of a name.

    >>> from functional_ds import transforms as T
    >>> table = holds(T.clip(0.1), only=["stages", "donation"])
    >>> print(table.check())
    clip(0.1), listed after T.zero
    stages             ok
    donation           ok
    """
    bound = laws(transform, **options)
    rows = [each.result() for each in bound]
    return LawTable(_title(bound[0].plan.method), rows)


def laws(
    transform: Any,
    *,
    optimizer: Callable[[], Any] | None = None,
    problem: Problem | None = None,
    order: str | None = None,
    oracle: Callable[[Any, list[Any]], Any] | None = None,
    sends: Callable[[int, int], int] | None = None,
    within: float = 1e-4,
    excused: Mapping[str, str] | None = None,
    only: Iterable[str] | None = None,
) -> list[BoundLaw]:
    """The laws as tests: ``@pytest.mark.parametrize("law", laws(my_transform))``, and ``law.check()`` in the test's body.

    Nothing runs before the first ``check``.

    Args:
        transform: as for ``holds``.
        optimizer: a function that makes the optimizer that a transform changes; by default sgd with momentum.
        problem: what is trained; by default a regression by two layers.
        order: "after" or "before" what is data-parallel in ``compose``; by default the first in which the method is right.
        oracle: ``(params, batches) -> params``: what the method must compute of whole batches, in plain PyTorch.
        sends: ``(stage, ranks) -> bytes``: what a rank sends in a step beyond what ``T.zero(stage)`` sends.
        within: the part of the way that a parameter has come from its start by which it may differ, in addition to rounding.
        excused: laws that do not apply to the method, and why.
        only: the laws to check; by default all.

    Raises:
        TypeError: ``transform`` is neither a transform, nor an optimizer, nor a function that makes one.
        ValueError: there is no law of a name.
    """
    excuses, chosen = dict(excused or {}), None if only is None else list(only)
    names = [law.name for law in LAWS]
    unknown = [name for name in (*excuses, *(chosen or ())) if name not in names]
    if unknown or chosen == []:
        raise ValueError(f"there is no law {unknown[0] if unknown else ''!r}; the laws are {', '.join(names)}")
    recipe = Recipe(factory_of(transform), optimizer, problem or Problem(), standard=problem is None)
    plan = _Plan(recipe, {"order": order, "oracle": oracle, "sends": sends, "within": within})
    return [BoundLaw(law, plan, excuses.get(law.name, "")) for law in LAWS if chosen is None or law.name in chosen]
