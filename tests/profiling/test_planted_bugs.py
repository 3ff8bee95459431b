"""Profiles that lie, as those of other systems have: each bug breaks a law."""

from collections.abc import Callable
from typing import Any

import pytest

from tests.planting import Bug, planted
from tests.profiling import test_module_flops, test_profiler, test_spans

SPANS, FLOPS, RANKS = "profiling.spans", "profiling.module_flops", "profiling.result"


def moments() -> None:
    with pytest.MonkeyPatch.context() as patch:
        test_spans.one_step_is_counted(patch)


def fresh(law: Callable[..., Any], *args: Any) -> Callable[[], Any]:
    def run() -> Any:
        test_profiler.two_ranks.cache_clear()
        return law(*args)

    return run


recomputed = fresh(test_module_flops.products_count, 3, 4, 5, 6, "remat")
BUGS: dict[Callable[[], Any], list[Bug]] = {
    moments: [
        Bug(
            "waiting is computing",
            "profiling.spans:SpanClock.waiting",
            "self._open[-1][0]._replace(waits_for=what)",
            "self._open[-1][0]",
        ),
        Bug("the time before a call is waited", "profiling.spans:SpanClock.waited", "max(began, self._last)", "self._last"),
        Bug("backward is forward", "profiling.spans:SpanClock.forward_ended", "place._replace(stage='backward')", "place"),
        Bug("an outer phase has its inner ones' time", "profiling.spans:SpanClock._count", "self._last = now", "pass"),
    ],
    test_spans.test_plain_steps_are_timed_from_one_to_the_next: [
        Bug(
            "an evaluation is between two steps",
            "profiling.plain_steps:PlainSteps.pause",
            "self.clock() if follows else self._ended",
            "self.clock()",
        ),
        Bug(
            "a failed step takes the row with it",
            "profiling.plain_steps:PlainSteps.step",
            "self.pause()",
            "self._since = None",
        ),
    ],
    fresh(test_profiler.bandwidths_agree, 3, [("all_reduce", 1), ("all_reduce", 2)]): [
        Bug(
            "an all-reduce goes one way",
            "comm.table.collective:Traffic.bus",
            "self.passes * ((n - 1) / n if self.keeps_share and n else 1.0)",
            "(n - 1) / n if self.keeps_share and n else 1.0",
        ),
        Bug("sizes are mixed", "comm.record.ledger:add_by_size", "event.payload", "0"),
    ],
    recomputed: [
        Bug(
            "recomputation is backward",
            "profiling.module_flops:ModuleFlops.add",
            "torch.is_grad_enabled() or (self._inside and self._inside[-1][1])",
            "False and (self._inside and self._inside[-1][1])",
        ),
        Bug(
            "backward belongs to the last module",
            "profiling.module_flops:ModuleFlops.add",
            "bisect_right(self._numbers, node) - 1",
            "-1",
        ),
    ],
    fresh(test_profiler.shared_batches_count_once, {"dp": 2, "tp": 2}): [
        Bug("each rank's tokens count", "profiling.result:Profile._once", "profile.shard[0]", "profile.rank"),
    ],
}
CASES = [pytest.param(law, bug, id=bug.name) for law, bugs in BUGS.items() for bug in bugs]


@pytest.mark.parametrize(("law", "bug"), CASES)
def test_a_bug_is_caught(law: Callable[[], Any], bug: Bug) -> None:
    with planted(bug), pytest.raises(bug.shows):
        law()
    test_profiler.two_ranks.cache_clear()


@pytest.mark.parametrize("law", BUGS)
def test_the_laws_hold(law: Callable[[], Any]) -> None:
    law()
