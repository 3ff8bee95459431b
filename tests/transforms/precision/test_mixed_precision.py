"""Laws 20, 24, 25, 29, 30 for mixed precision: policies, loss scales, skipped steps, what is kept in half precision."""

from collections.abc import Callable, Iterable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import functional_ds as fds
from functional_ds import comm, transforms
from functional_ds.sharding.layout import Layout
from functional_ds.sharding.leaf_map import LeafMap
from functional_ds.sharding.leaf_slice import LeafSlice
from functional_ds.sharding.sources import sliced
from functional_ds.transforms.precision.stochastic_rounding import Draws, round_stochastically
from tests.transforms.models import CASES, own_rows, run

STAGES = (0, 1, 2, 3)
HALVES = ("bf16", "fp16")
WORDS = {"f64": torch.float64, "f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}
DTYPES = st.sampled_from([*WORDS.values()])


# -- policies -----------------------------------------------------------------------------------------------------------


@st.composite
def policies(draw: st.DrawFn) -> transforms.Policy:
    compute = draw(DTYPES)
    paths = draw(st.lists(st.sampled_from(("*norm*", "blocks.[02].*", "out.?eight", "a.b")), unique=True))
    return transforms.Policy(
        params=draw(st.sampled_from((torch.float32, torch.float64, compute))),
        compute=compute,
        output=draw(DTYPES),
        reduce=draw(DTYPES),
        exceptions={path: draw(DTYPES) for path in paths},
    )


@pytest.mark.law(26)
@given(policies())
def test_policies_are_their_words(policy: transforms.Policy) -> None:
    """parse ∘ str = id; equal policies have equal hashes."""
    again = transforms.Policy.parse(str(policy))
    assert again == policy
    assert hash(again) == hash(policy)


def test_named_policies() -> None:
    assert str(transforms.Policy.parse("bf16")) == "params=f32,compute=bf16,output=f32,reduce=bf16"
    assert str(transforms.Policy.parse("fp16")) == "params=f32,compute=f16,output=f32,reduce=f16"
    assert transforms.Policy.parse("f32") == transforms.Policy()
    assert transforms.Policy.parse("float16, reduce = fp32").reduce == torch.float32


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: transforms.mixed_precision("bf8"), r"policy='bf8' is unknown.*the nearest is 'bf16'"),
        (lambda: transforms.mixed_precision("bf16,reduse=f32"), r"'reduse' is unknown; the nearest is 'reduce'"),
        (lambda: transforms.mixed_precision("compute=half"), r"'half' names no dtype"),
        (lambda: transforms.mixed_precision("bf16,*norm*"), r"'\*norm\*' is unknown"),
        (
            lambda: transforms.mixed_precision("params=bf16,compute=f16"),
            r"params=bf16 is neither f32, nor f64, nor comp",
        ),
        (lambda: transforms.Policy(compute=torch.int8), r"compute=torch.int8: use one of"),
        (lambda: transforms.mixed_precision("f32", autocast=True), r"autocast=True: the policy .* use compute=bf16"),
        (lambda: transforms.mixed_precision(states=torch.float16), r"states=torch.float16"),
        (lambda: transforms.mixed_precision(stochastic=True), r"nothing is rounded to bf16"),
    ],
)
def test_bad_input(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_refuses_other_types() -> None:
    with pytest.raises(TypeError, match="neither a Policy nor a string"):
        transforms.mixed_precision(torch.bfloat16)  # type: ignore[arg-type]


def test_refuses_compositions() -> None:
    step = fds.train_step(lambda p, b: p["w"].sum(), fds.sgd(0.1))
    half = transforms.mixed_precision("bf16")
    with pytest.raises(ValueError, match="a mixed precision already"):
        fds.compose(half, half)(step)
    random = transforms.mixed_precision("params=bf16,compute=bf16", stochastic=True)
    with pytest.raises(ValueError, match="put it before zero"):
        fds.compose(transforms.zero(1), random)(step)


@pytest.mark.parametrize("where", ["*nrom*", lambda path: False])
def test_exceptions_that_fit_nothing_are_refused(where: Any) -> None:
    params, loss = CASES["blocks"].make()
    policy = transforms.Policy(compute=torch.bfloat16, exceptions={where: torch.float32})
    step = transforms.mixed_precision(policy)(fds.train_step(loss, fds.sgd(0.1)))
    with pytest.raises(ValueError, match=r"fits no floating leaf; the nearest is '"):
        step.init(params)


@pytest.mark.parametrize("stage", [None, *STAGES])
@pytest.mark.parametrize("order", [1, -1])
def test_exceptions_keep_their_dtype(stage: int | None, order: int) -> None:
    """The loss sees them in theirs, in every stage and order; step.params gives all as they came, but rounded."""
    params = {"blocks": [{"norm": torch.full((3,), 1 + 2.0**-12), "w": torch.full((3,), 1 + 2.0**-12)} for _ in range(2)]}

    def program() -> Any:
        seen: list[Any] = []

        def loss(p: Any, x: Tensor) -> Tensor:
            seen.append(fds.tree.map(lambda leaf: (leaf * 1.0).dtype, p))
            return sum(((block["w"] * x) * block["norm"]).sum() for block in p["blocks"])  # type: ignore[return-value]

        chain = [transforms.mixed_precision("bf16,*.norm=f32"), *([] if stage is None else [transforms.zero(stage)])][::order]
        told = pytest.warns(UserWarning, match="put it before zero") if stage and order == -1 else nullcontext()
        with told:
            step = fds.compose(*chain)(fds.train_step(loss, fds.sgd(0.0)))
        state, _ = step(step.init(params), torch.ones(3))
        return seen[-1], step.params(state)

    for dtypes, after in comm.simulate(program, world_size=1 if stage is None else 2):
        assert dtypes == {"blocks": [{"norm": torch.float32, "w": torch.bfloat16}] * 2}
        assert all(fds.tree.leaves(fds.tree.map(torch.equal, after, params)))


def test_a_function_names_exceptions() -> None:
    def small(path: str) -> bool:
        return path.endswith("bias")

    policy = transforms.Policy(compute=torch.bfloat16, exceptions={small: torch.float32})
    params, loss = CASES["mlp"].make()
    state = transforms.mixed_precision(policy)(fds.train_step(loss, fds.sgd(0.1))).init(params)
    assert {path.rpartition(".")[2]: leaf.dtype for path, leaf in fds.tree.named(state.params)} == {
        "weight": torch.bfloat16,
        "bias": torch.float32,
    }
    assert str(policy).endswith("small=f32")


@pytest.mark.parametrize("output", [*WORDS])
def test_output_is_the_losses_dtype(output: str) -> None:
    """Of losses and metrics; weights are fp32, in which tokens can be counted, or fp64 for a loss in fp64."""

    def loss(p: Any, x: Tensor) -> Any:
        return fds.Weighted((p["w"] * x).sum(), 257), {"more": (p["w"] * x).sum()}

    step = transforms.mixed_precision(f"bf16,output={output}")(fds.train_step(loss, fds.sgd(0.1)))
    state = step.init({"w": torch.ones(2)})
    with torch.no_grad():
        found, metrics = step.loss(state, state.params, torch.ones(2))
    assert found.sum.dtype == metrics["more"].sum.dtype == WORDS[output]
    assert found.weight.dtype == (torch.float64 if output == "f64" else torch.float32)
    assert found.weight == 257


@pytest.mark.parametrize("stage", STAGES)
def test_reducing_in_fp32(stage: int) -> None:
    """Gradients travel and arrive in fp32, unrounded, because the policy says so; ``policy.reducing`` changes nothing more."""
    policy = transforms.Policy.parse("bf16,reduce=f32")
    values = torch.tensor([1.0, 2.0**-10])  # their sum is none of bf16's numbers

    def program(told: bool) -> tuple[float, int]:
        name = "reduce_scatter" if stage else "all_reduce"
        means = {name: policy.reducing(getattr(comm, name))} if told else {}
        chain = transforms.mixed_precision(policy), transforms.zero(stage, **means)
        step = fds.compose(*chain)(fds.train_step(lambda p, x: (p["w"] * x).sum() * 2, fds.sgd(1.0)))
        with comm.ledger() as book:
            state, _ = step(step.init({"w": torch.zeros(2)}), values[comm.world().rank].expand(2))
        return step.params(state)["w"][0].item(), sum(r.bytes for r in book.rows if r.group == "world/reduce")

    sent = 2 * 4 // 2 * (1 if stage else 2)
    for told in (True, False):
        assert comm.simulate(program, told, world_size=2) == [(-1 - 2.0**-10, sent)] * 2


@pytest.mark.parametrize("half", HALVES)
def test_autocast(half: str) -> None:
    """Matrices multiply in half precision, losses are in fp32, also when recomputed; batches come as they are."""
    dtype, seen = WORDS["bf16" if half == "bf16" else "f16"], []

    def loss(p: Any, x: Tensor) -> Tensor:
        def inner(x: Tensor) -> Tensor:
            y = x @ p["w"]
            seen.append((x.dtype, y.dtype, F.mse_loss(y, y).dtype))
            return torch.exp(y)

        return checkpoint(inner, x, use_reentrant=False).mean()  # type: ignore[no-any-return]

    step = transforms.mixed_precision(half, 8.0, autocast=True)(fds.train_step(loss, fds.sgd(0.5)))
    state = step.init({"w": torch.eye(3)})
    before = step.evaluate(state, torch.ones(2, 3))
    state, _ = step(state, torch.ones(2, 3))
    assert step.evaluate(state, torch.ones(2, 3)) < before
    assert seen == [(torch.float32, dtype, torch.float32)] * 4


# -- loss scales --------------------------------------------------------------------------------------------------------


def noted(*strategy: fds.Transform, optimizer: Any = None, batch: Any = None, params: Any = None) -> dict[str, Any]:
    """One step: the mean gradients that the optimizer gets, the metrics, and the params after it."""
    own, loss = CASES["weighted"].make()
    seen: dict[str, Any] = {}

    def update(inner: Any, step: fds.Step, state: fds.State, grads: fds.Weighted) -> Any:
        seen["mean"] = [grad.float() / grads.weight for grad in grads.sum]
        return inner(step, state, grads)

    step = fds.compose(fds.wrap("note", update=update), *strategy)(fds.train_step(loss, optimizer or fds.adamw(0.1)))
    state, metrics = step(step.init(own), own_rows(CASES["weighted"].batch(8), comm.world()))
    return {**seen, "metrics": metrics, "params": step.params(state)}


@pytest.mark.law(24)
@given(
    policy=st.sampled_from(("f32", "bf16")),
    power=st.integers(-16, 16),
    stage=st.sampled_from(STAGES),
    n=st.sampled_from((1, 2)),
    k=st.sampled_from((1, 2)),
)
def test_scaling_by_a_power_of_two_changes_no_bit(policy: str, power: int, stage: int, n: int, k: int) -> None:
    """Gradients, their clipped norm, losses and updated params have the same bits with a scale of 2^p as with none."""

    def program(scale: Any) -> dict[str, Any]:
        return noted(
            transforms.mixed_precision(policy, scale), transforms.zero(stage), transforms.accumulate(k), transforms.clip(0.5)
        )

    plain = comm.simulate(program, transforms.NoScale(), world_size=n)
    scaled = comm.simulate(program, 2.0**power, world_size=n)
    for a, b in zip(plain, scaled, strict=True):
        metrics = b["metrics"]
        assert metrics.pop("loss_scale") == 2.0**power
        assert metrics.pop("skipped") == 0
        assert fds.tree.structure(a) == fds.tree.structure(b)
        assert all(fds.tree.leaves(fds.tree.map(torch.equal, a, b)))


def python_momentum(lr: float) -> fds.Optimizer:
    """An optimizer that knows nothing of skipping, and writes into its arguments."""

    def update(params: list[Tensor], grads: fds.Weighted, state: Any, rate: Any) -> Any:
        for p, grad, momentum in zip(params, grads.sum, state["m"], strict=True):
            momentum.mul_(0.9).add_(grad.to(p.dtype) / grads.weight)
            p.sub_(lr * rate * momentum)
        return params, {"m": state["m"], "count": state["count"] + 1}

    return fds.Optimizer(lambda params: {"m": [torch.zeros_like(p) for p in params], "count": torch.zeros(())}, update)


OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "adamw": lambda: fds.adamw(0.1),
    "sgd": lambda: fds.sgd(0.1, momentum=0.9),
    "unaware": lambda: python_momentum(0.1),
    "by leaf": lambda: fds.adamw(0.1, decay="weight"),
    "muon": lambda: fds.muon(0.1, fds.adagrad(0.1)),
}
KEPT = {  # what there is to keep
    "fp16": {"policy": "fp16"},
    "bf16": {"policy": "bf16,blocks.?.2.*=f32", "autocast": True},  # the norms
    "fp32": {"policy": "f32"},
    "no masters": {"policy": "params=bf16,compute=bf16", "stochastic": True},
    "bf16 states": {"policy": "bf16", "states": torch.bfloat16, "stochastic": True},
}


