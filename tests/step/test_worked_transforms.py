"""The transforms that the docs work out: right with every data-parallel transform, and composed in the documented order."""

from collections.abc import Callable
from functools import partial
from itertools import permutations
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import functional_ds as fds
from functional_ds import comm
from functional_ds import transforms as T
from tests.planting import Bug, planted
from tests.step.worked import worked


def loss(params: Any, x: Tensor) -> Tensor:
    return ((x @ params["a"]).tanh() @ params["b"] - 1).square().mean()


def start() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {"a": torch.randn(3, 5, generator=generator), "b": torch.randn(5, 1, generator=generator)}


def whole_batch(index: int) -> Tensor:
    return torch.randn(12, 3, generator=torch.Generator().manual_seed(index))


def mean(grads: Any, memory: Any, group: comm.Group) -> Any:
    return comm.all_reduce(grads, group, op="avg"), memory


STRATEGIES: dict[str, Callable[[], fds.Transform]] = {
    **{f"zero {stage}": partial(T.zero, stage) for stage in range(4)},
    "replicated": lambda: T.replicated(reduce=mean),
    "compressed": lambda: T.compressed_gradients(comm.codecs.TopK(1.0)),
}
NAMES = sorted(worked().keys() - {"power_sgd"})  # which combines gradients itself, and not exactly


def trained(*strategy: fds.Transform, steps: int = 4) -> tuple[Any, float]:
    step = fds.compose(*strategy)(fds.train_step(loss, fds.sgd(0.1, momentum=0.5)))
    state, here = step.init(start()), comm.world()
    for index in range(steps):
        state, metrics = step(state, whole_batch(index).chunk(here.size)[here.rank])
    return step.params(state), metrics["loss"].item()


@pytest.mark.law(19)
@pytest.mark.parametrize("name", NAMES)
@given(strategy=st.sampled_from(sorted(STRATEGIES)), n=st.sampled_from((2, 3)), k=st.sampled_from((1, 2)))
def test_worked_transforms_are_right_with_every_data_parallel_transform(name: str, strategy: str, n: int, k: int) -> None:
    """The single-device step's params and losses, as the docs promise of each."""
    split = [] if k == 1 or name == "count_rows" else [T.accumulate(k)]
    alone = trained(worked()[name])
    for found in comm.simulate(lambda: trained(STRATEGIES[strategy](), *split, worked()[name]), world_size=n):
        torch.testing.assert_close(found, alone, rtol=1e-4, atol=1e-5)


def sharp() -> Any:
    return trained(STRATEGIES["compressed"](), worked()["sam"])


