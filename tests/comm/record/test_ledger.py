"""The ledger counts what each rank sends; the expected counts are derived here message by message."""

import contextlib
import csv
import json
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from functional_ds import comm, tree
from functional_ds.testing import ADDABLE, Inputs, inputs, world_sizes

# A message: who sends one element to whom.
Message = tuple[int, int]


def all_reduce(numel: int, n: int, root: int) -> Iterator[Message]:
    """Each element has an owner, who gets it from all others and sends all others the sum."""
    share = next(size for size in range(numel + 1) if size * n >= numel)
    for element in range(numel):
        owner = element // share
        yield from ((r, owner) for r in range(n))
        yield from ((owner, r) for r in range(n))


def all_gather(numel: int, n: int, root: int) -> Iterator[Message]:
    for _ in range(numel):
        yield from ((a, b) for a in range(n) for b in range(n))


def reduce_scatter(numel: int, n: int, root: int) -> Iterator[Message]:
    for element in range(numel):
        yield from ((r, element * n // numel) for r in range(n))


def broadcast(numel: int, n: int, root: int) -> Iterator[Message]:
    for _ in range(numel):
        yield from ((root, r) for r in range(n))


def reduce(numel: int, n: int, root: int) -> Iterator[Message]:
    for _ in range(numel):
        yield from ((r, root) for r in range(n))


def gather(numel: int, n: int, root: int) -> Iterator[Message]:
    return reduce(numel, n, root)


def scatter(numel: int, n: int, root: int) -> Iterator[Message]:
    for element in range(numel):
        yield root, element * n // numel


def all_to_all(numel: int, n: int, root: int) -> Iterator[Message]:
    for element in range(numel):
        yield from ((r, element * n // numel) for r in range(n))


def all_to_all_rows(numel: int, n: int, root: int) -> Iterator[Message]:
    """All goes to the root."""
    return reduce(numel, n, root)


def permute(numel: int, n: int, root: int) -> Iterator[Message]:
    """The ranks up to the root, around a ring of their own; the rest sends nothing."""
    for _ in range(numel):
        yield from ((r, (r + 1) % (root + 1)) for r in range(root + 1))


def transfer(numel: int, n: int, root: int) -> Iterator[Message]:
    """From the root to the next."""
    for _ in range(numel):
        yield root, (root + 1) % n


def reduce_from(numel: int, n: int, root: int) -> Iterator[Message]:
    return all_reduce(numel, n, root)


def gather_from(numel: int, n: int, root: int) -> Iterator[Message]:
    return all_gather(numel, n, root)


MESSAGES: dict[str, Callable[[int, int, int], Iterator[Message]]] = {
    f.__name__: f
    for f in (
        all_reduce,
        all_gather,
        reduce_scatter,
        broadcast,
        reduce,
        gather,
        scatter,
        all_to_all,
        all_to_all_rows,
        permute,
        transfer,
        reduce_from,
        gather_from,
    )
}
SILENT = {"barrier", "copy_to", "scatter_to"}  # nothing is sent
CUT = {"all_gather", "reduce_scatter", "gather", "scatter", "all_to_all", "all_to_all_rows", "gather_from"}


def sent(name: str, numel: int, n: int, root: int) -> list[int]:
    """Elements that each rank sends; what a rank has already costs nothing."""
    counts = Counter(a for a, b in MESSAGES[name](numel, n, root) if a != b)
    return [counts[r] for r in range(n)]


def call(name: str, case: Inputs, x: Any) -> Any:
    """Calls the collective; returns what the ledger names it, where that is another name."""
    n, root, dim, rank = case.size, case.seed % case.size, case.dim, comm.world().rank
    if name in ("all_gather", "reduce_scatter", "gather_from"):
        getattr(comm, name)(x, dim=dim)
    elif name in ("gather", "scatter"):
        getattr(comm, name)(x, root, dim=dim)
    elif name in ("broadcast", "reduce"):
        getattr(comm, name)(x, root)
    elif name == "all_to_all":
        comm.all_to_all(x, split_dim=dim, concat_dim=dim)
    elif name == "permute":
        comm.permute(x, [(r, (r + 1) % (root + 1)) for r in range(root + 1)])
    elif name == "transfer":
        after = (root + 1) % n
        if rank == root != after:
            comm.send(x, after)
            return "send"
        if rank == after != root:
            comm.recv(x, root)
            return "recv"
        return None
    else:
        getattr(comm, name)(x)
    return name


@pytest.mark.parametrize("name", [name for name in MESSAGES if name != "all_to_all_rows"])
@given(data=st.data())
def test_elements_and_bytes_are_those_of_the_messages(name: str, data: st.DataObject) -> None:
    """Each rank's elements and bytes, leaf by leaf; a tree is one call."""
    case = data.draw(inputs(cut=name in CUT))

    def program(x: Any) -> tuple[str | None, comm.Ledger]:
        with comm.ledger() as book:
            named = call(name, case, x)
        return named, book

    leaves = tree.leaves(case.of(0))
    for rank, (named, book) in enumerate(case.simulate(program)):
        counts = [sent(name, leaf.numel(), case.size, case.seed % case.size)[rank] for leaf in leaves]
        total = sum(count * leaf.element_size() for count, leaf in zip(counts, leaves, strict=True))
        assert book.rows == ([comm.Row(named, "world", case.size, 1, sum(counts), total)] if named else [])
        assert (book.calls, book.bytes) == (1 if named else 0, total)


@given(inputs(cut=True, max_leaves=1), st.booleans())
def test_an_exchange_of_rows_counts_the_rows_that_leave(case: Inputs, told: bool) -> None:
    """All rows to the root; where receivers are not told, each rank sends each other one an int64 first."""
    root, n = case.seed % case.size, case.size

    def program(x: Any) -> comm.Ledger:
        with comm.ledger() as book:
            for leaf in tree.leaves(x):
                rows = leaf.shape[case.dim]
                splits = [rows if r == root else 0 for r in range(n)]
                expected = [rows] * n if comm.world().rank == root else [0] * n
                comm.all_to_all(
                    leaf,
                    split_dim=case.dim,
                    concat_dim=case.dim,
                    input_splits=splits,
                    output_splits=expected if told else None,
                )
        return book

    leaves = tree.leaves(case.of(0))
    for rank, book in enumerate(case.simulate(program)):
        counts = [sent("all_to_all_rows", leaf.numel(), n, root)[rank] for leaf in leaves]
        size = sum(count * leaf.element_size() for count, leaf in zip(counts, leaves, strict=True))
        asked = (0 if told else n - 1) * len(leaves)
        calls = len(leaves) * (1 if told else 2)
        expected = [comm.Row("all_to_all", "world", n, calls, sum(counts) + asked, size + 8 * asked)] if leaves else []
        assert book.rows == expected


def test_what_stays_on_its_rank_is_no_row() -> None:
    """copy_to and scatter_to send nothing forward; backward they are reduce_from and gather_from, which do."""

    def program() -> tuple[list[comm.Row], list[comm.Row]]:
        x = torch.ones(6, requires_grad=True)
        with comm.ledger() as forward:
            y = comm.copy_to(x).sum() + comm.scatter_to(x).sum()
        with comm.ledger() as backward:
            y.backward()
        return forward.rows, sorted(backward.rows, key=lambda row: row.collective)

    for forward, backward in comm.simulate(program, world_size=3):
        assert forward == []
        assert backward == [comm.Row("gather_from", "world", 3, 1, 4, 16), comm.Row("reduce_from", "world", 3, 1, 8, 32)]


def test_every_row_of_the_table_is_derived() -> None:
    assert {row.name for row in comm.table.TABLE} == {*MESSAGES, *SILENT}


@given(world_sizes(), st.integers(0, 6), st.sampled_from(ADDABLE))
def test_the_textbook_volumes(n: int, k: int, dtype: torch.dtype) -> None:
    """Of N = k n bytes: AR 2N(n-1)/n, AG of shards and RS N(n-1)/n each, so AG ∘ RS sends what AR sends."""
    x = torch.ones(k * n, dtype=dtype)
    size = x.numel() * x.element_size()

    def volume(program: Callable[[], Any]) -> set[int]:
        def on_rank() -> int:
            with comm.ledger() as book:
                program()
            return book.bytes

        return set(comm.simulate(on_rank, world_size=n))

    assert volume(lambda: comm.all_reduce(x)) == {2 * size * (n - 1) // n}
    assert volume(lambda: comm.reduce_scatter(x)) == {size * (n - 1) // n}
    assert volume(lambda: comm.all_gather(x[:k])) == {size * (n - 1) // n}
    assert volume(lambda: comm.all_gather(comm.reduce_scatter(x))) == {2 * size * (n - 1) // n}
    assert volume(comm.barrier) == {0}


def test_rows_are_by_collective_and_group() -> None:
    """In order of first use; a channel is a group of its own; asynchronous calls and averages count alike."""

    def program() -> list[comm.Row]:
        mesh = comm.mesh(dp=2, tp=2)
        with comm.ledger() as book:
            comm.all_reduce(torch.ones(4), mesh["tp"])
            comm.start(comm.all_gather, torch.ones(1), mesh["dp"]).wait()
            comm.all_reduce(torch.ones(2), mesh["tp"], op="avg")
            comm.all_reduce(torch.ones(1), mesh["tp"].channel("fast"))
            comm.all_reduce(torch.ones(4))
        return book.rows

    for rank, rows in enumerate(comm.simulate(program, world_size=4)):
        assert rows == [
            comm.Row("all_reduce", "tp", 2, 2, 6, 24),
            comm.Row("all_gather", "dp", 2, 1, 1, 4),
            comm.Row("all_reduce", "tp/fast", 2, 1, 1, 4),
            comm.Row("all_reduce", "world", 4, 1, 6, 24),
        ], rank


def test_backward_passes_are_counted() -> None:
    """A transpose sends, too: AG's is an RS of all that was gathered."""

    def program() -> list[comm.Row]:
        x = torch.ones(3, requires_grad=True)
        y = comm.all_gather(x)
        with comm.ledger() as book:
            y.sum().backward()
        return book.rows

    assert comm.simulate(program, world_size=4) == [[comm.Row("reduce_scatter", "world", 4, 1, 9, 36)]] * 4


def test_a_ledger_is_open_while_its_block_runs() -> None:
    """Ledgers nest, each with its own time; the block's error closes it, too; other ranks' calls are not counted."""

    def program() -> Any:
        x = torch.ones(2)
        comm.all_reduce(x)
        with comm.ledger() as outer:
            with comm.ledger():
                pass  # as empty as the outer one, which stays open
            comm.all_reduce(x)
            with contextlib.suppress(KeyError), comm.ledger() as inner:
                comm.all_reduce(x)
                raise KeyError
            comm.all_reduce(x)
            with comm.ledger() as last:
                pass
        comm.all_reduce(x)
        alone = comm.mesh(each=comm.world().size // 2, pair=2)["pair"]
        with comm.ledger() as some:
            if comm.world().rank < 2:
                comm.barrier(alone)
        return outer.calls, inner.calls, last.calls, some.calls, comm.world().world.ledgers

    assert comm.simulate(program, world_size=4) == [(3, 1, 0, 1, [])] * 2 + [(3, 1, 0, 0, [])] * 2


def test_a_world_of_one_sends_nothing() -> None:
    with comm.ledger() as book:
        comm.all_reduce(torch.ones(5))
    assert book.rows == [comm.Row("all_reduce", "world", 1, 1, 0, 0)]


def test_the_table_as_text_and_as_csv(tmp_path: Path) -> None:
    """A line for each row and one for the total; the CSV holds the rows."""

    def program() -> comm.Ledger:
        with comm.ledger() as book:
            comm.all_reduce(torch.ones(4000))
            comm.all_gather(torch.ones(1, dtype=torch.float64))
        return book

    book = comm.simulate(program, world_size=2)[0]
    assert [line.split() for line in book.table().splitlines()] == [
        ["collective", "group", "ranks", "calls", "elements", "bytes"],
        ["all_reduce", "world", "2", "1", "4,000", "16,000"],
        ["all_gather", "world", "2", "1", "1", "8"],
        ["total", "2", "4,001", "16,008"],
    ]
    assert len({len(line) for line in book.table().splitlines()}) == 1
    book.to_csv(tmp_path / "book.csv")
    with (tmp_path / "book.csv").open() as file:
        head, *rows = csv.reader(file)
    sizes = ["collective", "group", "size", "calls", "elements", "bytes"]
    overlapped = ["overlapped", "overlapped_seconds", "overlapped_payload"]
    assert head == [*sizes, "ranks", "timed", "seconds", "payload", *overlapped, "algorithmic_bandwidth", "bus_bandwidth"]
    untimed = ["0 1", "0", "0.0", "0", "0", "0.0", "0", "", ""]
    assert rows == [
        ["all_reduce", "world", "2", "1", "4000", "16000", *untimed],
        ["all_gather", "world", "2", "1", "1", "8", *untimed],
    ]


# -- times ------------------------------------------------------------------------------------------------------------

FACTORS: dict[str, Callable[[int], float]] = {  # of the bus bandwidth over the algorithmic one, on n ranks
    "all_reduce": lambda n: 2 * (n - 1) / n,
    "reduce_from": lambda n: 2 * (n - 1) / n,
    "all_gather": lambda n: (n - 1) / n,
    "reduce_scatter": lambda n: (n - 1) / n,
    "gather": lambda n: (n - 1) / n,
    "scatter": lambda n: (n - 1) / n,
    "all_to_all": lambda n: (n - 1) / n,
    "gather_from": lambda n: (n - 1) / n,
    "broadcast": lambda n: 1.0,
    "reduce": lambda n: 1.0,
    "permute": lambda n: 1.0,
    "transfer": lambda n: 1.0,
}
GIVES_ALL = {"all_gather", "gather", "gather_from"}  # whose value is what comes out


def timed(name: str, n: int) -> comm.Ledger:
    case = Inputs(n, None, seed=n - 1)
    with comm.ledger(times=True) as book:
        for _ in range(2):
            call(name, case, torch.ones(4 * n))
    return book


@pytest.mark.parametrize("name", FACTORS)
@pytest.mark.parametrize("n", [2, 3])
def test_times_and_bandwidths(name: str, n: int) -> None:
    """Seconds are positive; algorithmic bandwidth is the values' bytes over them; bus bandwidth has nccl-tests' factor."""
    for book in comm.simulate(timed, name, n, world_size=n):
        for row in book.rows:
            payload = 2 * 4 * n * 4 * (n if name in GIVES_ALL else 1)
            assert (row.timed, row.calls, row.payload) == (2, 2, payload)
            assert row.seconds > 0
            assert row.algorithmic_bandwidth == pytest.approx(payload / row.seconds)
            assert row.bus_bandwidth == pytest.approx(FACTORS[name](n) * payload / row.seconds)
        assert [event.ended > event.began for event in book.events] == [True] * book.calls
        assert sum(event.bytes for event in book.events) == book.bytes
        assert sum(event.ended - event.began for event in book.events) == pytest.approx(sum(row.seconds for row in book.rows))


def test_without_times_there_are_no_bandwidths() -> None:
    """Nor for a call that nobody waited for; a timed ledger does not make another one timed."""

    def program() -> tuple[comm.Ledger, comm.Ledger]:
        with comm.ledger() as plain, comm.ledger(times=True) as book:
            comm.all_reduce(torch.ones(2))
            comm.start(comm.all_gather, torch.ones(2))
        return plain, book

    for plain, book in comm.simulate(program, world_size=2):
        assert plain.rows == book.rows  # what was sent, whether timed or not
        for row in [*plain.rows, book.rows[1]]:
            assert (row.timed, row.seconds, row.algorithmic_bandwidth, row.bus_bandwidth) == (0, 0.0, None, None)
        assert (plain.events, len(book.events), book.rows[0].timed) == ([], 1, 1)


def test_a_pending_is_timed_to_its_end() -> None:
    """From the call to the wait, once, however often it is waited for; nested ledgers each take their own."""

    def program() -> list[tuple[int, int]]:
        with comm.ledger(times=True) as outer, comm.ledger(times=True) as inner:
            pending = comm.start(comm.all_reduce, [torch.ones(3), torch.ones(2, 2)])
            pending.wait()
            pending.wait()
        assert inner.rows[0].payload == outer.rows[0].payload == 4 * 7
        return [(book.rows[0].timed, len(book.events)) for book in (outer, inner)]

    assert comm.simulate(program, world_size=2) == [[(1, 1)] * 2] * 2


def test_what_a_rank_computes_beside_a_call_is_no_transfer(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """An early receive has a time and no bandwidth; one that is waited for at once has both; nor is its rank waited for."""
    clock = [0.0]
    monkeypatch.setattr("functional_ds.comm.record.ledger.perf_counter", lambda: clock[0])

    def program(early: bool, both: bool) -> comm.Ledger:
        x, here = torch.ones(4), comm.world()
        with comm.ledger(times=True) as book:
            if early:
                pending = comm.start(comm.recv, x, 1) if here.rank == 0 else comm.start(comm.send, x, 0)
                clock[0] += 10
                pending.wait()
            if both:
                clock[0] += 2 * (1 - here.rank)  # rank 0 is late
                found = comm.recv(x, 1) if here.rank == 0 else comm.send(x, 0)
                assert found.shape == (4,)
                comm.all_reduce(x)
        return book

    def row(book: comm.Ledger) -> comm.Row:
        return next(row for row in book.rows if row.collective in ("send", "recv"))

    for book in comm.simulate(program, True, False, world_size=2):
        found = row(book)
        assert (found.timed, found.overlapped, found.seconds >= 10) == (1, 1, True)
        assert (found.algorithmic_bandwidth, found.bus_bandwidth) == (None, None)
        assert f"{found.seconds * 1e3:.3f}" in book.table()
    for seed in range(8):
        for book in comm.simulate(program, True, True, world_size=2, seed=seed):
            found = row(book)
            assert (found.timed, found.overlapped, found.overlapped_payload) == (2, 1, 16)
            alone = found.seconds - found.overlapped_seconds
            assert found.algorithmic_bandwidth == (16 / alone if alone else None)
    books = comm.simulate(program, True, True, world_size=2)
    assert {spread.collective for spread in comm.debug.spreads(books)} == {"all_reduce"}
    comm.debug.write_trace(books, tmp_path / "plain.json")
    comm.debug.write_trace(books, tmp_path / "moved.json", offsets=(0.0, 64.0))
    plain, moved = (json.loads((tmp_path / f"{name}.json").read_text())["traceEvents"] for name in ("plain", "moved"))
    shifts = {(one["pid"], two["ts"] - one["ts"]) for one, two in zip(plain, moved, strict=True) if one["ph"] == "X"}
    assert {pid: shift - dict(shifts)[0] for pid, shift in shifts} == {0: 0, 1: 64e6}


def two_axes() -> comm.Ledger:
    mesh = comm.mesh(a=2, b=2)
    with comm.ledger(times=True) as book:
        comm.all_reduce(torch.ones(8), mesh["a"])
        comm.all_gather(torch.ones(2), mesh["b"])
        comm.all_reduce(torch.ones(8), mesh["a"])
        if comm.world().rank == 0:
            comm.send(torch.ones(1), 1)
        if comm.world().rank == 1:
            comm.recv(torch.ones(1), 0)
    return book


def test_spreads_are_by_group() -> None:
    """A line for each collective of each group with every member's seconds; what not all have timed is left out."""
    books = comm.simulate(two_axes, world_size=4)
    spreads = comm.debug.spreads(reversed(books))
    found = {(spread.collective, spread.group, spread.ranks) for spread in spreads}
    assert found == {
        ("all_reduce", "a", (0, 2)),
        ("all_reduce", "a", (1, 3)),
        ("all_gather", "b", (0, 1)),
        ("all_gather", "b", (2, 3)),
    }
    for spread in spreads:
        rows = [
            row
            for r in spread.ranks
            for row in books[r].rows
            if (row.collective, row.group) == (spread.collective, spread.group)
        ]
        assert spread.seconds == tuple(row.seconds for row in rows)
        assert spread.slowest == min(zip(spread.seconds, spread.ranks, strict=True))[1]  # who comes last waits least
        assert str(spread).split()[:3] == [spread.collective, spread.group, "2"]
        assert str(spread).endswith(f"waited for rank {spread.slowest}")
    assert comm.debug.spreads([]) == comm.debug.spreads(books[:1]) == []


def test_a_trace_is_a_process_for_each_rank(tmp_path: Path) -> None:
    """Valid JSON: each rank a named process, each group a named lane, each timed call a slice with its bytes."""
    books = comm.simulate(two_axes, world_size=4)
    comm.debug.write_trace(books, tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    names = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert names == {r: f"rank {r}" for r in range(4)}
    for book in books:
        mine = [event for event in events if event["pid"] == book.rank]
        lanes = {event["tid"]: event["args"]["name"] for event in mine if event["name"] == "thread_name"}
        slices = [event for event in mine if event["ph"] == "X"]
        assert [(event["name"], lanes[event["tid"]], event["args"]["bytes sent"]) for event in slices] == [
            (event.collective, event.group, event.bytes) for event in book.events
        ]
        assert all(event["ts"] >= 0 and event["dur"] > 0 for event in slices)
    assert min(event["ts"] for event in events if event["ph"] == "X") == 0
    with pytest.raises(ValueError, match=r"ledgers: no ledger has times; open them with comm\.ledger\(times=True\)"):
        comm.debug.write_trace([comm.Ledger()], tmp_path / "none.json")


def test_the_table_and_the_csv_have_the_times(tmp_path: Path) -> None:
    book = comm.simulate(two_axes, world_size=4)[0]
    head, *lines, total = (line.split() for line in book.table().splitlines())
    assert head[6:] == ["ms", "alg", "GB/s", "bus", "GB/s"]
    assert total[0] == "total"
    for line, row in zip(lines, book.rows, strict=True):
        assert line[6:] == [f"{row.seconds * 1e3:.3f}"] + [
            f"{rate / 1e9:.3f}" for rate in (row.algorithmic_bandwidth, row.bus_bandwidth)
        ]
    book.to_csv(tmp_path / "book.csv")
    with (tmp_path / "book.csv").open() as file:
        for values, row in zip(csv.DictReader(file), book.rows, strict=True):
            assert (values["collective"], int(values["bytes"]), int(values["timed"])) == (row.collective, row.bytes, row.timed)
            assert [int(r) for r in values["ranks"].split()] == list(row.ranks)
            for name in ("seconds", "algorithmic_bandwidth", "bus_bandwidth"):
                assert float(values[name]) == getattr(row, name)
