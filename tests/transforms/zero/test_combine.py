"""Whole leaves' gradients combined by a function, with memory, in every stage: plain PyTorch's, and the same on processes."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import functional_ds as fds
from functional_ds import comm
from functional_ds import transforms as T
from functional_ds.testing import Problem, assert_same
from tests.comm.test_composed import Halves, butterfly
from tests.optim.test_per_leaf import lars
from tests.planting import Bug, planted

PROBLEM = Problem()
RANK = 1


def thin(leaf: Tensor) -> Tensor:
    return torch.randn(leaf.shape[-1], RANK, generator=torch.Generator().manual_seed(0))


def start(leaves: Any, group: comm.Group) -> Any:
    return [{"owed": torch.zeros_like(leaf), "right": thin(leaf)} if leaf.dim() == 2 else None for leaf in leaves]


def power_sgd(grads: Any, memory: Any, group: comm.Group) -> Any:
    """Vogels et al. 2019, as docs/phases.md has it."""

    def compressed(grad: Tensor, kept: Any) -> Any:
        if kept is None:
            return comm.all_reduce(grad, group, op="avg"), None
        grad = grad + kept["owed"]
        left = torch.linalg.qr(comm.all_reduce(grad @ kept["right"], group, op="avg")).Q
        right = comm.all_reduce(grad.T @ left, group, op="avg")
        return left @ right.T, {"owed": grad - left @ right.T, "right": right}

    found = [compressed(grad, kept) for grad, kept in zip(grads, memory, strict=True)]
    return [grad for grad, _ in found], [kept for _, kept in found]


def plain(n: int, limit: float | None, steps: int = 3) -> Any:
    """Each worker's gradient, thin factors and error feedback, plain SGD."""
    leaves, spec = fds.tree.flatten(PROBLEM.params)
    owed, right = (
        [[torch.zeros_like(x) for x in leaves] for _ in range(n)],
        {i: thin(x) for i, x in enumerate(leaves) if x.dim() == 2},
    )
    for batch in PROBLEM.batches[:steps]:
        leaves = [leaf.detach().requires_grad_() for leaf in leaves]
        own = [torch.autograd.grad(PROBLEM.loss(fds.tree.unflatten(spec, leaves), part), leaves) for part in batch.chunk(n)]
        means = []
        for i in range(len(leaves)):
            if i not in right:
                means.append(sum(grads[i] for grads in own) / n)
                continue
            full = [grads[i] + missing[i] for grads, missing in zip(own, owed, strict=True)]
            left = torch.linalg.qr(sum(x @ right[i] for x in full) / n).Q
            right[i] = sum(x.T @ left for x in full) / n
            means.append(left @ right[i].T)
            for missing, x in zip(owed, full, strict=True):
                missing[i] = x - means[i]
        norm = torch.stack([mean.norm() for mean in means]).norm()
        scale = 1.0 if limit is None else (limit / (norm + 1e-6)).clamp(max=1.0)
        leaves = [leaf.detach() - 0.1 * scale * mean for leaf, mean in zip(leaves, means, strict=True)]
    return fds.tree.unflatten(spec, leaves)


def program(stage: int, k: int = 1, limit: float | None = None, policy: str | None = None, steps: int = 3) -> Any:
    parts = [T.mixed_precision(policy, 2.0**8)] if policy else []
    parts += [T.zero(stage, aggregate=T.Combine(power_sgd, init=start))]
    parts += [T.accumulate(k)] * (k > 1) + ([] if limit is None else [T.clip(limit)])
    step = fds.compose(*parts)(fds.train_step(PROBLEM.loss, fds.sgd(0.1)))
    state, here = step.init(PROBLEM.params), comm.world()
    for batch in PROBLEM.batches[:steps]:
        state, _ = step(state, batch.chunk(here.size)[here.rank])
    return step.params(state)


@pytest.mark.law(19)
@given(
    stage=st.sampled_from((0, 1, 2, 3)),
    n=st.sampled_from((1, 2, 3)),
    k=st.sampled_from((1, 2)),
    limit=st.sampled_from((None, 0.05)),
)
def test_every_stage_is_plain_torch(stage: int, n: int, k: int, limit: float | None) -> None:
    """Of the micro-batches together, in stages 2 and 3, too; clipped by the norm of what was combined."""
    for found in comm.simulate(program, stage, k, limit, world_size=n):
        torch.testing.assert_close(found, plain(n, limit))


