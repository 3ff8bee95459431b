"""Optimizers from rules that ask for sums over their whole leaf: plain PyTorch's, in every stage."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

import functional_ds as fds
from functional_ds import comm
from functional_ds import transforms as T
from functional_ds.testing import Problem, holds
from tests.planting import Bug, planted

PROBLEM = Problem()


def rule(grad: Tensor, momentum: Tensor, step: Tensor, param: Tensor) -> Any:
    """LARS (You et al. 2017)."""
    w, g = yield param.square().sum(), grad.square().sum()
    local = 0.02 * w.sqrt() / (g.sqrt() + 1e-3 * w.sqrt() + 1e-12)
    momentum = 0.9 * momentum + local * (grad + 1e-3 * param)
    return momentum, momentum


def lars() -> fds.PerParameter:
    return fds.per_leaf(torch.zeros_like, rule, lr=1.0)


def plain_lars(params: Any, batches: Any) -> Any:
    leaves, spec = fds.tree.flatten(params)
    momenta = [torch.zeros_like(leaf) for leaf in leaves]
    for batch in batches:
        leaves = [leaf.detach().requires_grad_() for leaf in leaves]
        grads = torch.autograd.grad(PROBLEM.loss(fds.tree.unflatten(spec, leaves), batch), leaves)
        for i, (leaf, grad) in enumerate(zip(leaves, grads, strict=True)):
            w, g = leaf.detach().norm(), grad.norm()
            momenta[i] = 0.9 * momenta[i] + 0.02 * w / (g + 1e-3 * w + 1e-12) * (grad + 1e-3 * leaf.detach())
            leaves[i] = leaf.detach() - momenta[i]
    return fds.tree.unflatten(spec, leaves)


ROWS = ["oracle", "stages", "replicated", "checkpoints", "skipped steps", "unused leaves", "jit", "pipelines"]


def test_lars_holds() -> None:
    holds(lars, oracle=plain_lars, only=ROWS).check(refusals=False)


def test_one_collective_a_turn() -> None:
    def program(optimizer: Any) -> tuple[int, int]:
        step = T.zero(2)(fds.train_step(PROBLEM.loss, optimizer))
        state = step.init(PROBLEM.params)
        with comm.ledger() as book:
            step(state, PROBLEM.batches[0])
        return book.calls, book.bytes

    plain = comm.simulate(program, fds.sgd(0.1), world_size=2)
    assert comm.simulate(program, lars(), world_size=2) == [(calls + 1, sent + 2 * 5 * 4) for calls, sent in plain]


def test_complex_leaves_and_two_turns() -> None:
    def twice(grad: Tensor, state: Any, step: Tensor) -> Any:
        square = yield grad.square().sum()
        total = yield (grad / square.sqrt()).sum()
        return grad / square.sqrt() + 0.1 * total, state

    def program(*strategy: fds.Transform) -> Any:
        def loss(params: Any, x: Tensor) -> Tensor:
            found: Tensor = (params["c"] * x).real.sum() + (params["w"] * x.real).sum()
            return found

        step = fds.compose(*strategy)(fds.train_step(loss, fds.per_leaf(lambda part: (), twice, lr=0.5)))
        state = step.init({"c": torch.ones(5, dtype=torch.complex64), "w": torch.ones(5)})
        state, _ = step(state, torch.arange(1, 6) * (1 + 2j))
        return step.params(state)

    alone, x = program(), torch.arange(1.0, 6)
    torch.testing.assert_close(alone["w"], 1 - 0.5 * (x / x.norm() + 0.1 * (x / x.norm()).sum()))
    for stage in range(4):
        for found in comm.simulate(partial(program, T.zero(stage)), world_size=2):
            torch.testing.assert_close(found, alone)


def uneven(grad: Tensor, state: Any, step: Tensor) -> Any:
    if grad.numel() > 7:
        yield grad.sum()
    return grad, state


def tuple_of(part: Tensor) -> tuple[()]:
    return ()


def told(yielded: Any) -> Any:
    """A rule that asks for the sum of what is no number."""

    def rule(grad: Tensor, state: Any, step: Tensor) -> Any:
        yield yielded
        return grad, state

    return rule


def squares(grad: Tensor, state: Any, step: Tensor) -> Any:
    """A rule that asks for sums of another shape for each leaf."""
    yield grad.square()
    return grad, state


def pairs(grad: Tensor, state: Any, step: Tensor) -> Any:
    """A rule that asks for two sums as one tensor, and returns a list and another container of its state."""
    count, total = yield torch.stack([(grad == grad).sum(), grad.square().sum()])
    return [grad / (total / count).sqrt(), None]


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_sums_may_be_one_tensor(stage: int) -> None:
    def second_loss() -> float:
        step = T.zero(stage)(fds.train_step(PROBLEM.loss, fds.per_leaf(tuple_of, pairs, lr=0.1)))
        state, _ = step(step.init(PROBLEM.params), PROBLEM.rows(0))
        return float(step(state, PROBLEM.rows(1))[1]["loss"])

    [alone] = comm.simulate(second_loss, world_size=1)
    assert comm.simulate(second_loss, world_size=2) == pytest.approx([alone, alone], rel=1e-5)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: fds.per_leaf(torch.zeros_like, uneven, lr=0.1), "uneven: it must yield equally often"),
        (lambda: fds.per_leaf(lambda part: torch.zeros(3), uneven, lr=0.1), "init must make tensors of the shape of the part"),
        (
            lambda: fds.per_leaf(lambda part: (), lambda grad, state, step: (grad.sum(), state), lr=0.1),
            r"for '0.b' of shape \[7\] it returned",
        ),
        (lambda: fds.per_leaf(tuple_of, told(None), lr=0.1), "rule: for '0.b' it gives None, and not a sum"),
        (lambda: fds.per_leaf(tuple_of, told("x"), lr=0.1), "rule: for '0.b' it gives 'x', and not a sum"),
        (lambda: fds.per_leaf(tuple_of, squares, lr=0.1), r"squares: for '0.w' it gives a tensor of shape \[35\]"),
        (lambda: fds.per_leaf(tuple_of, told(()), lr=0.1), r"rule: for '0.b' it gives \(\), and not a sum"),
        (lambda: fds.per_leaf(tuple_of, lambda grad, state, step: None, lr=0.1), "<lambda>: for '0.b' it returned None"),
        (
            lambda: fds.per_leaf(tuple_of, lambda grad, state, step: (0.5, state), lr=0.1),
            r"for '0.b' it returned \(0.5, \(\)\)",
        ),
        (lambda: fds.per_leaf(tuple_of, lambda grad, state, step: (grad, "x"), lr=0.1), "for '0.b' it returned the state 'x'"),
        (lambda: fds.per_matrix(tuple_of, told(0), lr=0.1, others=fds.sgd(0.1)), "rule: for '0.w' it returned <generator"),
        (lambda: fds.per_leaf(3, uneven, lr=0.1), "init=3 is not callable"),
        (lambda: fds.per_leaf(torch.zeros_like, uneven, lr=-1.0), "lr=-1.0 must be finite and not negative"),
    ],
)
def test_wrong_rules_are_refused(make: Any, words: str) -> None:
    def run() -> None:
        step = fds.train_step(PROBLEM.loss, make())
        step(step.init(PROBLEM.params), PROBLEM.batches[0])

    with pytest.raises((TypeError, ValueError), match=words):
        run()


@pytest.mark.parametrize("stage", [None, 3])
@pytest.mark.parametrize(
    ("function", "words"),
    [
        (lambda x: None, "<lambda>: for '0.[bw]' it gives None, and not a sum"),
        (lambda x: 0.5, "for '0.[bw]' it gives 0.5"),
        (torch.square, r"square: for '0.[bw]' it gives a tensor of shape \[[0-9]+\], torch.float32"),
        (lambda x: (x > 0).any(), "<lambda>: it gives booleans, and not a sum over the elements"),
        (lambda x: x.sum() if x.numel() else 0.0, "<lambda>: for 'an empty part' it gives 0.0, and not a sum"),
        (torch.mean, "mean: of an empty part it gives nan, and a sum of no elements is 0"),
    ],
)
def test_per_leaf_refuses_what_is_no_sum(function: Any, words: str, stage: int | None) -> None:
    def update(inner: Any, step: fds.Step, state: fds.State, grads: fds.Weighted) -> Any:
        assert step.per_leaf(state, function, grads.sum)
        return inner(step, state, grads)

    def run() -> None:
        strategy = () if stage is None else (T.zero(stage),)
        step = fds.compose(*strategy, fds.wrap("sums", update=update))(fds.train_step(PROBLEM.loss, fds.sgd(0.1)))
        step(step.init(PROBLEM.params), PROBLEM.rows(0))

    with pytest.raises((TypeError, ValueError), match=words):
        comm.simulate(run, world_size=1 if stage is None else 2)


BUG = Bug(
    "rules are told of their own parts",
    "sharding.leaf_parts:LeafParts._totals",
    "self.leaf_map.total(torch.stack(rows))",
    "torch.stack(rows)",
)


def test_a_planted_bug_is_found() -> None:
    with planted(BUG):
        assert holds(lars, only=["stages"])["stages"].outcome == "wrong"
