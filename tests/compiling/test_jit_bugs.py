"""Graphs that are not their step: each bug breaks a law."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from functional_ds.comm.table.errors import DeadlockError
from tests.compiling import test_jit, test_jit_axes
from tests.planting import Bug, planted

JIT, PASSES = "compiling.jitted.jit_step", "compiling.graphs.graph_passes"
bound = partial(test_jit.test_no_more_whole_units_than_in_the_eager_step, test_jit.Tied, 2)
BUGS: dict[Callable[[], Any], list[Bug]] = {
    test_jit_axes.test_a_new_length_is_traced_in_its_second_step: [
        Bug(
            "a kind stays eager that was eager first",
            "compiling.jitted.jit_step:JitStep._entry",
            "EAGER_FIRST in entry.reason",
            "False",
        ),
    ],
    bound: [
        Bug(
            "more units are whole",
            "compiling.graphs.graph_passes:regather.run",
            "plan_fetches(tuple((unit for _, unit in uses)), live, whole)",
            "plan_fetches(tuple((unit for _, unit in uses)), live + 5, whole)",
        ),
        Bug("all gathers start at once", "compiling.graphs.graph_passes:schedule.run", "max(0, number - ahead)", "0"),
    ],
    test_jit.test_gathers_are_those_of_the_eager_step: [
        Bug(
            "a backward pass finds nothing whole",
            "compiling.graphs.graph_passes:regather.run",
            "whole if backward and (not reshard) else ()",
            "()",
        ),
    ],
    partial(test_jit.test_modes_of_modules_are_looked_at, False): [
        Bug(
            "modes are not looked at",
            "compiling.jitted.jit_step:JitStep._new_entry",
            "kind.modes = graph.notes.modes",
            "pass",
        ),
    ],
    test_jit.test_shapes_that_change_on_one_rank: [
        Bug(
            "each rank decides for itself",
            "compiling.jitted.jit_step:JitStep._entry",
            "group is not None",
            "False",
            DeadlockError,
        ),
    ],
    test_jit.test_a_donated_state_is_spent: [
        Bug(
            "a donated state can be used again",
            "compiling.jitted.jit_step:_run",
            "new = tree.replace(new, step=new.step.detach()) if new.step is before.step else new\n"
            "state.donate()\n"
            "mark_donated(before)",
            "new = tree.replace(new, step=new.step.detach()) if new.step is before.step else new",
            pytest.fail.Exception,
        ),
    ],
    test_jit.test_a_kept_state_stays: [
        Bug(
            "a kept state is written into",
            "compiling.jitted.jit_step:_run",
            "tree.replace(state) if donate else state.clone()",
            "tree.replace(state)",
        ),
    ],
}


@pytest.mark.sample(2)
@pytest.mark.parametrize(("law", "bug"), [pytest.param(law, bug, id=bug.name) for law, bugs in BUGS.items() for bug in bugs])
def test_a_bug_is_seen(law: Callable[[], Any], bug: Bug) -> None:
    with planted(bug), pytest.raises(bug.shows):
        law()
