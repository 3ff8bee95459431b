"""Runs a method in compositions that are written as text, so that they can be printed and sent to processes."""

import inspect
import math
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import attrs
from torch import Tensor

from functional_ds import comm
from functional_ds import transforms as T
from functional_ds.base import tree
from functional_ds.base.weighted import Weighted
from functional_ds.optim.optimizer import Optimizer, PerParameter
from functional_ds.optim.sgd import sgd
from functional_ds.step.compose import compose
from functional_ds.step.state.state import State
from functional_ds.step.step import Step, Transform
from functional_ds.step.train_step import train_step

from .problem import Problem
from .same import same_or_nan

STEPS = 3

# The axes of a mesh that a method may have, as ``AxisRole`` names them: whether their ranks get the same rows, and whether
# data-parallel transforms sum over them, too.
AXES = {"outer": (False, False), "tp": (True, False), "pp": (True, False), "sp": (True, True), "ep": (False, True)}


def mean_over_ranks(grads: Any, memory: Any, group: comm.Group) -> Any:
    """Averages gradients: ``T.replicated(reduce=mean_over_ranks)`` is plain data parallelism."""
    return comm.all_reduce(grads, group, op="avg"), memory


def overflowing(step: Step) -> Step:
    """The step, in which the last rank's gradients overflow half precision."""

    def loss(inner: Any, step: Step, state: State, params: Any, batch: Any) -> Any:
        value, metrics = inner(step, state, params, batch)
        here = comm.world()
        return Weighted(value.sum * (1e30 if here.rank == here.size - 1 else 1.0), value.weight), metrics

    return step.wrapped("overflow", loss=loss)


