"""Law 58 for joined collectives: equal values and bytes, fewer calls."""

from collections import Counter
from typing import Any

import pytest
from torch import nn

from functional_ds import comm
from functional_ds import transforms as T
from functional_ds.compiling import bucketing, regather, schedule
from tests.compiling.test_jit import Run, Tied, assert_same, blocks, run
from tests.planting import Bug, planted

PASSES = (regather(live=2), schedule(ahead=2))


def counted(rows: Any) -> tuple[Counter[str], Counter[str]]:
    calls, sent = Counter[str](), Counter[str]()
    for row in rows:
        calls[row.collective] += row.calls
        sent[row.collective] += row.bytes
    return calls, sent


def three() -> nn.Module:
    return blocks(count=3)


@pytest.mark.sample(1)
@pytest.mark.law(58)
@pytest.mark.parametrize(
    ("stage", "options", "make", "ranks"),
    [(3, {"prefetch": 2}, three, 2), (3, {"aggregate": "owner"}, Tied, 3), (1, {}, lambda: blocks(count=2), 3)],
)
def test_buckets_change_no_value(stage: int, options: Any, make: Any, ranks: int) -> None:
    micro_batches = 1 if options else 2

    def program(*passes: Any) -> Run:
        return run(True, [T.zero(stage, **options), T.accumulate(micro_batches), T.clip(1.0)], make, passes=passes)

    found = comm.simulate(program, *PASSES, bucketing(1 << 20), world_size=ranks)
    for joined, apart in zip(found, comm.simulate(program, *PASSES, world_size=ranks), strict=True):
        assert joined[2] == apart[2] == []
        assert_same(joined, apart, sent=False)
        (calls, sent), (more, as_many) = counted(joined[3]), counted(apart[3])
        assert sent == as_many
        assert calls["reduce_scatter"] < more["reduce_scatter"] or "aggregate" in options
        assert sum(calls.values()) < sum(more.values())


def joined_and_eager() -> tuple[Run, Run]:
    found, expected = (
        run(jits, [T.zero(3)], three, **more) for jits, more in ((True, {"passes": (*PASSES, bucketing())}), (False, {}))
    )
    return found, expected


def test_small_buckets_stay_as_they_are() -> None:
    def program(*passes: Any) -> Run:
        return run(True, [T.zero(3)], three, passes=passes)

    small, none = (comm.simulate(program, *PASSES, *more, world_size=2) for more in ([bucketing(8)], []))
    for found, expected in zip(small, none, strict=True):
        assert_same(found, expected)


def test_bad_size() -> None:
    with pytest.raises(ValueError, match="size=0"):
        bucketing(0)


def test_a_bug_is_seen() -> None:
    bug = Bug("results are mixed up", "compiling.graphs.graph_bucketing:_join", "number + place_of", "place_of")
    with planted(bug):
        found, expected = comm.simulate(joined_and_eager, world_size=2)[0]
    assert found[0] != expected[0]
