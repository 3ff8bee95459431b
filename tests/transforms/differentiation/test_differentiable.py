"""Differentiable steps: they are the ordinary steps, and their derivatives are finite differences, in every mode of torch."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.gradcheck import GradcheckError

import functional_ds as fds
from functional_ds import transforms as T
from tests.planting import Bug, planted

Rule = Callable[..., Any]
D = torch.float64
GENERATOR = torch.Generator().manual_seed(0)
PARAMS = {
    path: torch.randn(shape, dtype=D, generator=GENERATOR) for path, shape in (("w", (3, 4)), ("b", (4,)), ("head", (4, 1)))
}
BATCHES = [(torch.randn(8, 3, dtype=D, generator=GENERATOR), torch.randn(8, 1, dtype=D, generator=GENERATOR)) for _ in range(3)]
WHOLE = (T.accumulate(2), T.ema(0.5), T.clip(0.5))


def loss(params: Any, batch: Any, key: fds.Key | None = None) -> Tensor:
    x, y = batch
    hidden = torch.tanh(x @ params["w"] + params["b"])
    return ((hidden if key is None else key.dropout(hidden, 0.3, "hidden")) @ params["head"] - y).square().mean()


def trained(
    rule: Any, *strategy: fds.Transform, ordinary: bool = False, params: Any = PARAMS, seed: Any = 0, batches: Any = BATCHES
) -> Any:
    """The step, and its state after the batches."""
    step = fds.compose(*strategy)(fds.train_step(loss, rule, seed=seed))
    step = step if ordinary else fds.differentiable(step)
    state = step.init(params)
    for batch in batches:
        state, _ = step(state, batch)
    return step, state


def loss_after(rule: Any, *strategy: fds.Transform, **options: Any) -> Tensor:
    """The loss after the steps, of the params and of their average where there is one."""
    step, state = trained(rule, *strategy, **options)
    found = step.evaluate(state, BATCHES[0])
    return found + loss(T.averaged(step, state), BATCHES[1]) if "ema" in state.slots else found


class Heavy:
    """An optax-shaped pair."""

    def __init__(self, lr: Any, beta: Any) -> None:
        self.lr, self.beta = lr, beta

    def init(self, params: list[Tensor]) -> list[Tensor]:
        return [torch.zeros_like(p) for p in params]

    def update(self, grads: list[Tensor], state: list[Tensor], params: Any = None) -> tuple[list[Tensor], list[Tensor]]:
        state = [self.beta * mean + grad for mean, grad in zip(state, grads, strict=True)]
        return [-self.lr * mean for mean in state], state


def in_place(lr: Any) -> fds.Optimizer:
    """A custom optimizer, which writes into what it gets."""

    def update(params: list[Tensor], grads: fds.Weighted, state: Any, rate: Any) -> tuple[list[Tensor], Any]:
        for p, grad in zip(params, grads.sum, strict=True):
            p.sub_(lr * rate * grad / grads.weight)
        return params, state

    return fds.Optimizer(lambda params: (), update, "in_place")


# By name: an optimizer as a function of its hyperparameters, and values of them.
RULES: dict[str, tuple[Rule, tuple[float, ...]]] = {
    "sgd": (lambda lr, decay: fds.sgd(lr, weight_decay=decay), (0.1, 0.1)),
    "momentum": (lambda lr, beta, decay: fds.sgd(lr, momentum=beta, weight_decay=decay), (0.1, 0.8, 0.1)),
    "nesterov": (lambda lr, beta: fds.sgd(lr, momentum=beta, nesterov=True), (0.1, 0.8)),
    "adam": (lambda lr, a, b, eps, decay: fds.adam(lr, betas=(a, b), eps=eps, weight_decay=decay), (0.1, 0.8, 0.9, 0.01, 0.1)),
    "adamw": (
        lambda lr, a, b, eps, decay: fds.adamw(lr, betas=(a, b), eps=eps, weight_decay=decay),
        (0.1, 0.8, 0.9, 0.01, 0.1),
    ),
    "uncorrected": (lambda lr, a, b: fds.adamw(lr, betas=(a, b), eps=1e-2, bias_correction=False), (0.1, 0.8, 0.9)),
    "adagrad": (lambda lr, eps, decay: fds.adagrad(lr, eps=eps, weight_decay=decay, initial=0.1), (0.1, 0.01, 0.1)),
    "lion": (lambda lr, decay: fds.lion(lr, weight_decay=decay), (0.1, 0.1)),
    "groups": (
        lambda lr, beta, decay: fds.param_groups(
            {"^head": fds.sgd(lr, momentum=beta)}, fds.adamw(lr, weight_decay=decay, decay="w")
        ),
        (0.1, 0.8, 0.1),
    ),
    "optax": (Heavy, (0.1, 0.8)),
    "in place": (in_place, (0.1,)),
}


def numbers(values: tuple[float, ...]) -> tuple[Tensor, ...]:
    return tuple(torch.tensor(value, dtype=D, requires_grad=True) for value in values)


def same_steps(name: str, dtype: torch.dtype = D, *strategy: fds.Transform) -> None:
    """k differentiable steps are k ordinary ones, up to rounding."""
    make, values = RULES[name]
    params = {path: leaf.to(dtype) for path, leaf in PARAMS.items()}
    batches = [tuple(x.to(dtype) for x in batch) for batch in BATCHES]
    (_, state), (_, other) = (
        trained(make(*values), *strategy, ordinary=o, params=params, batches=batches) for o in (False, True)
    )
    assert fds.tree.structure((state.params, state.optimizer, state.slots)) == fds.tree.structure(
        (other.params, other.optimizer, other.slots)
    )
    for one, two in zip(fds.tree.leaves(state), fds.tree.leaves(other), strict=True):
        torch.testing.assert_close(one, two, rtol=0, atol=1e-14 if dtype == D else 1e-5)


@pytest.mark.sample(12)
@pytest.mark.parametrize("dtype", [D, torch.float32], ids=str)
@pytest.mark.parametrize("name", RULES)
def test_they_are_the_ordinary_steps(name: str, dtype: torch.dtype) -> None:
    same_steps(name, dtype, *WHOLE, T.schedule(T.warmup(2)))


def by_hyperparameters(name: str, *strategy: fds.Transform) -> None:
    """Reverse and forward mode against central differences."""
    make, values = RULES[name]
    torch.autograd.gradcheck(lambda *given: loss_after(make(*given), *strategy), numbers(values), check_forward_ad=True)


@pytest.mark.sample(5)
@pytest.mark.parametrize("name", RULES)
def test_derivatives_by_hyperparameters_are_finite_differences(name: str) -> None:
    by_hyperparameters(name, *WHOLE)


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", RULES)
def test_derivatives_by_first_params_and_data_are_finite_differences(name: str) -> None:
    make, values = RULES[name]

    def after(bias: Tensor, x: Tensor, y: Tensor) -> Tensor:
        return loss_after(make(*values), *WHOLE, params=PARAMS | {"b": bias}, batches=[(x, y), *BATCHES[1:]])

    given = (PARAMS["b"], *BATCHES[0])
    torch.autograd.gradcheck(after, [x.clone().requires_grad_() for x in given], check_forward_ad=True, fast_mode=True)


def all_modes(name: str) -> None:
    """torch.func's transforms agree with autograd; a batch of runs is a loop over runs."""
    make, values = RULES[name]
    given = numbers(values)
    wanted = torch.autograd.grad(loss_after(make(*given), *WHOLE), given)
    plain = tuple(x.detach() for x in given)

    def after(*given: Tensor) -> Tensor:
        return loss_after(make(*given), *WHOLE)

    places = tuple(range(len(plain)))
    found = torch.func.grad(after, places)(*plain)
    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-12)
    _, along = torch.func.jvp(after, plain, tuple(torch.ones_like(x) for x in plain))
    torch.testing.assert_close(along, torch.stack(wanted).sum(), rtol=1e-9, atol=1e-12)
    if name != "in place":
        rates = torch.tensor([0.05, 0.1], dtype=D)
        loop = [torch.func.grad_and_value(after)(rate, *plain[1:]) for rate in rates]
        batch = torch.func.vmap(torch.func.grad_and_value(after), (0, *(None,) * (len(plain) - 1)))(rates, *plain[1:])
        torch.testing.assert_close(batch, tuple(map(torch.stack, zip(*loop, strict=True))), rtol=1e-9, atol=1e-12)


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", RULES)
def test_all_modes_agree(name: str) -> None:
    all_modes(name)