def bits(state: fds.State) -> Any:
    """Everything that a skipped step must leave alone: all but the loss scale."""
    slots = {name: slot for name, slot in state.slots.items() if name != "loss_scale"}
    return fds.tree.map(torch.clone, (state.params, state.optimizer, state.step, slots))


def halving(count: Tensor) -> Tensor:
    return 0.5 ** count.float()


def with_overflows(
    kept: dict[str, Any], stage: int | None, optimizer: str, k: int, bad: tuple[int, int] | None, order: int, value: float
) -> tuple[Any, Any, dict[str, Tensor], Any, Any]:
    """A good step, one with ``value`` at (rank, micro-batch) ``bad``, a good step: states around and metrics of the second."""
    params, loss = CASES["blocks"].make()
    zero = [] if stage is None else [transforms.zero(stage)]
    rest = [transforms.accumulate(k), transforms.clip(0.5), transforms.schedule(halving)]
    mixed = transforms.mixed_precision(loss_scale=4.0, **kept)
    strategy = [[mixed, *zero, *rest], [*rest[::-1], mixed, *zero], [mixed, rest[2], rest[1], *zero, rest[0]]][order]
    step = fds.compose(*strategy)(fds.train_step(loss, OPTIMIZERS[optimizer](), seed=3))
    x, y = own_rows(CASES["blocks"].batch(2 * k * comm.world().size), comm.world())
    state, _ = step(step.init(params), (x, y))
    before = bits(state)
    metrics: dict[str, Tensor] = {}
    if bad is not None:
        wrong = y.clone()
        if comm.world().rank == bad[0]:
            wrong[2 * bad[1]] = value
        state, metrics = step(state, (x, wrong))
    after = bits(state)
    state, last = step(state, (x, y))
    return before, after, metrics, bits(state), last


