"""Checks a transform or an optimizer against all laws."""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any

import attrs

from functional_ds.base.tree import rows_of
from functional_ds.comm.record.notebook import html_table
from functional_ds.step.step import Step

from .laws import LAWS, Law
from .method import Method, NotApplicableError, WrongError, refuses
from .problem import DIVISOR, Problem
from .recipe import AXES, Recipe, Setup, axes_of, factory_of, imported, shown_axes

_LIBRARY = "functional_ds."
_ARGUMENTS = {"oracle": "oracle", "ranks": "by_ranks", "bytes": "sends"}  # what a law compares with


@attrs.frozen
class LawResult:
    """The result of a law.

    Attributes:
        law: its name.
        says: what must hold.
        outcome: "ok", "refused" (an error was raised), "wrong" or "not applicable".
        words: how the law fails, the error message, or why it does not apply.
        program: if it fails or raises an error, a program that reproduces it.
        seconds: the time that it took.
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
    """The results of ``holds``, which print as a table with a row for each law.

    Attributes:
        title: the method and its position in ``compose``.
        rows: the results, in the order of the laws.
    """

    title: str
    rows: Sequence[LawResult]

    def __getitem__(self, law: str) -> LawResult:
        return next(row for row in self.rows if row.law == law)

    def outcomes(self) -> dict[str, str]:
        """The outcome of each law."""
        return {row.law: row.outcome for row in self.rows}

    def check(self, *, refusals: bool = True) -> "LawTable":
        """Returns this table if all laws hold.

        Args:
            refusals: whether a law may be "refused", that is, a composition raises an error.

        Raises:
            AssertionError: a law fails; shows the table and a program for the first such law.
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
        return html_table(["law", "outcome", ""], lines, caption=self.title)


@attrs.define(eq=False)
class _Plan:
    """A method whose position in ``compose`` is determined when the first law is checked."""

    recipe: Recipe
    options: Mapping[str, Any]

    @cached_property
    def method(self) -> Method:
        return Method.of(self.recipe, **self.options)


@attrs.frozen(eq=False)
class BoundLaw:
    """A law for a method, for ``pytest.mark.parametrize``; ``law.check()`` raises if it does not hold.

    Attributes:
        law: the law.
        plan: the method.
        excuse: why the law does not apply; empty if it does.
    """

    law: Law
    plan: _Plan = attrs.field(repr=False)
    excuse: str = ""

    @property
    def __name__(self) -> str:
        return self.law.name.replace(" ", "-")

    def result(self) -> LawResult:
        """Checks the law; returns its result.

        Raises:
            ValueError: the method does not run in any position, or its arguments are wrong.
        """
        method, begin = self.plan.method, time.perf_counter()
        outcome, words, program = self._outcome(method)
        return LawResult(self.law.name, self.law.says, outcome, words, program, time.perf_counter() - begin)

    def check(self) -> None:
        """Raises AssertionError if the law does not hold."""
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
            return "refused" if refuses(error) else "wrong", words, _program(method, self.law, error)


def _title(method: Method) -> str:
    how = "alone on its ranks, " if method.counts_ranks else "reduces gradients itself, " * method.sums
    how += f"along {' and '.join(method.recipe.axes)}, " if method.recipe.axes else ""
    words = f"{method.name}, {how}listed {method.order} T.{'mixed_precision' if method.combines else 'zero'}"
    return words + f" (after it: {method.elsewhere})" * bool(method.elsewhere)


