"""Receives may be posted early: all else keeps its order."""

from hypothesis import given
from hypothesis import strategies as st

from functional_ds import pipelining as pp
from functional_ds.pipelining.schedules.action import COMPUTE, Action, Kind
from functional_ds.pipelining.schedules.lower import receives_early

GENERATORS = (pp.gpipe, pp.one_f_one_b, pp.interleaved_one_f_one_b, pp.zb_h1, pp.zbv, pp.dualpipe_v)
RECEIVES = (Kind.RECV_F, Kind.RECV_B)


def order(steps: list[tuple[Action, ...]], *, receives: bool) -> list[Action]:
    return [action for step in steps for action in step if (action.kind in RECEIVES) == receives]


def computed_before(steps: list[tuple[Action, ...]]) -> dict[Action, int]:
    """How many compute actions stand before each receive."""
    found, count = {}, 0
    for step in steps:
        count += step[0].kind in COMPUTE
        found.update((action, count) for action in step if action.kind in RECEIVES)
    return found


@given(st.sampled_from(GENERATORS), st.integers(2, 4), st.integers(0, 8), st.integers(1, 4))
def test_receives_come_early_and_in_order(make: object, ranks: int, more: int, lead: int) -> None:
    """Both orders stay; each receive is posted ``lead`` compute actions earlier, or before all of them."""
    schedule = pp.lower(make(ranks, 2 * ranks + more), reduces=True)  # type: ignore[operator]
    for rank in range(ranks):
        steps = list(schedule.steps(rank))
        early = receives_early(steps, lead)
        for receives in (False, True):
            assert order(early, receives=receives) == order(steps, receives=receives)
        before, after = computed_before(steps), computed_before(early)
        assert {action: max(0, count - lead) for action, count in before.items()} == after
