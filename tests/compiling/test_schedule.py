"""``schedule`` over drawn chains: gathers start early, also across the ends of passes, and no more units are whole."""

from functools import partial
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import functional_ds as fds
from functional_ds import comm
from functional_ds import transforms as T
from functional_ds.compiling import StepGraph
from functional_ds.compiling.graphs.graph_nodes import PHASE
from tests.compiling.test_jit import Run, assert_same, blocks, own_batch, run, squared
from tests.planting import Bug, planted

PASSES = "compiling.graphs.graph_passes"


def traced(count: int, strategy: list[Any], **options: Any) -> StepGraph:
    apply, params = fds.functional(blocks(count=count))
    step = fds.jit(fds.compose(*strategy)(fds.train_step(squared(apply), fds.adamw(0.05))), **options)
    state, _ = step(step.init(params), own_batch(0))
    return step.graph(state, own_batch(1))


@pytest.mark.law(58)
@settings(max_examples=max(1, settings.default.max_examples // 5))
@given(
    count=st.integers(3, 5),
    live=st.integers(1, 3),
    ahead=st.integers(0, 3),
    reshard=st.booleans(),
    micro_batches=st.integers(1, 2),
)
def test_a_gather_starts_before_the_wait_that_is_so_many_earlier(
    count: int, live: int, ahead: int, reshard: bool, micro_batches: int
) -> None:
    def program() -> tuple[StepGraph, Run, Run]:
        def strategy() -> list[Any]:
            zero = T.zero(3, max_live_units=live, prefetch=ahead, reshard_last_units=reshard)
            return [zero, T.accumulate(micro_batches)]

        found, expected = (run(jits, strategy(), lambda: blocks(count=count)) for jits in (True, False))
        return traced(count, strategy()), found, expected

    for graph, found, expected in comm.simulate(program, world_size=2):
        assert found[2] == []
        assert_same(found, expected)
        assert max(now.units for now in graph.live().values()) <= live + ahead
        order = {node: place for place, node in enumerate(graph.module.graph.nodes)}
        gathers = graph.gathers()
        starts = [order[gather.start] for gather in gathers]
        assert starts == sorted(starts)
        for number, gather in enumerate(gathers[1:], 1):
            assert order[gather.start] < order[gathers[max(0, number - ahead)].wait]


@pytest.mark.law(58)
def test_the_first_gather_of_a_pass_starts_in_the_pass_before() -> None:
    def program() -> list[tuple[str, str]]:
        graph = traced(4, [T.zero(3, max_live_units=1), T.accumulate(2)])
        return [(gather.start.meta[PHASE], gather.wait.meta[PHASE]) for gather in graph.gathers()]

    for told in comm.simulate(program, world_size=2):
        assert told.count(("forward", "backward")) == 2  # one of each micro-batch
        assert told.count(("backward", "forward")) == 1


BUGS = [
    (
        test_the_first_gather_of_a_pass_starts_in_the_pass_before,
        Bug(
            "no gather starts early",
            "compiling.graphs.graph_passes:schedule.run",
            "_start_before(gather.start, place, writes)",
            "pass",
        ),
    ),
    (
        partial(test_a_gather_starts_before_the_wait_that_is_so_many_earlier.hypothesis.inner_test, 4, 1, 1, False, 1),
        Bug(
            "one gather more is under way", "compiling.graphs.graph_passes:schedule.run", "number - ahead", "number - ahead - 1"
        ),
    ),
]


@pytest.mark.parametrize(("law", "bug"), BUGS, ids=[bug.name for _, bug in BUGS])
def test_a_bug_is_seen(law: Any, bug: Bug) -> None:
    with planted(bug), pytest.raises(bug.shows):
        law()
