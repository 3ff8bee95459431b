"""A page shows each timed call once, and an arrow points from whom a rank waited for to where it went on."""

import re
from collections import Counter
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from functional_ds import comm
from functional_ds import pipelining as pp
from tests.planting import Bug, planted


class _Page(HTMLParser):
    """Counts tags; every one that is opened must be closed, and none may load anything."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()
        self.open: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.counts[tag] += 1
        assert not {"src", "href"} & {name for name, _ in attrs}
        if tag != "meta":
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.counts[tag] += 1

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def program() -> comm.Ledger:
    rank, n = comm.world().rank, comm.world().size
    pairs = comm.mesh(a=n // 2, b=2)
    with comm.ledger(times=True) as book:
        comm.all_reduce(torch.ones(3))
        later = comm.start(comm.all_gather, torch.ones(2), pairs["b"])
        if rank == 0:
            comm.send(torch.ones(2), n - 1)
        if rank == n - 1:
            comm.recv(torch.ones(2), 0)
        comm.reduce_scatter(torch.ones(n))
        later.wait()
    return book


def check(books: list[comm.Ledger]) -> comm.debug.Chart:
    chart = comm.debug.calls_chart(books)
    n = len(books)
    shown = {(lane, span.name, span.began) for lane, spans in chart.lanes.items() for span in spans}
    assert shown == {(f"rank {b.rank}, {e.group}", e.collective, e.began) for b in books for e in b.events}
    assert len(chart.arrows) == 2 * (n - 1) + n // 2 + 1  # two collectives of all, one of each pair, a message
    reduces = [event.began for book in books for event in book.events if event.collective == "all_reduce"]
    starts = {arrow.from_time for arrow in chart.arrows}
    assert max(reduces) in starts  # the last that called it
    assert len(starts & set(reduces)) == 1
    sent = next(event for event in books[0].events if event.collective == "send")
    messages = [(arrow.from_lane, arrow.to_lane) for arrow in chart.arrows if arrow.from_time == sent.began]
    assert messages == [("rank 0, world", f"rank {n - 1}, world")]
    assert all(arrow.from_time < arrow.to_time for arrow in chart.arrows)
    return chart


@pytest.mark.law
@given(st.sampled_from([2, 4]), st.integers(0, 2**20))
def test_each_call_and_whom_it_waited_for(n: int, seed: int) -> None:
    check(comm.simulate(program, world_size=n, seed=seed))


def test_processes() -> None:
    check(comm.spawn(program, world_size=2))


def test_the_page_stands_alone(tmp_path: Path) -> None:
    chart = check(comm.simulate(program, world_size=4))
    run = pp.timeline(pp.one_f_one_b(2, 3)).chart()
    comm.debug.write_page([chart, run], tmp_path / "run.html", title="<4> ranks")
    text = (tmp_path / "run.html").read_text(encoding="utf-8")
    page = _Page(text)
    assert not page.open
    assert page.counts["rect"] == sum(map(len, [*chart.lanes.values(), *run.lanes.values()]))
    assert page.counts["line"] == len(chart.arrows)
    assert page.counts["figure"] == 2
    assert "&lt;4&gt; ranks" in text
    assert chart._repr_html_() in text


def check_waits(others: list[int], finishes: int) -> None:
    """Each rank sends to another one and waits for it; some have finished."""

    def program() -> None:
        rank = comm.world().rank
        if rank >= finishes and others[rank] != rank:
            comm.send(torch.ones(1), others[rank])

    waiting = {rank: other for rank, other in enumerate(others) if rank >= finishes and other != rank}
    with pytest.raises(comm.errors.DeadlockError) as caught:
        comm.simulate(program, world_size=len(others))
    assert {rank: missing for rank, (_, missing) in caught.value.waits.items()} == {a: (b,) for a, b in waiting.items()}
    chart = comm.debug.waits_chart(caught.value)
    assert [(arrow.from_lane, arrow.to_lane) for arrow in chart.arrows] == [
        (f"rank {a}", f"rank {b}") for a, b in waiting.items()
    ]
    assert {name for name, lane in chart.lanes.items() if lane} == {f"rank {rank}" for rank in waiting}
    told = [tuple(map(int, pair)) for pair in re.findall(r"rank (\d+) waits for rank (\d+)", chart.title)]
    assert told
    assert all(waiting[a] == b for a, b in told)
    inside = set(waiting)
    for _ in others:
        inside = {rank for rank in inside if waiting[rank] in inside}  # what is left after n rounds leads into a cycle
    assert (told[-1][1] == told[0][0]) == bool(inside)
    assert all(one[1] == two[0] for one, two in pairwise(told))
    assert inside or told[-1][1] not in waiting


@pytest.mark.law
@given(st.lists(st.integers(0, 4), min_size=5, max_size=5), st.integers(0, 3))
def test_a_deadlock_is_a_cycle_or_a_rank_that_does_not_come(others: list[int], finishes: int) -> None:
    assume(any(rank >= finishes and other != rank for rank, other in enumerate(others)))
    check_waits(others, finishes)


def test_a_cycle_beside_a_dead_end() -> None:
    error = comm.errors.DeadlockError(waits={0: ("barrier()", (1, 2)), 1: ("barrier()", (3,)), 2: ("send(dst=0)", (0,))})
    assert comm.debug.waits_chart(error).title == "deadlock: rank 0 waits for rank 2, rank 2 waits for rank 0"


def test_bad_input() -> None:
    with pytest.raises(ValueError, match="error: it has no record of which rank waits"):
        comm.debug.waits_chart(comm.errors.DeadlockError("no rank can proceed"))
    with pytest.raises(ValueError, match=r"ledgers: no ledger has times; open them with comm\.ledger\(times=True\)"):
        comm.debug.calls_chart([comm.Ledger()])


BUGS = [
    Bug("the first that called a collective", "comm.debug.page:_arrows", "max", "min"),
    Bug("a message comes from its receiver", "comm.debug.page:_arrows", "first.order[0]", "first.order[1]"),
    Bug(
        "sequences of all groups are one",
        "comm.debug.page:calls_chart",
        "(event.group, event.ranks, event.order)",
        "(event.order,)",
    ),
]


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_a_bug_is_seen(bug: Bug) -> None:
    books = comm.simulate(program, world_size=4)
    with planted(bug), pytest.raises(bug.shows):
        check(books)


DEADLOCKS = [
    (
        Bug("a chain that leads into a cycle", "comm.debug.page:_cycle", "chain = chain[chain.index(following) :]", "pass"),
        [1, 2, 1],
    ),
    (Bug("dead ends stay", "comm.debug.page:_cycle", "inside -= ends", "break", StopIteration), [1, 2, 2]),
    (
        Bug(
            "waits for all members",
            "comm.simulation.schedule:Simulator.deadlock",
            "set(slot.members) - set(slot.arrivals)",
            "set(slot.members)",
        ),
        [1, 0],
    ),
]


@pytest.mark.parametrize(("bug", "others"), DEADLOCKS, ids=lambda value: getattr(value, "name", ""))
def test_a_bug_of_deadlocks_is_seen(bug: Bug, others: list[int]) -> None:
    check_waits(others, 0)
    with planted(bug), pytest.raises(bug.shows):
        check_waits(others, 0)
