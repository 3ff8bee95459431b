"""The paper's figures, as text and as pictures."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from functional_ds import comm, memory
from functional_ds.memory import EIGHTEEN, SINGLE, SIXTEEN, Formula, by_stage


@pytest.mark.law(20)
def test_the_papers_table() -> None:
    """Ψ = 7.5e9, n = 64: 120, 31.4, 16.6, 1.9 GB."""
    totals = [sum(by_stage(stage).values(), Formula()).bytes(7.5e9, 64) / 1e9 for stage in range(4)]
    assert [round(total, 1) for total in totals] == [120.0, 31.4, 16.6, 1.9]
    rows = memory.zero_table().splitlines()[-4:]
    assert [row.split()[5] for row in rows] == ["120.00", "31.41", "16.64", "1.88"]


def test_conventions() -> None:
    """16 bytes; 18 where gradients are summed in fp32; 16 again in fp32."""
    assert (SIXTEEN.total, EIGHTEEN.total, SINGLE.total) == (16, 18, 16)
    assert [str(sum(by_stage(k, EIGHTEEN).values(), Formula())) for k in range(4)] == [
        "18Ψ",
        "6Ψ + 12Ψ/n",
        "2Ψ + 16Ψ/n",
        "18Ψ/n",
    ]
    assert EIGHTEEN.name in memory.zero_table(1e9, 8, convention=EIGHTEEN)


@given(stage=st.sampled_from((0, 1, 2, 3)), psi=st.integers(1, 10**12), n=st.integers(1, 1024))
def test_stages_only_cut(stage: int, psi: int, n: int) -> None:
    """On one rank all stages are alike; a further stage never holds more; nothing is less than 1/n of all."""
    for convention in (SIXTEEN, EIGHTEEN, SINGLE):
        whole = sum(by_stage(stage, convention).values(), Formula())
        assert whole.whole + whole.cut == convention.total
        assert convention.total * psi / n <= whole.bytes(psi, n) * (1 + 1e-12)
        if stage:
            before = sum(by_stage(stage - 1, convention).values(), Formula())
            assert whole.bytes(psi, n) <= before.bytes(psi, n) * (1 + 1e-12)


def test_bad_input() -> None:
    """Refused."""
    with pytest.raises(ValueError, match="stage=4"):
        by_stage(4)
    with pytest.raises(ValueError, match="at least one parameter"):
        memory.zero_table(0)
    with pytest.raises(ValueError, match="n=0"):
        memory.draw_zero(n=0)


def test_pictures() -> None:
    """A bar for each kind and stage, with the totals above."""
    figure = memory.draw_zero()
    (axes,) = figure.axes
    assert len(axes.patches) == 16
    assert [text.get_text().split("\n")[0] for text in axes.texts] == ["120.0", "31.4", "16.6", "1.9"]
    ranks = [memory.Memory(10, 20, 40, 10, peak=5), memory.Memory(11, 20, 40, 10, peak=6)]
    left, right = memory.draw_compared("a run", by_stage(1), 5, ranks).axes
    assert len(left.patches) == 4 * 3
    assert [bar.get_height() for bar in right.patches] == [5e-6, 6e-6]
    text = memory.compared("a run", by_stage(1), 5, ranks)
    assert "2Ψ " in text
    assert "peak of the process" in text


@pytest.mark.law(40)
@given(n=st.sampled_from((1, 2, 4)), tokens=st.integers(1, 5), width=st.sampled_from((4, 8)))
def test_a_layer_of_slices_sends_what_the_formula_says(n: int, tokens: int, width: int) -> None:
    """Two blocks of columns and rows: four all-reduces."""

    def program() -> int:
        group = comm.world()
        x = torch.ones(tokens, width, requires_grad=True)
        columns, rows = torch.ones(width, 2, requires_grad=True), torch.ones(2, width, requires_grad=True)
        with comm.ledger() as book:
            out = x
            for _ in range(2):
                out = out + comm.reduce_from(comm.copy_to(out, group) @ columns @ rows, group)
            out.sum().backward()
        return sum(row.elements for row in book.rows)

    assert set(comm.simulate(program, world_size=n)) == {memory.layer_elements_sent(tokens, width, n=n)}
