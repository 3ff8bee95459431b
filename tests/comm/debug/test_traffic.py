"""Who sends how much to whom: ledgers as matrices, and as a picture."""

import sys
from typing import Any

import pytest
import torch

from functional_ds import comm
from tests.comm.record.test_ledger import MESSAGES


def from_root(name: str, root: int) -> comm.Ledger:
    here = comm.world()
    x = torch.ones(12, dtype=torch.int8)
    with comm.ledger() as book:
        if name in ("broadcast", "reduce", "gather", "scatter"):
            getattr(comm, name)(x, root)
        elif name == "all_to_all_rows":
            splits = [12 if rank == root else 0 for rank in range(here.size)]
            comm.all_to_all(x, input_splits=splits, output_splits=[12 * (here.rank == root)] * here.size)
        elif name == "permute":
            comm.permute(x, [(rank, (rank + 1) % (root + 1)) for rank in range(root + 1)])
        elif name == "transfer":
            after = (root + 1) % here.size
            if here.rank == root:
                comm.send(x, after)
            if here.rank == after:
                comm.recv(x, root)
        else:
            getattr(comm, name)(x)
    return book


@pytest.mark.parametrize("name", MESSAGES)
def test_a_collectives_traffic_is_that_of_its_messages(name: str) -> None:
    """Byte by byte, where sizes divide."""
    n, root = 3, 1
    expected = torch.zeros(n, n, dtype=torch.float64)
    for a, b in MESSAGES[name](12, n, root):
        expected[a, b] += a != b
    assert torch.equal(comm.debug.traffic(comm.simulate(from_root, name, root, world_size=n))["world"], expected)


def on_a_mesh() -> comm.Ledger:
    mesh = comm.mesh(dp=2, sp=3, tp=2)
    ring = [(rank, (rank + 1) % 3) for rank in range(3)]
    with comm.ledger() as book:
        comm.all_reduce(torch.ones(8, device="meta"), mesh["tp"])
        comm.repeat(4, lambda turn: comm.permute(torch.ones(2, device="meta"), ring, mesh["sp"]))
        comm.all_gather(torch.ones(3, device="meta"), mesh["dp", "sp"].channel("gather"))
    return book


def test_axes_have_matrices_of_their_own() -> None:
    """Nothing leaves a group; a ring has one neighbour; rows add up to the ledgers' bytes, also of loops that ran once."""
    books = comm.simulate(on_a_mesh, world_size=12, shapes_only=True)
    found = comm.debug.traffic(books[::-1])
    assert found.keys() == {"tp", "sp", "dp,sp"}
    assert [sum(float(each[rank].sum()) for each in found.values()) for rank in range(12)] == [book.bytes for book in books]
    assert found["tp"][5].nonzero().flatten().tolist() == [4]
    assert {rank: float(found["sp"][5, rank]) for rank in range(12) if found["sp"][5, rank]} == {1: 4 * 8}
    assert found["dp,sp"][5].nonzero().flatten().tolist() == [1, 3, 7, 9, 11]


def test_a_picture_has_a_square_for_each_axis() -> None:
    pytest.importorskip("matplotlib")
    figure = comm.debug.draw_traffic(comm.simulate(on_a_mesh, world_size=12, shapes_only=True), title="a mesh")
    panels: Any = figure.axes
    assert [axes.get_title() for axes in panels] == ["tp\n32 B a rank", "sp\n32 B a rank", "dp,sp\n60 B a rank"]
    assert {text.get_text() for text in panels[1].texts} == {"32"}


def on_axes(names: str) -> comm.Ledger:
    mesh = comm.mesh(**dict.fromkeys(names, 2))
    with comm.ledger() as book:
        for axis in names:
            comm.all_reduce(torch.ones(8, device="meta"), mesh[axis])
    return book


@pytest.mark.parametrize("title", ["", "a mesh"])
@pytest.mark.parametrize("names", ["ab", "abc", "abcde"])
def test_a_picture_shows_all_of_its_words(names: str, title: str) -> None:
    agg = pytest.importorskip("matplotlib.backends.backend_agg")
    books = comm.simulate(on_axes, names, world_size=2 ** len(names), shapes_only=True)
    figure: Any = comm.debug.draw_traffic(books, title=title)
    agg.FigureCanvasAgg(figure).draw()
    box, (wide, high) = figure.get_tightbbox(), figure.get_size_inches()
    assert 0 <= box.x0 < box.x1 <= wide
    assert 0 <= box.y0 < box.y1 <= high


def test_what_is_no_book_of_each_rank_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """By name; without matplotlib there are still the numbers."""
    books = comm.simulate(on_a_mesh, world_size=12, shapes_only=True)
    with pytest.raises(ValueError, match=r"ledgers: of the ranks \[0, 0\]; pass one of each rank"):
        comm.debug.traffic([books[0], books[0]])
    with pytest.raises(ValueError, match="ledgers: nothing was sent"):
        comm.debug.draw_traffic([comm.Ledger()])
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r"pip install 'functional-ds\[train\]'"):
        comm.debug.draw_traffic(books)
