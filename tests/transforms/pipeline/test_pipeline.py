"""Laws 25, 34, 36: a pipeline of any schedule, on any mesh, is the single-device step."""

from collections.abc import Callable, Sequence
from functools import cache, partial
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import functional_ds as fds
from functional_ds import comm, transforms
from functional_ds import pipelining as pp
from functional_ds.pipelining.execution.boundary import TensorMeta
from functional_ds.pipelining.execution.runner import Runner
from tests.pipelining.cases import generated, rewritten
from tests.transforms.staged import Staged, on_mesh, trained

TOLERANCE = 2e-5  # a few hundred fp32 additions in other orders, through two AdamW updates with eps = 1e-4


@cache
def alone(count: int, rows: int) -> Any:
    """The single-device step on the whole batch; the metric of a pipeline's means is that of its micro-batches."""
    return trained(Staged.of(count, rows), transforms.clip(0.3))


def assert_same(found: Any, expected: Any, tolerance: float = TOLERANCE) -> None:
    for ours, theirs in zip((*found[0], found[1]), (*expected[0], expected[1]), strict=True):
        for name in theirs.keys() - {"largest"}:  # a mean over micro-batches
            assert ours[name] == pytest.approx(theirs[name], rel=tolerance, abs=tolerance), name
    for (path, leaf), other in zip(fds.tree.named(found[2]), fds.tree.leaves(expected[2]), strict=True):
        torch.testing.assert_close(leaf, other, rtol=tolerance, atol=tolerance, msg=lambda text, path=path: f"{path}: {text}")


SMALL = generated(p=3, m=4).filter(lambda schedule: schedule.stages <= 8)


@pytest.mark.law(36)
@settings(max_examples=settings.default.max_examples * 3 // 5)
@given(
    schedule=SMALL,
    zero=st.sampled_from((None, 0, 1, 2, 3)),
    dp=st.sampled_from((1, 2)),
    k=st.sampled_from((1, 2)),
    resident=st.sampled_from((None, 1, 2)),
    seed=st.integers(0, 99),
)
def test_a_pipeline_is_the_single_device_step(
    schedule: pp.Schedule, zero: int | None, dp: int, k: int, resident: int | None, seed: int
) -> None:
    """pipeline × ZeRO-k × accumulation, on any mesh = the step on the whole batch: loss, norm, params, evaluation.

    The model has a tied leaf, a skip connection over other stages, frozen and unused leaves, recomputation, integers that
    travel, draws, weights, and micro-batches of different sizes.
    """
    rows = 12 * dp * k
    dp = dp if zero is not None else 1
    run = partial(on_mesh, zero=zero, dp=dp, accumulate=k, resident=resident)
    found = comm.simulate(run, schedule, rows, world_size=schedule.ranks * dp, seed=seed)
    for each in found:
        assert_same(each, alone(schedule.stages, rows))
    for each in found[1:]:
        assert all(map(torch.equal, fds.tree.leaves(each[2]), fds.tree.leaves(found[0][2])))


# -- law 34 -------------------------------------------------------------------------------------------------------------


def exact(schedule: pp.Schedule) -> Any:
    """Gradients in small integers, whose sums are exact in any order."""
    stages = schedule.stages
    params = [{"w": torch.arange(1.0, 4.0) - i} for i in range(stages)]
    model = pp.stages([_times] * stages, params, loss=lambda y, batch: y.sum())
    step = transforms.pipeline(schedule, model)(fds.train_step(model, fds.sgd(2.0**-3)))
    state, metrics = step(step.init(params), (torch.arange(36.0).view(12, 3) % 5 - 2,))
    return metrics["loss"], step.params(state)


def _times(p: Any, x: Tensor) -> Tensor:
    return x * p["w"]


@pytest.mark.law(34)
@given(schedule=SMALL, seed=st.integers(0, 99), written=st.booleans())
def test_gradients_do_not_depend_on_the_schedule(schedule: pp.Schedule, seed: int, written: bool) -> None:
    """Bitwise, for any two schedules of the same stages and micro-batches; what was not filled is NaN and never shows.

    Messages may be written into the schedule, anywhere that is proved.
    """
    if written:
        schedule = rewritten(pp.lower(schedule, reduces=seed % 2 == 0), Random(seed))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TensorMeta, "like", _poisoned)
        found = comm.simulate(exact, schedule, world_size=schedule.ranks, seed=seed)
    expected = comm.simulate(exact, pp.gpipe(schedule.stages, schedule.microbatches), world_size=schedule.stages)
    for each in found:
        assert all(map(torch.equal, fds.tree.leaves(each), fds.tree.leaves(expected[0])))


