"""Transforms that act in every k-th update: local SGD and lookahead as plain PyTorch has them; eager and as graphs."""

import warnings
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

import functional_ds as fds
from functional_ds import comm
from functional_ds import transforms as T
from functional_ds.step.state.slots import Role
from functional_ds.testing import Problem, holds
from tests.planting import Bug, planted

PROBLEM = Problem()


@fds.tree.record
class Slow:
    weights: list[Tensor]

    roles = {"weights": Role.AVERAGE}  # noqa: RUF012


def lookahead(k: int = 2, alpha: float = 0.5) -> fds.Transform:
    """Zhang et al. 2019, as docs/phases.md has it."""

    def init(inner: Any, step: fds.Step, params: Any) -> fds.State:
        state = inner(step, params)
        return state.put(slow=Slow([leaf.detach().clone() for leaf in fds.tree.leaves(state.params)]))

    def meet(step: fds.Step, state: fds.State) -> fds.State:
        fast, spec = fds.tree.flatten(state.params)
        slow = [torch.lerp(old, new, alpha) for old, new in zip(state.slots["slow"].weights, fast, strict=True)]
        return fds.tree.replace(state, params=fds.tree.unflatten(spec, [x.clone() for x in slow])).put(slow=Slow(slow))

    return fds.compose(fds.wrap(f"lookahead({k})", slot="slow", init=init), T.every(k, meet))


def plain_lookahead(params: Any, batches: Any) -> Any:
    leaves, spec = fds.tree.flatten(params)
    fast = [leaf.clone().requires_grad_() for leaf in leaves]
    slow, optimizer = [leaf.clone() for leaf in leaves], torch.optim.SGD(fast, 0.1)
    for i, batch in enumerate(batches):
        optimizer.zero_grad()
        PROBLEM.loss(fds.tree.unflatten(spec, fast), batch).backward()
        optimizer.step()
        if (i + 1) % 2 == 0:
            slow = [torch.lerp(old, new.detach(), 0.5) for old, new in zip(slow, fast, strict=True)]
            for leaf, value in zip(fast, slow, strict=True):
                leaf.data.copy_(value)
    return fds.tree.unflatten(spec, [leaf.detach() for leaf in fast])


ROWS = ["oracle", "stages", "replicated", "checkpoints", "skipped steps", "jit", "pipelines"]


def test_lookahead_holds() -> None:
    holds(lookahead, oracle=plain_lookahead, optimizer=partial(fds.sgd, 0.1), only=ROWS).check(refusals=False)


def local_sgd(jits: bool, stage: int) -> tuple[Any, list[str], list[int]]:
    mesh = comm.mesh(outer=2, inner=comm.world().size // 2)

    def mean(step: fds.Step, state: fds.State) -> fds.State:
        return fds.tree.replace(state, params=comm.all_reduce(state.params, mesh["outer"], op="avg"))

    step = fds.compose(T.every(3, mean), T.zero(stage, mesh["inner"]))(fds.train_step(PROBLEM.loss, fds.sgd(0.1)))
    step = fds.jit(step) if jits else step
    state, sent = step.init(PROBLEM.params), []
    for batch in PROBLEM.batches:
        with comm.ledger() as book:
            state, _ = step(state, batch.chunk(2)[mesh["outer"].rank].chunk(mesh["inner"].size)[mesh["inner"].rank])
        sent.append(sum(row.calls for row in book.rows if row.group == "outer"))
    return step.params(state), getattr(step, "reasons", []), sent


def plain_local_sgd() -> Any:
    models = [fds.tree.flatten(PROBLEM.params)[0] for _ in range(2)]
    spec = fds.tree.structure(PROBLEM.params)
    for i, batch in enumerate(PROBLEM.batches):
        for rank in range(2):
            leaves = [leaf.detach().requires_grad_() for leaf in models[rank]]
            grads = torch.autograd.grad(PROBLEM.loss(fds.tree.unflatten(spec, leaves), batch.chunk(2)[rank]), leaves)
            models[rank] = [leaf.detach() - 0.1 * grad for leaf, grad in zip(leaves, grads, strict=True)]
        if (i + 1) % 3 == 0:
            models = [[(a + b) / 2 for a, b in zip(*models, strict=True)]] * 2
    return fds.tree.unflatten(spec, models[0])


@pytest.mark.parametrize("jits", [False, True])
@pytest.mark.parametrize("stage", [0, 3])
def test_local_sgd_is_plain_torch(stage: int, jits: bool) -> None:
    """Bits of the eager step as a graph, traced once with the mean and once without; nothing else is sent in other steps."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = comm.simulate(local_sgd, jits, stage, world_size=4)
    for params, reasons, sent in found:
        torch.testing.assert_close(params, plain_local_sgd())
        assert not reasons
        assert sent[2] == sent[5] == 1
        assert sent[:2] == sent[3:5] == [0, 0]


def test_a_step_in_halves_has_the_same_rounds() -> None:
    whole = fds.train_step(PROBLEM.loss, fds.sgd(0.1))
    step = fds.compose(lookahead(2), T.every(3, T.clip(0.05)))(whole)
    one, other = step.init(PROBLEM.params), step.init(PROBLEM.params)
    for batch in PROBLEM.batches:
        one, metrics = step(one, batch)
        other, halves = step.finish(other, step.open(other, batch).backward())
        torch.testing.assert_close(halves, metrics)
    torch.testing.assert_close(step.params(other), step.params(one), rtol=0, atol=0)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: T.every(0, T.clip(1.0)), "k=0 must be a positive integer"),
        (lambda: T.every(2, 3), "3 is neither a transform nor a function"),  # type: ignore[arg-type]
        (lambda: T.every(2, T.zero(1)), r"every\(2, zero\(1, world\)\): it wraps .*view"),
        (lambda: T.every(2, T.every(2, T.clip(1.0))), "it has a period already"),
    ],
)
def test_what_has_no_period_is_refused(make: Any, words: str) -> None:
    with pytest.raises((TypeError, ValueError), match=words):
        make()(fds.train_step(PROBLEM.loss, fds.sgd(0.1)))


BUGS = [
    Bug("rounds begin at zero", "transforms.rounds:every.due", "int(state.step) + 1", "int(state.step)"),
    Bug("it acts in every step", "step.phases:Layer.acting", "p not in OF_A_STEP", "True"),
]


@pytest.mark.parametrize("bug", BUGS, ids=[bug.name for bug in BUGS])
def test_a_planted_bug_is_found(bug: Bug) -> None:
    with planted(bug):
        assert (
            holds(lookahead, oracle=plain_lookahead, optimizer=partial(fds.sgd, 0.1), only=["oracle"])["oracle"].outcome
            == "wrong"
        )
