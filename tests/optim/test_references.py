"""Each optimizer against torch's class of its name, or its paper's formula, on one device."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

import functional_ds as fds
from functional_ds.optim.matrix.muon import orthogonalize

STEPS = 5
LATER = 1e-6  # of a param of about 1: a few roundings of fp32 an update, where the order of operations is another


def loss(params: Any, batch: Tensor) -> Tensor:
    return (torch.tanh(batch @ params["body.w"] + params["body.b"]) @ params["head"]).square().mean()


def fresh() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(4)
    shapes = {"body.w": (4, 6), "body.b": (6,), "head": (6, 2)}
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def batch() -> Tensor:
    return torch.randn(8, 4, generator=torch.Generator().manual_seed(1))


def trained(optimizer: Any) -> dict[str, Tensor]:
    step = fds.train_step(loss, optimizer)
    state = step.init(fresh())
    for _ in range(STEPS):
        state, _ = step(state, batch())
    return step.params(state)  # type: ignore[no-any-return]


def by_torch(make: Callable[[dict[str, Tensor]], Sequence[torch.optim.Optimizer]]) -> dict[str, Tensor]:
    params = {name: p.requires_grad_() for name, p in fresh().items()}
    optimizers = make(params)
    for _ in range(STEPS):
        for p in params.values():
            p.grad = None
        loss(params, batch()).backward()
        for optimizer in optimizers:
            optimizer.step()
    return {name: p.detach() for name, p in params.items()}


def by_formula(rule: Callable[[str, Tensor, Tensor, dict[str, Tensor], int], Tensor]) -> dict[str, Tensor]:
    """``rule(name, w, gradient, memory, t)`` gives the new w; the memory is a leaf's own."""
    params, memory = fresh(), {name: {} for name in fresh()}  # type: ignore[var-annotated]
    for t in range(1, STEPS + 1):
        leaves = {name: p.requires_grad_() for name, p in params.items()}
        grads = dict(zip(leaves, torch.autograd.grad(loss(leaves, batch()), list(leaves.values())), strict=True))
        params = {name: rule(name, p.detach(), grads[name], memory[name], t) for name, p in leaves.items()}
    return params


SAME_KERNEL = {
    "adam": (fds.adam(0.1), lambda p: [torch.optim.Adam(p.values(), 0.1, fused=True)]),
    "adam, decay": (
        fds.adam(0.1, betas=(0.8, 0.9), eps=1e-6, weight_decay=0.2),
        lambda p: [torch.optim.Adam(p.values(), 0.1, (0.8, 0.9), 1e-6, 0.2, fused=True)],
    ),
    "adamw": (
        fds.adamw(0.1, betas=(0.8, 0.9), eps=1e-6, weight_decay=0.2),
        lambda p: [torch.optim.AdamW(p.values(), 0.1, (0.8, 0.9), 1e-6, 0.2, fused=True)],
    ),
    "adamw, only the head decays": (
        fds.adamw(0.1, weight_decay=0.2, decay="^head"),
        lambda p: [
            torch.optim.AdamW([p["head"]], 0.1, weight_decay=0.2, fused=True),
            torch.optim.AdamW([p["body.w"], p["body.b"]], 0.1, weight_decay=0.0, fused=True),
        ],
    ),
    "sgd": (fds.sgd(0.1, weight_decay=0.2), lambda p: [torch.optim.SGD(p.values(), 0.1, weight_decay=0.2, fused=True)]),
    "sgd, momentum": (fds.sgd(0.1, momentum=0.9), lambda p: [torch.optim.SGD(p.values(), 0.1, 0.9, fused=True)]),
    "sgd, nesterov": (
        fds.sgd(0.1, momentum=0.9, nesterov=True, weight_decay=0.3, decay=lambda path: path.endswith("b")),
        lambda p: [
            torch.optim.SGD([p["body.b"]], 0.1, 0.9, weight_decay=0.3, nesterov=True, fused=True),
            torch.optim.SGD([p["body.w"], p["head"]], 0.1, 0.9, nesterov=True, fused=True),
        ],
    ),
    "adagrad": (
        fds.adagrad(0.1, initial=0.5, weight_decay=0.2),
        lambda p: [torch.optim.Adagrad(p.values(), 0.1, weight_decay=0.2, initial_accumulator_value=0.5, fused=True)],
    ),
    "one for each": (
        fds.param_groups({"w$": fds.adagrad(0.1), "^body": fds.sgd(0.2)}, fds.adam(0.05)),
        lambda p: [
            torch.optim.Adagrad([p["body.w"]], 0.1, fused=True),
            torch.optim.SGD([p["body.b"]], 0.2, fused=True),
            torch.optim.Adam([p["head"]], 0.05, fused=True),
        ],
    ),
}