@pytest.mark.law(25)
@given(data=st.data())
def test_an_overflow_anywhere_changes_nothing_anywhere(data: st.DataObject) -> None:
    """Params, masters, moments, counts and the schedule stay as they were on all ranks, and training goes on as if not."""
    kept = KEPT[data.draw(st.sampled_from([*KEPT]))]
    stage = data.draw(st.sampled_from((None, *STAGES)))
    n = 1 if stage is None else data.draw(st.sampled_from((1, 2, 3)))
    k = data.draw(st.sampled_from((1, 2)))
    bad = data.draw(st.tuples(st.integers(0, n - 1), st.integers(0, k - 1)))
    value = data.draw(st.sampled_from((float("inf"), -float("inf"), float("nan"))))
    args = kept, stage, data.draw(st.sampled_from([*OPTIMIZERS])), k
    order = data.draw(st.sampled_from((0, 1, 2)))
    found = comm.simulate(lambda: with_overflows(*args, bad, order, value), world_size=n)
    expected = comm.simulate(lambda: with_overflows(*args, None, order, value), world_size=n)
    for (before, after, metrics, end, last), (_, _, _, clean, same) in zip(found, expected, strict=True):
        assert all(fds.tree.leaves(fds.tree.map(torch.equal, before, after)))
        assert all(fds.tree.leaves(fds.tree.map(torch.equal, end, clean)))
        assert (metrics["skipped"], metrics["loss_scale"], metrics["rate"]) == (1, 4, 0.5)
        assert (last["skipped"], last["rate"]) == (0, 0.5)
        assert torch.equal(last["loss"], same["loss"])


