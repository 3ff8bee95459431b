"""Law 58: a step with compiled blocks is the step: equal bits without code generation, equal ledgers, as few whole units."""

import gc
import weakref
from collections.abc import Callable
from functools import cache
from typing import Any

import attrs
import pytest
import torch
import torch.nn.functional as F
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import functional_ds as fds
from functional_ds import comm
from functional_ds import pipelining as pp
from functional_ds import transforms as T
from functional_ds.testing import assert_same
from functional_ds.transforms.zero.gather import Gatherer
from tests.planting import Bug, planted
from tests.transforms.models import own_rows

CALLS: list[str] = []  # of modules that Python runs


class MLP(nn.Module):
    """Is compiled as a part of its block, unless something else runs it."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 12), nn.Linear(12, 8)

    def forward(self, x: Tensor) -> Tensor:
        if not torch.compiler.is_compiling():
            CALLS.append("mlp")
        return self.down(torch.tanh(self.up(x)))


class Block(nn.Module):
    """A block with a shared layer, a frozen one, draws, a buffer that it computes with and one that it writes in place."""

    def __init__(self, shared: nn.Module) -> None:
        super().__init__()
        self.norm, self.frozen, self.shared, self.mlp = nn.LayerNorm(8), nn.Linear(8, 8), shared, MLP()
        self.frozen.requires_grad_(False)
        self.scale, self.steps = nn.Buffer(torch.ones(8)), nn.Buffer(torch.zeros(()))

    def forward(self, x: Tensor, *, key: fds.Key | None = None) -> Tensor:
        if self.training:
            self.steps.add_(1)
            self.scale = self.scale * 1.5
        h = F.relu(self.frozen(self.norm(x))) * self.scale.to(x.dtype)
        h = h if key is None else key.dropout(h, 0.3, "hidden")
        return x + self.mlp(x + self.shared(h))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        shared = nn.Linear(8, 8, bias=False)
        self.inp, self.out = nn.Linear(6, 8), nn.Linear(8, 3)
        self.blocks = nn.ModuleList(Block(shared) for _ in range(3))

    def forward(self, x: Tensor, key: fds.Key | None = None) -> Tensor:
        x = self.inp(x)
        for block in self.blocks:
            x = block(x, key=key)
        return self.out(x)


def compiled(blocks: str = "blocks", **options: Any) -> fds.Transform:
    """Dynamo and AOT autograd, and no code."""
    return T.compiled(blocks, **{"backend": "aot_eager", **options})


@attrs.frozen
class Outcome:
    """What a step leaves."""

    losses: list[float]
    evaluated: float
    params: Any
    buffers: list[Tensor]
    sent: list[tuple[Any, ...]]
    report: fds.CompileReport | None


def train(*transforms: fds.Transform, stage: int | None, rows: tuple[int, ...] = (8, 8, 8)) -> Outcome:
    """Some steps and an evaluation, on this rank."""
    torch.manual_seed(3)
    apply, params = fds.functional(Net())

    def loss(p: Any, batch: Any, key: fds.Key | None) -> Tensor:
        return F.mse_loss(apply(p, batch[0].to(p["inp.weight"].dtype), key).float(), batch[1])

    first = ("mixed_precision(", "offload(", "ema(")  # what says how params are stored
    before = [each for each in transforms if str(each).startswith(first)]
    zero = [] if stage is None else [T.zero(stage)]
    rest = [each for each in transforms if each not in before]
    step = fds.compose(*before, *zero, *rest)(fds.train_step(loss, fds.adamw(1e-2, eps=1e-4), seed=5))
    state, losses = step.init(params), []
    generator = torch.Generator().manual_seed(7)
    with comm.ledger() as book:
        for count in rows:
            whole = torch.randn(count, 6, generator=generator), torch.randn(count, 3, generator=generator)
            state, metrics = step(state, own_rows(whole, comm.world()))
            losses.append(metrics["loss"].item())
        evaluated = step.evaluate(state, own_rows(whole, comm.world())).item()
    sent = [(row.collective, row.group, row.calls, row.elements) for row in book.rows]
    compiles = any("compiled" in str(each) for each in transforms)
    buffers = [x for x in fds.tree.leaves(state.slots["buffers"]) if isinstance(x, Tensor)]
    return Outcome(losses, evaluated, step.params(state), buffers, sent, fds.compile_report(step) if compiles else None)


OTHERS: dict[str, Callable[[], list[fds.Transform]]] = {
    "alone": list,
    "accumulate": lambda: [T.accumulate(2)],
    "bf16": lambda: [T.mixed_precision("bf16")],
    "autocast": lambda: [T.mixed_precision("bf16", autocast=True)],
    "remat of the block": lambda: [T.remat("blocks")],
    "remat inside": lambda: [T.remat("blocks.*.mlp")],
    "remat by operation inside": lambda: [T.remat("blocks.*.mlp", policy="recompute,matmuls=save")],
    "remat of the whole": lambda: [T.remat("")],
    "activations on the host": lambda: [T.remat("blocks", policy="offload")],
    "inputs on the host": lambda: [T.remat("blocks", policy="recompute,inputs=offload")],
    "offload": lambda: [T.offload("cpu")],
    "ema": lambda: [T.ema(0.9), T.clip(0.1)],
}


@cache
def without(others: str, stage: int | None, n: int) -> list[Outcome]:
    return comm.simulate(lambda: train(*OTHERS[others](), stage=stage), world_size=n)


def gathered(found: Outcome) -> int:
    """Elements of the layer that blocks share come with the first leaves of a block, not between its own."""
    return sum(row[3] for row in found.sent if row[0] == "all_gather")


def same_step(others: str, stage: int | None, n: int, *, first: bool) -> None:
    """The step with compiled blocks, composed first or last, and the step without."""

    inside = others.endswith("inside")  # graphs end there: a value in two of them gets its gradients in another order

    def program() -> Outcome:
        mine, more = compiled(backend="eager" if inside else "aot_eager"), OTHERS[others]()
        return train(*([mine, *more] if first else [*more, mine]), stage=stage)

    for found, plain in zip(comm.simulate(program, world_size=n), without(others, stage, n), strict=True):
        assert (found.losses, found.evaluated) == (plain.losses, plain.evaluated)
        assert found.sent == plain.sent or (inside and stage == 3 and gathered(found) < gathered(plain))
        assert_same((found.params, found.buffers), (plain.params, plain.buffers))
        assert found.report is not None
        assert found.report.calls >= 6


@pytest.mark.law(58)
@settings(max_examples=max(1, settings.default.max_examples // 4))
@given(
    others=st.sampled_from([*OTHERS]),
    stage=st.sampled_from((None, 0, 1, 2, 3)),
    n=st.integers(1, 2),
    first=st.booleans(),
)
@example("remat of the block", 3, 2, False)
@example("remat inside", 3, 2, True)
@example("activations on the host", 3, 2, False)
def test_a_compiled_step_is_the_step(others: str, stage: int | None, n: int, first: bool) -> None:
    """Losses, params, buffers and bytes: any stage of ZeRO, precision, accumulation, remat, offload, in any order."""
    same_step(others, stage, n, first=first)


@pytest.mark.law(58)
def test_no_more_units_are_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """At most two beside the one that is fetched ahead, as without; nothing of them is left after a step."""
    most, fetch, seen = [0], Gatherer.fetch, list[weakref.ref[Any]]()

    def watched(self: Gatherer, unit: int) -> list[Tensor]:
        found = fetch(self, unit)
        most[0] = max(most[0], len(self.whole))
        seen.extend(weakref.ref(flat.untyped_storage()) for flat in found)
        return found

    monkeypatch.setattr(Gatherer, "fetch", watched)
    comm.simulate(lambda: train(stage=3), world_size=2)
    plain, most[0] = most[0], 0
    comm.simulate(lambda: train(compiled(), stage=3), world_size=2)
    assert most[0] == plain == 2
    seen.clear()
    gc.disable()
    try:
        comm.simulate(lambda: train(compiled(), stage=3), world_size=2)  # nothing is compiled any more
        assert [ref for ref in seen if ref() is not None] == []
    finally:
        gc.enable()


# -- what is compiled ----------------------------------------------------------------------------------------------------


def test_one_graph_for_a_class_and_a_shape() -> None:
    """For three blocks, on all ranks: one for training, one for evaluation, and one for another number of rows."""

    class Fresh(Block):
        def forward(self, x: Tensor, *, key: fds.Key | None = None) -> Tensor:
            return super().forward(x, key=key)

    def program() -> fds.CompileReport:
        apply, params = fds.functional(nn.Sequential(*(Fresh(nn.Linear(8, 8)) for _ in range(3))))
        step = fds.compose(T.zero(3), compiled("[012]"))(fds.train_step(lambda p, x: apply(p, x).square().mean(), fds.sgd(0.1)))
        state = step.init(params)
        for rows in (4, 4, 6, 4):
            state, _ = step(state, torch.ones(rows, 8, requires_grad=True))
        step.evaluate(state, torch.ones(4, 8))
        return fds.compile_report(step)

    for report in comm.simulate(program, world_size=2):
        assert (report.compilations, report.graphs) == (3, 3)
        (row,) = report.rows
        assert (row.name.rpartition(".")[2], row.paths) == ("Fresh", ("0", "1", "2"))
        assert "size mismatch at index 0. expected 4, actual 6" in row.compilations[1].why
        assert (report.calls, report.eager) == (9 + 3, 3)
        assert "first step" in next(iter(row.eager))
        assert "the first of its class" in str(report)
        assert repr(report) == "CompileReport(3 compilations, 3 graphs, 12 calls, 3 eager)"


def test_what_others_run_inside_runs_by_python() -> None:
    """The graph ends before it and goes on behind, for all blocks the same; recomputation runs it again."""
    train(compiled(), T.remat("blocks.*.mlp"), stage=None)  # is compiled
    CALLS.clear()
    report = train(compiled(), T.remat("blocks.*.mlp"), stage=None).report
    assert len(CALLS) == 3 * 3 * 2
    CALLS.clear()
    train(compiled(), stage=None)
    assert CALLS == []
    assert report is not None
    assert report.rows[0].calls == 3 * 4


def test_a_block_in_a_block_is_a_part_of_it() -> None:
    found, plain = (train(*more, compiled(), stage=None) for more in ([compiled("blocks.*.mlp")], []))
    assert found.losses == plain.losses
    assert found.report is not None
    assert {row.name for row in found.report.rows} == {"Block"}


def test_saved_tensors_of_compiled_blocks_are_offloaded() -> None:
    """Also those that no operation is seen to make; params and buffers stay."""
    with fds.remat_report() as whole:
        train(T.remat("blocks", policy="offload"), stage=None, rows=(8,))
    with fds.remat_report() as report:
        train(T.remat("blocks", policy="offload"), compiled(), stage=None, rows=(8,))
    assert 0 < report.offloaded <= whole.offloaded


def test_steps_that_compile_nothing_have_no_report() -> None:
    step = fds.train_step(lambda p, x: p["w"].sum(), fds.sgd(0.1))
    with pytest.raises(ValueError, match="nothing of the step is compiled"):
        fds.compile_report(step)


# -- other axes ----------------------------------------------------------------------------------------------------------


@pytest.mark.law(58)
@pytest.mark.parametrize("schedule", [pp.one_f_one_b, pp.zb_h1])
def test_pipelines(schedule: Callable[[int, int], pp.Schedule]) -> None:
    """Stages that run blocks; a backward pass in two parts goes through a graph twice."""

    def program(*more: fds.Transform) -> Any:
        torch.manual_seed(0)
        mesh = comm.mesh(dp=2, pp=2)
        apply, params = fds.functional(nn.Sequential(*(MLP() for _ in range(4))))
        halves = [{path: leaf for path, leaf in params.items() if path[0] in places} for places in ("01", "23")]
        stages = pp.stages(
            [
                lambda p, x: apply.within(p, lambda module: module[1](module[0](x))),
                lambda p, x: apply.within(p, lambda module: module[3](module[2](x))),
            ],
            halves,
            loss=lambda y, batch: y.square().mean(),
        )
        step = fds.compose(T.zero(3, mesh["dp"]), T.pipeline(schedule(2, 2), stages, mesh["pp"]), *more)
        made = step(fds.train_step(stages, fds.sgd(0.1)))
        state, losses = made.init(halves), []
        for _ in range(2):
            state, metrics = made(state, torch.randn(4, 8, generator=torch.Generator().manual_seed(mesh["dp"].rank)))
            losses.append(metrics["loss"].item())
        return losses, made.params(state), fds.compile_report(made).calls if more else 0

    found, plain = (comm.simulate(lambda more=more: program(*more), world_size=4) for more in ([compiled("[0-3]")], []))
    assert_same([each[:2] for each in found], [each[:2] for each in plain])
    assert all(each[2] for each in found)


@pytest.mark.law(58)
def test_layers_that_are_cut() -> None:
    """Collectives of a plan run between graphs, the same ones."""

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.mlp = nn.LayerNorm(8), MLP()

        def forward(self, x: Tensor) -> Tensor:
            return x + self.mlp(self.norm(x)).relu()

    def program(*more: fds.Transform) -> Any:
        torch.manual_seed(0)
        mesh = comm.mesh(dp=2, tp=2)
        apply, params = fds.functional(nn.Sequential(Layer(), Layer()))
        plan = {"mlp.up": "colwise", "mlp.down": "rowwise"}
        step = fds.compose(T.zero(3, mesh["dp"]), T.tensor_parallel(plan, mesh["tp"]), *more)
        made = step(fds.train_step(lambda p, x: apply(p, x).square().mean(), fds.sgd(0.1)))
        state, losses = made.init(params), []
        with comm.ledger() as book:
            for _ in range(2):
                state, metrics = made(state, torch.ones(3, 8) * (1 + mesh["dp"].rank))
                losses.append(metrics["loss"].item())
        return losses, made.params(state), [(row.collective, row.group, row.calls, row.elements) for row in book.rows]

    found, plain = (comm.simulate(lambda more=more: program(*more), world_size=4) for more in ([compiled("[01]")], []))
    assert_same(found, plain)


class Mixture(nn.Module):
    """Sends its rows to the ranks that have their experts, one on each."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.weight = nn.Linear(8, 2, bias=False), nn.Parameter(torch.randn(1, 8, 8))

    def forward(self, x: Tensor) -> Tensor:
        routing = fds.moe.route(self.router(x), k=1)
        return fds.moe.exchange(
            lambda rows, groups: fds.moe.grouped_linear(rows, self.weight, groups), x, routing=routing, group=comm.world()
        )