def _program(method: Method, law: Law, error: Exception) -> str:
    """A program that reproduces the failure of a law; comments stand for objects that cannot be imported."""
    recipe = method.recipe
    rule = "fds.sgd(0.1, momentum=0.5)" if recipe.optimizer is None else imported("optimizer", recipe.optimizer)
    lines = ["import torch", "import functional_ds as fds", "from functional_ds import comm, testing, transforms as T"]
    if "T.replicated" in str(getattr(error, "setup", "")):
        lines.append("from functional_ds.testing.recipe import mean_over_ranks")
    if recipe.is_optimizer:
        lines += ["method = fds.compose()", imported("optimizer", recipe.make)]
    else:
        lines += [imported("method", recipe.make, recipe.axes), f"optimizer = {rule}" if recipe.optimizer is None else rule]
    lines += ["problem = testing.Problem()" if recipe.standard else "# problem = ..., as holds was given it", ""]
    setup: Setup | None = getattr(error, "setup", None)
    wanted, amount = (error.wanted, error.amount) if isinstance(error, WrongError) else (None, 0.0)
    short = wanted.ranks == 1 and amount > 0 if wanted else not isinstance(error, WrongError)
    if setup is None or setup.loss != "loss" or recipe.axes or not short:
        tested = "method" if recipe.axes else f"lambda: {'optimizer' if recipe.is_optimizer else 'method'}"
        given = f"{tested}, optimizer=lambda: optimizer, problem=problem, order={method.order!r}, only=[{law.name!r}]"
        given += f", axis={shown_axes(recipe.axes)}" if recipe.axes else ""
        known = "by_ranks" if method.counts_ranks else _ARGUMENTS.get(law.name, "")
        lines += [f"# {known} = ..., as holds was given it"] if known else []
        return "\n".join([*lines, f"testing.holds({given}{f', {known}={known}' if known else ''}).check()"])
    lines += [
        "def program(*strategy):",
        "    step = fds.compose(*strategy)(fds.train_step(problem.loss, optimizer))",
        "    state = step.init(problem.params)",
        f"    for index in range({setup.steps}):",
        "        state, metrics = step(state, problem.rows(index))",
        "    return step.params(state)",
        "",
    ]
    ranks = f"comm.simulate(lambda: program({', '.join(setup.transforms)}), world_size={setup.ranks})"
    if wanted is None:
        return "\n".join([*lines, ranks])
    return "\n".join(
        [
            *lines,
            f"alone = program({', '.join(wanted.transforms)})",
            f"for params in {ranks}:",
            f"    torch.testing.assert_close(params, alone, rtol=0, atol={amount / 2:.1e})",
        ]
    )


