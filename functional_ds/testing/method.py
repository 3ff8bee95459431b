"""A transform or optimizer under test: its position in ``compose``, its runs, and their comparison."""

import linecache
import math
import traceback
from collections.abc import Callable, Iterable, Sequence
from numbers import Real
from typing import Any

import attrs
import torch
from torch import Tensor

from functional_ds import comm
from functional_ds.base import tree
from functional_ds.comm.table.errors import CommError
from functional_ds.step.step import Step

from .recipe import AXES, STEPS, Recipe, Setup, name_of, rows_of_rank, train

BF16 = "T.mixed_precision('bf16')"
NEAR = 0.2  # of a leaf's change: half precision rounds each gradient by 2**-8 or more, and methods divide by gradients
_PARALLEL = ("T.zero", "T.replicated")
RANKS = (2, 3)  # of whole runs that a user's oracle describes
ALONG = 2  # ranks along each of the method's axes
_ROUNDING = 64  # units in the last place of a leaf's largest element, for sums in other orders


class WrongError(Exception):
    """A law does not hold.

    Attributes:
        setup: the smallest composition that shows it; None if it takes several.
        wanted: the single-device composition that it is compared with.
        amount: by how much a parameter differs; 0 if something else differs.
    """

    def __init__(self, words: str, setup: Setup | None = None, wanted: Setup | None = None, amount: float = 0.0) -> None:
        super().__init__(words)
        self.setup, self.wanted, self.amount = setup, wanted, amount


class NotApplicableError(Exception):
    """A law does not apply to the method; the message gives the reason."""


def refuses(error: Exception) -> bool:
    """Whether an error was raised on purpose by the library or the method, rather than by torch or between ranks."""
    if isinstance(error, CommError) or not isinstance(error, TypeError | ValueError | RuntimeError):
        return False
    *_, (frame, number) = traceback.walk_tb(error.__traceback__)
    line = linecache.getline(frame.f_code.co_filename, number)
    return not frame.f_globals.get("__name__", "").startswith("torch") and line.strip().startswith("raise ")


def apart(found: Any, wanted: Any, start: Any, within: float) -> tuple[float, str] | None:
    """The largest difference between two trees of tensors, and its leaf; None if they are close.

    A leaf may differ by ``within`` times its largest change since ``start``, and by rounding.

    Args:
        found: a tree.
        wanted: a tree of the same structure.
        start: the initial values of the leaves; None for zeros.
        within: the relative tolerance.
    """
    if tree.structure(found) != tree.structure(wanted):
        return float("inf"), f"the structure is {tree.structure(found)}, not {tree.structure(wanted)}"
    worst: tuple[float, str] | None = None
    starts = tree.leaves(wanted) if start is None else tree.leaves(start)
    for (path, x), y, begin in zip(tree.named(found), tree.leaves(wanted), starts, strict=True):
        if not isinstance(y, Tensor):
            continue
        if not isinstance(x, Tensor) or x.shape != y.shape:
            return float("inf"), f"{path}: {getattr(x, 'shape', x)} is not {y.shape}"
        one, other = x.detach().double(), y.detach().double()
        way = other if start is None else other - begin.detach().double()
        unit = torch.finfo(y.dtype).eps if y.is_floating_point() else 0.0
        largest = other.abs().amax().item() if other.numel() else 0.0
        allowed = within * (way.abs().amax().item() if way.numel() else 0.0) + _ROUNDING * unit * largest
        difference = (one - other).abs().amax().item() if other.numel() else 0.0
        if not difference <= allowed and (worst is None or not difference <= worst[0]):  # also if it is NaN
            worst = difference, f"{path or 'the value'} differs by {difference:.1e}, where {allowed:.0e} is rounding"
    return worst


