"""Law 58 for joined collectives: equal values and bytes, fewer calls."""

from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import functional_ds as fds
from functional_ds import comm, compiling
from functional_ds import transforms as T
from functional_ds.compiling import bucketing, merge, regather, schedule
from functional_ds.testing import check_pass
from tests.compiling.test_jit import Run, Tied, assert_same, blocks, own_batch, run
from tests.planting import Bug, planted

HERE = "compiling.graphs.graph_bucketing"
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


# -- rules of your own ---------------------------------------------------------------------------------------------------------


def by_leaf(stage: int = 0) -> Any:
    """A step with one reduction for each leaf, and in stage 3 one gather."""
    torch.manual_seed(0)
    apply, params = fds.functional(three())
    transforms = [T.zero(stage, unit_of=fds.units.by_leaf), T.accumulate(2), T.clip(1.0)]
    step = fds.compose(*transforms)(fds.train_step(lambda p, x: apply(p, x).square().mean(), fds.adamw(0.1)))
    return step, step.init(params), own_batch(0)


def calls_of(*passes: Any) -> list[compiling.CollectiveCall]:
    step, state, batch = by_leaf()
    step = fds.jit(step, passes=passes)
    state, _ = step(state, batch)
    return step.graph(state, batch).collectives()  # type: ignore[no-any-return]


def any_rule(stage: int = 0) -> None:
    """Rules may say yes to everything: what would change a value stays apart."""
    for fits in (lambda calls: True, lambda calls: len(calls) < 3, lambda calls: calls[0].name == "all_reduce"):
        check_pass(merge(fits), partial(by_leaf, stage), same_ledger=False)


def two_kinds() -> Any:
    """A sum that follows a maximum."""

    def loss(params: Any, x: Any) -> Any:
        largest, total = comm.all_reduce(x.sum(), op="max"), comm.all_reduce(x.sum())
        return (params["w"] * (largest - 2 * total)).sum()

    step = fds.train_step(loss, fds.sgd(0.1))
    return step, step.init({"w": torch.ones(3)}), torch.ones(2) + comm.world().rank


@pytest.mark.parametrize("stage", [0, 3])
def test_a_rule_changes_no_value(stage: int) -> None:
    any_rule(stage)


def test_two_kinds_stay_apart() -> None:
    check_pass(merge(lambda calls: True), two_kinds, same_ledger=False)


def test_calls_of_a_graph() -> None:
    calls = comm.simulate(calls_of, world_size=2)[0]
    sums = [call for call in calls if call.name == "all_reduce" and call.site.early]
    assert len(sums) == len(three().state_dict())
    for call in sums:
        assert [x.meta["val"].shape for x in call.inputs] == [x.meta["val"].shape for x in call.results]
        assert call.bytes == sum(x.meta["val"].nbytes for x in call.inputs)
    (joined,) = [call for call in comm.simulate(calls_of, merge(early), world_size=2)[0] if early([call])]
    assert joined.bytes == sum(call.bytes for call in sums)
    assert len(joined.results) == len(sums)


def early(calls: Sequence[compiling.CollectiveCall]) -> bool:
    return calls[0].name == "all_reduce" and calls[0].site.early


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
    bug = Bug("results are mixed up", f"{HERE}:_join", "number + place_of", "place_of")
    with planted(bug):
        found, expected = comm.simulate(joined_and_eager, world_size=2)[0]
    assert found[0] != expected[0]


BUGS = [
    (
        Bug("other kinds are joined", f"{HERE}:_alike", "_kind(bucket[0]) != _kind(call)", "False"),
        lambda: check_pass(merge(lambda calls: True), two_kinds, same_ledger=False),
    ),
    (
        Bug(
            "too late",
            f"{HERE}:_alike",
            "_first_use(writes.order, member.wait)[0] > writes.order[call.start]",
            "True",
            Exception,
        ),
        lambda: any_rule(3),
    ),
]


@pytest.mark.parametrize(("bug", "law"), BUGS, ids=[bug.name for bug, _ in BUGS])
def test_a_bug_in_joining_is_seen(bug: Bug, law: Callable[[], None]) -> None:
    with planted(bug), pytest.raises(bug.shows):
        law()
