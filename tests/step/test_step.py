"""Steps: donation, evaluation, order of transforms, records, bad input."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import functional_ds as fds
from functional_ds import comm, transforms
from functional_ds import pipelining as pp
from functional_ds.base.prng import Key
from functional_ds.optim.adam import AdamState
from functional_ds.optim.sgd import SGDState
from functional_ds.testing import assert_same
from tests.transforms.models import CASES, own_rows, run


def square(params: Any, batch: Tensor) -> Tensor:
    return ((batch @ params["w"]) ** 2).mean()


def started(*strategy: fds.Transform, optimizer: Any = None) -> tuple[fds.Step, fds.State, Tensor]:
    step = fds.compose(*strategy)(fds.train_step(square, optimizer or fds.adamw(0.1)))
    return step, step.init({"w": torch.arange(6.0).view(3, 2)}), torch.ones(4, 3)


@pytest.mark.law(26)
@given(seed=st.integers(0, 9))
def test_records_survive_flattening(seed: int) -> None:
    """unflatten ∘ flatten = id on every record, static fields and defaults included."""
    step, state, batch = started(transforms.mixed_precision(), transforms.zero(3))
    state, _ = step(state, batch)
    records = [
        state,
        state.slots["zero"],
        Key.of(seed),
        fds.Weighted(torch.ones(2), torch.ones(())),
        AdamState([torch.ones(1)], [torch.ones(2)], [torch.ones(3)]),
        SGDState([torch.ones(2)]),
    ]
    for record in records:
        leaves, spec = fds.tree.flatten(record)
        back = fds.tree.unflatten(spec, leaves)
        assert type(back) is type(record)
        again, same = fds.tree.flatten(back)
        assert same == spec
        assert all(a is b for a, b in zip(again, leaves, strict=True))
    assert fds.tree.unflatten(*reversed(fds.tree.flatten(state))).batch == state.batch
    assert state.batch is not None


@pytest.mark.law(31)
@given(stage=st.sampled_from((None, 0, 1, 2, 3)), half=st.booleans(), n=st.sampled_from((1, 2)))
def test_donation_changes_nothing_but_memory(stage: int | None, half: bool, n: int) -> None:
    """donate=True and donate=False give the same result; a kept state is untouched; a donated one raises."""
    strategy = [transforms.mixed_precision()] if half else []
    strategy += [] if stage is None else [transforms.zero(stage)]

    def program() -> None:
        step, state, batch = started(*strategy)
        state, _ = step(state, batch)
        before = fds.tree.map(torch.clone, state)
        kept, kept_metrics = step(state, batch, donate=False)
        for leaf, old in zip(fds.tree.leaves(state), fds.tree.leaves(before), strict=True):
            assert torch.equal(leaf, old)
        donated, metrics = step(state, batch)
        for leaf, other in zip(fds.tree.leaves(donated), fds.tree.leaves(kept), strict=True):
            assert torch.equal(leaf, other)
        assert torch.equal(metrics["loss"], kept_metrics["loss"])
        for use in (lambda: step(state, batch), lambda: step.params(state), lambda: state.optimizer):
            with pytest.raises(fds.DonatedStateError, match=r"donated.*donate=False"):
                use()

    comm.simulate(program, world_size=n)


def counting(fails_at: int = 99) -> fds.Transform:
    """Leaves in a slot how many gradients it has seen, and fails at some."""

    def init(inner: Any, step: fds.Step, params: Any) -> fds.State:
        return inner(step, params).put(seen=torch.zeros(()))

    def reduce(inner: Any, step: fds.Step, state: fds.State, grads: fds.Weighted) -> tuple[fds.State, fds.Weighted]:
        if state.slots["seen"] == fails_at:
            raise RuntimeError("no more")
        state, grads = inner(step, state, grads)
        return state.put(seen=state.slots["seen"] + 1), grads

    return fds.wrap("counting", slot="seen", init=init, reduce=reduce)


@pytest.mark.law(31)
@pytest.mark.parametrize("donate", [True, False])
def test_reduce_writes_state(donate: bool) -> None:
    """What ``reduce`` leaves is in the next state; the one before is donated or kept as ever, and whole after an error."""
    step, first, batch = started(counting(fails_at=1))
    second, _ = step(first, batch, donate=donate)
    assert second.slots["seen"] == 1
    if donate:
        with pytest.raises(fds.DonatedStateError):
            step.params(first)
    else:
        assert first.slots["seen"] == 0
        again, _ = step(first, batch)
        assert torch.equal(again.params["w"], second.params["w"])
    before = second.params["w"].clone()
    with pytest.raises(RuntimeError, match="no more"):
        step(second, batch)
    assert torch.equal(second.params["w"], before)


@pytest.mark.law(30)
@given(data=st.data(), n=st.sampled_from((1, 2)))
def test_transforms_of_different_phases_commute(data: st.DataObject, n: int) -> None:
    """zero(0) wraps view and total, clip update, accumulate gradients, schedule rate: any order is the same step."""
    parts = [
        transforms.zero(0),
        transforms.clip(0.05),
        transforms.accumulate(2),
        fds.wrap("half", rate=lambda inner, step, state: inner(step, state) / 2),
    ]
    order = data.draw(st.permutations(parts))
    expected = comm.simulate(lambda: run(CASES["blocks"], tuple(parts)), world_size=n)[0]
    found = comm.simulate(lambda: run(CASES["blocks"], tuple(order)), world_size=n)[0]
    assert found[:2] == expected[:2]
    for leaf, other in zip(fds.tree.leaves(found[2]), fds.tree.leaves(expected[2]), strict=True):
        assert torch.equal(leaf, other)


@given(stage=st.sampled_from((1, 2, 3)))
def test_clipping_and_sharding_commute(stage: int) -> None:
    """Both wrap phases of their own; the norm is the whole gradient's wherever clip stands."""
    inside = comm.simulate(lambda: run(CASES["mlp"], (transforms.clip(0.05), transforms.zero(stage))), world_size=2)[0]
    outside = comm.simulate(lambda: run(CASES["mlp"], (transforms.zero(stage), transforms.clip(0.05))), world_size=2)[0]
    torch.testing.assert_close(inside[:2], outside[:2], rtol=2e-5, atol=2e-5)