@pytest.mark.parametrize("stage", [1, 3])
def test_in_half_precision_it_is_near(stage: int) -> None:
    for found in comm.simulate(program, stage, 2, None, "fp16", world_size=2):
        torch.testing.assert_close(found, plain(2, None), rtol=0.05, atol=0.02)


def test_a_step_without_finite_gradients_keeps_the_memory() -> None:
    def overflow() -> Any:
        parts = T.mixed_precision("f32", 2.0), T.zero(2, aggregate=T.Combine(power_sgd, init=start))
        step, here = fds.compose(*parts)(fds.train_step(PROBLEM.loss, fds.sgd(0.1))), comm.world()
        state, _ = step(step.init(PROBLEM.params), PROBLEM.batches[0].chunk(2)[here.rank])
        batch = torch.full((12, 5), torch.inf if here.rank else 1.0)
        after, metrics = step(state, batch, donate=False)
        assert metrics["skipped"] == 1
        return (state.slots["combine"], step.params(state)), (after.slots["combine"], step.params(after))

    for before, after in comm.simulate(overflow, world_size=2):
        assert_same(after, before)


def test_it_is_saved_and_resumed(tmp_path: Any) -> None:
    def half(stage: int, save: bool) -> Any:
        step = T.zero(stage, aggregate=T.Combine(power_sgd, init=start))(fds.train_step(PROBLEM.loss, fds.sgd(0.1)))
        state, here = step.init(PROBLEM.params), comm.world()
        state = state if save else fds.load(tmp_path, like=state)
        for batch in PROBLEM.batches[:2] if save else PROBLEM.batches[2:3]:
            state, _ = step(state, batch.chunk(here.size)[here.rank])
        if save:
            fds.save(state, tmp_path)
        return step.params(state)

    comm.simulate(half, 3, True, world_size=2)
    for found in comm.simulate(half, 1, False, world_size=2):
        torch.testing.assert_close(found, plain(2, None))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: T.Combine(3), "reduce=3 is not a function"),  # type: ignore[arg-type]
        (lambda: T.zero(1, aggregate=T.Combine(power_sgd), gradient_predivide_factor=2.0), "its function sums the gradients"),
        (lambda: T.zero(1, aggregate=T.Combine(power_sgd)).cost_report(PROBLEM.params, n=2), "is up to its function"),
        (lambda: T.zero(1, aggregate=T.Combine(power_sgd), reduce_scatter=lambda x, group, tiled: x), "would change nothing"),
    ],
)
def test_what_it_cannot_be_is_refused(make: Any, words: str) -> None:
    with pytest.raises((TypeError, ValueError), match=words):
        make()


def sometimes(params: Any, batch: tuple[Tensor, bool]) -> Tensor:
    x, uses = batch
    return (params["w"] * x).sum() + ((params["u"] * x).sum() if uses else 0.0)


def decayed(strategy: Any, uses: list[bool]) -> tuple[list[float], dict[str, int]]:
    """A leaf that some steps leave out, under decay."""
    step = strategy(fds.train_step(sometimes, fds.sgd(1.0, weight_decay=0.5)))
    state = step.init({"w": torch.zeros(4), "u": torch.ones(4)})
    for used in uses:
        state, _ = step(state, (torch.tensor([3.0, 2.0, 3.0, 2.0]), used))
    return step.params(state)["u"].tolist(), {path: int(count) for path, count in state.idle.items()}


def feedback(stage: int | None, group: comm.Group | None = None) -> Any:
    """The larger half of each leaf, the rest in a later step; None for the transform that does this by itself."""
    codec = comm.codecs.TopK(0.5)
    if stage is None:
        return T.compressed_gradients(codec, group)
    sums = comm.codecs.ErrorFeedback(codec)
    return T.zero(stage, group, aggregate=T.Combine(lambda *args: sums.all_reduce(*args, op="avg"), init=sums.init))


@pytest.mark.law(14)
@pytest.mark.parametrize("stage", [None, 0, 1, 2, 3])
@pytest.mark.parametrize("n", [1, 2])
def test_a_leaf_that_no_loss_uses_is_skipped_unless_something_is_owed(stage: int | None, n: int) -> None:
    """One that was used comes with what is owed in the next step, and then stays as it is; one that never was does not move."""
    never = comm.simulate(decayed, feedback(stage), [False] * 3, world_size=n)
    assert never == [([1.0] * 4, {"u": 3})] * n
    once = comm.simulate(decayed, feedback(stage), [True, False, False], world_size=n)
    first = [1 - 3 - 0.5, 1 - 0.5]
    assert once == [([first[0] * 0.5, first[1] * 0.5 - 2] * 2, {"u": 1})] * n