def _poisoned(meta: TensorMeta) -> Tensor:
    value = float("nan") if meta.dtype.is_floating_point else -1
    return torch.full(meta.shape, value, dtype=meta.dtype)


@pytest.mark.law(36)
def test_what_is_written_is_carried_out_where_it_stands(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sends, gathers, evictions and reductions of each rank; receives may be posted early."""
    lowered = pp.lower(pp.breadth_first(2, 2), gathers=True, resident=1)
    schedule = rewritten(lowered, Random(5), moves=40)
    assert [[*map(str, row)] for row in schedule] != [[*map(str, row)] for row in lowered]
    done: list[list[pp.Action]] = [[] for _ in range(4)]

    def noted(name: str, actions: Callable[..., Sequence[pp.Action]]) -> None:
        plain = getattr(Runner, name)

        def run(self: Runner, *rest: Any) -> None:
            if self.records:
                done[comm.world().rank] += actions(*rest)
            plain(self, *rest)

        monkeypatch.setattr(Runner, name, run)

    noted("exchange", lambda actions: actions)
    for kind in (pp.Kind.GATHER, pp.Kind.EVICT, pp.Kind.REDUCE):
        noted(kind.name.lower(), lambda *rest, kind=kind: [pp.Action(kind, *rest)])
    for found in comm.simulate(partial(on_mesh, zero=3, dp=2), schedule, 24, world_size=4):
        assert_same(found, alone(4, 24))
    for rank, actions in enumerate(done):
        row = [action for action in schedule[rank % 2] if action.kind > pp.Kind.B] * 2  # two steps
        assert [each for each in actions if each.kind not in RECEIVES] == [each for each in row if each.kind not in RECEIVES]
        assert [each for each in actions if each.kind in RECEIVES] == [each for each in row if each.kind in RECEIVES]


RECEIVES = (pp.Kind.RECV_F, pp.Kind.RECV_B)


# -- law 25 -------------------------------------------------------------------------------------------------------------


@pytest.mark.law(25)
@settings(max_examples=settings.default.max_examples // 3)
@given(where=st.integers(0, 3), j=st.integers(0, 3), zero=st.sampled_from((None, 1, 3)))
def test_an_overflow_on_any_stage_changes_nothing_on_all(where: int, j: int, zero: int | None) -> None:
    """A gradient that is not finite, in one stage's micro-batch: params, optimizer and count are bitwise as they were."""

    def program() -> Any:
        mesh = comm.mesh(dp=1 if zero is None else 2, pp=4)
        params = [{"w": torch.ones(3)} for _ in range(4)]

        def layer(p: Any, x: Tensor, batch: Any, index: int) -> Tensor:
            bad = batch[1].all() & (batch[0][0, 0] == j) & (index == where)
            return x * p["w"] * torch.where(bad, float("inf"), 1.0).to(x.dtype)

        pieces = [pp.Piece(partial(layer, index=i), uses=f"{i}") for i in range(4)]
        model = pp.stages(pieces, params, loss=lambda y, batch: y.sum())
        strategy = [
            transforms.mixed_precision("fp16", 2.0**4),
            *([] if zero is None else [transforms.zero(zero, mesh["dp"])]),
            transforms.pipeline(pp.zb_h1(4, 4), model, mesh["pp"]),
        ]
        step = fds.compose(*strategy)(fds.train_step(model, fds.adamw(0.1)))
        before = step.init(params)
        x = torch.arange(4.0)[:, None].expand(4, 3)
        after, metrics = step(before, (x, torch.ones(4)), donate=False)
        kept = [
            torch.equal(a, b) for a, b in zip(fds.tree.leaves(before.optimizer), fds.tree.leaves(after.optimizer), strict=True)
        ]
        moved, fine = step(after, (x, torch.zeros(4)), donate=False)
        return (
            metrics["skipped"].item(),
            all(kept) and all(map(torch.equal, fds.tree.leaves(before.params), fds.tree.leaves(after.params))),
            after.step.item(),
            moved.step.item() - fine["skipped"].item(),
        )

    found = comm.simulate(program, world_size=4 if zero is None else 8)
    assert set(found) == {(1.0, True, 0, 1.0)}


# -- precision, real processes ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("precision", "scale", "tolerance"), [("bf16", None, 2e-2), ("fp16", 2.0**6, 4e-3)])
def test_half_precision(precision: str, scale: float | None, tolerance: float) -> None:
    """Within the rounding of the format: 2^-8 and 2^-11, over some operations."""
    inner = transforms.mixed_precision(precision, scale)
    expected = trained(Staged.of(4, 8), inner, transforms.clip(0.3))
    for zero in (None, 1, 3):
        run = partial(on_mesh, zero=zero, dp=1 if zero is None else 2)
        found = comm.simulate(run, pp.zbv(2, 2), 8, inner, world_size=2 if zero is None else 4)
        assert_same(found[0], expected, tolerance)


def on_processes() -> list[Any]:
    schedules = [pp.gpipe(2, 4), pp.one_f_one_b(2, 4), pp.interleaved_one_f_one_b(2, 4), pp.zbv(2, 4)]
    found = [on_mesh(schedule, 8) for schedule in schedules]
    return [*found, on_mesh(pp.interleaved_one_f_one_b(2, 2), 8, zero=3, resident=1)]


@pytest.mark.law(36)
def test_two_processes() -> None:
    """GPipe, 1F1B, interleaved and ZBV on Gloo are the single-device step, and agree with the simulator bit for bit."""
    found = comm.spawn(on_processes, world_size=2)
    simulated = comm.simulate(on_processes, world_size=2)
    for ours, theirs in zip(found, simulated, strict=True):
        for count, each, other in zip((2, 2, 4, 4, 4), ours, theirs, strict=True):
            assert_same(each, alone(count, 8))
            assert each[:2] == other[:2]
            assert all(map(torch.equal, fds.tree.leaves(each[2]), fds.tree.leaves(other[2])))


# -- memory -------------------------------------------------------------------------------------------------------------


@given(schedule=SMALL, rows=st.sampled_from((12, 24)))
@settings(max_examples=6)
def test_the_peak_of_live_activations_is_as_predicted(schedule: pp.Schedule, rows: int) -> None:
    """To the byte, on each rank: from shapes alone, and as a recorder counts it in a run."""
    case = Staged.of(schedule.stages, rows * schedule.microbatches)
    micro = fds.tree.map(lambda x: x[:rows], case.batch)

    def program() -> Any:
        recorder = pp.Recorder()
        piped = transforms.pipeline(schedule, case.stages, recorder=recorder)
        step = piped(fds.train_step(case.stages, fds.sgd(0.1)))
        step(step.init(case.params), case.batch)
        return recorder.peak, recorder.run(schedule, comm.world()).makespan > 0

    predicted = pp.timeline(schedule, pp.estimated(case.stages, case.params, micro)).peak
    assert comm.simulate(program, world_size=schedule.ranks) == [(peak, True) for peak in predicted]


def test_a_rank_stores_its_stages_alone_and_evicts_what_it_gathered() -> None:
    """Stage 3 with resident=1: between steps shards, within a step one of its two stages whole."""

    def program() -> Any:
        mesh = comm.mesh(dp=2, pp=2)
        params = [{"w": torch.ones(64, 64)} for _ in range(4)]
        whole: list[int] = []

        def layer(p: Any, x: Tensor) -> Tensor:
            whole.append(sum(room.nbytes() for room in rooms(p)))
            return x @ p["w"]

        seen: dict[int, Any] = {}

        def rooms(p: Any) -> Any:
            seen[p["w"].untyped_storage()._cdata] = p["w"].untyped_storage()
            return seen.values()

        model = pp.stages([layer] * 4, params, loss=lambda y, batch: y.mean())
        strategy = transforms.zero(3, mesh["dp"]), transforms.pipeline(pp.breadth_first(2, 2), model, mesh["pp"], resident=1)
        step = fds.compose(*strategy)(fds.train_step(model, fds.sgd(0.1)))
        state = step.init(params)
        stored = sum(leaf.nbytes for leaf in fds.tree.leaves(state.params))
        state, _ = step(state, (torch.ones(4, 64),))  # the first one looks at shapes alone, too
        whole.clear()
        seen.clear()
        step(state, (torch.ones(4, 64),))
        return stored, max(whole)

    one = 64 * 64 * 4
    assert comm.simulate(program, world_size=4) == [(one, one)] * 4  # two halves; one whole


# -- bad input ----------------------------------------------------------------------------------------------------------


def step_of(schedule: pp.Schedule, case: Staged, **options: Any) -> fds.Step:
    return transforms.pipeline(schedule, case.stages, **options)(fds.train_step(case.stages, fds.sgd(0.1)))


def test_errors_before_anything_runs() -> None:
    case = Staged.of(2, 8)
    with pytest.raises(ValueError, match="it has 3 stages, and the model 2"):
        step_of(pp.gpipe(3, 4), case)
    with pytest.raises(ValueError, match="it is for 2 ranks, and group 'world' has 1"):
        step_of(pp.gpipe(2, 4), case).init(case.params)
    with pytest.raises(pp.ScheduleError, match="waits in a cycle"):
        step_of(pp.Schedule.of(["0F0 0B0 0F1 0B1", "1F0 1F1 1B0 1B1"]), case)
    with pytest.raises(ValueError, match="resident=0"):
        step_of(pp.gpipe(2, 4), case, resident=0)
    with pytest.raises(TypeError, match="are not Stages"):
        transforms.pipeline(pp.gpipe(2, 4), [lambda p, x: x])  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="is not a group"):
        transforms.pipeline(pp.gpipe(2, 4), case.stages, 3)  # type: ignore[arg-type]
    base = fds.train_step(case.stages, fds.sgd(0.1))
    with pytest.raises(ValueError, match=r"put pipeline before it"):
        transforms.pipeline(pp.gpipe(2, 4), case.stages)(transforms.accumulate(2)(base))