@pytest.mark.law(29)
@given(n=st.sampled_from((1, 2, 4)), k=st.sampled_from((1, 2)), stage=st.sampled_from((0, 1, 2, 3)))
def test_draws_depend_on_the_global_position(n: int, k: int, stage: int) -> None:
    """Dropout depends on (seed, step, global row), not on n or on micro-batches, recomputation included."""
    from torch.utils.checkpoint import checkpoint

    def loss(params: Any, batch: Tensor, key: Key | None) -> Tensor:
        def layer(x: Tensor) -> Tensor:
            hidden = torch.tanh(x @ params["w"])
            return hidden if key is None else key.dropout(hidden, 0.5, "hidden")

        return (checkpoint(layer, batch, use_reentrant=False) ** 2).mean()

    def program(*strategy: fds.Transform) -> tuple[list[float], float]:
        step = fds.compose(*strategy)(fds.train_step(loss, fds.sgd(0.5), seed=11))
        state = step.init({"w": torch.linspace(-1, 1, 15).view(3, 5)})
        batch = own_rows(torch.linspace(-1, 1, 24).view(8, 3), comm.world())
        losses = []
        for _ in range(3):
            state, metrics = step(state, batch)
            losses.append(metrics["loss"].item())
        return losses, step.evaluate(state, batch).item()

    expected = program()
    assert expected[0][0] != expected[0][1]
    strategy = (transforms.zero(stage), transforms.accumulate(k))
    for found in comm.simulate(lambda: program(*strategy), world_size=n):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


@given(p=st.floats(0, 0.9), seed=st.integers(0, 2**40))
def test_dropout_keeps_its_share(p: float, seed: int) -> None:
    """A fraction p is dropped, within five standard deviations, and other names, steps and seeds draw otherwise."""
    key, x = Key.of(seed), torch.ones(64, 64)
    dropped = (key.dropout(x, p, "a") == 0).float().mean().item()
    assert abs(dropped - p) <= 5 * (p * (1 - p) / x.numel()) ** 0.5 + 1e-9
    draws = [
        key.uniform(x, "a"),
        key.uniform(x, "b"),
        key.at(step=torch.tensor(1)).uniform(x, "a"),
        Key.of(seed + 1).uniform(x, "a"),
    ]
    assert all(not torch.equal(a, b) for i, a in enumerate(draws) for b in draws[:i])