def test_second_derivatives_are_finite_differences() -> None:
    def after(lr: Tensor) -> Tensor:
        return loss_after(fds.adamw(lr, eps=1e-2), T.clip(0.5))

    lr = torch.tensor(0.1, dtype=D)
    wanted = (after(lr + 1e-4) - 2 * after(lr) + after(lr - 1e-4)) / 1e-8
    torch.testing.assert_close(torch.func.hessian(after)(lr), wanted, rtol=1e-4, atol=1e-4)


def test_a_batch_of_seeds_is_a_loop_over_seeds() -> None:
    """Each run has the draws and the first params of its own seed, as an ordinary step has them."""

    def after(seed: Any, params: Any, *, ordinary: bool = False) -> Tensor:
        return loss_after(fds.adamw(0.1), *WHOLE, seed=seed, params=params, ordinary=ordinary)

    firsts = [{path: leaf + seed for path, leaf in PARAMS.items()} for seed in range(3)]
    stacked = {path: torch.stack([first[path] for first in firsts]) for path in PARAMS}
    found = torch.func.vmap(after)(torch.arange(3), stacked)
    wanted = torch.stack([after(seed, first, ordinary=True) for seed, first in enumerate(firsts)])
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-14)
    assert len(found.unique()) == 3


def test_schedules_and_limits_may_be_tensors() -> None:
    """Also where clipping does not bite, and where it does."""

    def after(decay: Tensor, limit: Tensor) -> Tensor:
        return loss_after(fds.sgd(0.1, momentum=0.5), T.schedule(lambda count: decay**count), T.clip(limit))

    for limit in (0.1, 10.0):
        torch.autograd.gradcheck(after, numbers((0.7, limit)), check_forward_ad=True)
    batch = torch.func.vmap(after)(torch.tensor([0.7, 0.8], dtype=D), torch.tensor([0.1, 0.2], dtype=D))
    assert batch.shape == (2,)