@pytest.mark.parametrize("name", sorted(SAME_KERNEL))
def test_torchs_kernels_give_torchs_bits(name: str) -> None:
    ours, theirs = SAME_KERNEL[name]
    found, expected = trained(ours), by_torch(theirs)
    for path, value in expected.items():
        assert torch.equal(found[path], value), path


UNFUSED: dict[str, tuple[Any, Callable[[list[Tensor]], torch.optim.Optimizer]]] = {
    "adamw": (fds.adamw(0.1), lambda p: torch.optim.AdamW(p, 0.1, foreach=False)),
    "adam": (fds.adam(0.1), lambda p: torch.optim.Adam(p, 0.1, foreach=False)),
    "sgd": (fds.sgd(0.5, weight_decay=0.25), lambda p: torch.optim.SGD(p, 0.5, weight_decay=0.25, foreach=False)),
    "sgd with momentum": (fds.sgd(0.5, momentum=0.5), lambda p: torch.optim.SGD(p, 0.5, 0.5, foreach=False)),
    "adagrad": (fds.adagrad(0.1), lambda p: torch.optim.Adagrad(p, 0.1, foreach=False)),
}


@pytest.mark.parametrize("name", sorted(UNFUSED))
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_moves(name: str, dtype: torch.dtype) -> None:
    """As with torch's class that is not fused, but for roundings, in tensors of whole vectors and some more, and of fewer."""
    ours, theirs = UNFUSED[name]
    start = {"long": torch.linspace(0.5, 2, 67).to(dtype), "short": torch.ones(3, dtype=dtype), "wide": torch.ones(40)}
    step = fds.train_step(lambda params, x: sum((p.float() * p.float()).sum() for p in params.values()), ours)
    state = step.init(start)
    expected = {path: p.clone().requires_grad_() for path, p in start.items()}
    optimizer = theirs(list(expected.values()))
    for _ in range(2):
        state, _ = step(state, torch.ones(1))
        optimizer.zero_grad()
        torch.stack([(p.float() * p.float()).sum() for p in expected.values()]).sum().backward()
        optimizer.step()
    for path, p in step.params(state).items():
        torch.testing.assert_close(p, expected[path].detach(), rtol=0.02, atol=0.01)
        assert (p != start[path]).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.complex64])
@pytest.mark.parametrize("rule", [fds.sgd(0.25), fds.adamw(0.25), fds.adagrad(0.25), fds.lion(0.25), fds.lamb(0.25)], ids=str)
def test_scalars_move(rule: Any, dtype: torch.dtype) -> None:
    """A leaf of no dimension, which torch promotes less than others."""
    step = fds.train_step(lambda p, x: sum((leaf * leaf.conj()).real.float().sum() for leaf in p.values()), rule)
    state = step.init({"s": torch.ones((), dtype=dtype), "v": torch.ones(1, dtype=dtype)})
    for _ in range(2):
        state, _ = step(state, torch.ones(1))
    found = step.params(state)
    assert found["s"].dtype == dtype
    torch.testing.assert_close(found["s"], found["v"][0])
    assert found["s"] != 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["lion", "lamb", "muon", "pair"])
def test_weights_that_half_precision_does_not_hold(name: str, dtype: torch.dtype) -> None:
    """``Weighted(70000 x, 70000)`` moves as ``Weighted(x, 1)`` does."""

    class Plain:
        def init(self, params: list[Tensor]) -> tuple[()]:
            return ()

        def update(self, grads: list[Tensor], state: Any, params: Any = None) -> Any:
            return [-0.5 * grad for grad in grads], state

    rules = {"lion": fds.lion(0.25), "lamb": fds.lamb(0.25), "muon": fds.muon(0.25, fds.lion(0.25)), "pair": Plain()}

    def moved(weight: float) -> Any:
        step = fds.train_step(lambda p, x: fds.Weighted((p["w"].float() * x).sum() * weight, weight), rules[name])
        state, _ = step(step.init({"w": torch.ones(2, 2, dtype=dtype)}), torch.tensor([[0.5, -0.25], [0.125, 0.5]]))
        return step.params(state)["w"]

    torch.testing.assert_close(moved(70000.0), moved(1.0), rtol=0.01, atol=0)
    assert (moved(70000.0) != 1).all()


