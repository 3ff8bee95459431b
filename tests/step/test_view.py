"""``view`` and ``pull`` are a linear map and its transpose (law 64)."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.overrides import TorchFunctionMode

import functional_ds as fds
from functional_ds import comm
from functional_ds import transforms as T
from tests.planting import Bug, planted

SIZES = {"a": (3, 2), "b": (5,), "c": (2, 2)}


def integers(seed: int) -> dict[str, Tensor]:
    """Small ones, whose sums are exact."""
    draw = torch.Generator().manual_seed(seed)
    return {name: torch.randint(-4, 5, size, generator=draw).float() for name, size in SIZES.items()}


def step_of(stage: int | None, *others: fds.Transform) -> fds.Step:
    zero = [] if stage is None else [T.zero(stage, unit_of=lambda path: path)]
    return fds.compose(*zero, *others)(fds.train_step(lambda p, x: x, fds.sgd(0.1)))


def pulled(step: fds.Step, state: fds.State, how: str, cotangents: dict[str, Tensor]) -> list[Tensor]:
    """The stored leaves' gradients, from a loss that is linear in the params, or from their gradients by path."""
    view = step.view(state)
    try:
        with view.scope():
            params = view.params
            loss = sum((params[path] * c).sum() for path, c in cotangents.items()) if how == "loss" else None
        outputs = [(params[path], c) for path, c in cotangents.items()] if loss is None else [(loss, None)]
        return view.pull(outputs, None, True).wait().sums
    finally:
        view.close()


def dot(ones: Any, others: Any) -> Tensor:
    return sum(((one.reshape(-1) * other.reshape(-1)).sum() for one, other in zip(ones, others, strict=True)), torch.zeros(()))


def transposed(stage: int | None, how: str, seed: int) -> None:
    """⟨pull(c), dp⟩ = ⟨c, view(dp)⟩, summed over the ranks."""
    step, here = step_of(stage), comm.world()
    dp, c = integers(seed), integers(seed + 1 + here.rank)
    state = step.init(integers(0))
    stored = step.trained(step.init(dp))
    mine = dot(pulled(step, state, how, c), stored)
    left = mine if stage == 0 or stage is None else comm.all_reduce(mine)
    right = comm.all_reduce(dot(c.values(), dp.values()))
    assert torch.equal(left, right)


def linear(stage: int | None, how: str, seed: int) -> None:
    """pull(c) + pull(d) = pull(c + d)."""
    step, rank = step_of(stage), comm.world().rank
    c, d = integers(seed + rank), integers(seed + 9 + rank)
    state = step.init(integers(0))
    total = [one + other for one, other in zip(*(pulled(step, state, how, each) for each in (c, d)), strict=True)]
    both = pulled(step, state, how, {path: c[path] + d[path] for path in c})
    assert all(map(torch.equal, total, both))


@pytest.mark.law(64)
@pytest.mark.parametrize("how", ["loss", "gradients by path"])
@pytest.mark.parametrize("stage", [None, 0, 1, 2, 3])
@given(seed=st.integers(1, 1000))
def test_pull_is_the_transpose_of_view(stage: int | None, how: str, seed: int) -> None:
    n = 1 if stage is None else 3
    comm.simulate(transposed, stage, how, seed, world_size=n)
    comm.simulate(linear, stage, how, seed, world_size=n)


@pytest.mark.law(64)
@pytest.mark.parametrize("stage", [None, 0, 1, 2, 3])
def test_a_mapped_view(stage: int | None) -> None:
    """Gradients flow back through what a transform makes of the params, by path, too."""

    def doubled(inner: Any, step: Any, state: Any, trains: bool, whole: bool) -> fds.View:
        return inner(step, state, trains, whole).map(lambda params: {path: 2 * leaf for path, leaf in params.items()})

    def program(how: str) -> None:
        c = integers(1)
        plain, step = step_of(stage), step_of(stage, fds.wrap("doubled", view=doubled))
        one, other = pulled(plain, plain.init(integers(0)), how, c), pulled(step, step.init(integers(0)), how, c)
        assert all(torch.equal(2 * grad, twice) for grad, twice in zip(one, other, strict=True))

    for how in ("loss", "gradients by path"):
        comm.simulate(program, how, world_size=1 if stage is None else 2)