def metrics_and_weights() -> None:
    """Metrics have graphs, and weights of rows may depend on what is differentiated by."""

    def weighed(params: Any, batch: Any) -> fds.Weighted:
        x, weights = batch
        return fds.Weighted((weights * (x @ params["w"]).square()).sum(), weights.sum())

    def after(weights: Tensor) -> Tensor:
        step = fds.differentiable(T.accumulate(2)(fds.train_step(weighed, fds.sgd(0.1))))
        state = step.init({"w": PARAMS["b"][:3]})
        for x, _ in BATCHES:
            state, metrics = step(state, (x, weights))
        return metrics["loss"]  # type: ignore[no-any-return]

    weights = torch.linspace(0.5, 2, 8, dtype=D)
    shift = torch.eye(8, dtype=D) * 1e-6
    wanted = torch.stack([(after(weights + one) - after(weights - one)) / 2e-6 for one in shift])
    torch.testing.assert_close(torch.func.grad(after)(weights), wanted, rtol=1e-6, atol=1e-8)
    torch.testing.assert_close(torch.func.jacfwd(after)(weights), wanted, rtol=1e-6, atol=1e-8)


def test_metrics_and_weights_have_derivatives() -> None:
    metrics_and_weights()


def some_leaves_are_unused() -> None:
    """They are left alone where an ordinary step leaves them alone."""

    def sometimes(params: Any, batch: Tensor) -> Tensor:
        found = (batch @ params["w"]).square().mean()
        return found if len(batch) == 8 else found + params["v"].square().sum()

    def after(lr: Any, *, ordinary: bool = False) -> Any:
        step = fds.train_step(sometimes, fds.adamw(lr, weight_decay=0.5))
        step = step if ordinary else fds.differentiable(step)
        state = step.init({"w": PARAMS["b"][:3], "v": PARAMS["b"]})
        for rows in (8, 4, 8, 4):
            state, _ = step(state, BATCHES[0][0][:rows])
        return torch.cat([*step.params(state).values()])

    torch.testing.assert_close(after(0.1), after(0.1, ordinary=True), rtol=0, atol=1e-14)
    torch.autograd.gradcheck(after, numbers((0.1,)), check_forward_ad=True)


def test_unused_leaves_are_left_alone() -> None:
    some_leaves_are_unused()


