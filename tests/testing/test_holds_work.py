"""``holds`` stays quick: what it runs is counted, not timed. ``benchmarks/holds.py`` has the seconds."""

from collections.abc import Sequence

import pytest

from functional_ds import comm, testing
from functional_ds.step.step import Step
from functional_ds.testing.recipe import Recipe
from tests.planting import Bug, planted
from tests.testing.methods import METHODS
from tests.testing.test_holds import NAMES

WHOLE = [name for name in NAMES if name != "processes"]  # which run elsewhere
COMPARED = ["stages", "replicated", "accumulate before", "accumulate after", "bf16"]


def work(name: str, only: Sequence[str]) -> tuple[int, int]:
    """How many worlds of simulated ranks are run for a method, and how many steps on all their ranks."""
    worlds = steps = 0
    called, made = Step.__call__, Recipe.step

    def call(step: Step, *args: object, **options: object) -> object:
        nonlocal steps
        steps += 1
        return called(step, *args, **options)  # type: ignore[arg-type]

    def make(recipe: Recipe, setup: object) -> Step:
        nonlocal worlds
        worlds += comm.world().rank == 0
        return made(recipe, setup)  # type: ignore[arg-type]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Step, "__call__", call)
        patch.setattr(Recipe, "step", make)
        testing.holds(METHODS[name].make, **METHODS[name].options, only=only)
    return worlds, steps


@pytest.mark.parametrize(
    ("name", "worlds", "steps"), [("clip", 105, 520), ("zero 2", 55, 230), ("research diloco", 90, 820), ("majority", 45, 185)]
)
def test_a_table_runs_about_a_hundred_compositions(name: str, worlds: int, steps: int) -> None:
    """A transform with an oracle and a formula of bytes, a data-parallel one, one over an outer axis, and an oracle of ranks.

    A step is a few ms, so that a table takes five seconds or so. Who adds a law raises these, and says why it is worth it.
    """
    found = work(name, WHOLE)
    assert found[0] <= worlds, found
    assert found[1] <= steps, found


def test_runs_that_laws_share_are_run_once() -> None:
    """All compare with one run on one device; without the cache each would run it again."""
    assert work("ema", COMPARED)[0] <= 29
    with planted(Bug("no run is kept", "testing.method:Method.run", "setup not in self._runs", "True")):
        assert work("ema", COMPARED)[0] > 60