class Sparse(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.experts, self.last = nn.LayerNorm(8), Mixture(), MLP()

    def forward(self, x: Tensor) -> Tensor:
        return self.last(x + self.experts(self.norm(x)).relu())


@pytest.mark.law(58)
def test_experts() -> None:
    """A module that exchanges tokens stays Python where the user says so, and is refused where not."""

    def program(*more: fds.Transform) -> Any:
        torch.manual_seed(0)
        apply, params = fds.functional(nn.Sequential(Sparse(), Sparse()))
        step = fds.compose(T.zero(3), *more)(fds.train_step(lambda p, x: apply(p, x).square().mean(), fds.sgd(0.1)))
        state, losses = step.init(params), []
        x = torch.randn(5, 8, generator=torch.Generator().manual_seed(comm.world().rank))
        with comm.ledger() as book:
            for _ in range(3):
                state, metrics = step(state, x)
                losses.append(metrics["loss"].item())
        return losses, step.params(state), [(row.collective, row.group, row.calls, row.elements) for row in book.rows]

    mine = compiled("[01]", backend="eager", eager="*.experts")
    assert_same(comm.simulate(program, mine, world_size=2), comm.simulate(program, world_size=2))
    with pytest.raises(RuntimeError, match=r"block '0' \(Sparse\) cannot be compiled"):
        comm.simulate(program, compiled("[01]"), world_size=2)


class Shortened(nn.Module):
    """A block that takes as many rows as a value says; its backward pass cannot be compiled by inductor."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        return y[: int((x > 0).sum())].sum() + y  # type: ignore[no-any-return]


def test_a_backward_pass_that_cannot_be_compiled() -> None:
    """Inductor compiles it when it first runs, after the block's call: the error has the advice, and the state is as it was."""
    torch.manual_seed(0)
    apply, params = fds.functional(nn.Sequential(Shortened()))
    step = compiled("0", backend="inductor")(fds.train_step(lambda p, x: apply(p, x).square().mean(), fds.sgd(0.1)))
    state = step.init(params)
    with pytest.raises(RuntimeError, match=r"backward pass of a block of '0' cannot be compiled: .* Name what"):
        step(state, torch.randn(4, 4))
    assert int(state.step) == 0


# -- processes, and code -------------------------------------------------------------------------------------------------


def small(*more: fds.Transform) -> list[float]:
    """The losses of some steps of one small block in stage 3, on this rank."""
    torch.manual_seed(0)
    apply, params = fds.functional(nn.Sequential(nn.Linear(4, 4), nn.Tanh()))
    step = fds.compose(T.zero(3), *more)(fds.train_step(lambda p, x: apply(p, x).square().mean(), fds.sgd(0.1)))
    state, losses = step.init(params), []
    for _ in range(3):
        state, metrics = step(state, torch.ones(2, 4) * (1 + comm.world().rank))
        losses.append(metrics["loss"].item())
    return losses


def _process() -> list[float]:
    return small(T.compiled("0", backend="eager"))


@pytest.mark.law(58)
def test_processes() -> None:
    assert comm.spawn(_process, world_size=2) == comm.simulate(small, world_size=2)


@pytest.mark.law(58)
def test_inductor() -> None:
    """Generated code rounds otherwise."""
    torch.testing.assert_close(small(T.compiled("0", options={"compile_threads": 1})), small(), rtol=1e-6, atol=0)


# -- refused -------------------------------------------------------------------------------------------------------------


class Bare(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.calls = nn.Linear(4, 4), 0

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)


class Sums(Bare):
    def forward(self, x: Tensor) -> Tensor:
        return comm.all_reduce(self.linear(x))


class Gathers(Bare):
    def forward(self, x: Tensor) -> Tensor:
        return comm.start(comm.all_gather, self.linear(x)).wait()


class Chooses(Bare):
    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) if x.sum() > 0 else x


