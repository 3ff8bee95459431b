"""Graphs that are not their step: each bug breaks a law."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from functional_ds.comm import DeadlockError
from tests.compiling import test_jit
from tests.planting import Bug, planted

JIT, PASSES = "compiling.jitted.jit_step", "compiling.graphs.graph_passes"
bound = partial(test_jit.test_no_more_whole_units_than_in_the_eager_step, test_jit.Tied, 2)
BUGS: dict[Callable[[], Any], list[Bug]] = {
    bound: [
        Bug("more units are whole", PASSES, "for _, unit in uses), live, whole)", "for _, unit in uses), live + 5, whole)"),
        Bug("all gathers start at once", PASSES, "gathers[max(0, number - ahead)]", "gathers[0]"),
    ],
    test_jit.test_gathers_are_those_of_the_eager_step: [
        Bug("a backward pass finds nothing whole", PASSES, "whole if backward and not reshard else ()", "()"),
    ],
    partial(test_jit.test_modes_of_modules_are_looked_at, False): [
        Bug("modes are not looked at", JIT, 'kind.modes = graph.notes.get("modes", {})', "pass"),
    ],
    test_jit.test_shapes_that_change_on_one_rank: [
        Bug(
            "each rank decides for itself",
            JIT,
            "if group is not None:\n            found = tuple(",
            "if False:\n            found = tuple(",
            DeadlockError,
        ),
    ],
    test_jit.test_a_donated_state_is_spent: [
        Bug(
            "a donated state can be used again",
            JIT,
            "        state.donate()\n        mark_donated(before)\n    return",
            "    return",
            pytest.fail.Exception,
        ),
    ],
    test_jit.test_a_kept_state_stays: [
        Bug("a kept state is written into", JIT, "if donate else state.clone()", ""),
    ],
}


@pytest.mark.sample(2)
@pytest.mark.parametrize(("law", "bug"), [pytest.param(law, bug, id=bug.name) for law, bugs in BUGS.items() for bug in bugs])
def test_a_bug_is_seen(law: Callable[[], Any], bug: Bug) -> None:
    with planted(bug), pytest.raises(bug.shows):
        law()
