"""Programs in fp64 are right to fp64's precision: nothing on the way, a weight or a rate, is fp32."""

import math
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import functional_ds as fds
from functional_ds import comm
from functional_ds import transforms as T
from functional_ds.optim.matrix.muon import orthogonalize
from tests.planting import Bug, planted

STEPS, RTOL, LR, DECAY = 6, 1e-13, 0.02, 0.1
Rule = Callable[[Tensor, Tensor, dict[str, Any], int, float], Tensor]


def draws(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def fresh() -> dict[str, Tensor]:
    return {"a": draws(0, 5, 4), "b": draws(1, 4), "c": draws(2, 3).to(torch.complex128) * (1 + 0.5j)}


def batch(step: int) -> tuple[Tensor, Tensor]:
    return draws(step + 10, 12, 5), draws(step + 90, 12).abs() + 0.1


def errors(params: Mapping[str, Tensor], x: Tensor) -> Tensor:
    y = (x @ params["a"] + params["b"]).tanh() - x[:, :4]
    return y.square().mean(1) + (params["c"] * x[:, :3]).abs().square().mean(1)


def torchs(make: Callable[[list[Tensor]], torch.optim.Optimizer]) -> Any:
    def begin(params: dict[str, Tensor]) -> Callable[[float], None]:
        optimizer = make(list(params.values()))

        def move(rate: float) -> None:
            for group in optimizer.param_groups:
                group["lr"] = LR * rate
            optimizer.step()

        return move

    return begin


def by_formula(rule: Rule) -> Any:
    def begin(params: dict[str, Tensor]) -> Callable[[float], None]:
        memory: dict[str, dict[str, Any]] = {path: {"t": 0} for path in params}

        def move(rate: float) -> None:
            for path, p in params.items():
                memory[path]["t"] += 1
                own, grad = (torch.view_as_real(x) if x.is_complex() else x for x in (p.detach(), p.grad))  # type: ignore[union-attr]
                own.copy_(rule(own, grad, memory[path], memory[path]["t"], LR * rate))

        return move

    return begin


def lion(p: Tensor, g: Tensor, m: dict[str, Any], t: int, lr: float) -> Tensor:
    mean = m.get("m", torch.zeros_like(p))
    m["m"] = 0.99 * mean + 0.01 * g
    return p - lr * ((0.9 * mean + 0.1 * g).sign() + DECAY * p)


def lamb(p: Tensor, g: Tensor, m: dict[str, Any], t: int, lr: float) -> Tensor:
    m["m"] = 0.9 * m.get("m", 0) + 0.1 * g
    m["v"] = 0.999 * m.get("v", 0) + 0.001 * g * g
    change = (m["m"] / (1 - 0.9**t)) / ((m["v"] / (1 - 0.999**t)).sqrt() + 1e-6) + DECAY * p
    return p - lr * (p.norm() / change.norm()).clamp(0, 10) * change


def muon(p: Tensor, g: Tensor, m: dict[str, Any], t: int, lr: float) -> Tensor:
    if p.shape != (5, 4):
        return p - lr * g
    m["m"] = 0.95 * m.get("m", 0) + 0.05 * g
    ahead = orthogonalize(g + 0.95 * (m["m"] - g))
    return p * (1 - lr * DECAY) - lr * math.sqrt(5 / 4) * ahead


def shampoo(p: Tensor, g: Tensor, m: dict[str, Any], t: int, lr: float) -> Tensor:
    if p.shape != (5, 4):
        return p - lr * g
    m["m"] = m.get("m", 0) + g
    return p * (1 - lr * DECAY) - lr * m["m"] / m["m"].norm()


def _normed(grad: Tensor, total: Tensor, step: int) -> tuple[Tensor, Tensor]:
    return (total + grad) / (total + grad).norm(), total + grad


RULES: dict[str, tuple[Any, Any]] = {
    "adam": (fds.adam(LR, weight_decay=DECAY), torchs(lambda p: torch.optim.Adam(p, weight_decay=DECAY, foreach=False))),
    "adamw": (fds.adamw(LR, weight_decay=DECAY), torchs(lambda p: torch.optim.AdamW(p, weight_decay=DECAY, foreach=False))),
    "sgd": (
        fds.sgd(LR, momentum=0.9, nesterov=True, weight_decay=DECAY),
        torchs(lambda p: torch.optim.SGD(p, momentum=0.9, nesterov=True, weight_decay=DECAY)),
    ),
    "adagrad": (fds.adagrad(LR, weight_decay=DECAY), torchs(lambda p: torch.optim.Adagrad(p, weight_decay=DECAY))),
    "param_groups": (fds.param_groups({"a": fds.sgd(LR)}, fds.sgd(LR)), torchs(torch.optim.SGD)),
    "lion": (fds.lion(LR, weight_decay=DECAY), by_formula(lion)),
    "lamb": (fds.lamb(LR, weight_decay=DECAY), by_formula(lamb)),
    "muon": (fds.muon(LR, fds.sgd(LR), weight_decay=DECAY, dtype=torch.float64), by_formula(muon)),
    "per_matrix": (
        fds.per_matrix(torch.zeros_like, _normed, lr=LR, others=fds.sgd(LR), weight_decay=DECAY),
        by_formula(shampoo),
    ),
}
SCHEDULES: dict[str, tuple[Any, Callable[[int], float]]] = {
    "none": (None, lambda i: 1.0),
    "python": (lambda n: 0.7 ** int(n), lambda i: 0.7**i),
    "own, with dtype": (lambda n, dtype: 1 / (n.to(dtype) + 3), lambda i: 1 / (i + 3)),
    "warmup": (T.warmup(3, floor=0.1), lambda i: 0.1 + 0.9 * min(1, (i + 1) / 3)),
    "warmup from 0": (T.warmup(3), lambda i: min(1, (i + 1) / 3)),
    "log warmup": (T.warmup(7, shape="log"), lambda i: min(1, math.log(i + 1) / math.log(7))),
    "warmup_decay": (T.warmup_decay(3, 7), lambda i: min(1, (i + 1) / 3, max(0, (7 - i) / 4))),
    "one_cycle": (
        T.one_cycle(3, 2, floor=0.3, decay=0.7),
        lambda i: 0.3 + 0.7 * min((i + 1) / 3, (4 - i) / 2) if i < 5 else 0.3 / (1 + 0.7 * (i - 4)),
    ),
    "range_test": (T.range_test(3, rate=0.4), lambda i: 1 + 0.4 * (i + 1) / 3),
    "warmup_cosine": (
        T.warmup_cosine(3, 7, floor=0.1),
        lambda i: (i + 1) / 3 if i < 3 else 0.1 + 0.45 * (1 + math.cos(math.pi * (i - 3) / 4)),
    ),
}


def plain(
    rule: str, schedule: str, clip: float | None, weighted: bool, ema: float
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The params, and their mean, by torch alone."""
    params = {path: leaf.requires_grad_() for path, leaf in fresh().items()}
    move, mean = RULES[rule][1](params), {path: leaf.detach().clone() for path, leaf in params.items()}
    for i in range(STEPS):
        x, weights = batch(i)
        loss = (errors(params, x) * weights).sum() / weights.sum() if weighted else errors(params, x).mean()
        grads = torch.autograd.grad(loss, list(params.values()))
        norm = torch.stack([grad.norm() for grad in grads]).norm()
        factor = 1.0 if clip is None else min(1.0, clip / (norm.item() + 1e-6))
        for leaf, grad in zip(params.values(), grads, strict=True):
            leaf.grad = grad * factor
        move(SCHEDULES[schedule][1](i))
        mean = {path: ema * mean[path] + (1 - ema) * leaf.detach() for path, leaf in params.items()}
    return {path: leaf.detach() for path, leaf in params.items()}, mean


def check(
    rule: str, *, schedule: str, clip: float | None, weighted: bool, parts: int, stage: int | None, n: int, scaled: bool
) -> None:
    def loss(params: Any, given: tuple[Tensor, Tensor]) -> Any:
        return _weighted(params, given) if weighted else errors(params, given[0]).mean()

    def program() -> Any:
        chain = [T.ema(0.7), *([T.mixed_precision("params=f64,compute=f64,output=f64", 8.0)] if scaled else [])]
        chain += [] if stage is None else [T.zero(stage)]
        chain += [] if schedule == "none" else [T.schedule(SCHEDULES[schedule][0])]
        chain += [] if clip is None else [T.clip(clip)]
        step = fds.compose(*chain, T.accumulate(parts))(fds.train_step(loss, RULES[rule][0]))
        state = step.init(fresh())
        for i in range(STEPS):
            index, count = step.batch_shard(state)
            state, metrics = step(state, tuple(x.tensor_split(count)[index] for x in batch(i)))
            assert metrics["loss"].dtype == torch.float64
            if schedule != "none":
                assert metrics["rate"].item() == pytest.approx(SCHEDULES[schedule][1](i), rel=1e-15)
        return step.params(state), T.averaged(step, state)

    expected = plain(rule, schedule, clip, weighted, 0.7)
    for found in comm.simulate(program, world_size=n):
        for one, other in zip(found, expected, strict=True):
            for path, leaf in other.items():
                assert (one[path] - leaf).abs().max() <= RTOL * leaf.abs().max(), path


@pytest.mark.parametrize("rule", RULES)
@given(data=st.data())
def test_fp64_programs_are_plain_torchs(rule: str, data: st.DataObject) -> None:
    stage = data.draw(st.sampled_from([None, 0, 1, 2, 3]))
    check(
        rule,
        schedule=data.draw(st.sampled_from(sorted(SCHEDULES))),
        clip=data.draw(st.sampled_from([None, 0.01])),
        weighted=data.draw(st.booleans()),
        parts=data.draw(st.sampled_from([1, 2])),
        stage=stage,
        n=1 if stage is None else data.draw(st.sampled_from([1, 2, 3])),
        scaled=data.draw(st.booleans()),
    )


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_each_schedule(schedule: str) -> None:
    check("adamw", schedule=schedule, clip=0.01, weighted=True, parts=2, stage=1, n=2, scaled=False)


def test_over_processes() -> None:
    comm.spawn(_on_ranks, world_size=2)


def _weighted(params: Any, given: tuple[Tensor, Tensor]) -> fds.Weighted:
    return fds.Weighted((errors(params, given[0]) * given[1]).sum(), given[1].sum())


def _on_ranks() -> None:
    step = fds.compose(T.zero(2), T.schedule(T.warmup(3)), T.clip(0.01))(fds.train_step(_weighted, RULES["adam"][0]))
    state = step.init(fresh())
    for i in range(STEPS):
        index, count = step.batch_shard(state)
        state, _ = step(state, tuple(x.tensor_split(count)[index] for x in batch(i)))
    expected, found = plain("adam", "warmup from 0", 0.01, True, 0.7)[0], step.params(state)
    for path, leaf in expected.items():
        assert (found[path] - leaf).abs().max() <= RTOL * leaf.abs().max(), path


def test_fp32_leaves_beside_fp64_ones_move_by_an_fp32_weight() -> None:
    """The kernels take fp32 alone there; each leaf is right to its own precision."""
    start = {"narrow": draws(0, 9).float(), "wide": draws(1, 9)}

    def loss(params: Any, x: Tensor) -> Any:
        return fds.Weighted((params["narrow"] * x).square().sum() + (params["wide"] * x).square().sum(), 3.7)

    for rule, theirs in (
        (fds.adam(LR), torch.optim.Adam),
        (fds.sgd(LR, momentum=0.9), lambda p, lr: torch.optim.SGD(p, lr, 0.9)),
    ):
        step = fds.compose(T.schedule(T.warmup(3)), T.clip(0.5))(fds.train_step(loss, rule))
        state, params = step.init(start), {path: leaf.clone().requires_grad_() for path, leaf in start.items()}
        optimizer = theirs(list(params.values()), LR)
        for i in range(STEPS):
            state, _ = step(state, draws(i + 5, 9))
            found = loss(params, draws(i + 5, 9))
            optimizer.zero_grad()
            (found.sum / found.weight).backward()
            torch.nn.utils.clip_grad_norm_(params.values(), 0.5)
            for group in optimizer.param_groups:
                group["lr"] = LR * min(1, (i + 1) / 3)
            optimizer.step()
        for path, rtol in (("narrow", 1e-6), ("wide", 1e-13)):  # the norm is partly of fp32 gradients
            torch.testing.assert_close(step.params(state)[path], params[path].detach(), rtol=max(rtol, 1e-7), atol=0)


@pytest.mark.parametrize(
    ("bug", "case"),
    [
        (
            Bug(
                "a weight in fp32",
                "base.weighted:weight_dtype",
                "torch.float64 if dtype in (torch.float64, torch.complex128) else torch.float32",
                "torch.float32 if dtype in (torch.float64, torch.complex128) else torch.float32",
            ),
            {"schedule": "none", "clip": None},
        ),
        (
            Bug(
                "a rate in fp32",
                "transforms.schedule:_rate_dtype",
                "torch.float64 if dtypes & {torch.float64, torch.complex128} else torch.float32",
                "torch.float32 if dtypes & {torch.float64, torch.complex128} else torch.float32",
            ),
            {"schedule": "warmup", "clip": None},
        ),
        (
            Bug("fp64 gradients not divided", "optim.kernels:_run_wide", "means(grads, params)", "gradients(grads, params)"),
            {"schedule": "none", "clip": None},
        ),
    ],
    ids=lambda given: getattr(given, "name", ""),
)
def test_a_planted_bug_breaks_the_law(bug: Bug, case: Any) -> None:
    rest: dict[str, Any] = {"weighted": True, "parts": 1, "stage": None, "n": 1, "scaled": False}
    check("sgd", **case, **rest)
    with planted(bug), pytest.raises((bug.shows, RuntimeError)):
        check("sgd", **case, **rest)


def test_unused_leaves_where_the_default_dtype_is_fp64() -> None:
    torch.set_default_dtype(torch.float64)
    try:
        for rule in (fds.adamw(LR), fds.sgd(LR, momentum=0.9), fds.adagrad(LR), fds.lamb(LR)):
            step = fds.train_step(lambda params, x: (params["a"] * x).mean(), rule)
            state = step.init({"a": torch.ones(3), "idle": torch.ones(2)})
            for i in range(2):
                state, _ = step(state, torch.arange(3.0) + i)
            assert torch.equal(step.params(state)["idle"], torch.ones(2))
            assert not torch.equal(step.params(state)["a"], torch.ones(3))
    finally:
        torch.set_default_dtype(torch.float32)