def test_a_batch_with_too_few_rows() -> None:
    case = Staged.of(2, 3)
    with pytest.raises(ValueError, match="has 3 rows, too few for 4 micro-batches"):
        comm.simulate(on_mesh, pp.gpipe(2, 4), 3, world_size=2)
    with pytest.raises(ValueError, match="put pipeline after zero"):
        comm.simulate(lambda: _after(case, transforms.zero(1, comm.mesh(pp=2, dp=1)["dp"])), world_size=2)


def _after(case: Staged, later: fds.Transform) -> None:
    fds.compose(transforms.pipeline(pp.gpipe(2, 2), case.stages), later)(fds.train_step(case.stages, fds.sgd(0.1))).init(
        case.params
    )


def test_a_stage_that_cannot_take_what_comes_is_named_by_all() -> None:
    """Before any rank computes: the stage, the shapes, the reason."""
    params = [{"w": torch.ones(3, 4)}, {"w": torch.ones(3, 4)}]
    model = pp.stages([lambda p, x: x @ p["w"]] * 2, params, loss=lambda y, batch: y.mean())
    step = transforms.pipeline(pp.gpipe(2, 2), model)(fds.train_step(model, fds.sgd(0.1)))

    def program() -> str:
        with pytest.raises(ValueError, match=r"stage 1 .* cannot be run on float32\[2, 4\]: RuntimeError") as caught:
            step(step.init(params), (torch.ones(4, 3),))
        return str(caught.value)

    first, second = comm.simulate(program, world_size=2)
    assert first == second