class Counts(Bare):
    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.linear(x)


class Hooked(Bare):
    def __init__(self) -> None:
        super().__init__()
        self.linear.register_forward_hook(lambda *_: None)


class Scales(Bare):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Buffer(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        self.scale.view(2, 2).mul_(2)
        return self.linear(x) * (self.scale + 1)


class ScalesOut(Scales):
    def forward(self, x: Tensor) -> Tensor:
        torch.add(self.scale, self.scale, out=self.scale)
        return self.linear(x) * self.scale


class ScalesInplace(Scales):
    def forward(self, x: Tensor) -> Tensor:
        F.leaky_relu(self.scale, 0.5, True)
        return self.linear(x) * self.scale


class ScalesByMethod(Scales):
    def forward(self, x: Tensor) -> Tensor:
        self.scale.__imul__(2)
        return self.linear(x) * self.scale


class Bound(Bare):
    def __init__(self) -> None:
        super().__init__()
        self.forward = torch.tanh


def steps(block: type[nn.Module], *transforms: fds.Transform, rows: tuple[int, ...] = (2, 2, 2)) -> None:
    """Some steps of two such blocks."""

    def program() -> None:
        apply, params = fds.functional(nn.Sequential(block(), block()))
        step = fds.compose(*transforms)(fds.train_step(lambda p, x: apply(p, x).square().mean(), fds.sgd(0.1)))
        state = step.init(params)
        for count in rows:
            state, _ = step(state, torch.ones(count, 4))

    comm.simulate(program, world_size=2)


@pytest.mark.parametrize(
    ("block", "words"),
    [
        (Sums, r"block '0' \(Sums\) .* comm.all_reduce, and a collective cannot be a part of compiled code"),
        (Gathers, r"block '0' \(Gathers\) .* comm.all_gather"),
        (Chooses, r"block '0' \(Chooses\) .* data-dependent branching .* if x.sum\(\) > 0"),
        (Counts, r"\(Counts\) cannot be compiled: its forward sets 'calls'"),
        (Hooked, r"block '0' \(Hooked\) .*: a Linear inside of it has hooks"),
        *(
            (block, r"writes the buffer '\w*scale_?' in place and computes with it afterwards")
            for block in (Scales, ScalesOut, ScalesInplace, ScalesByMethod)
        ),
        (Bound, r"its forward is not a method of it"),
    ],
)
def test_blocks_that_cannot_be_compiled(block: type[nn.Module], words: str) -> None:
    with pytest.raises(RuntimeError, match=words):
        steps(block, compiled("[01]"))


class Masks(Bare):
    def __init__(self) -> None:
        super().__init__()
        self.mask = nn.Buffer(torch.tensor([True, False, True, False]))

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x)
        return x.masked_fill(~self.mask, 0.0) + x.masked_fill(self.mask, 1.0)