@attrs.frozen
class Setup:
    """A composition, and how it is run.

    Attributes:
        transforms: the arguments of ``compose`` as source text: ``("T.zero(3)", "method")``, where ``method`` is under test.
        ranks: the number of simulated ranks.
        steps: the number of updates.
        loss: the loss of the problem: "loss", "unused", or "layers", whose ``stages`` a pipeline runs.
        along: the number of ranks along each of the method's axes, or of models that ranks train apart.
    """

    transforms: tuple[str, ...] = ()
    ranks: int = 1
    steps: int = STEPS
    loss: str = "loss"
    along: tuple[int, ...] = ()

    @property
    def parts(self) -> int:
        """The number of ranks that share a model, or of models."""
        return math.prod(self.along)

    def __str__(self) -> str:
        where = f"{self.ranks} ranks" if self.ranks > 1 else "one device"
        sizes = [size for size in (*self.along, self.ranks // self.parts) if size > 1]
        if len(sizes) > 1:
            where = f"a mesh of {' x '.join(map(str, sizes))} ranks"
        return f"compose({', '.join(self.transforms)}), {where}, {self.steps} steps"


@attrs.frozen(eq=False)
class Recipe:
    """Makes steps on any rank; can be pickled if the user's functions can.

    Attributes:
        make: makes the transform or optimizer under test.
        optimizer: makes the optimizer to combine with a transform; None for SGD with momentum.
        problem: the training problem.
        standard: whether that is ``Problem()``.
        axes: the axes of a mesh whose groups ``make`` takes, of ``AXES``.
    """

    make: Callable[..., Any]
    optimizer: Callable[[], Any] | None
    problem: Problem
    standard: bool = False
    axes: tuple[str, ...] = ()

    @property
    def is_optimizer(self) -> bool:
        """Whether an optimizer is under test."""
        return not self.axes and is_optimizer(self.make())

    @property
    def is_itself(self) -> bool:
        """Whether a transform was given, and not a function that makes it."""
        return isinstance(self.make, partial) and self.make.func is _itself

    @property
    def shares_model(self) -> bool:
        """Whether the ranks along the axes train one model."""
        return bool(self.axes) and self.axes != ("outer",)

    def parts(self, *groups: comm.Group) -> tuple[Transform, Any]:
        """The method as a transform and an optimizer."""
        made = self.make(*groups)
        return (compose(), made) if is_optimizer(made) else (made, self.rule())

    def rule(self) -> Any:
        """The optimizer below a transform."""
        return sgd(0.1, momentum=0.5) if self.optimizer is None else self.optimizer()

    def step(self, setup: Setup) -> Step:
        """The composed step."""
        scope: dict[str, Any] = {"T": T, "mean_over_ranks": mean_over_ranks}
        groups: list[comm.Group] = []
        if self.axes:
            sizes = dict(zip(self.axes, setup.along or [1] * len(self.axes), strict=True))
            order = sorted(sizes, key=lambda axis: not AXES[axis][0])  # ranks with other rows are neighbours
            scope["mesh"] = mesh = comm.mesh(**{axis: sizes[axis] for axis in order}, dp=setup.ranks // setup.parts)
            beside = [axis for axis in self.axes if AXES[axis][1] and axis != "ep"]  # experts are alike along these
            groups = [mesh[(*beside, "dp") if name == "edp" else name] for name in groups_of(self.axes)]
        elif any("mesh" in text for text in setup.transforms):
            scope["mesh"] = comm.mesh(nodes=2, dp=setup.ranks // 2)
        with_method = "method" in setup.transforms or not self.axes
        scope["method"], optimizer = self.parts(*groups) if with_method else (None, self.rule())
        loss = self.problem.unused if setup.loss == "unused" else self.problem.loss
        if setup.loss == "loss" and not with_method:
            loss = self.problem.plain or loss
        if setup.loss == "layers":
            from functional_ds.pipelining.schedules.generators import one_f_one_b
            from functional_ds.pipelining.stages.from_functions import stages

            loss = stages([*(self.problem.layers or ())], self.problem.params, loss=self.problem.error)
            scope |= {"one_f_one_b": one_f_one_b, "stages": loss}
        chosen = [eval(text, scope) for text in setup.transforms]  # texts of this package
        return compose(*chosen)(train_step(loss, optimizer))  # type: ignore[arg-type]

    def rows(self, setup: Setup, index: int) -> Any:
        """This rank's rows of a step's batch; the two ranks of a pipeline get the same."""
        alike = math.prod(size for axis, size in zip(self.axes, setup.along, strict=False) if AXES[axis][0])
        alike = 2 if setup.loss == "layers" else alike
        parts = max(1, setup.ranks // alike)
        return rows_of_rank(self.problem.batches[index % len(self.problem.batches)], comm.world().rank % parts, parts)


def rows_of_rank(batch: Any, rank: int, ranks: int) -> Any:
    """A rank's rows of a batch."""
    return tree.map(lambda leaf: leaf.chunk(ranks)[rank], batch)


def started(recipe: Recipe, setup: Setup) -> tuple[Step, State]:
    """The step and its initial state."""
    step = recipe.step(setup)
    return step, step.init(recipe.problem.params)


def train(
    recipe: Recipe, setup: Setup, *, changed: Callable[[Step], Step] = lambda step: step, keep: bool = False
) -> tuple[Any, list[Tensor], int, Step]:
    """The params after some steps, the losses, the bytes that this rank sent in the last step, and the step.

    Args:
        recipe: makes the step.
        setup: the composition.
        changed: is applied to the composed step.
        keep: runs steps with ``donate=False``, and checks that they do not change the old state.

    Raises:
        AssertionError: with ``keep``, a step has changed its input state.
    """
    step = changed(recipe.step(setup))
    state, losses, sent = step.init(recipe.problem.params), [], 0
    for index in range(setup.steps):
        old, copies = state, [(path, leaf.clone()) for path, leaf in tree.named(state) if keep and isinstance(leaf, Tensor)]
        with comm.ledger() as book:
            state, metrics = step(state, recipe.rows(setup, index), donate=not keep)
        losses.append(metrics["loss"])
        sent = book.bytes
        now = dict(tree.named(old)) if keep else {}
        spoilt = [path for path, copy in copies if not same_or_nan(now[path], copy)]
        if spoilt:
            raise AssertionError(f"with donate=False a step has changed state.{spoilt[0]} of the state that it was given")
    return step.params(state), losses, sent, step


def axes_of(axis: Any) -> tuple[str, ...]:
    """The names of ``holds(axis=)``, which is a name, several, or None."""
    return () if axis is None else (axis,) if isinstance(axis, str) or not isinstance(axis, Sequence) else tuple(axis)


def groups_of(axes: Sequence[str]) -> list[str]:
    """Of which groups a method is a function: with experts also of the ranks that have the same ones."""
    return [*axes, *(["edp"] if "ep" in axes else [])]


def factory_of(transform: Any, axes: Sequence[str] = ()) -> Callable[..., Any]:
    """A function without arguments that makes the transform: ``transform`` itself if it is one, as ``partial(T.clip, 1.0)``.

    With ``axes`` it is a function of their groups.

    Raises:
        TypeError: ``transform`` is neither a transform, nor an optimizer, nor a function that makes one.
    """
    if axes:
        names = groups_of(axes)
        wanted = f"{len(names)} groups, {' and '.join(names)}" if len(names) > 1 else "one group"
        try:
            inspect.signature(transform).bind(*names)
        except TypeError as error:
            raise TypeError(
                f"axis={shown_axes(axes)}: transform={transform!r} must be a function of {wanted}: {error}"
            ) from None
        return transform  # type: ignore[no-any-return]
    if is_optimizer(transform):
        return partial(_itself, transform)
    if isinstance(transform, Step) or not callable(transform):
        raise TypeError(f"transform={transform!r} is neither a transform, nor an optimizer, nor a function that makes one")
    parameters = inspect.signature(transform).parameters.values()
    needed = [p for p in parameters if p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    return partial(_itself, transform) if needed else transform


def is_optimizer(value: Any) -> bool:
    """Whether a value is an optimizer: one of the library, or an object with ``init`` and ``update`` as in optax."""
    pair = all(callable(getattr(value, name, None)) for name in ("init", "update"))
    return isinstance(value, Optimizer | PerParameter) or (pair and not callable(value))


def _itself(value: Any) -> Any:
    return value


def name_of(make: Callable[[], Any]) -> str:
    """The name of a method in the table: that of its maker, or its own."""
    inner: Any = make.func if isinstance(make, partial) else make
    if inner is _itself or (inner.__name__ == "<lambda>" and not inspect.signature(inner).parameters):
        made = make()
        return name_of(made) if isinstance(made, partial) else getattr(made, "__name__", None) or str(made)
    words = [*map(repr, make.args), *(f"{k}={v!r}" for k, v in make.keywords.items())] if isinstance(make, partial) else []
    return f"{inner.__name__}({', '.join(words)})"


def shown_axes(axes: Sequence[str]) -> str:
    """The argument ``axis=`` as text."""
    return repr(axes[0] if len(axes) == 1 else tuple(axes))


def imported(name: str, make: Callable[..., Any], axes: Sequence[str] = ()) -> str:
    """Source lines that make the object of ``make``, or with ``axes`` a function of groups; a comment if it has no name."""
    inner: Any = make.func if isinstance(make, partial) else make
    importable = getattr(sys.modules.get(inner.__module__), inner.__name__, None) == inner
    if not importable or inner is _itself or inner.__module__ == "__main__":
        return f"# {name} = ..., as holds was given it"
    made = name_of(make)
    if axes:
        made = f"lambda *group: {made[:-1]}{'' if made.endswith('()') else ', '}*group)"
    return f"from {inner.__module__} import {inner.__name__}\n{name} = {made}"
