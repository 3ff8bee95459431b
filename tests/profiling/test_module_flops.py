"""Operations by module: exact for layers whose number is known, and torch's own count of the whole."""

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import functional_ds as fds
from functional_ds import comm
from functional_ds import pipelining as pp
from functional_ds import transforms as T
from functional_ds.profiling import Flops, RankProfile


class Block(nn.Module):
    """A product and what keeps its result; ``again`` recomputes it by torch's own checkpoint."""

    def __init__(self, m: int, n: int, *, again: bool = False) -> None:
        super().__init__()
        self.product, self.again = nn.Linear(m, n), again

    def forward(self, x: Tensor) -> Tensor:
        if self.again:
            return checkpoint(lambda x: self.product(x).tanh(), x, use_reentrant=False)  # type: ignore[no-any-return]
        return self.product(x).tanh()


class Model(nn.Module):
    """Two blocks, and a product of its own."""

    def __init__(self, a: int, b: int, c: int, *, again: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(a, b, again=again), Block(b, c, again=again)])
        self.last = nn.Parameter(torch.ones(c, 2))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x @ self.last


def found(step: fds.Step, params: Any, x: Any, *, warm: int = 1) -> RankProfile:
    profiled, state = fds.profile(step, skip=warm, every=1), step.init(params)
    for _ in range(warm + 1):
        state, _ = profiled(state, x)
    return profiled.own()


def count(transform: fds.Transform, a: int, b: int, c: int, rows: int, *, again: bool = False) -> Mapping[str, Flops]:
    apply, params = fds.functional(Model(a, b, c, again=again))
    step = transform(fds.train_step(lambda p, x: apply(p, x).square().mean(), fds.sgd(0.1)))
    rank = found(step, params, torch.randn(rows, a))
    assert rank.all_flops == rank.flops_below("")
    assert rank.flops_below("blocks") == rank.flops_below("blocks.0") + rank.flops_below("blocks.1")
    return rank.flops


size = st.integers(1, 9)


@settings(max_examples=settings.default.max_examples // 2)
@given(a=size, b=size, c=size, rows=st.integers(2, 9), how=st.sampled_from(("plain", "remat", "torch", "whole")))
def test_products_count_twice_their_multiplications(a: int, b: int, c: int, rows: int, how: str) -> None:
    """2mnk forward; backward twice that, once where the input needs no gradient; recomputed once more, apart."""
    products_count(a, b, c, rows, how)


def products_count(a: int, b: int, c: int, rows: int, how: str) -> None:
    transform = {"remat": T.remat("blocks"), "whole": T.remat("")}.get(how, fds.compose())
    first, second, last = (2 * rows * m * n for m, n in ((a, b), (b, c), (c, 2)))
    recomputed = how != "plain"
    assert count(transform, a, b, c, rows, again=how == "torch") == {
        "blocks.0.product": Flops(first, first, first * recomputed),
        "blocks.1.product": Flops(second, 2 * second, second * recomputed),
        "": Flops(last, 2 * last, last * (how == "whole")),
    }


def test_the_whole_is_torchs_count() -> None:
    model = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    apply, params = fds.functional(model)
    x = torch.randn(3, 5, 8)
    step = fds.train_step(lambda p, x: apply(p, x).square().mean(), fds.sgd(0.1))
    with FlopCounterMode(display=False) as counter:
        model(x).square().mean().backward()
    rank = found(step, params, x)
    extra = rank.flops_below("self_attn").total  # torch has no formula for the CPU's attention kernel
    assert rank.all_flops.total - extra == counter.get_total_flops() - sum(
        counter.get_flop_counts().get("TransformerEncoderLayer.self_attn", {}).values()
    )
    assert {path.split(".")[0] for path in rank.flops} == {"self_attn", "linear1", "linear2"}


def test_ranks_have_the_operations_of_one_device_together() -> None:
    """Whatever ZeRO shards, whatever a tensor-parallel plan cuts, and in whatever stages a pipeline runs."""
    sizes, rows = (4, 8, 6), 8
    expected = sum(count(fds.compose(), *sizes, rows).values(), Flops())

    def program(how: str) -> Any:
        here = comm.world()
        if how == "pipeline":
            model = Model(*sizes)
            parts = [fds.functional(block) for block in model.blocks]
            functions = [parts[0][0], lambda p, x: parts[1][0](p["block"], x) @ p["last"]]
            params = [parts[0][1], {"block": parts[1][1], "last": model.last.detach()}]
            stages = pp.stages(functions, params, loss=lambda y, batch: y.square().mean())
            step = T.pipeline(pp.one_f_one_b(2, 4), stages)(fds.train_step(stages, fds.sgd(0.1)))
            return found(step, params, (torch.randn(rows, sizes[0]),)).all_flops
        apply, params = fds.functional(Model(*sizes))
        base = fds.train_step(lambda p, x: apply(p, x).square().mean(), fds.sgd(0.1))
        plan = {"blocks.0.product": "colwise", "blocks.1.product": "rowwise", "last": "replicated"}
        if how == "tensor":
            mesh = comm.mesh(tp=2)
            rank = found(T.tensor_parallel(plan, mesh["tp"])(base), params, torch.randn(rows, sizes[0]))
            return attrs_without(rank.all_flops, rank.flops[""])
        rank = found(T.zero(int(how))(base), params, torch.randn(rows // here.size, sizes[0]))
        return rank.all_flops

    for how in ("1", "3", "pipeline"):
        assert sum(comm.simulate(program, how, world_size=2), Flops()) == expected, how
    products = sum((f for path, f in count(fds.compose(), *sizes, rows).items() if path), Flops())
    assert sum(comm.simulate(program, "tensor", world_size=2), Flops()) == products


def attrs_without(whole: Flops, part: Flops) -> Flops:
    return Flops(*(getattr(whole, kind) - getattr(part, kind) for kind in ("forward", "backward", "recomputed", "others")))


def test_an_optimizers_products_are_apart() -> None:
    """Muon's: they are no model's, and count for what the device did alone."""
    step = fds.train_step(lambda p, x: (x @ p["w"]).square().mean(), fds.muon(0.1, others=fds.adamw(0.1)))
    rank = found(step, {"w": torch.randn(4, 3)}, torch.randn(2, 4))
    assert rank.all_flops.model == 2 * (2 * 2 * 4 * 3)
    assert rank.all_flops.others > 0
    assert rank.all_flops.total == rank.all_flops.model + rank.all_flops.others


@pytest.mark.parametrize("dim", [2, 3])
def test_modules_that_are_called_inside_of_no_grad(dim: int) -> None:
    """A frozen part has operations forward and none backward."""

    class Frozen(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.below, self.head = nn.Linear(4, dim), nn.Linear(dim, 2)

        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                x = self.below(x)
            return self.head(x)  # type: ignore[no-any-return]

    apply, params = fds.functional(Frozen())
    rank = found(fds.train_step(lambda p, x: apply(p, x).sum(), fds.sgd(0.1)), params, torch.randn(5, 4))
    assert rank.flops == {"below": Flops(2 * 5 * 4 * dim), "head": Flops(2 * 5 * dim * 2, 2 * 5 * dim * 2)}
