"""What a cell shows of a record: its numbers, as text that a browser cannot take for tags."""

import html
import re

import pytest
import torch

import functional_ds as fds
from functional_ds import comm, testing
from functional_ds import transforms as T
from functional_ds.comm.record.notebook import html_table
from tests.planting import Bug, planted


def cells(shown: str) -> list[list[str]]:
    return [re.findall(r"<t[dh]>(.*?)</t[dh]>", row) for row in re.findall(r"<tr>(.*?)</tr>", shown)]


def check_table() -> None:
    shown = html_table(["a", "<b>"], [[1, "&"], ["", "x"]], caption="<1>")
    assert cells(shown) == [["a", "&lt;b&gt;"], ["1", "&amp;"], ["", "x"]]
    assert "<caption>&lt;1&gt;</caption>" in shown
    assert cells(html_table([], [[1]])) == [["1"]]


def test_a_table() -> None:
    check_table()


def test_a_bug_is_seen() -> None:
    bug = Bug("text is taken for tags", "comm.record.notebook:html_table.line", "escape(str(cell))", "str(cell)")
    with planted(bug), pytest.raises(bug.shows):
        check_table()


@pytest.mark.parametrize("times", [False, True])
def test_a_ledger_is_its_rows_and_their_sum(times: bool) -> None:
    def program() -> comm.Ledger:
        with comm.ledger(times=times) as book:
            comm.all_reduce(torch.ones(6))
            comm.all_gather(torch.ones(2))
        return book

    for rank, book in enumerate(comm.simulate(program, world_size=2)):
        head, *rows, total = cells(book._repr_html_())
        assert ("ms" in head) == times
        assert [(row[0], int(row[3]), int(row[5])) for row in rows] == [(r.collective, r.calls, r.bytes) for r in book.rows]
        assert total[:6] == ["total", "", "", "2", f"{book.elements:,}", f"{book.bytes:,}"]
        assert f"sent by rank {rank}" in book._repr_html_()


def test_a_mesh_is_its_grid() -> None:
    mesh = comm.simulate(lambda: comm.mesh(pp=2, dp=2, tp=2), world_size=8)[6]
    assert cells(mesh._repr_html_()) == [
        ["pp", "dp", "tp 0", "tp 1"],
        ["0", "0", "0", "1"],
        ["0", "1", "2", "3"],
        ["1", "0", "4", "5"],
        ["1", "1", "[6]", "7"],
    ]


def test_a_graph_and_what_a_configuration_costs() -> None:
    params = {"w": torch.ones(4, 4)}

    def program() -> tuple[str, str]:
        step = fds.jit(T.zero(3)(fds.train_step(lambda p, x: (x @ p["w"]).square().mean(), fds.sgd(0.1))))
        state, x = step.init(params), torch.ones(2, 4)
        state, _ = step(state, x)
        graph = step.graph(state, x)
        return graph._repr_html_(), str(graph)

    shown, text = comm.simulate(program, world_size=2)[0]
    counts = {row[0]: int(row[2]) for row in cells(shown)[1:] if row[1].startswith("world")}
    assert counts["all_gather"] == counts["reduce_scatter"] == 1
    assert html.escape(text) in shown
    report = T.zero(3).cost_report(params, n=2)
    assert html.escape(str(report)) in report._repr_html_()


def test_reports_are_their_text() -> None:
    report = testing.PassReport("a<b", (1, 2), (3, 4), (5, 6), (7, 8))
    bugs = testing.MutantTable("mine", [testing.Mutant(3, "a < b", "a > b", "the other way round")])
    for shown in (report, bugs):
        assert shown._repr_html_() == f"<pre>{html.escape(str(shown))}</pre>"
