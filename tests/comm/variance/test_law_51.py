"""Law 51: a program that declares what its values are, and passes, has the gradients of the dense one."""

from collections.abc import Callable, Sequence
from typing import Any

import attrs
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from functional_ds import comm
from functional_ds.comm.table.collective import Collective, Options, Variance
from functional_ds.comm.table.exchanges import TABLE
from functional_ds.comm.table.permutation import Permutation
from functional_ds.testing import seeds

WIDTH, TOKENS = 6, 6

OPTIONS: dict[str, Options] = {
    "all_reduce": {"op": "sum"},
    "reduce": {"dst": 0, "op": "sum"},
    "broadcast": {"src": 0},
    "all_gather": {"dim": 0, "tiled": True},
    "reduce_scatter": {"dim": 0, "tiled": True, "op": "sum"},
    "gather": {"dst": 0, "dim": 0},
    "scatter": {"src": 0, "dim": 0},
    "all_to_all": {"split_dim": 0, "concat_dim": 1},
    "all_to_all_rows": {"dim": 0, "input_splits": (1, 1), "output_splits": (1, 1)},
    "permute": {"perm": Permutation([(0, 1)])},
    "transfer": {"src": 0, "dst": 1, "tag": 0},
    "reduce_from": {"op": "sum"},
    "scatter_to": {"dim": 0},
    "gather_from": {"dim": 0, "tiled": True},
}


# -- the table -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", Variance)
def test_the_dual_of_the_dual_is_the_kind(kind: Variance) -> None:
    assert kind.dual.dual is kind


@pytest.mark.law(51)
@pytest.mark.parametrize("row", TABLE, ids=lambda row: row.name)
def test_transposes_go_between_duals(row: Collective) -> None:
    """From a to b, the transpose goes from b's dual to a's dual."""
    adjoint = row.adjoint(OPTIONS.get(row.name, {}))
    if adjoint is None:
        assert row.name == "barrier"
        return
    assert adjoint.collective.takes is row.gives.dual
    assert adjoint.collective.gives is row.takes.dual


# -- programs ----------------------------------------------------------------------------------------------------------


@attrs.define
class Collectives:
    """The collectives of a program, the ``missing``-th of which is replaced by something of the same shape."""

    missing: int = -1
    count: int = 0

    def _call(self, there: Callable[[], Tensor], instead: Callable[[], Tensor]) -> Tensor:
        self.count += 1
        return instead() if self.count - 1 == self.missing else there()

    def copy_to(self, x: Tensor) -> Tensor:
        return self._call(lambda: comm.copy_to(x), lambda: x)

    def reduce_from(self, x: Tensor) -> Tensor:
        return self._call(lambda: comm.reduce_from(x), lambda: x)

    def scatter_to(self, x: Tensor) -> Tensor:
        return self._call(lambda: comm.scatter_to(x), lambda: own(x))

    def gather_from(self, x: Tensor) -> Tensor:
        return self._call(lambda: comm.gather_from(x), lambda: x.repeat(comm.world().size, 1))

    def all_gather(self, x: Tensor) -> Tensor:
        return self._call(lambda: comm.all_gather(x), lambda: x.repeat(comm.world().size, 1))

    def reduce_scatter(self, x: Tensor) -> Tensor:
        return self._call(lambda: comm.reduce_scatter(x), lambda: own(x))


def own(x: Tensor, dim: int = 0) -> Tensor:
    """This rank's slice."""
    return x.chunk(comm.world().size, dim)[comm.world().rank]


def weights(seed: int) -> list[Tensor]:
    """A square matrix for each layer and a pair that may be cut, and the input."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(WIDTH, WIDTH, generator=generator, dtype=torch.float64) for _ in range(3)]


LAYERS = ("dense", "columns_and_rows", "tokens", "sequence_parallel", "terms")


def program(layers: Sequence[str], seed: int, missing: int = -1) -> tuple[int, dict[str, Tensor]]:
    """How many collectives there are, and the loss and gradients, of slices those of the slice."""
    c, leaves = Collectives(missing), {}

    def leaf(name: str, value: Tensor) -> Tensor:
        leaves[name] = value.clone().requires_grad_()
        return leaves[name]

    h = comm.invariant(leaf("x", weights(seed)[2]))
    for i, layer in enumerate(layers):
        whole, columns, _ = weights(seed + i + 1)
        if layer in ("dense", "tokens"):
            w = comm.invariant(leaf(f"{i} whole", whole))
        else:
            a = comm.varying(leaf(f"{i} columns", own(columns, 1)))
            b = comm.varying(leaf(f"{i} rows", own(whole)))
        if layer == "dense":
            h = torch.tanh(h @ w)
        elif layer == "columns_and_rows":
            h = c.reduce_from(comm.partial(torch.tanh(c.copy_to(h) @ a) @ b))
        elif layer == "tokens":
            h = c.gather_from(torch.tanh(c.scatter_to(h) @ c.copy_to(w)))
        elif layer == "sequence_parallel":
            inside = comm.replicated(c.all_gather(c.scatter_to(h)))
            h = c.gather_from(c.reduce_scatter(comm.partial(torch.tanh(inside @ a) @ b)))
        else:
            term = comm.partial(c.copy_to(h) @ a @ b)
            h = c.reduce_from(term / 2 - term.T.flip(0))
    loss = comm.invariant(h.square().mean() + h.sum())
    grads = torch.autograd.grad(loss, list(leaves.values()))
    return c.count, {"loss": loss.detach(), **dict(zip(leaves, grads, strict=True))}


def is_dense(found: dict[str, Tensor], dense: dict[str, Tensor], rank: int, n: int) -> bool:
    """Whether they are the dense program's, or slices of them."""

    def expected(name: str) -> Tensor:
        cut = {"columns": 1, "rows": 0}.get(name.partition(" ")[2])
        return dense[name] if cut is None else dense[name].chunk(n, cut)[rank]

    return all(torch.allclose(grad, expected(name), atol=1e-9) for name, grad in found.items())


def passes(n: int, layers: Sequence[str], seed: int, missing: int = -1) -> bool | str:
    """Whether the results are the dense program's; what is wrong, where that is named."""
    ((_, dense),) = comm.simulate(program, layers, seed, world_size=1)
    try:
        found = comm.simulate(program, layers, seed, missing, world_size=n, seed=seed, variance=True)
    except comm.errors.VarianceError as error:
        return str(error)
    return all(is_dense(grads, dense, rank, n) for rank, (_, grads) in enumerate(found))


@pytest.mark.law(51)
@settings(max_examples=settings.default.max_examples // 2)
@given(st.lists(st.sampled_from(LAYERS), min_size=1, max_size=3), st.sampled_from((2, 3)), seeds())
def test_programs_that_pass_have_the_dense_gradients(layers: list[str], n: int, seed: int) -> None:
    assert passes(n, layers, seed) is True


@pytest.mark.law(51)
@settings(max_examples=settings.default.max_examples)
@given(st.lists(st.sampled_from(LAYERS[1:]), min_size=1, max_size=2), st.sampled_from((2, 3)), seeds(), st.data())
def test_a_collective_that_is_missing_is_named(layers: list[str], n: int, seed: int, data: Any) -> None:
    """The error has this file and a line, or nothing was missing."""
    ((count, _),) = comm.simulate(program, layers, seed, world_size=1)
    missing = data.draw(st.integers(0, count - 1))
    said = passes(n, layers, seed, missing)
    assert said is True or (isinstance(said, str) and "test_law_51.py:" in said), (missing, said)