@pytest.mark.parametrize("stage", [None, 0, 1, 2, 3])
def test_evaluate_is_the_loss_without_the_update(stage: int | None) -> None:
    """step.evaluate(state, batch) is the loss that step(state, batch) reports, and changes nothing."""

    def program() -> None:
        step, state, batch = started(*([] if stage is None else [transforms.zero(stage)]))
        before = step.evaluate(state, batch)
        assert not before.requires_grad
        again = step.evaluate(state, batch)
        _, metrics = step(state, batch)
        assert torch.equal(before, again)
        assert torch.equal(before, metrics["loss"])

    comm.simulate(program, world_size=2)


def test_metrics_of_the_loss_function() -> None:
    """A loss function may return further metrics; they are averaged with their weights over ranks and micro-batches.

    A bool is one or zero: its mean says how often it holds.
    """

    def loss(params: Any, batch: Tensor) -> Any:
        hits = fds.Weighted((batch > 1).float().sum(), float(batch.numel()))
        return ((batch * params["w"]) ** 2).mean(), {"above": hits, "small": (batch < 4).all()}

    def program() -> list[float]:
        step = fds.compose(transforms.zero(2), transforms.accumulate(2))(fds.train_step(loss, fds.sgd(0.1)))
        state = step.init({"w": torch.ones(1)})
        batch = own_rows(torch.arange(8.0), comm.world())
        found = step.measure(state, batch), step(state, batch)[1]
        return [metrics[name].item() for metrics in found for name in ("above", "small")]

    assert comm.simulate(program, world_size=2) == [[0.75, 0.5] * 2] * 2


def test_params_are_copied_and_never_changed() -> None:
    params = {"w": torch.ones(3, 2)}
    step = fds.train_step(square, fds.sgd(0.1))
    state, _ = step(step.init(params), torch.ones(4, 3))
    assert torch.equal(params["w"], torch.ones(3, 2))
    out = step.params(state)
    out["w"].zero_()
    assert step.params(state)["w"].abs().sum() > 0


@pytest.mark.parametrize("stage", [None, 0, 1, 2, 3])
@pytest.mark.parametrize("rule", [fds.sgd(0.5), fds.sgd(0.5, momentum=0.5), fds.adagrad(0.5), fds.lion(0.5)])
def test_leaves_that_autograd_gives_one_gradient(stage: int | None, rule: Any) -> None:
    """Those that are added, in whole or in part, and one that is summed: kernels write into gradients; each has its own."""

    def loss(p: Any, x: Tensor, *, apart: bool = False) -> fds.Weighted:
        both = [(p[name] * x).sum() for name in "ab"] if apart else [((p["a"] + p["b"]) * x).sum()]
        part = F.pad(p["c"], (0, 2)) + F.pad(p["d"], (2, 0))
        return fds.Weighted(torch.stack([*both, p["sum"].sum(), (part * x).sum()]).sum(), 4.0)

    sizes = {"a": 8, "b": 8, "c": 6, "d": 6, "sum": 5}

    def moved(loss: Any, *strategy: fds.Transform) -> Any:
        step = fds.compose(*strategy, transforms.clip(1e9))(fds.train_step(loss, rule))
        state = step.init({name: torch.ones(size) for name, size in sizes.items()})
        for x in torch.arange(1.0, 17.0).view(2, 8):
            state, _ = step(state, x)
        return step.params(state)

    found = moved(loss, *([] if stage is None else [transforms.zero(stage)]))
    assert_same(found, moved(lambda p, x: loss({name: 1 * leaf for name, leaf in p.items()}, x, apart=True)))
    assert torch.equal(found["a"], found["b"])
    assert torch.equal(found["a"][:6], found["c"])
    assert torch.equal(found["a"][2:], found["d"])


def test_a_printed_step_says_what_it_is() -> None:
    step, _, _ = started(transforms.zero(3), transforms.clip(1.0))
    assert str(step).startswith("train_step(square, adamw(lr=0.1")
    assert str(step).endswith("-> zero(3, world) -> clip(1.0)")