BUGS = [
    Bug("micro-batches are combined apart", "transforms.zero.zero:Zero._reducer", "last and self.combine is None", "last"),
    Bug("leaves are in the segments' order", "transforms.zero.combine:combining.reduce", "row[0].leaf", "-row[0].leaf"),
    Bug("nothing is owed", "transforms.zero.combine:Combine.combined", "state.put(**{slot: memory})", "state"),
    Bug("sums are taken for means", "transforms.zero.combine:Combine.combined", "ranks.size / weight", "1 / weight"),
]


SKIPS = [
    Bug("leaves that nothing uses have gradients of zero", "transforms.zero.combine:_unused", "state.unused", "None"),
    Bug(
        "what is owed is lost",
        "transforms.zero.combine:_unused",
        "leaf.path in unused and not mean.any()",
        "leaf.path in unused",
    ),
]


@pytest.mark.parametrize("bug", SKIPS, ids=[bug.name for bug in SKIPS])
def test_a_planted_bug_of_skipped_leaves_is_found(bug: Bug) -> None:
    with planted(bug), pytest.raises(AssertionError):
        test_a_leaf_that_no_loss_uses_is_skipped_unless_something_is_owed(1, 2)


@pytest.mark.parametrize("bug", BUGS, ids=[bug.name for bug in BUGS])
def test_a_planted_bug_is_found(bug: Bug) -> None:
    def holds() -> None:
        for found in comm.simulate(program, 2, 2, world_size=2):
            torch.testing.assert_close(found, plain(2, None))

    with planted(bug), pytest.raises((AssertionError, RuntimeError, KeyError)):
        holds()


# -- algorithms ----------------------------------------------------------------------------------------------------------

ALGORITHMS = ("ring", "tree", "double_tree", "halving_doubling", "recursive_doubling")


def summed_by(all_reduce: Any = None) -> Any:
    strategy = T.zero(0) if all_reduce is None else T.zero(0, all_reduce=all_reduce)
    step = fds.compose(T.clip(0.1), strategy)(fds.train_step(PROBLEM.loss, fds.adamw(0.05)))
    state = step.init(PROBLEM.params)
    for index in range(3):
        state, _ = step(state, PROBLEM.rows(index))
    return step.params(state)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_gradients_are_summed_by_any_algorithm(name: str) -> None:
    """All ranks have the same bits, which are those of zero(0) up to rounding."""
    first, *others = comm.simulate(summed_by, getattr(comm.algorithms, name), world_size=4)
    for found in others:
        assert_same(found, first)
    torch.testing.assert_close(first, comm.simulate(summed_by, world_size=4)[0], rtol=1e-4, atol=1e-6)


# -- processes -----------------------------------------------------------------------------------------------------------


def everything() -> Any:
    """All that a custom method is made of, once."""
    found = [program(3, 2)]
    codec = comm.codecs.compressed(comm.reduce_scatter, Halves())
    for strategy in (
        T.zero(0, all_reduce=butterfly),
        T.zero(0, all_reduce=comm.algorithms.ring),
        T.zero(2, reduce_scatter=codec),
    ):
        step = fds.compose(T.every(2, T.clip(0.1)), strategy)(fds.train_step(PROBLEM.loss, lars()))
        state, here = step.init(PROBLEM.params), comm.world()
        for batch in PROBLEM.batches[:3]:
            state, _ = step(state, batch.chunk(here.size)[here.rank])
        batch = PROBLEM.batches[0].chunk(here.size)[here.rank]
        product = fds.hvp(step, state, batch, step.trained(state))
        there = step.with_trained(state, product)
        norms = step.per_leaf(state, lambda x: x.square().sum(), product)
        found.append((step.params(state), step.params(there), step.dot(state, product, product), norms))
        found.append(step.run(there, lambda params, x: x @ params[0]["w"], torch.ones(2, 5)))
    return found


def test_processes_give_the_simulated_bits() -> None:
    assert_same(comm.spawn(everything, world_size=2), comm.simulate(everything, world_size=2))