def holds(transform: Any, **options: Any) -> LawTable:
    """Checks a transform or an optimizer against the laws; returns a table of results.

    A law is *ok*, *refused* (a composition raised an error: the message), *wrong* (the difference in the smallest failing
    composition, and a program that reproduces it) or *not applicable* (the reason). Most laws compare simulated ranks with
    single-device training; an ``oracle`` also checks what is computed on a single device. Takes some ten seconds of CPU time.

    Args:
        transform: a transform, an optimizer, or better a function without arguments that makes one, such as
            ``partial(T.ema, 0.9)``: if it can be imported, it is also run in new processes, and printed programs import it.
        options: as for ``laws``.

    Raises:
        TypeError: ``transform`` is neither a transform, nor an optimizer, nor a function that makes one.
        ValueError: the method runs neither before nor after ``T.zero``, as an optimizer that is declared elementwise and is
            not; the oracle's result does not match the params; a law's name is unknown.

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
    oracle: Callable[[Any, list[Any]], Any] | Step | None = None,
    by_ranks: Callable[[Any, list[list[Any]]], Sequence[Any]] | None = None,
    sends: Callable[[int | None, int], int] | None = None,
    within: float = 1e-4,
    axis: str | Sequence[str] | None = None,
    excused: Mapping[str, str] | None = None,
    only: Iterable[str] | None = None,
) -> list[BoundLaw]:
    """The laws as pytest parameters: ``@pytest.mark.parametrize("law", laws(my_transform))``; tests call ``law.check()``.

    Nothing runs before the first ``check``.

    Args:
        transform: as for ``holds``.
        optimizer: a function that makes the optimizer to combine with a transform; by default SGD with momentum.
        problem: the training problem; by default a regression with two layers.
        order: the position in ``compose``, "after" or "before" the data-parallel transform; by default the first that works.
        oracle: ``(params, batches) -> params``: the expected result on whole batches, in plain PyTorch; or a step, which is
            run over the batches.
        by_ranks: ``(params, batches) -> [params of each rank]``, where ``batches[step][rank]`` are a rank's rows: the
            expected result of a method that depends on the number of ranks by design, such as local SGD, gossip, or votes of
            signs. It is run without ``T.zero``, and other laws compare it with itself on as many ranks.
        sends: ``(stage, ranks) -> bytes``: the bytes that a rank sends in a step in addition to those of ``T.zero(stage)``; of
            a method that reduces gradients itself, ``stage`` is None, and these are all.
        within: the tolerance, relative to a parameter's total change since its initial value, in addition to rounding.
        axis: the axis of a mesh of whose group ``transform`` is a function, by what its ranks have, as ``AxisRole`` says:
            "tp" slices of the model, "pp" its stages, "sp" positions of the same rows, "ep" experts and rows of their own (then
            a function of two groups, ``ep`` and ``edp``), "outer" a model each. ``T.zero`` and others are over ``mesh["dp"]``,
            for "sp" and "ep" over both axes. Laws compare with the step on one device without the transform, whose loss must
            run there; the axis has two ranks, and in some laws four. Several, as ``("pp", "tp")``, are of one model, and
            ``transform`` is a function of their groups. With "outer", as in DiLoCo, ``T.apart`` is listed last,
            laws compare with two models of one rank, and ``batches[step][model]`` are the rows of ``by_ranks``.
        excused: laws that do not apply to the method, with the reasons.
        only: the laws to check; by default all.

    Raises:
        TypeError: ``transform`` is neither a transform, nor an optimizer, nor a function that makes one, or with ``axis`` no
            function of a group; ``oracle``, ``by_ranks`` or ``sends`` is no function.
        ValueError: a law's name, ``order``, ``axis`` or ``within`` is unknown; the batches cannot be divided; ``oracle`` or
            ``by_ranks`` with an axis whose ranks it does not describe.

    >>> from functional_ds import transforms as T
    >>> only = laws(T.clip(1.0), only=["stages", "donation"])
    >>> [law.__name__ for law in only]
    ['stages', 'donation']
    """
    excuses, chosen = dict(excused or {}), None if only is None else list(only)
    names = [law.name for law in LAWS]
    unknown = [name for name in (*excuses, *(chosen or ())) if name not in names]
    if unknown or chosen == []:
        raise ValueError(f"there is no law {unknown[0] if unknown else ''!r}; the laws are {', '.join(names)}")
    options = {"order": order, "oracle": oracle, "by_ranks": by_ranks, "sends": sends, "within": within}
    _check_options(options)
    given = problem or Problem()
    axes = axes_of(axis)
    if axis is not None:
        _check_axes(axes, options, given)
    recipe = Recipe(factory_of(transform, axes), optimizer, given, standard=problem is None, axes=axes)
    plan = _Plan(recipe, options)
    return [BoundLaw(law, plan, excuses.get(law.name, "")) for law in LAWS if chosen is None or law.name in chosen]


def _check_axes(axes: Sequence[str], options: Mapping[str, Any], problem: Problem) -> None:
    """Raises an error for what no law over these axes could use."""
    shown = shown_axes(axes)
    if not axes or any(axis not in [*AXES] for axis in axes):
        raise ValueError(f"axis={shown} is not an axis of which a method is a function: {', '.join(AXES)}")
    outer = "outer" in axes
    if len({*axes}) < len(axes) or (outer and len(axes) > 1):
        raise ValueError(f"axis={shown}: give each axis once, and 'outer', whose ranks have a model each, alone")
    wrong, right = ("oracle", "by_ranks") if outer else ("by_ranks", "oracle")
    if options[wrong] is not None:
        have = "a model each" if outer else "one model"
        raise ValueError(f"{wrong}: with axis={shown} ranks have {have}; pass {right}=")
    odd = [rows for rows in map(rows_of, problem.batches) if not all(AXES[axis][0] for axis in axes) and rows % (2 * DIVISOR)]
    if odd:
        raise ValueError(f"axis={shown}: its ranks divide a batch, too; give multiples of {2 * DIVISOR} rows, not {odd}")


def _check_options(options: Mapping[str, Any]) -> None:
    """Raises an error for what no law could use, before anything runs."""
    order, within = options["order"], options["within"]
    if order not in (None, "after", "before"):
        raise ValueError(f"order={order!r} is neither 'after' nor 'before' what is data-parallel")
    if not isinstance(within, int | float) or not 0 <= within < float("inf"):
        raise ValueError(f"within={within!r} is not a tolerance of 0 or more")
    for name, arguments in (("oracle", "params, batches"), ("by_ranks", "params, batches"), ("sends", "stage, ranks")):
        if options[name] is not None and not callable(options[name]):
            raise TypeError(f"{name}={options[name]!r} is not a function of ({arguments})")
