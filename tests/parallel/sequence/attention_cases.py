"""Attention on one device by its definition, and draws of layouts, masks and heads."""

import itertools
from collections.abc import Callable
from typing import Any

import attrs
import torch
from hypothesis import strategies as st
from torch import Tensor

from functional_ds import comm, seq

TOLERANCES = {
    torch.float64: {"atol": 1e-11, "rtol": 1e-9},
    torch.float32: {"atol": 3e-5, "rtol": 1e-4},
    torch.bfloat16: {"atol": 5e-2, "rtol": 5e-2},
}


@attrs.frozen
class Case:
    """An attention over a cut sequence."""

    ranks: int
    layout: seq.SequenceLayout
    length: int
    heads: tuple[int, int] = (4, 2)
    sizes: tuple[int, int] = (8, 8)
    causal: bool = True
    window: int | None = None
    documents: tuple[tuple[int, ...], ...] | None = None
    dtype: torch.dtype = torch.float64
    rows: int = 2

    def inputs(self) -> list[Tensor]:
        """q, k, v and the gradient of the result, of the whole sequence."""
        torch.manual_seed(0)
        (h, g), (d, e) = self.heads, self.sizes
        shapes = ((h, d), (g, d), (g, e), (h, e))
        return [torch.randn(self.rows, n, self.length, m, dtype=torch.float64).to(self.dtype) for n, m in shapes]

    def numbers(self) -> Tensor | None:
        """The documents as an argument."""
        return None if self.documents is None else torch.tensor(self.documents)

    def mask(self) -> Tensor:
        """Which position attends to which."""
        at = torch.arange(self.length)
        allowed = torch.ones(1, 1, self.length, self.length, dtype=torch.bool)
        if self.causal:
            allowed = allowed & (at[:, None] >= at)
        if self.window is not None:
            allowed = allowed & (at[:, None] - at < self.window)
        numbers = self.numbers()
        if self.layout.documents is not None:
            numbers = torch.tensor([[i for i, size in enumerate(self.layout.documents) for _ in range(size)]])
        if numbers is not None:
            allowed = allowed & ((numbers[:, :, None] == numbers[:, None]) & (numbers >= 0)[:, None])[:, None]
        return allowed

    def expected(self) -> tuple[Tensor, list[Tensor]]:
        """The attention to the whole sequence and its gradients, in float64."""
        *inputs, grad = (x.double() for x in self.inputs())
        q, k, v = (x.requires_grad_() for x in inputs)
        repeat = self.heads[0] // self.heads[1]
        scores = q @ k.repeat_interleave(repeat, 1).mT * self.sizes[0] ** -0.5
        mask = self.mask()
        some = mask.any(-1, keepdim=True)
        weights = torch.where(mask | ~some, scores, -torch.inf).softmax(-1) * some
        o = weights @ v.repeat_interleave(repeat, 1)
        return o.detach(), list(torch.autograd.grad((o * grad).sum(), [q, k, v]))

    def own(self, x: Tensor, rank: int) -> Tensor:
        """A rank's positions of a tensor."""
        return x.index_select(2, self.layout.positions(self.length, self.ranks, rank))

    def arguments(self) -> dict[str, Any]:
        """What the attention is called with."""
        found = {"causal": self.causal, "window": self.window, "documents": self.numbers()}
        return {name: value for name, value in found.items() if value is not None}


def run(
    case: Case, make: Callable[[comm.Group], Callable[..., Tensor]], **options: Any
) -> list[tuple[comm.Ledger, comm.Ledger]]:
    """Checks an attention and its gradients on all ranks; returns what each sent forward and backward."""

    def program() -> tuple[Tensor, list[Tensor], comm.Ledger, comm.Ledger]:
        group = comm.world()
        *inputs, grad = (case.own(x, group.rank) for x in case.inputs())
        for x in inputs:
            x.requires_grad_()
        with comm.ledger() as forward:
            o = make(group)(*inputs, **case.arguments())
        with comm.ledger() as backward:
            grads = torch.autograd.grad((o * grad).sum(), inputs)
        return o.detach(), list(grads), forward, backward

    o, grads = case.expected()
    found = comm.simulate(program, world_size=case.ranks, **options)
    for rank, (own_o, own_grads, *_) in enumerate(found):
        for mine, whole in zip([own_o, *own_grads], [o, *grads], strict=True):
            assert mine.dtype == case.dtype
            torch.testing.assert_close(mine.double(), case.own(whole, rank), **TOLERANCES[case.dtype])
    return [(forward, backward) for *_, forward, backward in found]


@st.composite
def layouts(draw: st.DrawFn, *, most: int = 4) -> tuple[int, seq.SequenceLayout, int]:
    """How many ranks, a layout on them, and a length that lies on them."""
    ranks = draw(st.integers(1, most))
    inner = draw(st.sampled_from([n for n in (1, 2) if ranks % n == 0]))
    kind = draw(st.sampled_from(["contiguous", "zigzag", "striped", "per_document"]))
    if kind == "per_document":
        layout = seq.SequenceLayout.per_document(draw(st.lists(st.integers(1, 13), min_size=1, max_size=4)), inner=inner)
        length = sum(layout.documents or ())
        layout = layout.extended(layout.padding(length, ranks))
        return ranks, layout, sum(layout.documents or ())
    layout = seq.SequenceLayout(kind, inner=inner)
    return ranks, layout, layout.multiple(ranks) * draw(st.integers(1, 4))


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Attention over cut sequences: layouts, masks, heads and sizes."""
    ranks, layout, length = draw(layouts())
    keys = draw(st.integers(1, 4))
    causal = draw(st.booleans())
    documents = None
    if layout.documents is None and draw(st.booleans()):
        row = st.lists(st.integers(-1, 2), min_size=length, max_size=length).map(tuple)
        documents = tuple(draw(st.lists(row, min_size=2, max_size=2) | st.lists(row, min_size=1, max_size=1)))
    return Case(
        ranks,
        layout,
        length,
        heads=(keys * draw(st.integers(1, 3)), keys),
        sizes=(8, draw(st.sampled_from([8, 4]))),
        causal=causal,
        window=draw(st.none() | st.integers(1, 9)) if causal else None,
        documents=documents,
        dtype=draw(st.sampled_from([torch.float64, torch.float32])),
    )


def pairs_of(rows: tuple[range, ...], cols: tuple[range, ...]) -> list[tuple[int, int, int, int]]:
    """All pairs: place and position of the row, place and position of the column."""
    q, k = ([*enumerate(itertools.chain(*runs))] for runs in (rows, cols))
    return [(i, a, j, b) for i, a in q for j, b in k]