@pytest.mark.sample(7)
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("kept", [*KEPT])
def test_one_rank_overflows_in_every_stage(stage: int, kept: str) -> None:
    """Law 25, whatever Hypothesis drew."""
    found = comm.simulate(lambda: with_overflows(KEPT[kept], stage, "adamw", 2, (1, 0), 0, float("inf")), world_size=2)
    for before, after, metrics, _, _ in found:
        assert all(fds.tree.leaves(fds.tree.map(torch.equal, before, after)))
        assert metrics["skipped"] == 1


def test_an_optax_shaped_pair_skips_too() -> None:
    torchopt = pytest.importorskip("torchopt")
    step = transforms.mixed_precision("fp16", 2.0)(fds.train_step(lambda p, x: (p["w"] * x).sum(), torchopt.adam(0.1)))
    state, _ = step(step.init({"w": torch.ones(3)}), torch.ones(3))
    before = bits(state)
    state, metrics = step(state, torch.full((3,), 1e5))  # infinite in fp16
    assert metrics["skipped"] == 1
    assert all(fds.tree.leaves(fds.tree.map(torch.equal, before, bits(state))))
    state, metrics = step(state, torch.ones(3))
    assert metrics["skipped"] == 0
    assert step.params(state)["w"][0] < before[0]["w"][0]