def losses_of_read_values(*, reads: bool) -> list[float]:
    """A loss that reads numbers on the host: for a print, for a choice, and for a factor."""
    seen: list[float] = []

    def loss(y: Tensor, batch: Any) -> fds.Weighted:
        error = (y - 1).square()
        if reads:
            seen.append(error.sum().item())
            error = error * float(batch[0].max()) if error.max() > 0.5 else error / int(batch[0].numel())
        else:
            error = torch.where(error.max() > 0.5, error * batch[0].max(), error / batch[0].numel())
        return fds.Weighted(error.sum(), len(y))

    params = [{"w": torch.arange(12.0).view(3, 4).sin()}, {"w": torch.arange(12.0).view(4, 3).cos()}]
    model = pp.stages([lambda p, x: x @ p["w"], lambda p, x: x @ p["w"]], params, loss=loss)
    step = transforms.pipeline(pp.one_f_one_b(2, 2), model)(fds.train_step(model, fds.sgd(0.01)))
    state, losses = step.init(params), []
    for index in range(2):
        state, metrics = step(state, (torch.randn(4, 3, generator=torch.Generator().manual_seed(index)),))
        losses.append(metrics["loss"].item())
    return losses


def test_a_loss_may_read_values() -> None:
    """``.item()``, ``float`` and an ``if`` in the loss function of the last stage."""
    read = comm.simulate(lambda: losses_of_read_values(reads=True), world_size=2)
    assert read == comm.simulate(lambda: losses_of_read_values(reads=False), world_size=2)