def test_the_docs_say_who_wraps_what() -> None:
    """The table of phases in docs/steps.md names, for each phase, the transforms that wrap it, and no others."""
    model = pp.stages([lambda p, x: x], [{"w": torch.ones(1)}], loss=lambda y, batch: y.sum())
    base = fds.train_step(square, fds.sgd(0.1))
    made = [
        *(transforms.zero(stage) for stage in range(4)),
        transforms.zero(0, gradient_predivide_factor=2.0),
        transforms.mixed_precision("fp16"),
        transforms.accumulate(2),
        transforms.clip(1.0),
        transforms.schedule(lambda done: done),
        transforms.ema(0.9),
        transforms.remat(""),
        transforms.offload("cpu", "cpu"),
        transforms.tensor_parallel({"w": 0}),
        transforms.pipeline(pp.gpipe(1, 1), model),
        transforms.local_gradients(),
        transforms.compressed_gradients(comm.codecs.Blocks(8)),
        transforms.replicated(reduce=lambda grads, memory, group: (grads, memory)),
        transforms.compiled(backend="eager"),
        transforms.sequence(comm.mesh(sp=1)["sp"]),
        transforms.experts("experts", comm.mesh(ep=1)["ep"]),
        transforms.balance(0.1, {"router": 2}),
        transforms.apart(comm.mesh(dp=1)["dp"]),
        transforms.every(2, lambda step, state: state),
    ]
    wraps: dict[str, set[str]] = {phase: set() for phase in base.phases}
    for step in (transform(base) for transform in made):
        for phase in base.phases:
            if step.phases[phase] is not base.phases[phase]:
                wraps[phase].add(step.names[-1].split("(")[0])
    names = set().union(*wraps.values())
    page = Path(__file__).parents[2] / "docs/steps.md"
    rows = re.findall(r"^\| `(\w+)` \|.*\| ([^|]*) \|$", page.read_text(encoding="utf-8"), re.MULTILINE)
    assert {phase: set(re.findall(r"\w+", who)) & names for phase, who in rows if phase in wraps} == wraps


# -- bad input ----------------------------------------------------------------------------------------------------------


def test_refuses_a_leaf_that_is_no_tensor() -> None:
    with pytest.raises(TypeError, match=r"params: the leaf at 'b' is int 3, not a tensor"):
        fds.train_step(square, fds.sgd(0.1)).init({"w": torch.ones(2), "b": 3})


@pytest.mark.parametrize("stage", [None, 3])
def test_refuses_a_loss_that_is_no_scalar(stage: int | None) -> None:
    step = fds.train_step(lambda params, batch: params["w"] * batch, fds.sgd(0.1))
    step = step if stage is None else transforms.zero(stage)(step)
    with pytest.raises(ValueError, match=r"the loss must be a scalar.*shape \[3\]"):
        step(step.init({"w": torch.ones(3)}), torch.ones(3))
    text = fds.train_step(lambda params, batch: "high", fds.sgd(0.1))
    with pytest.raises(TypeError, match="not str"):
        text(text.init({"w": torch.ones(3)}), torch.ones(3))


def test_refuses_a_batch_of_another_structure() -> None:
    step, state, batch = started()
    state, _ = step(state, batch)
    with pytest.raises(ValueError, match="batch: its structure is"):
        step(state, (batch, batch))
    step(state, torch.ones(2, 3))  # another number of rows is fine, and the refusal lost nothing


@pytest.mark.parametrize("stage", [None, 0, 1, 3])
def test_refuses_params_without_values(stage: int | None) -> None:
    """But for a batch without values: the step's shapes."""
    bare, some = torch.ones(3, 2, device="meta"), torch.ones(4, 3)
    step = fds.compose(*([] if stage is None else [transforms.zero(stage)]))(fds.train_step(square, fds.lion(0.1)))
    with pytest.raises(ValueError, match=r"the leaf 'w' of its params is on the device 'meta'.*fds.deferred\(build\)"):
        step(step.init({"w": bare}), some)
    partly = fds.train_step(lambda p, x: (x @ p["w"] @ p["v"]).sum(), fds.sgd(0.1))
    frozen = torch.nn.Parameter(torch.ones(2, 2, device="meta"), requires_grad=False)
    with pytest.raises(ValueError, match=r"the leaf 'v' of its params"):
        partly(partly.init({"w": torch.ones(3, 2), "v": frozen}), some)
    if stage is None:
        _, metrics = step(step.init({"w": bare}), torch.ones(4, 3, device="meta"))
        assert metrics["loss"].is_meta


@pytest.mark.parametrize("k", [1, 2])
@pytest.mark.parametrize("zero", [(), (transforms.zero(0),), (transforms.zero(3),)])
def test_refuses_sparse_gradients(k: int, zero: Any) -> None:
    apply, params = fds.functional(torch.nn.Embedding(5, 3, sparse=True))
    step = fds.compose(*zero, transforms.accumulate(k))(fds.train_step(lambda p, x: apply(p, x).sum(), fds.sgd(0.1)))
    with pytest.raises(ValueError, match=r"the gradient of a leaf of shape \[5, 3\] is sparse.*sparse=False"):
        step(step.init(params), torch.tensor([1, 2]))