def dynamic_run(stage: int) -> tuple[list[float], list[float], list[int], list[Any]]:
    """Scales, skips and counts while fp16 overflows at 2^16 and 2^15 on rank 1 only; then the params."""
    scale = transforms.DynamicScale(2.0**16, window=2, hysteresis=1)
    chain = transforms.mixed_precision("fp16", scale), transforms.zero(stage)
    step = fds.compose(*chain)(fds.train_step(lambda p, x: (p["w"] * x).sum(), fds.adamw(0.1)))
    state, scales, skips, counts = step.init({"w": torch.ones(4)}), [], [], []
    x = torch.full((4,), 6.0 if comm.world().rank == 1 else 1.0)  # rank 1's share of the mean: 3 · scale; in all 3.5 · scale
    for _ in range(6):
        state, metrics = step(state, x)
        scales.append(metrics["loss_scale"].item())
        skips.append(metrics["skipped"].item())
        counts.append(state.step.item())
    return scales, skips, counts, step.params(state)["w"].tolist()


@pytest.mark.parametrize("stage", STAGES)
def test_the_scale_finds_its_level(stage: int) -> None:
    """It falls until nothing overflows on any rank, tries again after a window, and steps count only where they moved."""
    first, second = comm.simulate(dynamic_run, stage, world_size=2)
    assert first == second
    assert first[0] == [2.0**16, 2.0**15, 2.0**14, 2.0**14, 2.0**15, 2.0**14]
    assert first[1] == [1, 1, 0, 0, 1, 0]
    assert first[2] == [0, 0, 1, 2, 2, 3]


def everything_on_processes() -> list[Any]:
    return [dynamic_run(stage) for stage in STAGES] + [
        with_overflows(kept, stage, "adamw", 2, (1, 1), 0, float("inf"))
        for kept, stage in zip(KEPT.values(), (0, 1, 2, 3, 3), strict=True)
    ]


def test_processes_give_the_bits_of_the_simulator() -> None:
    """Law 18 for skipped steps, on two Gloo processes."""
    simulated = comm.simulate(everything_on_processes, world_size=2)
    spawned = comm.spawn(everything_on_processes, world_size=2)
    for here, there in zip(simulated, spawned, strict=True):
        for a, b in zip(fds.tree.leaves(here), fds.tree.leaves(there), strict=True):
            assert torch.equal(a, b) or (a.isnan() and b.isnan()) if isinstance(a, Tensor) else a == b


@pytest.mark.law(30)
@given(half=st.sampled_from(HALVES), stage=st.sampled_from(STAGES), order=st.permutations(range(4)))
def test_orders_do_not_matter(half: str, stage: int, order: list[int]) -> None:
    """Mixed precision, clipping, a schedule and accumulation around one zero, in any order: the same bits."""

    def program(order: Iterable[int]) -> Any:
        parts = [
            transforms.mixed_precision(half, 2.0**6),
            transforms.accumulate(2),
            transforms.clip(0.5),
            transforms.schedule(halving),
        ]
        return noted(*(parts[i] for i in order), transforms.zero(stage))

    expected = comm.simulate(program, range(4), world_size=2)
    for a, b in zip(comm.simulate(program, order, world_size=2), expected, strict=True):
        assert all(fds.tree.leaves(fds.tree.map(torch.equal, a, b)))


