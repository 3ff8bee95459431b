"""Messages between two ranks: whom they meet, in which order, and what is said when they do not."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from functional_ds import comm
from functional_ds.testing import assert_same, seeds

HERE = Path(__file__).name
ONES = torch.ones(2)


def rank() -> int:
    return comm.world().rank


def line_of(function: Callable[..., Any], offset: int = 0) -> str:
    """A line of a function, as errors name it."""
    return f"{HERE}:{function.__code__.co_firstlineno + offset}"


# -- rendezvous -------------------------------------------------------------------------------------------------------


def faces() -> None:
    other = 1 - rank()
    if rank() == 0:
        comm.send(ONES, other)
        comm.recv(ONES, other)
    else:
        comm.send(ONES, other)
        comm.recv(ONES, other)


def test_two_facing_sends_are_a_deadlock() -> None:
    """Both ranks, what each sends to whom, and both call sites."""
    for seed in range(3):
        with pytest.raises(comm.errors.DeadlockError) as caught:
            comm.simulate(faces, world_size=2, seed=seed)
        assert str(caught.value).splitlines() == [
            "deadlock: no rank can proceed",
            f"  rank 0 waits in send(dst=1) of [float32[2]] on group 'world' at {line_of(faces, 3)} for rank 1",
            f"  rank 1 waits in send(dst=0) of [float32[2]] on group 'world' at {line_of(faces, 6)} for rank 0",
        ]


def test_two_facing_receives_are_a_deadlock() -> None:
    with pytest.raises(comm.errors.DeadlockError, match=r"rank 0 waits in recv\(src=1\).*\n.*rank 1 waits in recv\(src=0\)"):
        comm.simulate(lambda: comm.recv(ONES, 1 - rank()), world_size=2)


@pytest.mark.parametrize("world_size", [2, 3, 64])
def test_a_ring_of_sends_is_a_deadlock_and_a_batch_is_none(world_size: int) -> None:
    """Everybody sends on before anybody receives; batched, each value moves on by one."""

    def ring(batched: bool) -> int:
        after, before = (rank() + 1) % world_size, (rank() - 1) % world_size
        x = torch.tensor(rank())
        if batched:
            zeros, came = comm.batch_p2p([comm.Send(x, after), comm.Recv(x, before)])
            return int(zeros + came)
        comm.send(x, after)
        return int(comm.recv(x, before))

    with pytest.raises(comm.errors.DeadlockError) as caught:
        comm.simulate(ring, False, world_size=world_size)
    lines = str(caught.value).splitlines()[1:]
    assert len(lines) == world_size
    for r, line in enumerate(lines):
        after = (r + 1) % world_size
        assert line.startswith(f"  rank {r} waits in send(dst={after}) of [int64[]] on group 'world' at {HERE}:")
        assert line.endswith(f" for rank {after}")
    assert comm.simulate(ring, True, world_size=world_size) == [(r - 1) % world_size for r in range(world_size)]


def test_asynchronous_sends_may_face_each_other() -> None:
    """What is started is not waited for yet."""

    def swap() -> int:
        sent = comm.start(comm.send, torch.tensor(rank()), 1 - rank())
        came = comm.recv(torch.tensor(0), 1 - rank())
        return int(came + sent.wait())

    assert comm.simulate(swap, world_size=2) == [1, 0]


def test_a_send_returns_when_it_is_received() -> None:
    """What the receiver does before its recv comes before what the sender does after its send."""
    for seed in range(6):
        seen: list[str] = []

        def program(seen: list[str] = seen) -> None:
            if rank() == 0:
                comm.send(ONES, 1)
                seen.append("after the send")
            else:
                seen.append("before the recv")
                comm.recv(ONES, 0)

        comm.simulate(program, world_size=2, seed=seed)
        assert seen == ["before the recv", "after the send"]


def test_others_may_run_on_meanwhile() -> None:
    """A message concerns its two ranks: collectives and messages of the others go on, and nobody else has to take part."""

    def program() -> int:
        if rank() < 2:
            pair = comm.new_group([0, 1])
            comm.barrier(pair)
            return int(comm.send(torch.tensor(7), 2)) if rank() == 0 else 0
        if rank() == 2:
            return int(comm.recv(torch.tensor(0), 0))
        return -1

    assert comm.simulate(program, world_size=4) == [0, 0, 7, -1]


def test_ranks_count_within_the_group() -> None:
    """dst and src are places in the group, in its own order."""

    def program() -> int | None:
        group = comm.new_group([3, 1])
        if group.rank == 0:
            comm.send(torch.tensor(30 + rank()), 1, group)
        return int(comm.recv(torch.tensor(0), 0, group)) if group.rank == 1 else None

    assert comm.simulate(program, world_size=4) == [None, 33, None, None]


# -- order ------------------------------------------------------------------------------------------------------------


@given(st.lists(st.integers(0, 2), max_size=8), st.randoms(use_true_random=False), seeds())
def test_messages_of_one_tag_come_in_order(tags: list[int], random: Any, seed: int) -> None:
    """The i-th receive of a tag gets the i-th send of that tag, however sends, receives and waits of the tags interleave."""
    receives = tags.copy()
    random.shuffle(receives)
    waits = list(range(len(tags)))
    random.shuffle(waits)

    def program() -> dict[int, list[int]]:
        if rank() == 0:
            pendings = [comm.start(comm.send, torch.tensor(i), 1, tag=tag) for i, tag in enumerate(tags)]
        else:
            pendings = [comm.start(comm.recv, torch.tensor(0), 0, tag=tag) for tag in receives]
        found = {i: int(pendings[i].wait()) for i in waits}
        return {tag: [found[i] for i, other in enumerate(receives) if other == tag] for tag in range(3)}

    sent = {tag: [i for i, other in enumerate(tags) if other == tag] for tag in range(3)}
    assert comm.simulate(program, world_size=2, seed=seed)[1] == sent


def test_the_two_directions_have_orders_of_their_own() -> None:
    """Messages from 0 to 1 and from 1 to 0 do not wait for one another; nor do those of two groups."""

    def program() -> list[int]:
        other = 1 - rank()
        apart = comm.new_group([0, 1], "apart")
        pendings = [comm.start(comm.send, torch.tensor(10 * rank() + i), other) for i in range(2)]
        aside = comm.start(comm.send, torch.tensor(100 + rank()), other, apart)
        came = [int(comm.recv(torch.tensor(0), other, apart)), *(int(comm.recv(torch.tensor(0), other)) for _ in range(2))]
        comm.Pending.all([*pendings, aside]).wait()
        return came

    assert comm.simulate(program, world_size=2) == [[101, 10, 11], [100, 0, 1]]


def test_trees_travel_whole() -> None:
    """A message is a pytree; its template says the structure."""

    def program() -> Any:
        x = {"a": torch.arange(3), "b": [torch.tensor(1.5), torch.tensor([True])]}
        if rank() == 0:
            return comm.send(x, 1)
        like = {"a": torch.empty(3, dtype=torch.int64), "b": [torch.empty(()), torch.empty(1, dtype=torch.bool)]}
        return comm.recv(like, 0)

    zeros, came = comm.simulate(program, world_size=2)
    assert_same(came, {"a": torch.arange(3), "b": [torch.tensor(1.5), torch.tensor([True])]})
    assert_same(zeros, {"a": torch.zeros(3, dtype=torch.int64), "b": [torch.tensor(0.0), torch.tensor([False])]})


def test_an_empty_batch_is_no_message() -> None:
    """And a tree without leaves is one without anything in it."""
    assert comm.simulate(lambda: comm.send({}, 1) if rank() == 0 else comm.recv({}, 0), world_size=2) == [{}, {}]
    assert comm.simulate(lambda: comm.batch_p2p([]), world_size=2) == [[], []]
    assert comm.batch_p2p([]) == []


# -- what does not fit ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("blocking", [True, False])
@pytest.mark.parametrize(
    ("like", "text"),
    [
        (torch.ones(3), "float32[3]"),
        (torch.ones(2, 1), "float32[2, 1]"),
        (torch.ones(2, dtype=torch.float64), "float64[2]"),
        ([torch.ones(2), torch.ones(2)], "float32[2], float32[2]"),
    ],
)
def test_a_template_of_another_kind_is_a_mismatch(like: Any, text: str, blocking: bool) -> None:
    """Both sides: what was sent and what was to arrive, with both call sites."""

    def sends() -> None:
        comm.send(ONES, 1, tag=5) if blocking else comm.start(comm.send, ONES, 1, tag=5).wait()

    def receives() -> None:
        comm.recv(like, 0, tag=5) if blocking else comm.start(comm.recv, like, 0, tag=5).wait()

    for seed in range(3):
        with pytest.raises(comm.errors.MismatchError) as caught:
            comm.simulate(lambda: sends() if rank() == 0 else receives(), world_size=2, seed=seed)
        message = str(caught.value)
        assert f"rank 0 called send(dst=1, tag=5) of [float32[2]] at {line_of(sends, 1)}" in message
        assert f"rank 1 called recv(src=0, tag=5) of [{text}] at {line_of(receives, 1)}" in message


@pytest.mark.parametrize("waits", [True, False])
def test_a_message_that_nobody_receives_is_reported(waits: bool) -> None:
    """Waited for, it is a deadlock; left alone, it is found when all have finished: rank, call and line."""

    def sends() -> None:
        pending = comm.start(comm.send, ONES, 1, tag=3)
        if waits:
            pending.wait()

    where = f"send(dst=1, tag=3) of [float32[2]] on group 'world' at {line_of(sends, 1)} for rank 1"
    error = comm.errors.DeadlockError if waits else comm.errors.UnmatchedError
    with pytest.raises(error) as caught:
        comm.simulate(lambda: sends() if rank() == 0 else None, world_size=2)
    assert f"  rank 0 {'waits in' if waits else 'started'} {where}" in str(caught.value).splitlines()


def test_all_messages_left_over_are_listed() -> None:
    def program() -> None:
        if rank() == 0:
            comm.start(comm.send, ONES, 1)
            comm.start(comm.send, ONES, 1)
        if rank() == 1:
            comm.recv(ONES, 0)
            comm.start(comm.recv, ONES, 2)

    with pytest.raises(comm.errors.UnmatchedError) as caught:
        comm.simulate(program, world_size=3)
    head, *lines = str(caught.value).splitlines()
    assert head == "all ranks have finished, but some never came to what others started"
    assert [re.sub(r" at .*:\d+", "", line) for line in lines] == [
        "  rank 0 started send(dst=1) of [float32[2]] on group 'world' for rank 1",
        "  rank 1 started recv(src=2) of [float32[2]] on group 'world' for rank 2",
    ]


def test_another_tag_is_another_message() -> None:
    """Tags must agree: each side says what it waits for."""

    def program() -> None:
        comm.send(ONES, 1, tag=1) if rank() == 0 else comm.recv(ONES, 0, tag=2)

    with pytest.raises(comm.errors.DeadlockError, match=r"send\(dst=1, tag=1\)(.|\n)*recv\(src=0, tag=2\)"):
        comm.simulate(program, world_size=2)


BAD: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "dst too large": (lambda: comm.send(ONES, 2), ValueError, "dst=2 is not a rank of the group; its ranks are 0..1"),
    "dst negative": (
        lambda: comm.start(comm.send, ONES, -1),
        ValueError,
        "dst=-1 is not a rank of the group; its ranks are 0..1",
    ),
    "src too large": (lambda: comm.recv(ONES, 2), ValueError, "src=2 is not a rank of the group; its ranks are 0..1"),
    "src negative": (
        lambda: comm.start(comm.recv, ONES, -1),
        ValueError,
        "src=-1 is not a rank of the group; its ranks are 0..1",
    ),
    "src no integer": (lambda: comm.recv(ONES, "0"), ValueError, "src='0' is not a rank of the group; its ranks are 0..1"),
    "to itself": (lambda: comm.send(ONES, rank()), ValueError, "is this rank itself; use the value as it is"),
    "from itself": (lambda: comm.recv(ONES, rank()), ValueError, "is this rank itself; use the value as it is"),
    "an empty tree": (lambda: comm.send({}, 2), ValueError, "dst=2 is not a rank of the group; its ranks are 0..1"),
    "in a batch": (lambda: comm.batch_p2p([comm.Send(ONES, 3)]), ValueError, "dst=3 is not a rank of the group"),
    "a number": (lambda: comm.send(1.0, 1 - rank()), TypeError, "send: every leaf must be a tensor"),
    "a number to receive": (lambda: comm.recv([1], 1 - rank()), TypeError, "recv: every leaf must be a tensor; [0] is int 1"),
    "no op": (
        lambda: comm.batch_p2p([(ONES, 1)]),
        TypeError,
        "batch_p2p: ops are Send(value, dst) and Recv(like, src), not tuple",
    ),
    "tag no integer": (lambda: comm.send(ONES, 1 - rank(), tag="a"), ValueError, "tag='a' is not an integer"),
}


@pytest.mark.parametrize("what", BAD)
def test_bad_messages_are_refused(what: str) -> None:
    """The error names the call, the rank, the argument and what would do; nothing has been sent."""
    call, error, text = BAD[what]

    def program() -> None:
        with comm.ledger() as book:
            try:
                call()
            finally:
                assert not book.rows

    with pytest.raises(error, match=re.escape(text)) as caught:
        comm.simulate(program, world_size=2)
    if error is ValueError:
        assert re.match(r"(send|recv)\((dst|src)=.*\) on rank [01] of 'world': ", str(caught.value))


def test_in_a_world_of_one_there_is_nobody_to_talk_to() -> None:
    for call in (lambda: comm.send(ONES, 0), lambda: comm.recv(ONES, 0)):
        with pytest.raises(ValueError, match="=0 is this rank itself"):
            call()
    with pytest.raises(ValueError, match=re.escape("dst=1 is not a rank of the group; its ranks are 0..0")):
        comm.send(ONES, 1)


def test_a_rank_outside_of_the_group_may_not_send_in_it() -> None:
    def program() -> None:
        group = comm.new_group([1, 2], "pair")
        if rank() == 0:
            comm.send(ONES, 1, group)

    with pytest.raises(
        comm.errors.CommError, match=r"send\(dst=1\): rank 0 is not in Group\('pair', not a member, ranks \[1, 2\]\)"
    ):
        comm.simulate(program, world_size=3)


def test_a_batch_is_pending_as_a_whole() -> None:
    """Its results come in the order of its ops; gradients of all go back at once."""

    def program() -> Any:
        other = 1 - rank()
        x = torch.tensor([1.0 + rank()], requires_grad=True)
        pending = comm.start(comm.batch_p2p, [comm.Recv(x, other), comm.Send(x * 2, other), comm.Send(x * 3, other, tag=1),
                                  comm.Recv(x, other, tag=1)])  # fmt: skip
        first, zero, nought, second = pending.wait()
        (first * 5 + second * 7 + zero + nought).sum().backward()
        return first.item(), second.item(), zero.item(), nought.item(), x.grad.item()

    assert comm.simulate(program, world_size=2) == [(4.0, 6.0, 0.0, 0.0, 31.0), (2.0, 3.0, 0.0, 0.0, 31.0)]
