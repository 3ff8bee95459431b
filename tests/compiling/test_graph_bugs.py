"""Bugs of prices, of counted memory and of what holds passes to the law, planted one at a time."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from tests.compiling import test_check_pass, test_graph_cost, test_graph_live, test_jit_axes
from tests.planting import Bug, planted

COST, RECORD, NODES = "compiling.graphs.graph_cost", "compiling.graphs.graph_record", "compiling.graphs.graph_nodes"
AGREE, CHECK = "compiling.jitted.graph_agreement", "compiling.jitted.check_pass"


def held() -> None:
    with pytest.MonkeyPatch.context() as patch:
        test_graph_live.test_a_run_holds_what_is_counted("accumulate", patch)


def named(change: Any, stage: int, words: str) -> Callable[[], None]:
    return partial(test_check_pass.test_what_breaks_the_law_is_named, change, stage, AssertionError, words)


BUGS: dict[Callable[[], Any], list[Bug]] = {
    partial(test_graph_cost.test_times_add_up, "stage 3", test_graph_cost.CPU): [
        Bug(
            "a wait costs nothing",
            "compiling.graphs.graph_cost:_RankTimeline._until",
            "self.device, self.last = (span.end, place)",
            "self.last = place",
        ),
        Bug(
            "a channel carries two at once",
            "compiling.graphs.graph_cost:_RankTimeline.start",
            "last is not None and self.spans[last].end > begin",
            "False",
        ),
    ],
    partial(test_graph_cost.test_channels_share_the_link_between_nodes, "stage 3", 1): [
        Bug(
            "each channel has its own link between nodes",
            "compiling.graphs.graph_cost:_RankTimeline.start",
            "link is None and self.machine.crosses(row)",
            "False",
        ),
    ],
    partial(test_graph_cost.test_the_critical_path_takes_the_whole_step, "stage 3", test_graph_cost.FAST): [
        Bug(
            "the path forgets channels",
            "compiling.graphs.graph_cost:_RankTimeline.start",
            "begin, before = (self.spans[last].end, last)",
            "begin = self.spans[last].end",
        ),
    ],
    held: [
        Bug(
            "what is written and given counts twice",
            "compiling.graphs.graph_nodes:root_of",
            "_gives_what_it_writes(node)",
            "False",
        ),
        Bug(
            "memory from the wait on",
            "compiling.graphs.graph_record:StepGraph.live",
            "node.args[0] if node.target is WAIT else node",
            "node",
        ),
    ],
    named(test_check_pass.swapped_on_rank_1, 3, "start other collectives"): [
        Bug(
            "what looks alike is alike",
            "compiling.jitted.graph_agreement:rank_collectives",
            "(site.call.agreement(xs, here), site.label, site.turn)",
            "site.call.agreement(xs, here)",
        ),
    ],
    test_check_pass.test_groups_in_another_order_on_one_rank: [
        Bug(
            "orders of groups do not count", "compiling.jitted.graph_agreement:disagreement", "_deadlock(told)", "''", Exception
        ),
    ],
    named(test_check_pass.other_value_on_rank_1, 3, "changes a value on rank"): [
        Bug(
            "values are not compared",
            "compiling.jitted.check_pass:_Checked.report",
            "any(told)",
            "False",
            pytest.fail.Exception,
        ),
    ],
    partial(test_jit_axes.test_a_jitted_step_is_the_step, "balance"): [
        Bug(
            "a trace takes what it sees for a trial",
            "comm.worlds.current:runs_on_shapes",
            "tensor.is_meta or not recorder().traces",
            "True",
            Exception,
        ),
    ],
}


@pytest.mark.sample(3)
@pytest.mark.parametrize(("law", "bug"), [pytest.param(law, bug, id=bug.name) for law, bugs in BUGS.items() for bug in bugs])
def test_a_bug_is_seen(law: Callable[[], Any], bug: Bug) -> None:
    with planted(bug), pytest.raises(bug.shows):
        law()