@pytest.mark.parametrize("stage", STAGES)
def test_fp16_trains(stage: int) -> None:
    """Near the fp32 step, in every stage; its default scale is dynamic."""
    scale = transforms.DynamicScale(2.0**10)
    losses, _, params = comm.simulate(
        lambda: run(CASES["mlp"], (transforms.mixed_precision("fp16", scale), transforms.zero(stage)), steps=5), world_size=2
    )[0]
    expected = run(CASES["mlp"], (), steps=5)[0]
    torch.testing.assert_close(losses, expected, rtol=5e-3, atol=5e-3)
    assert {leaf.dtype for leaf in fds.tree.leaves(params)} == {torch.float32}
    assert "DynamicScale(initial=65536.0" in repr(
        transforms.mixed_precision("fp16")(fds.train_step(lambda p, b: p, fds.sgd(0.1))).init({"w": torch.ones(1)}).slots
    )


# -- what is kept in half precision -------------------------------------------------------------------------------------


@given(wide=st.floats(-(2.0**100), 2.0**100, width=32), draws=st.lists(st.integers(0, 65535), min_size=1, max_size=8))
def test_rounds_to_a_neighbour_with_the_right_chances(wide: float, draws: list[int]) -> None:
    """Of 65536 equally spaced draws, as many round away as the value is far: the mean is exact."""
    value = torch.tensor(wide)
    found = round_stochastically(value.expand(65536), torch.arange(65536) / 65536)
    down = (value.view(torch.int32) & ~0xFFFF).view(torch.float32)
    up = ((value.view(torch.int32) & ~0xFFFF) + 0x10000).view(torch.float32)
    share = (value.view(torch.int32) & 0xFFFF).item()
    assert (found == up.bfloat16()).sum() == (65536 if up == down else share)
    assert ((found == up.bfloat16()) | (found == down.bfloat16())).all()


def test_rounding_leaves_what_bf16_has() -> None:
    every = torch.arange(-32768, 32768, dtype=torch.int16).view(torch.bfloat16)
    found = round_stochastically(every.float(), torch.full(every.shape, 1 - 2.0**-24))
    assert torch.equal(found.isnan(), every.isnan())
    assert torch.equal(found.nan_to_num(), every.nan_to_num())


def stochastic_run(n: int, stage: int | None, steps: int = 3, **options: Any) -> Any:
    """Params that integers move by less than bf16 shows, on n ranks; the gradient does not depend on n."""
    params = {"blocks": [torch.ones(5), torch.ones(3, 3)], "head": torch.ones(17), "x": torch.ones(1)}

    def program() -> Any:
        chain = [transforms.mixed_precision(**options), *([] if stage is None else [transforms.zero(stage)])]
        loss = lambda p, rows: sum((leaf * 1.0).sum() for leaf in fds.tree.leaves(p)) + 0 * rows.sum()  # noqa: E731
        step = fds.compose(*chain)(fds.train_step(loss, fds.adamw(2.0**-11, weight_decay=0.0), seed=5))
        state = step.init(params)
        for _ in range(steps):
            state, _ = step(state, torch.ones(2))
        return step.params(state)

    return comm.simulate(program, world_size=n)[0]


RANDOM = {
    "no masters": {"policy": "params=bf16,compute=bf16", "stochastic": True},
    "bf16 states": {"states": torch.bfloat16, "stochastic": True},
    "both": {"policy": "params=bf16,compute=bf16", "states": torch.bfloat16, "stochastic": True},
}


@pytest.mark.law(29)
@given(kind=st.sampled_from([*RANDOM]), stage=st.sampled_from(STAGES), n=st.integers(1, 5))
def test_draws_do_not_depend_on_n(kind: str, stage: int, n: int) -> None:
    """Stochastic rounding on n ranks in any stage gives the bits of one device without zero."""
    alone, found = stochastic_run(1, None, **RANDOM[kind]), stochastic_run(n, stage, **RANDOM[kind])
    assert all(fds.tree.leaves(fds.tree.map(torch.equal, alone, found)))