@pytest.mark.parametrize("adjust", ["original", "match_rms_adamw"])
@pytest.mark.parametrize("nesterov", [True, False])
def test_muon_is_torchs(adjust: Any, nesterov: bool) -> None:
    """With AdamW for what is no matrix, and for a matrix that is not among those named."""
    ours = fds.muon(0.05, fds.adamw(0.01), nesterov=nesterov, momentum=0.9, adjust=adjust, matrices="^body")
    expected = by_torch(
        lambda p: [
            torch.optim.Muon([p["body.w"]], 0.05, 0.1, 0.9, nesterov, adjust_lr_fn=adjust),
            torch.optim.AdamW([p["body.b"], p["head"]], 0.01, fused=True),
        ]
    )
    found = trained(ours)
    for path in ("body.b", "head"):  # they see the matrix's rounding through the loss
        torch.testing.assert_close(found[path], expected[path], rtol=LATER, atol=LATER)
    torch.testing.assert_close(found["body.w"], expected["body.w"], rtol=LATER, atol=LATER)


@pytest.mark.parametrize("shape", [(3, 5), (5, 3), (4, 4), (1, 6)])
@pytest.mark.parametrize("steps", [1, 5])
def test_orthogonalizing_is_torchs(shape: tuple[int, int], steps: int) -> None:
    """Bit for bit, in bf16: what Muon subtracts from zeros at a learning rate of one."""
    grad = torch.randn(shape, generator=torch.Generator().manual_seed(2))
    p = torch.zeros(shape, requires_grad=True)
    p.grad = grad
    torch.optim.Muon([p], 1.0, 0.0, 0.0, nesterov=False, ns_steps=steps, adjust_lr_fn="original").step()
    ratio = max(1, shape[0] / shape[1]) ** 0.5
    assert torch.equal(torch.zeros(shape).sub_(orthogonalize(grad.bfloat16(), steps=steps).float() * ratio), p.detach())


@pytest.mark.parametrize("weight_decay", [0.0, 0.2])
def test_lion_is_its_papers(weight_decay: float) -> None:
    """Chen et al. 2023, program 1."""

    def rule(name: str, w: Tensor, g: Tensor, memory: dict[str, Tensor], t: int) -> Tensor:
        m = memory.get("m", torch.zeros_like(w))
        update = (0.9 * m + 0.1 * g).sign() + weight_decay * w
        memory["m"] = 0.99 * m + 0.01 * g
        return w - 0.01 * update

    found = trained(fds.lion(0.01, weight_decay=weight_decay))
    for path, value in by_formula(rule).items():
        torch.testing.assert_close(found[path], value, rtol=LATER, atol=LATER)


@pytest.mark.parametrize("trust", [(0.0, float("inf")), (0.01, 0.5)])
def test_lamb_is_its_papers(trust: tuple[float, float]) -> None:
    """You et al. 2020, algorithm 2, a layer being a leaf; weight decay for the body alone."""

    def rule(name: str, w: Tensor, g: Tensor, memory: dict[str, Tensor], t: int) -> Tensor:
        m = memory["m"] = 0.9 * memory.get("m", torch.zeros_like(w)) + 0.1 * g
        v = memory["v"] = 0.99 * memory.get("v", torch.zeros_like(w)) + 0.01 * g * g
        r = (m / (1 - 0.9**t)) / ((v / (1 - 0.99**t)).sqrt() + 1e-6)
        r = r + (0.2 if name.startswith("body") else 0.0) * w
        return w - 0.05 * float(torch.clamp(w.norm() / r.norm(), *trust)) * r

    found = trained(fds.lamb(0.05, betas=(0.9, 0.99), weight_decay=0.2, trust=trust, decay="^body"))
    for path, value in by_formula(rule).items():
        torch.testing.assert_close(found[path], value, rtol=10 * LATER, atol=10 * LATER)  # two norms more


def test_lamb_moves_zeros() -> None:
    """Where a norm is zero the ratio is one, not zero and not NaN."""
    step = fds.train_step(lambda p, x: (p["w"] * x).sum() + 0 * p["b"].sum(), fds.lamb(0.5))
    state, _ = step(step.init({"w": torch.zeros(2), "b": torch.ones(2)}), torch.ones(2))
    params = step.params(state)
    torch.testing.assert_close(params["w"], torch.full((2,), -0.5))
    assert torch.equal(params["b"], torch.ones(2))


