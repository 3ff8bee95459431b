"""Ulysses of an attention that acts by head is that attention (law 42), alone and around a ring; so are gathered keys."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

import functional_ds as fds
from functional_ds import comm, seq
from functional_ds import transforms as T
from tests.parallel.sequence.attention_cases import Case, cases, run

Layout = seq.SequenceLayout


def sent(case: Case) -> int:
    """What all ranks send in one pass: q and the result by heads, k and v to all who use them."""
    keys = sum(map(len, seq.head_shares(*case.heads, ranks=case.ranks).keys))
    return case.rows * case.length // case.ranks * (case.ranks - 1) * (case.heads[0] + keys) * sum(case.sizes)


@pytest.mark.law(42)
@given(cases())
def test_ulysses_is_the_attention_in_two_exchanges(case: Case) -> None:
    books = run(case, lambda group: seq.ulysses(None, group, layout=case.layout))
    assert all(book.calls == 2 for pair in books for book in pair)
    for found in zip(*books, strict=True):
        assert sum(book.elements for book in found) == sent(case)


@pytest.mark.law(42)
@pytest.mark.parametrize(
    ("ranks", "h", "g", "elements"),
    [
        (2, 8, 4, (2 * 8 + 2 * 4) * 8 * 12 // 2),  # (2h + 2g) d N/P (P - 1)/P
        (4, 8, 4, (2 * 8 + 2 * 4) * 8 * 6 * 3 // 4),
        (4, 8, 8, 4 * 24 * 64 * 3 // 16),  # 4 N H (P - 1)/P²
        (4, 8, 2, 2 * 8 * 8 * 6 * 3 // 4 + 2 * 24 * 8 * 3 // 4),  # keys and values 2 N d (P - 1)/P
        (4, 4, 1, 2 * 4 * 8 * 6 * 3 // 4 + 2 * 24 * 8 * 3 // 4),
    ],
)
def test_each_rank_sends_what_the_paper_says(ranks: int, h: int, g: int, elements: int) -> None:
    case = Case(ranks, Layout(), 24, heads=(h, g), rows=1)
    for pair in run(case, lambda group: seq.ulysses(None, group)):
        assert [book.elements for book in pair] == [elements] * 2


def _biased(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, *, power: float) -> Tensor:
    """An attention of another kind, with arguments of its own."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    weights = (q @ k.mT + bias).square() ** power
    return weights @ v


@given(st.integers(1, 4), st.integers(1, 5), st.integers(1, 3))
def test_any_attention_that_acts_by_head(ranks: int, keys: int, times: int) -> None:
    case = Case(ranks, Layout("zigzag"), 16 * 3, heads=(keys * times, keys), sizes=(4, 6))
    bias = torch.randn(case.length, case.length, dtype=torch.float64)
    q, k, v, _ = case.inputs()
    expected = _biased(q, k, v, bias, power=1.0)

    def program() -> Tensor:
        group = comm.world()
        own = [case.own(x, group.rank) for x in (q, k, v)]
        return seq.ulysses(_biased, group, layout=case.layout)(*own, bias, power=1.0)

    for rank, found in enumerate(comm.simulate(program, world_size=ranks)):
        torch.testing.assert_close(found, case.own(expected, rank))


def test_torchs_attention() -> None:
    case = Case(2, Layout(), 8, heads=(4, 2), dtype=torch.float32)

    def make(group: comm.Group) -> Callable[..., Tensor]:
        def attend(*args: Tensor, causal: bool) -> Tensor:
            whole = seq.ulysses(F.scaled_dot_product_attention, group)
            return whole(*args, is_causal=causal, enable_gqa=True)

        return attend

    run(case, make)


@pytest.mark.law(42)
@pytest.mark.law(43)
@pytest.mark.parametrize("kind", ["contiguous", "zigzag", "striped"])
@pytest.mark.parametrize("heads", [(4, 2), (3, 3), (2, 1), (1, 1)])
@pytest.mark.parametrize("save", [False, True])
def test_ulysses_around_a_ring(kind: str, heads: tuple[int, int], save: bool) -> None:
    """Heads go over one axis of a mesh, positions over the other; a rank may have no head."""
    case = Case(4, Layout(kind, inner=2), 16, heads=heads, documents=((0,) * 7 + (1,) * 7 + (-1,) * 2,))

    def make(_: comm.Group) -> Callable[..., Tensor]:
        mesh = comm.mesh(ring=2, ulysses=2)
        return seq.ulysses(seq.ring(mesh["ring"], layout=kind, save_blocks=save), mesh["ulysses"])

    run(case, make)


def test_ulysses_around_a_ring_sends_the_sum_of_both() -> None:
    """PARALLEL.md's numbers at 8 ranks, 4 of them by heads: 10.0 M elements where h = 32, g = 8, d = 128, N = 8192."""
    counts = []
    for ring, heads in ((8, 1), (2, 4), (1, 8)):

        def program(ring: int = ring, heads: int = heads) -> int:
            mesh = comm.mesh(ring=ring, ulysses=heads)
            q, k = (torch.empty(1, n, 1024, 128, device="meta") for n in (32, 8))
            with comm.ledger() as book:
                seq.ulysses(seq.ring(mesh["ring"], layout="zigzag"), mesh["ulysses"])(q, k, k, causal=True)
            return book.elements

        counts.append(comm.simulate(program, world_size=8, shapes_only=True)[5] / 1e6)
    assert [round(count, 1) for count in counts] == [14.7, 10.0, 9.2]