def dead_units_have_finite_derivatives() -> None:
    """Adam's root has none at zero, where its gradients always were zero."""

    def dead(params: Any, x: Tensor) -> Tensor:
        return (torch.relu(x @ params["w"]) @ params["v"]).square().mean()

    def after(lr: Tensor) -> Tensor:
        rules = fds.param_groups({"w": fds.adamw(lr)}, fds.adagrad(lr))
        step = fds.differentiable(T.clip(0.1)(fds.train_step(dead, rules)))
        state = step.init({"w": torch.tensor([[-9.0, 1.0]] * 3, dtype=D), "v": torch.ones(2, dtype=D)})
        for x, _ in BATCHES:
            state, metrics = step(state, x.abs())
        return metrics["loss"]  # type: ignore[no-any-return]

    torch.autograd.gradcheck(after, numbers((0.1,)))


def test_dead_units_have_finite_derivatives() -> None:
    dead_units_have_finite_derivatives()


@pytest.mark.sample(2)
@pytest.mark.parametrize("rule", [fds.sgd, fds.adamw, fds.adagrad, fds.lion], ids=lambda rule: rule.__name__)
def test_complex_params_are_pairs_of_reals(rule: Rule) -> None:
    """As in ordinary steps, with a derivative by the learning rate."""

    def complex_loss(params: Any, x: Tensor) -> Tensor:
        return (x @ params["w"]).abs().square().mean()

    def after(lr: Any, *, ordinary: bool = False) -> Any:
        step = fds.train_step(complex_loss, rule(lr))
        step = step if ordinary else fds.differentiable(step)
        state = step.init({"w": torch.complex(PARAMS["w"], PARAMS["w"].flip(0))})
        for x, _ in BATCHES:
            state, _ = step(state, x.to(torch.complex128))
        return torch.view_as_real(step.params(state)["w"])

    torch.testing.assert_close(after(0.1), after(0.1, ordinary=True), rtol=0, atol=1e-14)
    torch.autograd.gradcheck(after, numbers((0.1,)), check_forward_ad=True)


def test_a_state_of_another_strategy_is_refused() -> None:
    step = fds.train_step(loss, fds.sgd(0.1))
    state = T.zero(3)(step).init(PARAMS)
    with pytest.raises(ValueError, match=r"differentiable: zero\(3, world\)"):
        T.zero(3)(fds.differentiable(step))(state, BATCHES[0])


# -- modules -------------------------------------------------------------------------------------------------------------------


def module_run(norm: nn.Module, *, evaluates: bool = False) -> Callable[[Tensor], Tensor]:
    torch.manual_seed(0)
    apply, params = fds.functional(nn.Sequential(nn.Linear(3, 4), norm, nn.ReLU(), nn.Linear(4, 1)).double())
    apply.module.train(not evaluates)

    def after(lr: Tensor) -> Tensor:
        step = fds.differentiable(
            T.clip(1.0)(fds.train_step(lambda p, b: (apply(p, b[0]) - b[1]).square().mean(), fds.adamw(lr)))
        )
        state = step.init(params)
        for batch in BATCHES:
            state, _ = step(state, batch)
        return step.evaluate(state, BATCHES[0])

    return after


def attends(params: Any, x: Tensor) -> Tensor:
    return nn.functional.scaled_dot_product_attention((x @ params["q"])[None], x[None], x[None], is_causal=True).square().mean()


def test_attention_has_derivatives() -> None:
    """Torch's fused kernel has no second ones."""

    def after(lr: Tensor) -> Tensor:
        step = fds.differentiable(fds.train_step(attends, fds.sgd(lr)))
        state = step.init({"q": torch.eye(3, dtype=D)})
        for x, _ in BATCHES:
            state, metrics = step(state, x)
        return metrics["loss"]  # type: ignore[no-any-return]

    torch.autograd.gradcheck(after, numbers((0.1,)), check_forward_ad=True)


def modules_have_derivatives() -> None:
    torch.autograd.gradcheck(module_run(nn.LayerNorm(4)), numbers((0.1,)), check_forward_ad=True)