@pytest.mark.law(19)
def test_processes_are_as_sharp() -> None:
    torch.testing.assert_close(comm.spawn(sharp, world_size=2), [trained(worked()["sam"])] * 2, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("policy", ["bf16", "fp16"])
@pytest.mark.parametrize("strategy", ["none", "zero 1", "zero 3", "replicated"])
def test_worked_transforms_run_in_half_precision(name: str, policy: str, strategy: str) -> None:
    """Listed where they see what they need: those that move params before mixed precision, others after it."""
    half = T.mixed_precision(policy, 2.0**6 if policy == "fp16" else None)
    first = name in ("within_the_box", "lookahead", "clip_weights", "ema")
    parallel = [] if strategy == "none" else [STRATEGIES[strategy]()]
    chain = [worked()[name], half, *parallel] if first else [half, *parallel, worked()[name]]
    alone, _ = trained(worked()[name])
    for found, _ in comm.simulate(lambda: trained(*chain), world_size=1 if strategy == "none" else 2):
        for one, other in zip(found.values(), alone.values(), strict=True):
            assert (one - other).norm() < 0.1 * other.norm() or name == "sign_gradient"
            assert one.isfinite().all()


@pytest.mark.law(19)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_sharpness_and_curvature_see_the_whole_gradient(strategy: str) -> None:
    """Those that look at gradients within the phase ``gradients``, against plain PyTorch on one device."""
    params = start()

    def by_hand() -> Any:
        grads = lambda at, x: torch.autograd.grad(loss(at, x), list(at.values()))  # noqa: E731
        now = start()
        for index in range(3):
            here = {name: leaf.clone().requires_grad_() for name, leaf in now.items()}
            first = grads(here, whole_batch(index))
            norm = torch.stack([grad.norm() for grad in first]).norm()
            there = {n: (x + 0.05 * g / norm).requires_grad_() for (n, x), g in zip(now.items(), first, strict=True)}
            now = {n: x - 0.1 * g for (n, x), g in zip(now.items(), grads(there, whole_batch(index)), strict=True)}
        return now

    def program() -> Any:
        step = fds.compose(STRATEGIES[strategy](), worked()["sam"])(fds.train_step(loss, fds.sgd(0.1)))
        state, here = step.init(params), comm.world()
        rows = [whole_batch(index).chunk(here.size)[here.rank] for index in range(3)]
        plain = STRATEGIES[strategy]()(fds.train_step(loss, fds.sgd(0.1)))
        at = plain.init(params)
        product = fds.hvp(plain, at, rows[0], plain.placed(at, params))
        for x in rows:
            state, _ = step(state, x)
        return step.params(state), product, plain.placed(at, want)

    _, whole = torch.autograd.functional.hvp(
        lambda a, b: loss({"a": a, "b": b}, whole_batch(0)), (*start().values(),), (*start().values(),)
    )
    want = dict(zip(params, whole, strict=True))
    for moved, product, expected in comm.simulate(program, world_size=3):
        torch.testing.assert_close(moved, by_hand())
        torch.testing.assert_close(
            [part.view_as(x) for part, x in zip(product, expected, strict=True)], expected, rtol=1e-4, atol=1e-5
        )


def test_gradients_that_are_not_reduced_have_no_norm() -> None:
    """What the docs' SAM did before: a refusal where it would be another method, and right under zero."""

    def gradients(inner: Any, step: fds.Step, state: fds.State, batch: Any, carry: Any, last: bool) -> Any:
        after, grads, metrics = inner(step, state, batch, carry, last)
        return after, grads, metrics | {"norm": fds.Weighted(step.norm(after, grads.sum), torch.ones(()))}

    normed = fds.wrap("normed", gradients=gradients)
    for strategy in ("replicated", "compressed"):
        with pytest.raises(ValueError, match=r"step\.norm is asked within the phase gradients.*step\.reduce\(state, grads\)"):
            comm.simulate(lambda strategy=strategy: trained(STRATEGIES[strategy](), normed), world_size=2)
    comm.simulate(lambda: trained(T.zero(1), normed), world_size=2)


@pytest.mark.law(38)
def test_the_error_memory_is_of_the_steps_own_gradients() -> None:
    """SAM's first gradients travel through the codec, too, and leave nothing in its memory: what moved is what was sent."""

    def program() -> None:
        rate, seen = 0.1, []

        def gradients(inner: Any, step: fds.Step, state: fds.State, batch: Any, carry: Any, last: bool) -> Any:
            after, grads, metrics = inner(step, state, batch, carry, last)
            seen.append([comm.all_reduce(grad / grads.weight, op="avg") for grad in grads.sum])
            return after, grads, metrics

        strategy = (T.compressed_gradients(comm.codecs.TopK(0.3)), worked()["sam"], fds.wrap("watch", gradients=gradients))
        step = fds.compose(*strategy)(fds.train_step(loss, fds.sgd(rate)))
        state, here = step.init(start()), comm.world()
        for index in range(3):
            state, _ = step(state, whole_batch(index).chunk(here.size)[here.rank])
        total = sum(grad.sum() for grads in seen for grad in grads)
        moved = sum((old - new).sum() / rate for old, new in zip(start().values(), step.params(state).values(), strict=True))
        owed = sum(part.sum() for part in fds.tree.leaves(state.slots["compressed_gradients"]))
        torch.testing.assert_close(moved + comm.all_reduce(owed, op="avg"), total, rtol=1e-4, atol=1e-5)

    comm.simulate(program, world_size=2)


# -- gradients that pass through several transforms -----------------------------------------------------------------------

Change = Callable[[list[Tensor]], list[Tensor]]  # of gradients of ``start()``


def length(grads: list[Tensor]) -> Tensor:
    return torch.stack([grad.norm() for grad in grads]).norm()


def scaled(inner: Any, step: fds.Step, state: fds.State, grads: fds.Weighted) -> Any:
    return inner(step, state, fds.Weighted(grads.sum, grads.weight / 3))


PLAIN: dict[str, Change] = {
    "clip": lambda grads: [grad * min(1.0, 0.1 / (length(grads).item() + 1e-6)) for grad in grads],
    "unit_gradient": lambda grads: [grad / length(grads) for grad in grads],
    "sign_gradient": lambda grads: [grad.sign() for grad in grads],
    "add_l2": lambda grads: [grad + 0.1 * leaf for grad, leaf in zip(grads, start().values(), strict=True)],
    "scaled": lambda grads: [grad * 3 for grad in grads],
}


def changes() -> dict[str, fds.Transform]:
    return {"clip": T.clip(0.1), "scaled": fds.wrap("scaled", update=scaled), **worked()}


def composed_in_order(names: tuple[str, ...], stage: int | None) -> None:
    """``compose(f, g)`` gives the optimizer f(g(gradient)), as plain PyTorch computes it."""
    leaves = {name: leaf.requires_grad_() for name, leaf in start().items()}
    grads = list(torch.autograd.grad(loss(leaves, whole_batch(0)), list(leaves.values())))
    for name in reversed(names):
        grads = PLAIN[name](grads)
    want = {name: leaf.detach() - grad for (name, leaf), grad in zip(leaves.items(), grads, strict=True)}

    def program() -> Any:
        zero, known, here = [] if stage is None else [T.zero(stage)], changes(), comm.world()
        step = fds.compose(*zero, *(known[name] for name in names))(fds.train_step(loss, fds.sgd(1.0)))
        state, _ = step(step.init(start()), whole_batch(0).chunk(here.size)[here.rank])
        return step.params(state)

    for found in comm.simulate(program, world_size=1 if stage is None else 2):
        torch.testing.assert_close(found, want, rtol=1e-4, atol=1e-5)


@pytest.mark.law(30)
@pytest.mark.parametrize("names", [*permutations(PLAIN, 2), ("clip", "add_l2", "unit_gradient"), ("add_l2", "clip", "scaled")])
@pytest.mark.parametrize("stage", [None, 0, 3])
def test_gradients_pass_through_transforms_in_the_documented_order(names: tuple[str, ...], stage: int | None) -> None:
    composed_in_order(names, stage)


# -- planted bugs -----------------------------------------------------------------------------------------------------------


BUGS = [
    (
        test_gradients_that_are_not_reduced_have_no_norm,
        Bug(
            "a rank's own norm passes",
            "step.guards:refuse_unreduced",
            "state.reduced is False",
            "False",
            pytest.fail.Exception,
        ),
    ),
    (
        lambda: composed_in_order(("clip", "scaled"), 0),
        Bug(
            "clip forgets the weight",
            "transforms.clip:clip.update",
            "grads.weight * torch.clamp((norm + _EPS) / limit, min=1.0)",
            "torch.clamp((norm + _EPS) / limit, min=1.0)",
        ),
    ),
    (
        lambda: composed_in_order(("clip", "unit_gradient"), 0),
        Bug(
            "clip takes the norm of sums",
            "transforms.clip:clip.update",
            "step.norm(state, grads.sum) / grads.weight",
            "step.norm(state, grads.sum)",
        ),
    ),
]


@pytest.mark.parametrize(("law", "bug"), BUGS, ids=lambda value: getattr(value, "name", ""))
def test_planted_bugs_are_caught(law: Any, bug: Bug) -> None:
    with planted(bug), pytest.raises(bug.shows):
        law()
