"""Law 48: the biases of routers are those of one device that sees the whole batch, however it is divided and recomputed."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import functional_ds as fds
from functional_ds import comm
from functional_ds import transforms as T
from tests.transforms.parallel.mixture import batch, params

RATE, STEPS, K = 0.03, 5, 2
ROUTERS = {"0.router": 4, "1.router": 4}


def routed(x: Tensor, router: Tensor, bias: Tensor | None) -> fds.moe.Routing:
    return fds.moe.route(x @ router, K, gate="sigmoid", bias=bias)


def loss(p: Any, given: tuple[Tensor, Tensor, Tensor], *, recompute: bool = False) -> fds.Weighted:
    inputs, targets, weights = given

    def block(x: Tensor, name: str) -> Tensor:
        routing = routed(x, p[name], fds.moe.router_bias(name))
        fds.moe.count_demand(name, routing.demand(weights))
        return x + routing.weights.sum(-1, keepdim=True).to(x.dtype) * torch.tanh(x)

    x = inputs @ p["embed"]
    for name in ROUTERS:
        x = checkpoint(block, x, name, use_reentrant=False) if recompute else block(x, name)
    return fds.Weighted(((x @ p["head"] - targets).square().sum(-1) * weights).sum(), weights.sum())


def by_hand(rows: int) -> tuple[dict[str, Tensor], list[float]]:
    """Plain PyTorch on the whole batch: SGD, and biases that follow the counts of all its rows."""
    leaves = {path: leaf.clone().requires_grad_() for path, leaf in params().items()}
    biases, violations = {name: torch.zeros(count) for name, count in ROUTERS.items()}, []
    inputs, targets, weights = batch(rows)
    for _ in range(STEPS):
        x, counts = inputs @ leaves["embed"], {}
        for name in ROUTERS:
            scores = (x @ leaves[name]).sigmoid()
            chosen = (scores + biases[name]).topk(K, -1).indices
            counts[name] = torch.bincount(chosen[weights].flatten(), minlength=4)
            x = x + scores.gather(-1, chosen).sum(-1, keepdim=True) * torch.tanh(x)
        total = ((x @ leaves["head"] - targets).square().sum(-1) * weights).sum() / weights.sum()
        grads = torch.autograd.grad(total, list(leaves.values()), allow_unused=True)
        for leaf, grad in zip(leaves.values(), grads, strict=True):
            if grad is not None:
                leaf.data -= 0.1 * grad
        for name, c in counts.items():
            biases[name] = biases[name] + RATE * (c.float().mean() - c).sign()
        violations.append(max((c.max() / c.float().mean() - 1).item() for c in counts.values()))
    return biases, violations


def trained(strategy: list[fds.Transform], rows: int, part: tuple[int, int], recompute: bool = False) -> Any:
    def update(inner: Any, step: fds.Step, state: fds.State, grads: fds.Weighted) -> Any:
        for demand in state.slots["balance"].demand.values():
            assert int(demand.sum()) == K * int(mine[2].sum())  # each choice once, whatever is computed again
        return inner(step, state, grads)

    step = fds.train_step(lambda p, b: loss(p, b, recompute=recompute), fds.sgd(0.1))
    step = fds.compose(*strategy, fds.wrap("look", update=update))(step)
    state, violations = step.init(params()), []
    mine = tuple(x.tensor_split(part[1])[part[0]] for x in batch(rows))
    for _ in range(STEPS):
        step.evaluate(state, mine)  # which counts nothing
        state, metrics = step(state, mine)
        violations.append(metrics["max_violation"].item())
    return state.slots["balance"], violations


@pytest.mark.law(48)
@settings(max_examples=settings.default.max_examples // 3)
@given(
    n=st.sampled_from((1, 2, 4)),
    stage=st.sampled_from((0, 1, 2, 3)),
    k=st.sampled_from((1, 2)),
    recompute=st.sampled_from(("no", "checkpoint", "all", "all, before")),
    first=st.booleans(),
)
def test_biases_are_the_single_devices(n: int, stage: int, k: int, recompute: str, first: bool) -> None:
    """The same bits on any number of ranks and micro-batches, with and without recomputation, wherever balance stands."""
    expected, violations = by_hand(16)

    def program() -> Any:
        here, balance = comm.world(), T.balance(RATE, ROUTERS)
        around = [T.remat("")] if recompute.startswith("all") else []
        chain = [*around, balance] if recompute.endswith("before") else [balance, *around]
        chain = [*chain, T.accumulate(k)] if first else [T.accumulate(k), *chain]
        return trained([T.zero(stage), *chain], 16, (here.rank, here.size), recompute == "checkpoint")

    for slot, found in comm.simulate(program, world_size=n):
        assert slot.demand == {}
        assert slot.counting is None
        for name, bias in expected.items():
            assert torch.equal(slot.bias[name], bias), name
        assert found == pytest.approx(violations, rel=1e-6)


@pytest.mark.law(25)
@pytest.mark.parametrize("order", ["before", "after"])
def test_a_skipped_update_moves_no_bias(order: str) -> None:
    """Wherever balance stands beside mixed precision."""
    precision, balance = T.mixed_precision("fp16", 2.0), T.balance(RATE, {"0.router": 4, "1.router": 4})
    chain = [balance, precision] if order == "before" else [precision, balance]

    def overflows(p: Any, given: Any) -> fds.Weighted:
        found = loss(p, given[:3])
        return fds.Weighted(found.sum + given[3].sum() * p["head"].sum(), found.weight)

    step = fds.compose(*chain)(fds.train_step(overflows, fds.sgd(0.1)))
    state = step.init(params())
    state, metrics = step(state, (*batch(16), torch.tensor([6e4, 6e4])))
    assert metrics["skipped"].item() == 1.0
    assert not any(bias.any() for bias in state.slots["balance"].bias.values())
    state, metrics = step(state, (*batch(16), torch.zeros(2)))
    assert metrics["skipped"].item() == 0.0
    assert any(bias.any() for bias in state.slots["balance"].bias.values())


def test_one_all_reduce_of_eight_bytes_an_expert() -> None:
    def program() -> Any:
        step = fds.compose(T.zero(0), T.balance(RATE, ROUTERS))(fds.train_step(loss, fds.sgd(0.1)))
        state, mine = step.init(params()), tuple(x.tensor_split(2)[comm.world().rank] for x in batch(16))
        state, _ = step(state, mine)
        with comm.ledger() as book:
            step(state, mine, donate=False)
        without = fds.compose(T.zero(0))(fds.train_step(loss, fds.sgd(0.1)))
        state = without.init(params())
        state, _ = without(state, mine)
        with comm.ledger() as other:
            without(state, mine)
        return [sum(row.bytes for row in each.rows) for each in (book, other)], [
            sum(row.calls for row in each.rows) for each in (book, other)
        ]

    for size, calls in comm.simulate(program, world_size=2):
        assert (size[0] - size[1], calls[0] - calls[1]) == (8 * 8, 1)


def test_the_slot_is_saved_and_loaded(tmp_path: Any) -> None:
    """With no word of it in checkpoints; on another number of ranks."""

    def save() -> Any:
        here = comm.world()
        step = fds.compose(T.zero(3), T.balance(RATE, ROUTERS))(fds.train_step(loss, fds.sgd(0.1)))
        state = step.init(params())
        state, _ = step(state, tuple(x.tensor_split(here.size)[here.rank] for x in batch(16)))
        fds.save(state, tmp_path)
        return state.slots["balance"].bias

    def load() -> Any:
        step = fds.compose(T.zero(1), T.balance(RATE, ROUTERS))(fds.train_step(loss, fds.sgd(0.1)))
        return fds.load(tmp_path, like=step.init(params())).slots["balance"].bias

    expected = comm.simulate(save, world_size=4)[0]
    for found in comm.simulate(load, world_size=2):
        assert all(torch.equal(found[name], bias) for name, bias in expected.items())


def test_what_is_refused() -> None:
    base = fds.train_step(loss, fds.sgd(0.1))
    with pytest.raises(ValueError, match="rate=0"):
        T.balance(0, ROUTERS)
    with pytest.raises(ValueError, match=r"routers='\(' is not a regular expression"):
        T.balance(0.1, "(")
    with pytest.raises(ValueError, match="'a' has 0 experts"):
        T.balance(0.1, {"a": 0})
    with pytest.raises(TypeError, match="over=3 is not a group"):
        T.balance(0.1, ROUTERS, over=3)  # type: ignore[arg-type]
    step = T.balance(0.1, {"0.router": 4})(base)
    with pytest.raises(ValueError, match=r"router='1.router' is not one of the step's balance; the nearest is '0.router'"):
        step(step.init(params()), batch(8))
    step = T.balance(0.1, {**ROUTERS, "2.router": 4})(base)
    with pytest.raises(ValueError, match=r"the loss counted no choices of '2.router'"):
        step(step.init(params()), batch(8))
    step = T.balance(0.1, "bias$")(fds.train_step(lambda p, b: p["head"].sum(), fds.sgd(0.1)))
    with pytest.raises(
        ValueError, match=r"the loss counted no choices of buffers that match 'bias\$', of which there are none"
    ):
        step(step.init(params()), batch(8))
    step = T.balance(0.1, dict.fromkeys(ROUTERS, 8))(base)
    with pytest.raises(ValueError, match=r"bias has shape \[8\]"):
        step(step.init(params()), batch(8))
