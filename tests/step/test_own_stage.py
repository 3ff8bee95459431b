"""The ZeRO stage that the docs work out: it is right, and what it keeps is saved and resharded like the library's own."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import functional_ds as fds
from functional_ds import comm
from functional_ds import transforms as T
from functional_ds.testing import Problem
from tests.optim.test_per_leaf import lars
from tests.planting import Bug, planted
from tests.step.worked import defined, worked

PROBLEM = Problem()
OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "adamw": partial(fds.adamw, 0.05),
    "lamb": partial(fds.lamb, 0.05),
    "lars": lars,
    "groups": lambda: fds.param_groups({"^1": fds.adamw(0.05)}, fds.sgd(0.1, momentum=0.9)),
}


def own() -> fds.Transform:
    transform: fds.Transform = defined("docs/phases.md")["round_robin"](comm.world())
    return transform


def program(
    strategy: Callable[[], fds.Transform], optimizer: str, *further: fds.Transform, steps: range = range(4), folder: Any = None
) -> Any:
    step = fds.compose(strategy(), *further)(fds.train_step(PROBLEM.loss, OPTIMIZERS[optimizer]()))
    state, here = step.init(PROBLEM.params), comm.world()
    if steps.start:
        state = fds.load(folder, like=state)
    for index in steps:
        state, _ = step(state, PROBLEM.batches[index].chunk(here.size)[here.rank])
    if folder is not None and not steps.start:
        fds.save(state, folder)
    return step.params(state)


@pytest.mark.law(19)
@pytest.mark.parametrize("optimizer", sorted(OPTIMIZERS))
def test_it_is_one_device(optimizer: str) -> None:
    further = T.accumulate(2), T.clip(0.5)
    alone = program(fds.compose, optimizer, *further)
    for n in (2, 3):
        for found in comm.simulate(program, own, optimizer, *further, world_size=n):
            torch.testing.assert_close(found, alone)


def test_sam_composes_with_it() -> None:
    alone = program(fds.compose, "adamw", worked()["sam"])
    for found in comm.simulate(program, own, "adamw", worked()["sam"], world_size=3):
        torch.testing.assert_close(found, alone)


@pytest.mark.parametrize("optimizer", ["adamw", "lars", "groups"])
@pytest.mark.parametrize(
    ("first", "m", "then", "n"), [(own, 2, own, 3), (own, 3, partial(T.zero, 3), 2), (partial(T.zero, 2), 2, own, 3)]
)
@pytest.mark.sample(5)
def test_it_is_saved_and_resharded(optimizer: str, first: Any, m: int, then: Any, n: int, tmp_path: Path) -> None:
    """Saved on m ranks and loaded on n, also from and into the library's stages, it goes on as one run."""
    comm.simulate(lambda: program(first, optimizer, steps=range(2), folder=tmp_path), world_size=m)
    for found in comm.simulate(lambda: program(then, optimizer, steps=range(2, 4), folder=tmp_path), world_size=n):
        torch.testing.assert_close(found, program(fds.compose, optimizer))


BUG = Bug(
    "all leaves are the first",
    "state_dict.leaf_places:_of_leaf_map",
    "Cut(part.leaf, part.offset, part.start, part.numel)",
    "Cut(0, part.offset, part.start, part.numel)",
)


def test_a_planted_bug_is_found(tmp_path: Path) -> None:
    with planted(BUG), pytest.raises((AssertionError, ValueError, RuntimeError)):
        test_it_is_saved_and_resharded("adamw", own, 2, own, 3, tmp_path)