def test_complex_leaves() -> None:
    """They are pairs of reals: Adam on a complex leaf is Adam on its parts; LAMB's norm is that of the parts."""
    start = torch.tensor([1 + 2j, -3 + 0.5j])

    def moved(optimizer: Any, start: Tensor) -> Tensor:
        step = fds.train_step(lambda p, x: ((p["z"] if x is None else p["z"] * x).abs() ** 2).sum(), optimizer)
        state = step.init({"z": start})
        for _ in range(3):
            state, _ = step(state, torch.ones(1))
        return step.params(state)["z"]  # type: ignore[no-any-return]

    rules = (fds.adam(0.1), fds.adagrad(0.1), fds.lion(0.1, weight_decay=0.1), fds.lamb(0.1), fds.muon(0.1, fds.adamw(0.1)))
    for rule in rules:
        both = torch.view_as_real(moved(rule, start))
        apart = moved(rule if "muon" not in str(rule) else fds.adamw(0.1), torch.view_as_real(start).clone())
        torch.testing.assert_close(both, apart, rtol=LATER, atol=LATER)


def test_decay_may_name_what_another_rule_moves() -> None:
    """A mask for the whole model: those of its leaves that are matrices decay as Muon has it, or as another rule does."""
    plain, decaying = fds.lion(0.1), fds.lion(0.1, weight_decay=0.5, decay="w$|^head")
    for rule in (lambda rest: fds.muon(0.1, rest), lambda rest: fds.param_groups({"w$|^head": fds.sgd(0.1)}, rest)):
        found, expected = trained(rule(decaying)), trained(rule(plain))
        for path, value in expected.items():
            assert torch.equal(found[path], value), path
    with pytest.raises(ValueError, match="decay='weigh' matches no trained leaf; the nearest is"):
        trained(fds.muon(0.1, fds.lion(0.1, weight_decay=0.5, decay="weigh")))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: fds.adam(-1), "lr=-1"),
        (lambda: fds.adamw(float("inf")), "lr=inf must be finite"),
        (lambda: trained(fds.adamw(1, decay="(")), r"decay='\(' is not a regular expression"),
        (lambda: fds.adam(1, betas=(0.9, 1.0)), "betas"),
        (lambda: fds.adagrad(1, initial=-1), "initial=-1"),
        (lambda: fds.lion(1, betas=(1.0, 0.9)), "betas"),
        (lambda: fds.lamb(1, trust=(2.0, 1.0)), "trust"),
        (lambda: fds.muon(1, fds.sgd(1), momentum=1.0), "momentum=1.0"),
        (lambda: fds.muon(1, fds.sgd(1), steps=0), "steps=0"),
        (lambda: fds.muon(1, fds.sgd(1), adjust="max"), "adjust='max'"),  # type: ignore[arg-type]
        (
            lambda: fds.train_step(loss, fds.param_groups({"boddy": fds.sgd(1)}, fds.sgd(1))).init(fresh()),
            "nearest is 'bod",
        ),
        (lambda: fds.train_step(loss, fds.adamw(1, decay="weigh")).init(fresh()), "decay='weigh' matches no trained leaf"),
        (lambda: fds.train_step(loss, fds.muon(1, fds.sgd(1), matrices="x")).init(fresh()), "matrices='x'"),
    ],
)
def test_bad_input(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_others_must_be_optimizers() -> None:
    with pytest.raises(TypeError, match=r"torch\.optim\.AdamW changes parameters of its own in place"):
        fds.muon(0.1, torch.optim.AdamW)
    with pytest.raises(TypeError, match="neither an fds optimizer"):
        fds.param_groups({"w": 3}, fds.sgd(0.1))


def test_a_rule_without_leaves_does_nothing() -> None:
    """All leaves decay, or none is a matrix."""
    assert torch.equal(trained(fds.adamw(0.1, decay=""))["head"], trained(fds.adamw(0.1))["head"])
    step = fds.train_step(lambda p, x: (p["b"] * x).sum(), fds.muon(0.1, fds.sgd(0.5)))
    state, _ = step(step.init({"b": torch.zeros(2)}), torch.ones(2))
    assert step.params(state)["b"].tolist() == [-0.5, -0.5]
