"""Profiles that lie, as those of other systems have: each bug breaks a law."""

from collections.abc import Callable
from typing import Any

import pytest

from tests.planting import Bug, planted
from tests.profiling import test_module_flops, test_profiler, test_spans

SPANS, FLOPS, RANKS = "profiling.spans", "profiling.module_flops", "profiling.result"
PLAIN, LEDGER = "profiling.plain_steps", "comm.record.ledger"


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
        Bug("waiting is computing", SPANS, "self._open[-1][0]._replace(waits_for=what))", "self._open[-1][0])"),
        Bug("the time before a call is waited", SPANS, "began = max(began, self._last)", "began = self._last"),
        Bug("backward is forward", SPANS, 'place._replace(stage="backward")', "place"),
        Bug("an outer phase has its inner ones' time", SPANS, "        self._last = now\n", "        pass\n"),
    ],
    test_spans.test_plain_steps_are_timed_from_one_to_the_next: [
        Bug(
            "an evaluation is between two steps", PLAIN, "now = self.clock() if follows else self._ended", "now = self.clock()"
        ),
        Bug(
            "a failed step takes the row with it",
            PLAIN,
            "self.pause()\n            raise",
            "self._since = None\n            raise",
        ),
    ],
    fresh(test_profiler.bandwidths_agree, 3, [("all_reduce", 1), ("all_reduce", 2)]): [
        Bug(
            "an all-reduce goes one way",
            LEDGER,
            "2 * shares if self.collective in _TWICE",
            "shares if self.collective in _TWICE",
        ),
        Bug("sizes are mixed", LEDGER, "event.ranks, event.payload), fresh)", "event.ranks, 0), fresh)"),
    ],
    recomputed: [
        Bug("recomputation is backward", FLOPS, "torch.is_grad_enabled() or", "False and"),
        Bug(
            "backward belongs to the last module",
            FLOPS,
            "self._paths[bisect_right(self._numbers, node) - 1]",
            "self._paths[-1]",
        ),
    ],
    fresh(test_profiler.shared_batches_count_once, {"dp": 2, "tp": 2}): [
        Bug("each rank's tokens count", RANKS, "{each.shard[0]: count(each)", "{each.rank: count(each)"),
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
