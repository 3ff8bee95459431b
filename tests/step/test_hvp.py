"""Forward passes at any params, products with the Hessian, and sums over all ranks' parts: those of plain PyTorch."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import functional_ds as fds
from functional_ds import comm
from functional_ds import transforms as T
from functional_ds.testing import Problem
from tests.planting import Bug, planted

PROBLEM = Problem()
PATHS = ["0.w", "0.b", "1.w", "1.scale", "1.b"]


def mean(grads: Any, memory: Any, group: comm.Group) -> Any:
    return comm.all_reduce(grads, group, op="avg"), memory


STRATEGIES: dict[str, Callable[[], fds.Transform]] = {
    **{f"zero {stage}": partial(T.zero, stage) for stage in range(4)},
    "replicated": lambda: T.replicated(reduce=mean),
    "combine 2": lambda: T.zero(2, aggregate=T.Combine(mean)),
    "hsdp": lambda: T.zero(3, comm.mesh(a=1, b=comm.world().size)["b"], replicate=comm.mesh(a=1, b=comm.world().size)["a"]),
    "bf16": lambda: fds.compose(T.mixed_precision("bf16"), T.zero(3)),
}
names = st.sampled_from(sorted(STRATEGIES))


def vector(seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {path: torch.randn(leaf.shape, generator=generator) for path, leaf in fds.tree.named(PROBLEM.params)}


def whole_of(step: fds.Step, state: fds.State, tensors: list[Tensor]) -> dict[str, Tensor]:
    return dict(fds.tree.named(step.params(step.with_trained(state, tensors))))


def loss_at(leaves: dict[str, Tensor], batch: Tensor) -> Tensor:
    params = [{path[2:]: leaf for path, leaf in leaves.items() if path[0] == which} for which in "01"]
    loss: Tensor = PROBLEM.loss(params, batch)
    return loss


def expected_product(v: dict[str, Tensor], batch: Tensor) -> dict[str, Tensor]:
    leaves = {path: leaf.clone().requires_grad_() for path, leaf in fds.tree.named(PROBLEM.params)}
    grads = torch.autograd.grad(loss_at(leaves, batch), list(leaves.values()), create_graph=True)
    product = sum((grad * v[path]).sum() for path, grad in zip(leaves, grads, strict=True))
    found = torch.autograd.grad(product, list(leaves.values()), materialize_grads=True)  # type: ignore[arg-type]
    return dict(zip(leaves, found, strict=True))


def program(k: int, *strategy: Callable[[], fds.Transform]) -> dict[str, Any]:
    further = [T.accumulate(k)] if k > 1 else []
    step = fds.compose(*(make() for make in strategy), *further)(fds.train_step(PROBLEM.loss, fds.sgd(0.1)))
    state, here = step.init(PROBLEM.params), comm.world()
    batch = PROBLEM.batches[0].chunk(here.size)[here.rank]
    u, v = (step.placed(state, vector(seed)) for seed in (1, 2))
    there = step.with_trained(state, u)
    whole = step.run(there, lambda params, x: (params[0]["w"] * 1.0, params[1], x @ params[0]["w"]), torch.ones(1, 5))
    found = {
        "product": whole_of(step, state, fds.hvp(step, state, batch, v)),
        "dot": step.dot(state, u, v),
        "squares": step.per_leaf(state, lambda a, b: torch.stack([(a * b).sum(), b.square().sum()]), u, v),
        "counts": step.per_leaf(state, torch.count_nonzero, v),
        "run": whole,
        "place": step.params(there),
    }
    state, _ = step(state, batch)  # what ``run`` gave is no view of memory that the update writes
    return found


def expected(batch: Tensor) -> dict[str, Any]:
    u, v = vector(1), vector(2)
    nested = [{path[2:]: leaf for path, leaf in u.items() if path[0] == which} for which in "01"]
    return {
        "product": expected_product(v, batch),
        "dot": torch.stack([(u[path] * v[path]).sum() for path in u]).sum(),
        "squares": {path: torch.stack([(u[path] * v[path]).sum(), v[path].square().sum()]) for path in u},
        "counts": {path: torch.tensor(leaf.numel()) for path, leaf in v.items()},
        "run": (u["0.w"], nested[1], torch.ones(1, 5) @ u["0.w"]),
        "place": nested,
    }


@pytest.mark.law(19)
@given(name=names, n=st.sampled_from((1, 2, 3)), k=st.sampled_from((1, 2)))
def test_all_is_that_of_one_device(name: str, n: int, k: int) -> None:
    """In every stage of ZeRO, beside replicated, and by micro-batches; bf16 to its rounding."""
    near = {"rtol": 0.05, "atol": 0.1} if name == "bf16" else {"rtol": 1e-5, "atol": 1e-5}
    for found in comm.simulate(program, k, STRATEGIES[name], world_size=n):
        for what, value in expected(PROBLEM.batches[0]).items():
            torch.testing.assert_close(
                found[what], value, **near, check_dtype=False, msg=lambda text, what=what: f"{what}: {text}"
            )


def test_alone_it_is_plain_torch() -> None:
    torch.testing.assert_close(program(1), expected(PROBLEM.batches[0]), check_dtype=False)


def test_the_oracle_is_torchs_own() -> None:
    leaves, v = dict(fds.tree.named(PROBLEM.params)), vector(2)

    def function(*x: Tensor) -> Tensor:
        return loss_at(dict(zip(leaves, x, strict=True)), PROBLEM.batches[0])

    _, found = torch.autograd.functional.hvp(function, tuple(leaves.values()), tuple(v.values()))
    torch.testing.assert_close(list(expected_product(v, PROBLEM.batches[0]).values()), list(found))


def sam(rho: float) -> fds.Transform:
    """Foret et al. 2021, as docs/phases.md has it."""

    def gradients(inner: Any, step: fds.Step, state: fds.State, batch: Any, carry: Any, last: bool) -> Any:
        after, first, metrics = inner(step, state, batch, None, True)
        reduced, first = step.reduce(after, first)
        length, held = rho / step.norm(reduced, first.sum), step.trained(state)
        ahead = [leaf + length * grad.view_as(leaf) for leaf, grad in zip(held, first.sum, strict=True)]
        _, second, _ = inner(step, step.with_trained(state, ahead), batch, carry, last)
        return after, second, metrics

    return fds.wrap(f"sam({rho})", gradients=gradients)


def teacher(weight: float = 0.5) -> fds.Transform:
    """Outputs of the mean of the params, which stay in shards (distillation from an EMA teacher)."""

    def gradients(inner: Any, step: fds.Step, state: fds.State, batch: Any, carry: Any, last: bool) -> Any:
        mean = fds.tree.leaves(state.slots["ema"])
        target = step.run(step.with_trained(state, mean), lambda params, x: torch.tanh(x @ params[0]["w"]), batch)

        def loss(below: Any, step: fds.Step, state: fds.State, params: Any, batch: Any) -> Any:
            found, metrics = below(step, state, params, batch)
            error = (torch.tanh(batch @ params[0]["w"]) - target).square().mean()
            return fds.Weighted(found.sum + weight * error * found.weight, found.weight), metrics

        return inner(step.wrapped("student", loss=loss), state, batch, carry, last)

    return fds.wrap("teacher", gradients=gradients)


@pytest.mark.parametrize("make", [partial(sam, 0.05)], ids=["sam"])
def test_methods_hold(make: Any) -> None:
    fds.testing.holds(make, only=["stages", "replicated", "accumulate before", "checkpoints", "skipped steps"]).check()


def distilled(*strategy: fds.Transform) -> Any:
    step = fds.compose(T.ema(0.8), *strategy, teacher())(fds.train_step(PROBLEM.loss, fds.sgd(0.1)))
    state, here = step.init(PROBLEM.params), comm.world()
    for batch in PROBLEM.batches[:3]:
        state, _ = step(state, batch.chunk(here.size)[here.rank])
    return step.params(state)


def test_a_teacher_stays_in_shards() -> None:
    alone = distilled()
    for stage in range(4):
        for found in comm.simulate(distilled, T.zero(stage), world_size=2):
            torch.testing.assert_close(found, alone)


# -- refusals ----------------------------------------------------------------------------------------------------------


def test_what_does_not_line_up_is_refused() -> None:
    step = fds.train_step(PROBLEM.loss, fds.sgd(0.1))
    state = step.init(PROBLEM.params)
    with pytest.raises(ValueError, match=r"with_trained: the tensors have .* elements, and step\.trained"):
        step.with_trained(state, step.trained(state)[:2])
    with pytest.raises(ValueError, match=r"step\.dot: the lists have"):
        step.dot(state, step.trained(state), step.trained(state)[:2])


def test_gradients_of_one_ranks_rows_are_refused() -> None:
    def look(inner: Any, step: fds.Step, state: fds.State, batch: Any, carry: Any, last: bool) -> Any:
        after, grads, metrics = inner(step, state, batch, carry, last)
        step.per_leaf(after, torch.sum, grads.sum)
        return after, grads, metrics

    def wrong() -> None:
        step = fds.compose(T.replicated(reduce=mean), fds.wrap("look", gradients=look))(
            fds.train_step(PROBLEM.loss, fds.sgd(0.1))
        )
        step(step.init(PROBLEM.params), PROBLEM.batches[0])

    with pytest.raises(ValueError, match="is asked within the phase gradients"):
        comm.simulate(wrong, world_size=2)


# -- planted bugs ------------------------------------------------------------------------------------------------------

BUGS = [
    Bug("shards are not summed by leaf", "sharding.leaf_map:LeafMap.total", "comm.all_reduce(rows, self.group)", "rows"),
    Bug("a product is of its own gradient", "second_order.hvp:hvp", "step.sum_over_ranks(state, grads.weight)", "grads.weight"),
    Bug("a product is not reduced", "second_order.hvp:hvp", "_, grads = step.reduce(after, grads)", "..."),
    Bug("a vector is the params", "second_order.hvp:hvp", "step.with_trained(state, vector)", "state"),
    Bug(
        "a place is not published",
        "step.at_params:AtParams.with_trained",
        "new.view_as(leaves[place]).to(leaves[place].dtype)",
        "leaves[place]",
    ),
    Bug(
        "products count replicas",
        "step.over_ranks.gradient_sums:dot",
        "_total(dividing, rows, lambda a, b: _dot(state, a, b, wide))",
        "_dot(state, *rows, wide)",
    ),
    Bug("what a pass returns is a view of params", "step.pass_scope:evaluated", "x.clone() if lies_in_params(x) else x", "x"),
]


@pytest.mark.parametrize("bug", BUGS, ids=[bug.name for bug in BUGS])
def test_a_planted_bug_is_found(bug: Bug) -> None:
    def holds() -> None:
        for name in ("zero 1", "replicated"):
            for found in comm.simulate(program, 1, STRATEGIES[name], world_size=2):
                torch.testing.assert_close(found, expected(PROBLEM.batches[0]), check_dtype=False)

    with planted(bug), pytest.raises((AssertionError, RuntimeError, ValueError)):
        holds()