def test_modules_have_derivatives() -> None:
    modules_have_derivatives()
    after = module_run(nn.BatchNorm1d(4), evaluates=True)
    torch.autograd.gradcheck(after, numbers((0.1,)), check_forward_ad=True)
    found = torch.func.vmap(torch.func.grad(after))(torch.tensor([0.1, 0.2], dtype=D))
    torch.testing.assert_close(found, torch.stack([torch.func.grad(after)(torch.tensor(lr, dtype=D)) for lr in (0.1, 0.2)]))


def test_without_gradients_no_graph_is_kept() -> None:
    with torch.no_grad():
        _, state = trained(fds.adamw(torch.tensor(0.1, dtype=D)))
    assert not any(leaf.requires_grad for leaf in state.params.values())


def test_nothing_is_donated_or_changed() -> None:
    step = fds.differentiable(fds.compose(*WHOLE)(fds.train_step(loss, in_place(0.1))))
    state = step.init(PARAMS)
    before = [leaf.clone() for leaf in fds.tree.leaves(state)]
    one, other = (step(state, BATCHES[0])[0].params for _ in range(2))
    assert all(map(torch.equal, fds.tree.leaves(state), before))
    assert all(torch.equal(one[path], other[path]) for path in PARAMS)


# -- planted bugs --------------------------------------------------------------------------------------------------------------

HERE = "transforms.differentiation.differentiable"
BUGS: list[tuple[Bug, Callable[[], None]]] = [
    (
        Bug("gradients are constants", f"{HERE}:_gradients", "torch.is_grad_enabled()", "False", GradcheckError),
        lambda: by_hyperparameters("sgd"),
    ),
    (
        Bug(
            "micro-batches are forgotten",
            f"{HERE}:_gradients",
            "own if carry is None else tree.map(torch.add, carry, own)",
            "own",
        ),
        lambda: same_steps("sgd", D, *WHOLE),
    ),
    (
        Bug("no leaf is unused", f"{HERE}:_gradients", "with_unused(step, state, unused)", "with_unused(step, state, [])"),
        some_leaves_are_unused,
    ),
    (
        Bug(
            "states are cut off",
            "step.state.state:State.clone",
            "leaf if keeps_graph else leaf.detach()",
            "leaf.detach()",
            GradcheckError,
        ),
        lambda: by_hyperparameters("sgd"),
    ),
    (
        Bug(
            "marked leaves are cut off",
            "base.marks:_marked",
            "leaf.view_as(leaf) if tracked else leaf.detach()",
            "leaf.detach()",
            GradcheckError,
        ),
        modules_have_derivatives,
    ),
    (
        Bug(
            "weights are constants",
            "base.weighted:weigh",
            "weighted.weight.reshape(())",
            "weighted.weight.detach().reshape(())",
        ),
        metrics_and_weights,
    ),
    (
        Bug(
            "a root has no slope",
            "optim.formula:root",
            "torch.where(known, torch.where(known, square, 1.0).sqrt(), 0.0)",
            "square.sqrt()",
            GradcheckError,
        ),
        dead_units_have_finite_derivatives,
    ),
    (
        Bug(
            "averages are cut off",
            "transforms.ema:ema.update",
            "leaf.to(mean.dtype)",
            "leaf.detach().to(mean.dtype)",
            GradcheckError,
        ),
        lambda: by_hyperparameters("sgd", T.ema(0.5)),
    ),
    (
        Bug(
            "the decay is constant",
            "optim.adam:adam_optimizer.rule",
            "p * (1 - lr * weight_decay)",
            "p * (1 - lr.detach() * weight_decay)",
            GradcheckError,
        ),
        lambda: by_hyperparameters("adamw"),
    ),
    (
        Bug("no look ahead", "optim.sgd:sgd.rule", "grad + momentum * mean if nesterov else mean", "mean"),
        lambda: same_steps("nesterov"),
    ),
    (Bug("counts stand still", "optim.adam:adam_optimizer.rule", "count + 1", "count + 0"), lambda: same_steps("adam")),
    (Bug("groups are swapped", "optim.param_groups:_Groups.moved", "new[place].view_as(p)", "p"), lambda: same_steps("groups")),
]


@pytest.mark.sample(4)
@pytest.mark.parametrize(("bug", "law"), BUGS, ids=[bug.name for bug, _ in BUGS])
def test_a_planted_bug_breaks_its_law(bug: Bug, law: Callable[[], None]) -> None:
    with planted(bug), pytest.raises(bug.shows):
        law()
