"""The ledger counts what each rank sends; the expected counts are derived here message by message."""

import contextlib
import csv
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


MESSAGES: dict[str, Callable[[int, int, int], Iterator[Message]]] = {
    f.__name__: f for f in (all_reduce, all_gather, reduce_scatter, broadcast, reduce)
}


def sent(name: str, numel: int, n: int, root: int) -> list[int]:
    """Elements that each rank sends; what a rank has already costs nothing."""
    counts = Counter(a for a, b in MESSAGES[name](numel, n, root) if a != b)
    return [counts[r] for r in range(n)]


def call(name: str, case: Inputs, x: Any) -> Any:
    root = case.seed % case.size
    if name in ("all_gather", "reduce_scatter"):
        return getattr(comm, name)(x, dim=case.dim)
    return getattr(comm, name)(x, root) if name in ("broadcast", "reduce") else comm.all_reduce(x)


@pytest.mark.parametrize("name", MESSAGES)
@given(data=st.data())
def test_elements_and_bytes_are_those_of_the_messages(name: str, data: st.DataObject) -> None:
    """Each rank's elements and bytes, leaf by leaf; a tree is one call."""
    case = data.draw(inputs(cut=name in ("all_gather", "reduce_scatter")))

    def program(x: Any) -> comm.Ledger:
        with comm.ledger() as book:
            call(name, case, x)
        return book

    leaves = tree.leaves(case.of(0))
    for rank, book in enumerate(case.simulate(program)):
        counts = [sent(name, leaf.numel(), case.size, case.seed % case.size)[rank] for leaf in leaves]
        total = sum(count * leaf.element_size() for count, leaf in zip(counts, leaves, strict=True))
        assert book.rows == [comm.Row(name, "world", case.size, 1, sum(counts), total)]
        assert (book.calls, book.bytes) == (1, total)


def test_every_row_of_the_table_is_derived() -> None:
    assert {row.name for row in comm.TABLE} == {*MESSAGES, "barrier"}


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
            comm.all_gather(torch.ones(1), mesh["dp"], async_op=True).wait()
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
        return outer.calls, inner.calls, last.calls, some.calls, comm.world().world.books

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
        assert list(csv.reader(file)) == [
            ["collective", "group", "size", "calls", "elements", "bytes"],
            ["all_reduce", "world", "2", "1", "4000", "16000"],
            ["all_gather", "world", "2", "1", "1", "8"],
        ]
