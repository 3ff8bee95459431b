"""Law 40 of the functions: ``row ∘ column`` is the dense layer, in value and gradients, at the papers' volumes."""

from typing import Any

import attrs
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import functional_ds as fds
from functional_ds import comm

FEW = settings.default.max_examples


@attrs.frozen
class Block:
    """A block of two linears on whole tensors, in small integers, so that sums are exact."""

    n: int
    batch: int = 2
    positions: int = 1  # of the sequence, for each rank and chunk
    inputs: int = 3
    hidden: int = 2  # features a rank
    heads: int = 1  # weights for one input
    sequence: bool = False
    regather: bool = False
    chunks: int = 1
    biased: bool = True
    ends: bool = False  # columns gather, and rows split, so that each layer stands alone
    again: bool = False  # under activation checkpointing, which lets saved tensors be read once

    @property
    def length(self) -> int:
        """The whole sequence."""
        return self.positions * self.n * self.chunks

    def tensors(self) -> dict[str, Tensor]:
        """The whole input, weights and biases."""
        generator = torch.Generator().manual_seed(3)

        def leaf(*shape: int) -> Tensor:
            return torch.randint(-3, 4, shape, generator=generator).double().requires_grad_()

        wide = self.hidden * self.n
        found = {"x": leaf(self.batch, self.length, self.inputs), "down": leaf(4, wide)}
        found |= {f"up{i}": leaf(wide, self.inputs) for i in range(self.heads)}
        if self.biased:
            found |= {f"bias{i}": leaf(wide) for i in range(self.heads)} | {"bias": leaf(4)}
        return found

    def dense(self) -> tuple[Tensor, dict[str, Tensor]]:
        """The value and the gradients, on one device."""
        t = self.tensors()
        hidden = [F.linear(t["x"], t[f"up{i}"], t.get(f"bias{i}")) for i in range(self.heads)]
        y = F.linear(self.joined(hidden), t["down"], t.get("bias"))
        return y.detach(), self.gradients(y, t)

    @staticmethod
    def joined(hidden: Any) -> Tensor:
        """What stands between the layers acts elementwise."""
        total = hidden[0] * hidden[0]
        for each in hidden[1:]:
            total = total + 2 * each
        return total  # type: ignore[no-any-return]

    def gradients(self, y: Tensor, t: dict[str, Tensor], start: int = 0) -> dict[str, Tensor]:
        """Of a loss that weighs every element of the whole output otherwise."""
        weights = torch.arange(self.batch * self.length * 4).remainder(5).view(self.batch, self.length, 4).double()
        part = weights.narrow(1, start, y.shape[1])
        return dict(zip(t, torch.autograd.grad((y * part).sum(), list(t.values())), strict=True))

    def parallel(self) -> tuple[Tensor, dict[str, Tensor], comm.Ledger]:
        """This rank's part of the value and the gradients, put together."""
        here, t = comm.world(), self.tensors()
        start = here.rank * (self.length // self.n) if self.sequence else 0
        cut = {"down": (1, t["down"]), **{name: (0, leaf) for name, leaf in t.items() if name[:2] == "up" or name[4:]}}
        own = {name: leaf.detach() for name, leaf in t.items()}
        own |= {name: leaf.detach().chunk(self.n, dim)[here.rank] for name, (dim, leaf) in cut.items()}
        own["x"] = own["x"].narrow(1, start, self.length // self.n) if self.sequence else own["x"]
        own = {name: leaf.clone().requires_grad_() for name, leaf in own.items()}
        more: dict[str, Any] = {"sequence_dim": 1, "chunks": self.chunks} if self.sequence else {}
        with comm.ledger() as sent:
            ups, biases = [own[f"up{i}"] for i in range(self.heads)], [own.get(f"bias{i}") for i in range(self.heads)]
            again = {"regather": True} if self.regather else {}

            def forward(x: Tensor) -> Any:
                hidden = fds.tp.column(x, ups, bias=biases, group=here, gather_output=self.ends, **more, **again)
                joined = self.joined(hidden)
                return fds.tp.row(joined, own["down"], bias=own.get("bias"), group=here, split_input=self.ends, **more)

            y = checkpoint(forward, own["x"], use_reentrant=False) if self.again else forward(own["x"])
            grads = self.gradients(y, own, start)
        for name, (dim, _) in cut.items():
            grads[name] = comm.all_gather(grads[name], here, dim=dim)
        if self.sequence:
            y, grads["x"] = comm.all_gather(y.detach(), here, dim=1), comm.all_gather(grads["x"], here, dim=1)
            grads |= {"bias": comm.all_reduce(grads["bias"], here)} if self.biased else {}
        return y.detach(), grads, sent


def agrees(block: Block) -> None:
    """Law 40."""
    value, grads = block.dense()
    for y, found, _ in comm.simulate(block.parallel, world_size=block.n):
        assert torch.equal(y, value)
        assert found.keys() == grads.keys()
        for name, grad in grads.items():
            assert torch.equal(found[name], grad), name


def blocks(draw: Any) -> Block:
    sequence = draw(st.booleans())
    return Block(
        n=draw(st.integers(1, 4)),
        batch=draw(st.integers(1, 2)),
        positions=draw(st.integers(1, 3)),
        hidden=draw(st.integers(1, 3)),
        heads=draw(st.integers(1, 3)),
        sequence=sequence,
        regather=sequence and draw(st.booleans()),
        chunks=draw(st.integers(1, 3)) if sequence else 1,
        biased=draw(st.booleans()),
        ends=draw(st.booleans()),
        again=draw(st.booleans()),
    )


@pytest.mark.law(40)
@settings(max_examples=2 * FEW)
@given(block=st.composite(blocks)())
def test_row_of_column_is_dense(block: Block) -> None:
    """``row(column(x, A), B)`` is the dense block: bitwise on integers, in any number of chunks, recomputed or not."""
    agrees(block)


@pytest.mark.law(40)
@pytest.mark.parametrize("n", [2, 4])
@pytest.mark.parametrize(("chunks", "regather"), [(1, False), (2, False), (1, True), (2, True)])
def test_what_a_block_sends(n: int, chunks: int, regather: bool) -> None:
    """One all-reduce forward and one backward; all-gathers and reduce-scatters send the same elements."""
    block = Block(n, positions=2, heads=3, sequence=False, biased=False)
    x, y = 2 * block.length * 3, 2 * block.length * 4
    for _, _, sent in comm.simulate(block.parallel, world_size=n):
        assert {(row.collective, row.calls, row.elements) for row in sent.rows} == {
            ("all_reduce", 2, 2 * (x + y) * (n - 1) // n)
        }
    block = attrs.evolve(block, sequence=True, chunks=chunks, regather=regather)
    x, y = 2 * block.length * 3, 2 * block.length * 4
    for _, _, sent in comm.simulate(block.parallel, world_size=n):
        gathers = 2 * chunks + regather * chunks
        assert {(row.collective, row.calls, row.elements) for row in sent.rows} == {
            ("all_gather", gathers, (x + y + regather * x) * (n - 1) // n),
            ("reduce_scatter", 2 * chunks, (x + y) * (n - 1) // n),
        }


def test_second_derivatives_are_the_dense_ones() -> None:
    """The gradient of a gradient's square, through each way."""

    def twice(block: Block, run: Any) -> Tensor:
        t = block.tensors()
        here = comm.world()
        own = t["x"].detach().chunk(here.size, 1)[here.rank] if block.sequence and run is not F.linear else t["x"].detach()
        own = own.clone().requires_grad_()
        up = t["up0"].detach().clone().requires_grad_()
        hidden = run(own, up)
        grad = torch.autograd.grad((hidden**3).sum(), own, create_graph=True)[0]
        (found,) = torch.autograd.grad((grad**2).sum(), own)
        whole = block.sequence and run is not F.linear
        return comm.all_gather(found, here, dim=1) if whole else found

    for block in (Block(2, biased=False), Block(2, sequence=True, chunks=2, regather=True, biased=False)):

        def program(block: Block = block) -> Tensor:
            here = comm.world()

            def run(x: Tensor, up: Tensor) -> Tensor:
                cut = up.chunk(here.size)[here.rank]
                more: dict[str, Any] = {"sequence_dim": 1, "chunks": 2, "regather": True} if block.sequence else {}
                return fds.tp.column(x, cut, group=here, **more)

            return twice(block, run)

        expected = twice(block, F.linear)
        for found in comm.simulate(program, world_size=2):
            assert torch.equal(found, expected)


def test_bad_input_is_refused() -> None:
    """By name, with the sizes."""
    x, w = torch.ones(2, 4, 6), torch.ones(3, 6)
    here = comm.world()
    for call, words in (
        (lambda: fds.tp.column(x, w), r"tp.column: group=None, and no T.tensor_parallel is in the running step"),
        (lambda: fds.tp.row(x, w, group=3), "tp.row: group=3 is not a group"),  # type: ignore[arg-type]
        (
            lambda: fds.tp.column(x, w.t(), group=here),
            r"x of shape \[2, 4, 6\] does not fit this rank's weight of shape \[6, 3\]",
        ),
        (lambda: fds.tp.column(x, w, group=here, chunks=2), "chunks=2 needs sequence_dim="),
        (lambda: fds.tp.column(x, w, group=here, regather=True), "regather=True needs sequence_dim="),
        (lambda: fds.tp.column(x, w, group=here, sequence_dim=2), "sequence_dim=2 is not a dim of x"),
        (lambda: fds.tp.column(x, w, group=here, sequence_dim=1, chunks=3), r"does not divide along dim 1 into 3 equal parts"),
        (lambda: fds.tp.row(x, w, group=here, sequence_dim=1, chunks=0), "chunks=0 must be at least 1"),
        (lambda: fds.tp.column(x, [w, w], bias=[w[:, 0]], group=here), "bias: 1 for 2 weights"),
    ):
        with pytest.raises((ValueError, TypeError), match=words):
            call()