def test_a_buffer_that_is_inverted_is_not_written() -> None:
    steps(Masks, compiled("[01]", backend="eager"))


def test_why_buffers_that_are_written_and_used_are_refused() -> None:
    """torch 2.13 alone: the backward pass writes once more. When this fails, the refusal can go."""

    def gradient(forward: Callable[..., Tensor]) -> float:
        module = Scales()
        weight = torch.eye(4).requires_grad_()
        module.linear._parameters["weight"] = weight
        (grad,) = torch.autograd.grad(forward(module, torch.ones(1, 4)).sum(), weight)
        return float(grad[0, 0])

    assert gradient(Scales.forward) == 3.0
    assert gradient(torch.compile(Scales.forward, backend="aot_eager")) == 5.0


def test_a_shape_that_changes_every_step() -> None:
    """Is named where it gets expensive; sizes as symbols are the mend."""
    with pytest.raises(RuntimeError, match=r"compiled 2 times already, now because .*size mismatch.*dynamic=True"):
        steps(Bare, compiled("[01]", recompile_limit=2), rows=(2, 3, 4))
    steps(Bare, compiled("[01]", recompile_limit=2, dynamic=True), rows=(2, 3, 4))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"backend": "indctor"}, "there is no back end 'indctor' here; the nearest is 'inductor'"),
        ({"backend": 3}, "backend=3 is neither a name nor a function"),
        ({"mode": "max-autotune"}, "mode='max-autotune' is inductor's, and backend='aot_eager' has no modes"),
        ({"backend": "inductor", "mode": "fast"}, "Unrecognized mode=fast"),
        ({"backend": "inductor", "mode": "lite", "options": {"debug": True}}, "is a set of options"),
        ({"recompile_limit": 0}, "recompile_limit=0 is not a number"),
        ({"blocks": ""}, "would be the whole loss function"),
        ({"blocks": 3}, "blocks=3 is not a path"),
        ({"eager": 3}, "eager=3 is not a path"),
    ],
)
def test_bad_arguments(options: dict[str, Any], words: str) -> None:
    with pytest.raises((TypeError, ValueError), match=words):
        compiled(**options)