def test_refuses_unknown_phases_and_what_is_no_transform() -> None:
    with pytest.raises(ValueError, match=r"wraps \['updat'\], which are not phases"):
        fds.wrap("typo", updat=lambda inner, step: None)(fds.train_step(square, fds.sgd(0.1)))
    with pytest.raises(TypeError, match="not a transform"):
        fds.compose(3)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="not callable"):
        fds.train_step(None, fds.sgd(0.1))  # type: ignore[arg-type]


def test_a_module_that_is_called_outside_a_step() -> None:
    """apply is a plain function too: gradients, recomputation and other parameters in between do no harm."""
    from tests.transforms.models import Blocks

    torch.manual_seed(0)
    module = Blocks(recompute=True)
    apply, params = fds.functional(module)
    x = torch.randn(4, 6)
    others = {name: p.detach() * 2 for name, p in params.items()}
    y = apply(params, x)
    with torch.no_grad():
        apply(others, x)
    apply(others, x)
    found = torch.autograd.grad(y.sum(), list(params.values()))
    expected = torch.autograd.grad(module(x).sum(), list(module.parameters()))
    for a, b in zip(found, expected, strict=True):
        assert torch.equal(a, b)
    assert torch.equal(apply(params, x), module(x))
    with pytest.raises(ValueError, match=r"missing \['out\.bias'\], extra \[\]"):
        apply({name: p for name, p in params.items() if name != "out.bias"}, x)


def test_apply_keeps_ties_modes_and_buffers() -> None:
    module = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Dropout(0.5))
    apply, params = fds.functional(module)
    x = torch.randn(8, 3)
    apply(params, x)
    assert module[1].running_mean.abs().sum() == 0  # the user's module stays as it was
    apply.module.eval()
    assert torch.equal(apply(params, x), apply(params, x))
    assert F.mse_loss(apply(params, x), x).isfinite()


@pytest.mark.parametrize("strategy", [[], [transforms.zero(1)], [transforms.zero(3), transforms.clip(1.0)]], ids=len)
@pytest.mark.parametrize("sums", [0.0, 1.0])
def test_a_sum_that_weighs_nothing(sums: float, strategy: list[fds.Transform]) -> None:
    """Nothing over nothing moves nothing; something over nothing is infinite, as in plain PyTorch, and the params say so."""

    def program() -> tuple[Tensor, Tensor]:
        step = fds.compose(*strategy)(
            fds.train_step(lambda params, x: fds.Weighted((params["w"] * x).sum() * sums, 0), fds.sgd(0.1))
        )
        state, metrics = step(step.init({"w": torch.ones(2)}), torch.ones(2))
        return step.params(state)["w"], metrics["loss"]

    for moved, loss in comm.simulate(program, world_size=2 if strategy else 1):
        assert not loss.isfinite()
        assert moved.isnan().all() if sums else moved.tolist() == [1.0, 1.0]


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: transforms.zero(1)(square), r"zero\(1, world\) is a transform: give it a step.*not <function square"),
        (lambda: transforms.clip(1.0)(square), r"clip\(1.0\) is a transform"),
        (lambda: fds.compose(transforms.clip(1.0))(square), r"compose\(...\) is a transform"),
        (lambda: fds.train_step(square, torch.optim.AdamW([torch.ones(1)])), r"torch.optim.AdamW .* pass fds.adamw\(lr, ...\)"),
        (lambda: fds.train_step(square, torch.optim.RMSprop), r"torch.optim.RMSprop .* or fds.Optimizer\(init, update\)"),
        (
            lambda: transforms.schedule(
                torch.optim.lr_scheduler.ConstantLR(torch.optim.SGD([torch.ones(1)]))  # type: ignore[arg-type]
            ),
            r"fn=ConstantLR\(...\) sets the learning rate of a torch optimizer; pass a function",
        ),
    ],
)
def test_refuses_what_a_newcomer_passes(call: Callable[[], Any], says: str) -> None:
    """A loss for a step, torch's optimizer, torch's scheduler: the error says what to pass instead."""
    with pytest.raises(TypeError, match=says):
        call()