CHOICES: dict[str, Any] = {
    "mask": lambda x, chosen: x[chosen],
    "rows": lambda x, chosen: x[torch.where(chosen[:, 0])[0]],
    "masked_select": torch.masked_select,
    "nonzero": lambda x, chosen: x[tuple(chosen.nonzero().T)],
    "argwhere": lambda x, chosen: x.flatten()[torch.argwhere(chosen.flatten())[:, 0]],
}


@pytest.mark.parametrize("choice", CHOICES)
def test_a_loss_may_choose_elements(choice: str) -> None:
    """As labels of -100 are left out: how many there are is known with the values alone."""

    def loss(y: Tensor, batch: Any) -> fds.Weighted:
        some = CHOICES[choice](y, batch[0] > 0)
        return fds.Weighted(some.square().sum(), some.numel())

    params = [{"w": torch.arange(9.0).view(3, 3).sin()}, {"w": torch.arange(9.0).view(3, 3).cos()}]
    batch = (torch.randn(4, 3, generator=torch.Generator().manual_seed(0)),)
    model = pp.stages([lambda p, x: x @ p["w"]] * 2, params, loss=loss)

    def trained(*strategy: fds.Transform) -> Any:
        step = fds.compose(*strategy)(fds.train_step(model, fds.sgd(0.01)))
        state, metrics = step(step.init(params), batch)
        return metrics["loss"], step.params(state)

    expected = trained()
    for found in comm.simulate(lambda: trained(transforms.pipeline(pp.one_f_one_b(2, 2), model)), world_size=2):
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("phase", ["penalty", "metric", "weight"])
def test_a_loss_phase_that_reads_all_params(phase: str, frozen: bool) -> None:
    """On the last rank it would read that stage's alone. One that reads the loss alone is the step on one device."""

    def reads(inner: Any, step: fds.Step, state: fds.State, params: Any, batch: Any) -> Any:
        loss, metrics = inner(step, state, params, batch)
        norm = sum(leaf.square().sum() for leaf in fds.tree.leaves(params))
        if phase == "metric":
            return loss, metrics | {"norm": fds.Weighted(norm, torch.ones(()))}
        if phase == "weight":
            return loss, metrics | {"norm": fds.Weighted(torch.ones(()), norm)}
        return fds.Weighted(loss.sum + norm * loss.weight, loss.weight), metrics

    def doubled(inner: Any, step: fds.Step, state: fds.State, params: Any, batch: Any) -> Any:
        loss, metrics = inner(step, state, params, batch)
        return fds.Weighted(2 * loss.sum, loss.weight), metrics

    last = torch.tensor(2.0)
    params = [{"w": torch.tensor(3.0)}, {"w": fds.freeze(last) if frozen else last}]
    model = pp.stages([lambda p, x: x * p["w"]] * 2, params, loss=lambda y, batch: y.mean())

    def program(loss: Any, *strategy: fds.Transform) -> Any:
        step = fds.compose(*strategy, fds.wrap("changed", loss=loss))(fds.train_step(model, fds.sgd(0.1)))
        state, _ = step(step.init(params), torch.ones(4))
        return {path: leaf.item() for path, leaf in fds.tree.named(step.params(state))}

    def evaluated() -> Any:
        step = fds.compose(pipeline, fds.wrap("changed", loss=reads))(fds.train_step(model, fds.sgd(0.1)))
        return step.evaluate(step.init(params), torch.ones(4))

    pipeline = transforms.pipeline(pp.one_f_one_b(2, 2), model)
    assert comm.simulate(program, doubled, pipeline, world_size=2)[0] == pytest.approx(program(doubled))
    says = rf"a transform's phase loss reads '1\.w' for '{'loss' if phase == 'penalty' else 'norm'}': in a pipeline it has"
    with pytest.raises(ValueError, match=says):
        comm.simulate(program, reads, pipeline, world_size=2)
    with pytest.raises(ValueError, match=says):
        comm.simulate(evaluated, world_size=2)


def test_another_loss_function_than_the_stages() -> None:
    case = Staged.of(2, 4)
    step = transforms.pipeline(pp.gpipe(2, 2), case.stages)(fds.train_step(lambda params, batch: batch[0].sum(), fds.sgd(0.1)))
    with pytest.raises(ValueError, match=r"train_step\(stages, optimizer\)"):
        comm.simulate(lambda: step(step.init(case.params), case.batch), world_size=2)