@pytest.mark.law(43)
@given(cases())
def test_gathered_keys_are_the_whole_attention_in_one_collective(case: Case) -> None:
    elements = case.rows * case.heads[1] * sum(case.sizes) * case.length // case.ranks * (case.ranks - 1)
    for pair in run(case, lambda group: seq.gathered(group, layout=case.layout)):
        assert [(book.calls, book.elements) for book in pair] == [(1, elements)] * 2


@given(st.integers(1, 9), st.integers(1, 4), st.integers(1, 9))
def test_shares_of_heads(keys: int, times: int, ranks: int) -> None:
    shares = seq.head_shares(keys * times, keys, ranks=ranks)
    assert [head for share in shares.queries for head in share] == list(range(keys * times))
    sizes = [len(share) for share in shares.queries]
    assert max(sizes) - min(sizes) <= 1
    for wrong in (keys * times + 1, 0):
        with pytest.raises(ValueError, match=f"{keys * times} query heads do not divide among {wrong} key-value heads"):
            seq.head_shares(keys * times, wrong, ranks=ranks)
    for queries, used in zip(shares.queries, shares.keys, strict=True):
        assert set(used) == {head // times for head in queries}


@pytest.mark.parametrize(
    ("attention", "match"),
    [
        (lambda q, k, v: q[:, :, :2], r"the attention returned shape \[2, 2, 2, 8\], and \[2, 2, 6, 8\] was expected"),
        (lambda q, k, v: (_ for _ in ()).throw(ValueError("mine")), "mine"),
    ],
)
def test_another_shape_is_refused(attention: Any, match: str) -> None:
    x = torch.ones(2, 4, 3, 8)
    with pytest.raises(ValueError, match=match):
        comm.simulate(lambda: seq.ulysses(attention, comm.world())(x, x, x), world_size=2)


def test_other_shapes_than_an_attentions_are_refused() -> None:
    x = torch.ones(2, 4, 3, 8)
    for args, match in (((x, x[:, :, :1], x[:, :, :1]), "3 queries and 1 keys"), ((x, x[:, :3], x[:, :3]), "do not divide")):
        with pytest.raises(ValueError, match=match):
            comm.simulate(lambda args=args: seq.ulysses(None, comm.world())(*args), world_size=2)


def ring_in_ulysses(kind: str, *, inner: int, ring: str, documents: bool = True, alone: bool = False) -> Any:
    """Weights after two steps of a loss that calls Ulysses over a ring with groups of a mesh."""
    mesh = comm.mesh(dp=1, ring=1, heads=1) if alone else comm.mesh(dp=1, ring=2, heads=2)

    def loss(params: Any, batch: Any) -> fds.Weighted:
        x = params["words"][batch["input_ids"]]
        q = (x @ params["q"]).unflatten(-1, (4, 2)).transpose(1, 2)
        around = seq.ring() if ring == "the step's" else seq.ring(mesh["ring"], layout=ring)
        y = seq.ulysses(around, mesh["heads"] if ring != "the step's" else None)(q, q, q, causal=True)
        counts = batch["shift_labels"] != -100
        return fds.Weighted((y.transpose(1, 2).flatten(-2).square().sum(-1) * counts).sum(), counts.sum())

    layout = Layout(kind, inner=1 if alone else inner)
    chain = T.zero(1, mesh["dp", "ring", "heads"]), T.sequence(mesh["ring", "heads"], layout=layout)
    draw = torch.Generator().manual_seed(0)
    params = {"words": torch.randn(10, 8, generator=draw), "q": torch.randn(8, 8, generator=draw)}
    step = fds.compose(*chain)(fds.train_step(loss, fds.sgd(0.1)))
    state = step.init(params)
    for _ in range(2):
        tokens = torch.randint(0, 10, (2, 16), generator=draw)
        batch = {"input_ids": tokens, "labels": tokens}
        rows = torch.tensor([[0] * 5 + [1] * 11, [0] * 9 + [1] * 7])
        state, _ = step(state, {**batch, "documents": rows} if documents else batch)
    return step.params(state)


@pytest.mark.law(42)
@pytest.mark.parametrize("kind", ["contiguous", "zigzag", "striped"])
@pytest.mark.parametrize("documents", [False, True])
def test_over_a_ring_in_a_loss(kind: str, documents: bool) -> None:
    """With the groups of a mesh, in the step's layout: the single device's weights, with its documents."""
    alone = comm.simulate(lambda: ring_in_ulysses(kind, inner=1, ring=kind, documents=documents, alone=True), world_size=1)[0]
    for found in comm.simulate(lambda: ring_in_ulysses(kind, inner=2, ring=kind, documents=documents), world_size=4):
        torch.testing.assert_close(found, alone)


@pytest.mark.parametrize(("inner", "ring"), [(1, "zigzag"), (2, "contiguous"), (1, "the step's"), (2, "the step's")])
def test_another_ring_is_refused_with_one_advice(inner: int, ring: str) -> None:
    """Without ``inner``, with another layout, or without groups: all say what to compose."""
    with pytest.raises(ValueError, match="Ulysses") as caught:
        comm.simulate(lambda: ring_in_ulysses("zigzag", inner=inner, ring=ring), world_size=4)
    for part in ("SequenceLayout(kind, inner=2)", "fds.seq.ulysses(fds.seq.ring(mesh['ring'], layout=kind), mesh['heads'])"):
        assert part in str(caught.value)