@attrs.frozen(eq=False)
class Method:
    """A transform or optimizer under test.

    Attributes:
        recipe: makes its steps.
        order: "after" or "before" the data-parallel transform in ``compose``.
        sums: whether it reduces gradients itself; then it is tried without a data-parallel transform.
        within: the relative tolerance of comparisons with a single device, as in ``apart``.
        oracle: ``(params, batches) -> params``, the expected result, or a step that computes it; None if unknown.
        by_ranks: ``(params, batches) -> [params of each rank]``, of a method that depends on the number of ranks; None if it
            does not.
        sends: ``(stage, ranks) -> bytes``, the bytes that a rank sends in addition to ``T.zero(stage)``; None if unknown.
        elsewhere: the error in the other order of composition, for the table.
    """

    recipe: Recipe
    order: str = "after"
    sums: bool = False
    within: float = 1e-4
    oracle: Callable[[Any, list[Any]], Any] | Step | None = None
    by_ranks: Callable[[Any, list[list[Any]]], Sequence[Any]] | None = None
    sends: Callable[[int | None, int], int] | None = None
    elsewhere: str = ""
    _runs: dict[Setup, list[Any]] = attrs.field(factory=dict, repr=False)

    @property
    def name(self) -> str:
        """Its name in the table."""
        return name_of(self.recipe.make)

    @property
    def combines(self) -> bool:
        """Whether it is all that the ranks have in common, without ``T.zero``."""
        return self.sums or self.counts_ranks

    @property
    def counts_ranks(self) -> bool:
        """Whether what it computes depends on the number of ranks, and not on that of models along an outer axis."""
        return self.by_ranks is not None and not self.recipe.axes

    def listed(self, *parallel: str, first: str = "", last: str = "") -> tuple[str, ...]:
        """The method in its position among the ``parallel`` transforms; ``first`` and ``last`` come around all."""
        if self.combines:
            parallel = tuple(text for text in parallel if not text.startswith(_PARALLEL))
        axes = self.recipe.axes
        if axes:
            summed = [axis for axis in axes if AXES[axis][1]]
            over = ", ".join(map(repr, [*summed, "dp"]))
            if summed and not any(x.startswith(_PARALLEL) for x in parallel):
                parallel = (*parallel, "T.zero(0)")
            if "ep" in axes:  # T.replicated keeps all params the same on its ranks
                parallel = tuple("T.zero(1)" if x.startswith("T.replicated") else x for x in parallel)
            parallel = tuple(f"{x[:-1]}, group=mesh[{over}])" if x.startswith(_PARALLEL) else x for x in parallel)
        core = ("method", *parallel) if self.order == "before" else (*parallel, "method")
        return tuple(filter(None, (first, *core, last, "T.apart(mesh['outer'])" * ("outer" in axes))))

    def on(
        self,
        ranks: int,
        *parallel: str,
        loss: str = "loss",
        steps: int = STEPS,
        first: str = "",
        last: str = "",
        along: int = ALONG,
    ) -> Setup:
        """The setup of ``listed`` on a number of ranks; with axes, for each of ``along`` ranks along each of them."""
        sizes = (along,) * len(self.recipe.axes)
        total = ranks * math.prod(sizes)
        return Setup(
            self.listed(*parallel, first=first, last=last), total, steps, loss, (ranks,) if self.counts_ranks else sizes
        )

    def alone(self, *, loss: str = "loss", steps: int = STEPS, first: str = "", last: str = "") -> Setup:
        """What others are compared with: one device; without the method, if ranks share a model along its axis."""
        if self.recipe.shares_model:
            return Setup(tuple(filter(None, (first, last))), 1, steps, loss)
        return self.on(1, loss=loss, steps=steps, first=first, last=last)

    def model(self, setup: Setup, rank: int) -> int:
        """The model that a rank trains."""
        return 0 if self.recipe.shares_model else rank * setup.parts // setup.ranks

    def run(self, setup: Setup) -> list[Any]:
        """Each rank's params and losses; cached."""
        if setup not in self._runs:
            seed = setup.ranks + len(self._runs)
            try:
                results = comm.simulate(train, self.recipe, setup, world_size=setup.ranks, seed=seed)
            except Exception as error:
                error.__dict__["setup"] = setup  # for a program that raises it
                raise
            self._runs[setup] = [(params, losses) for params, losses, *_ in results]
        return self._runs[setup]

    def differs(self, setup: Setup, wanted: Setup, within: float) -> tuple[float, str]:
        """By how much the params differ from those of another run, and what differs; (0, "") if nothing does.

        The other run is on one device for each model.
        """
        others = self.run(wanted)
        first = tree.leaves(self.run(setup)[0][0])
        for rank, (own, own_losses) in enumerate(self.run(setup)):
            params, losses = others[self.model(setup, rank)]
            if found := apart(own, params, self.recipe.problem.params, within):
                return found[0], f"rank {rank}: {found[1]}"
            if found := apart(own_losses, losses, None, max(within, 1e-4)):
                return 0.0, f"rank {rank}, the losses: {found[1]}"
            if len(others) == 1 and not all(map(torch.equal, tree.leaves(own), first)):
                return 0.0, f"rank {rank} has other params than rank 0"
        return 0.0, ""

    def equal(self, setups: Iterable[Setup], wanted: Setup, within: float | None = None) -> None:
        """Checks that each setup equals ``wanted``, a single-device run, up to rounding; on as many ranks, if those matter.

        Raises:
            NotApplicableError: the setups are ``wanted`` itself.
            WrongError: one does not; with the fewest steps that show it.
        """
        bound = self.within if within is None else within
        pairs = dict.fromkeys(setups, wanted)
        if self.counts_ranks:
            pairs = {setup: attrs.evolve(wanted, ranks=setup.ranks, along=setup.along) for setup in pairs}
        if all(setup == other for setup, other in pairs.items()):
            raise NotApplicableError("it depends on the number of ranks by design: see the row ranks")
        for setup, other in pairs.items():
            if not self.differs(setup, other, bound)[1]:
                continue
            for steps in range(1, setup.steps + 1):
                pair = attrs.evolve(setup, steps=steps), attrs.evolve(other, steps=steps)
                amount, words = self.differs(*pair, bound)
                if words:
                    raise WrongError(f"{pair[0]}: {words}", *pair, amount)

    @staticmethod
    def of(recipe: Recipe, *, order: str | None, **options: Any) -> "Method":
        """The method in the first order of composition in which it is right, or else runs.

        Args:
            recipe: makes its steps.
            order: "after" or "before" the data-parallel transform; None tries both.
            options: further attributes.

        Raises:
            ValueError: it runs in neither order, or not on a single device; with axis="outer" it reduces gradients itself;
                the result of ``oracle`` or ``by_ranks`` does not match params.
            TypeError: what ``sends`` returns is not a number of bytes.
        """
        method = Method(recipe, **options)
        if method.oracle is not None:
            _check_like(method.oracle_params(), recipe.problem.params)
        if method.by_ranks is not None:
            [*map(method.params_of_ranks, [ALONG] if recipe.axes else RANKS)]
        try:
            step = recipe.step(attrs.evolve(method.alone(), ranks=1, along=()))
            if not isinstance(step, Step):
                raise TypeError(f"it makes {step!r} of a step, and a transform makes a step")
        except Exception as error:
            hint = "; a function that makes transforms is given with all its arguments, as partial(T.clip, 1.0)"
            words = f"{type(error).__name__}: {error}{hint if recipe.is_itself else ''}"
            raise ValueError(f"holds: {method.name} does not run on one device: {words}") from error
        method = attrs.evolve(method, sums=step.sums and not method.counts_ranks)
        if method.sums and "outer" in recipe.axes:
            raise ValueError(f"axis='outer': {method.name} reduces gradients itself, and models are trained apart")
        sent: object = 0 if method.sends is None else method.sends(None if method.combines else 0, RANKS[0])
        if not isinstance(sent, Real):
            raise TypeError(f"sends: it gives {sent!r}, and not a number of bytes")
        try:
            method.run(method.alone())
        except Exception as error:
            what = f"the loss without {method.name}" if recipe.shares_model else method.name
            hint = "; give one that does: Problem(plain=)" * recipe.shares_model
            raise ValueError(f"holds: {what} does not run on one device: {type(error).__name__}: {error}{hint}") from error
        places = [attrs.evolve(method, order=place) for place in (["after", "before"] if order is None else [order])]
        trials = [place.trial() for place in places]
        best = max(range(len(places)), key=lambda index: trials[index][0])
        if not trials[best][0]:
            words = "; ".join(f"{place.order} it, {text}" for place, (_, text) in zip(places, trials, strict=True))
            where = "run on 2 ranks" if method.combines else "be composed with T.zero(1)"
            raise ValueError(f"holds: {method.name} cannot {where}: {words}")
        return attrs.evolve(places[best], elsewhere=trials[0][1] if best else "")

    def trial(self) -> tuple[int, str]:
        """A score of this order of composition, and the error.

        0: raises an error with ``T.zero(1)``; 1: wrong with it; 2: wrong with the bf16 policy; 3: right.
        """
        wanted = self.on(2, steps=2) if self.counts_ranks else self.alone(steps=2)
        for score, parallel, within in ((1, ("T.zero(1)",), self.within), (2, (BF16, "T.zero(1)"), max(NEAR, self.within))):
            try:
                words = self.differs(self.on(2, *parallel, steps=2), wanted, within)[1]
            except Exception as error:
                words = f"{type(error).__name__}: {error}"
                if score == 1 and refuses(error):
                    return 0, words
            if words:
                return score, words
        return 3, ""

    def oracle_params(self) -> Any:
        """The oracle's result for the params and the whole batches."""
        params, batches = tree.map(torch.clone, self.recipe.problem.params), self._batches()
        if not isinstance(self.oracle, Step):
            return params if self.oracle is None else self.oracle(params, batches)
        state = self.oracle.init(params)
        for batch in batches:
            state, _ = self.oracle(state, batch)
        return self.oracle.params(state)

    def params_of_ranks(self, ranks: int) -> Sequence[Any]:
        """The params that ``by_ranks`` expects on each rank.

        Raises:
            ValueError: they are not as many as the ranks, or do not match the params.
        """
        problem = self.recipe.problem
        rows = [[rows_of_rank(batch, rank, ranks) for rank in range(ranks)] for batch in self._batches()]
        given = [] if self.by_ranks is None else [*self.by_ranks(tree.map(torch.clone, problem.params), rows)]
        if len(given) != ranks:
            raise ValueError(f"by_ranks: it gives {len(given)} values for {ranks} ranks: return a list of each rank's params")
        for params in given:
            _check_like(params, problem.params)
        return given

    def _batches(self) -> list[Any]:
        batches = self.recipe.problem.batches
        return [batches[index % len(batches)] for index in range(STEPS)]


def _check_like(given: Any, params: Any) -> None:
    if tree.structure(given) != tree.structure(params):
        raise ValueError(f"oracle: it gives {tree.structure(given)}, and params are {tree.structure(params)}")
    for (path, x), y in zip(tree.named(given), tree.leaves(params), strict=True):
        if not isinstance(x, Tensor) or x.shape != y.shape:
            raise ValueError(f"oracle: its {path!r} is {getattr(x, 'shape', x)}, and the parameter is {y.shape}")