@pytest.mark.law(49)
@given(
    dims=st.tuples(st.integers(1, 3), st.integers(1, 4)),
    n=st.sampled_from((1, 2, 4)),
    dim=st.integers(0, 1),
    zero=st.booleans(),
)
def test_draws_on_slices_are_one_devices(dims: tuple[int, int], n: int, dim: int, zero: bool) -> None:
    """Whichever dim is cut, in blocks, and in shards of the slice."""
    sizes = [4 * dims[0], 8 * dims[1]]
    whole = torch.zeros(sizes)
    key, step = fds.Key.of(3), torch.tensor(2)
    alone = Draws.of(LeafMap.of({"w": whole}), key, step).for_param(0, whole)

    def program() -> None:
        mesh = comm.mesh(dp=2 if zero else 1, tp=n)
        cut = LeafSlice.even(dim, [sizes[dim] // 2] * 2 if dim else sizes[0], n, mesh["tp"].rank)
        layout = Layout.of({"w": sliced(whole, cut)}, mesh["dp"].size)
        parts = LeafMap.of_layout(layout, mesh["dp"])
        like = torch.zeros(layout.segments[0].shard)
        found = Draws.of(parts, key, step).for_param(0, like)
        (shard,) = parts.shards
        assert torch.equal(found[: shard.numel], cut.of(alone).reshape(-1)[shard.offset : shard.offset + shard.numel])

    comm.simulate(program, world_size=n * (2 if zero else 1))


def test_small_changes_are_not_lost_without_masters() -> None:
    """Steps of 2^-11 from 1, of which bf16's neighbours are 2^-8 and 2^-7 away: all arrive in the mean, none when rounded."""
    plain = stochastic_run(1, None, steps=8, policy="params=bf16,compute=bf16")
    assert all((leaf == 1).all() for leaf in fds.tree.leaves(plain))
    seeds = torch.cat([leaf.flatten() for leaf in fds.tree.leaves(stochastic_run(1, None, steps=8, **RANDOM["no masters"]))])
    assert len(seeds.unique()) > 1
    assert abs((1 - seeds.float()).mean().item() - 8 * 2.0**-11) < 4 * 2.0**-8 * (8 * 0.125 / 32) ** 0.5  # four deviations


@pytest.mark.law(20)
@pytest.mark.parametrize("stage", STAGES)
@given(n=st.sampled_from((1, 2, 4)))
def test_bytes_of_what_is_kept(stage: int, n: int) -> None:
    """Per parameter: 2 for params without masters, 4 for bf16 moments; 2 + 4 + 4 with masters."""

    def program(**options: Any) -> list[int]:
        step = fds.compose(transforms.mixed_precision(**options), transforms.zero(stage))(
            fds.train_step(lambda p, x: (p["w"] * x).sum(), fds.adamw(0.1))
        )
        state, _ = step(step.init({"w": torch.ones(64)}), torch.ones(64))
        kinds = state.params, state.slots["mixed_precision"].masters, (state.optimizer.exp_avg, state.optimizer.exp_avg_sq)
        return [sum(leaf.nbytes for leaf in fds.tree.leaves(kind)) for kind in kinds]

    part, psi = 64 // n, 64
    held, kept = (psi if stage < 3 else part), (part if stage else psi)
    for options, expected in (
        ({}, [2 * held, 4 * kept, 8 * kept]),
        (RANDOM["no masters"], [2 * held, 0, 8 * kept]),
        (RANDOM["bf16 states"], [2 * held, 4 * kept, 4 * kept]),
        (RANDOM["both"], [2 * held, 0, 4 * kept]),
    ):
        assert comm.simulate(lambda options=options: program(**options), world_size=n) == [expected] * n


# -- on a GPU -----------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("kept", [*KEPT])
@pytest.mark.parametrize("optimizer", [*OPTIMIZERS])
def test_nothing_waits_for_the_gpu(kept: str, optimizer: str) -> None:
    """Good and skipped steps queue up without one synchronisation with the host."""
    torch.manual_seed(0)
    params = {"w": torch.ones(8, 8, device="cuda"), "bias": torch.ones(8, device="cuda")}
    chain = (
        transforms.mixed_precision(loss_scale=transforms.DynamicScale(8.0, window=2, hysteresis=1), **KEPT[kept]),
        transforms.clip(1.0),
        transforms.schedule(halving),
    )
    step = fds.compose(*chain)(fds.train_step(lambda p, x: (x @ p["w"] + p["bias"]).square().mean(), OPTIMIZERS[optimizer]()))
    good, bad = torch.ones(4, 8, device="cuda"), torch.full((4, 8), float("inf"), device="cuda")
    state, _ = step(step.init(params), good)
    skips = []
    torch.cuda.set_sync_debug_mode("error")
    try:
        for batch in (good, bad, good):
            state, metrics = step(state, batch)
            skips.append(metrics["skipped"])
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert [skip.item() for skip in skips] == [0, 1, 0]
    assert state.step.item() == 3