def test_bad_compositions() -> None:
    """Fixed addresses for params that move, operations inside of compiled code, and paths that are none."""
    fixed = compiled("[01]", backend="inductor", mode="reduce-overhead")
    with pytest.raises(ValueError, match=r"mode='reduce-overhead' replays CUDA graphs, .* and zero\(3"):
        steps(Bare, T.zero(3), fixed)
    with pytest.raises(ValueError, match="keeps the results of single operations, and compiled code has none"):
        steps(Bare, T.remat("[01]", policy="recompute,matmuls=save"), compiled("[01]"))
    with pytest.raises(ValueError, match=r"blocks='block' matches no module; the nearest is"):
        steps(Bare, compiled("block"))
    step = compiled("w")(fds.train_step(lambda p, x: p["w"]["a"].sum(), fds.sgd(0.1)))
    with pytest.raises(ValueError, match=r"runs no fds\.functional module"):
        step(step.init({"w": {"a": torch.ones(2)}}), torch.ones(2))


# -- planted bugs --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("others", "bug"),
    [
        ("alone", Bug("leaves stay fetched", "compiling.block_calls:_fetched", "reversed(undo)", "reversed(undo[len(undo):])")),
        (
            "remat of the block",
            Bug(
                "compiled the second time alone", "compiling.block_calls:_watched", "pass_.slots.get(_EAGER, '')", "str('', '')"
            ),
        ),
    ],
    ids=lambda each: each.name if isinstance(each, Bug) else "",
)
def test_planted_bugs(others: str, bug: Bug) -> None:
    with planted(bug), pytest.raises(Exception):  # noqa: B017, PT011
        same_step(others, 3, 2, first=False)