def test_a_view_gives_its_gradients_once() -> None:
    def program() -> None:
        step = step_of(3)
        view = step.view(step.init(integers(0)))
        pulling = view.pull([(leaf, torch.ones_like(leaf)) for leaf in view.params.values()], None, True)
        pulling.wait()
        with pytest.raises(RuntimeError, match="taken already"):
            pulling.wait()
        view.close()
        with pytest.raises(RuntimeError, match="closed"):
            view.pull((), None, True)

    comm.simulate(program, world_size=2)


def gradients_lie_apart() -> None:
    """Autograd gives leaves that are added one tensor, joined ones parts of one, and summed ones an expanded number."""
    x = torch.arange(1.0, 4.0)
    view = (step := step_of(None)).view(step.init({name: torch.ones(3) for name in "abcdef"}))
    a, b, c, d, e, f = view.params.values()
    loss = ((a + b) * x).sum() + (torch.cat([c, d]) * torch.cat([x, 2 * x])).sum() + (e.sum() + f.sum())
    grads = view.pull([(loss, None)], None, True).wait().sums
    for grad in grads:
        grad.mul_(2)  # as an update may
    assert [grad.tolist() for grad in grads] == [(2 * y).tolist() for y in (x, x, x, 2 * x, torch.ones(3), torch.ones(3))]


def test_gradients_lie_apart() -> None:
    gradients_lie_apart()


def torchs_errors() -> None:
    """A backward pass of one's own has torch's checks, and torch's function modes."""
    view = (step := step_of(None)).view(step.init(integers(0)))
    (leaf, *_) = view.params.values()
    for outputs, words in (
        ([(2 * leaf, torch.ones(7))], "Mismatch in shape"),
        ([(2 * leaf, None)], "only for scalar outputs"),
        ([((1j * leaf).sum(), None)], "only for real scalar outputs"),
    ):
        with pytest.raises(RuntimeError, match=words):
            view.pull(outputs, None, True)

    class Seen(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            names.append(func.__name__)
            return func(*args, **(kwargs or {}))

    names: list[str] = []
    loss = leaf.sum()
    with Seen():
        view.pull([(loss, None)], None, True).wait()
    assert "grad" in names


def test_torchs_errors() -> None:
    torchs_errors()


BUGS = [
    Bug(
        "gradients by path stay where they are",
        "transforms.zero.lazy_params:LazyParams.pull",
        "given.get(self.layout.paths[leaf])",
        "None",
    ),
    Bug("a leaf's own gradient is lost", "step.views.view:differentiate", "id(x) in places", "False"),
    Bug("a leaf has no checks", "step.views.view:_is_plain", "has_torch_function((*roots, *leaves))", "False"),
    Bug("a leaf takes any shape", "step.views.view:_is_plain", "x.shape == seed.shape", "True"),
    Bug("one leaf's gradient is another's", "step.views.plain_view:_apart", "first[storage] == place", "True"),
    Bug("a leaf's gradient is one number", "step.views.plain_view:_apart", "0 not in grads[place].stride()", "True"),
]


@pytest.mark.parametrize(
    ("bug", "check"),
    [
        (BUGS[0], lambda: transposed(2, "gradients by path", 1)),
        (BUGS[1], lambda: transposed(None, "gradients by path", 1)),
        (BUGS[2], torchs_errors),
        (BUGS[3], torchs_errors),
        (BUGS[4], gradients_lie_apart),
        (BUGS[5], gradients_lie_apart),
    ],
    ids=[bug.name for bug in BUGS],
)
def test_planted_bugs(bug: Bug, check: Callable[[], None]) -> None:
    with planted(bug), pytest.raises(Exception):  # noqa: B017, PT011
        comm.simulate(check, world_size=1 if "leaf" in bug.name else 2)
