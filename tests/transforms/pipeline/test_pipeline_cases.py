"""Law 36 for special stages and losses: dtypes, uneven rows, params as outputs, patterns by path."""

import csv
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.pipelining.schedules import ScheduleGPipe

import functional_ds as fds
from functional_ds import comm, transforms
from functional_ds import pipelining as pp
from functional_ds.base.marks import is_trainable
from functional_ds.pipelining.execution.runner import Runner
from tests.pipelining.schedules.test_csv import Theirs
from tests.transforms.staged import on_mesh


def layer(p: Any, x: Tensor) -> Tensor:
    return torch.tanh(x @ p["w"])


def error(y: Tensor, batch: Any) -> Tensor:
    return (y - batch[1]).square().mean()


def weights(count: int, dtype: torch.dtype = torch.float32) -> Any:
    return [{"w": torch.eye(4, dtype=dtype) + i / 8} for i in range(count)]


def rows(count: int, dtype: torch.dtype = torch.float32) -> Any:
    both = torch.linspace(-1, 1, 8 * count, dtype=dtype).view(2, count, 4)
    return both[0], both[1].flip(0)


def run(model: pp.Stages, params: Any, batch: Any, schedule: pp.Schedule | None, *strategy: Any, rule: Any = None) -> Any:
    """Metrics of two steps, those of an evaluation, and the params; ``strategy`` is made of the mesh."""
    mesh = comm.mesh(dp=comm.world().size // (schedule.ranks if schedule else 1), pp=schedule.ranks if schedule else 1)
    resident = None if schedule is None or schedule.has(pp.Kind.GATHER) else 1
    piped = [] if schedule is None else [transforms.pipeline(schedule, model, mesh["pp"], resident=resident)]
    step = fds.compose(*(make(mesh) for make in strategy), *piped)(fds.train_step(model, rule or fds.sgd(0.1)))
    state, batch = step.init(params), fds.tree.map(lambda x: x.tensor_split(mesh["dp"].size)[mesh["dp"].rank], batch)
    found = []
    for _ in range(2):
        state, metrics = step(state, batch)
        found.append(metrics)
    return [*found, step.measure(state, batch)], step.params(state)


def zero(stage: int) -> Any:
    return lambda mesh: transforms.zero(stage, mesh["dp"])


def check(
    model: pp.Stages, params: Any, batch: Any, schedule: pp.Schedule, *strategy: Any, dp: int = 1, **options: Any
) -> None:
    """The pipeline on every rank is the same without it on dp ranks."""
    expected = comm.simulate(lambda: run(model, params, batch, None, *strategy, **options), world_size=dp)[0]
    for found in comm.simulate(
        lambda: run(model, params, batch, schedule, *strategy, **options), world_size=dp * schedule.ranks
    ):
        torch.testing.assert_close(found, expected, rtol=2e-5, atol=2e-5)


@pytest.mark.law(36)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_losses_and_metrics_of_any_dtype(dtype: torch.dtype) -> None:
    """A count of hits is an integer; the ranks without it send zeros of its dtype."""

    def loss(y: Tensor, batch: Any) -> Any:
        hits = (y.argmax(-1) == batch[1].argmax(-1)).sum()
        return error(y, batch), {
            "accuracy": fds.Weighted(hits, len(y)),
            "hits": hits / len(y),
            "mean": y.mean(),
            "finite": y.isfinite().all(),
        }

    params = weights(2, dtype)
    check(pp.stages([layer] * 2, params, loss=loss), params, rows(5, dtype), pp.one_f_one_b(2, 3))


@pytest.mark.law(27)
def test_a_norm_is_as_exact_as_the_widest_leaf_of_any_stage() -> None:
    """To 1e-12 on all ranks, where the first stage is fp64, the second has no params, and the third is fp32."""
    params = {"a": torch.eye(4, dtype=torch.float64) / 3, "b": torch.eye(4)}
    pieces = [
        pp.Piece(lambda a, x: torch.tanh(x @ a), uses="a"),
        pp.Piece(lambda p, x: torch.sin(x), uses=()),
        pp.Piece(lambda b, x: x @ b.double(), uses="b"),
    ]
    model, batch = pp.stages(pieces, params, loss=error), rows(3, torch.float64)
    clip = [lambda mesh: transforms.clip(0.01)]
    [((expected, *_), _)] = comm.simulate(lambda: run(model, params, batch, None, *clip), world_size=1)
    for (found, *_), _ in comm.simulate(lambda: run(model, params, batch, pp.one_f_one_b(3, 1), *clip), world_size=3):
        torch.testing.assert_close(found["grad_norm"], expected["grad_norm"], rtol=1e-12, atol=0)


@pytest.mark.law(36)
@pytest.mark.parametrize("stored", [None, "cpu", "disk"])
def test_params_on_the_host_or_a_disk(tmp_path: Path, stored: str | None) -> None:
    """In stage 3, gathered and let go of one stage at a time."""

    def offload(mesh: Any) -> fds.Transform:
        folder = tmp_path / f"{mesh['pp'].size} stages"
        folder.mkdir(exist_ok=True)
        return transforms.offload("disk", stored, path=folder)

    params = weights(4)
    model = pp.stages([layer] * 4, params, loss=error)
    check(model, params, rows(8), pp.breadth_first(2, 2), offload, zero(3), dp=2, rule=fds.adamw(0.1, eps=1e-3))


@pytest.mark.sample(2)
@pytest.mark.law(28)
@pytest.mark.parametrize("schedule", [pp.gpipe(2, 2), pp.zb_h1(2, 2)], ids=["whole", "split"])
@pytest.mark.parametrize("blocks", ["*", ""])
def test_activations_divided_over_another_axis(schedule: pp.Schedule, blocks: str) -> None:
    """Shapes alone have no values to divide or to compare; the blocks in a run have, and the step stays the same."""
    torch.manual_seed(3)
    net = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(4)))
    model, params = pp.cut(net, 2, example=rows(4), loss=error)

    def program(policy: str) -> Any:
        mesh = comm.mesh(tp=2, pp=2)
        remat = transforms.remat(blocks, policy=policy, group=mesh["tp"] if policy == "partition" else None)
        step = fds.compose(transforms.pipeline(schedule, model, mesh["pp"]), remat)(fds.train_step(model, fds.sgd(0.1)))
        state = step.init(params)
        with fds.remat_report() as report:
            state, metrics = step(state, rows(4))
        return metrics["loss"], step.params(state), report.partitioned

    for found, plain in zip(*(comm.simulate(program, policy, world_size=4) for policy in ("partition", "save")), strict=True):
        assert all(map(torch.equal, fds.tree.leaves(found[:2]), fds.tree.leaves(plain[:2])))
        assert found[2] > 0


@pytest.mark.law(36)
def test_tables_that_torch_has_lowered(tmp_path: Path) -> None:
    """With its own sends, receives, gathers and reductions, or reductions alone, the step is the same."""
    params = weights(4)
    model = pp.stages([layer] * 4, params, loss=error)
    for schedule in (pp.interleaved_one_f_one_b(2, 4), pp.zbv(2, 4)):
        pp.to_csv(schedule, tmp_path / "mine.csv")
        theirs = Theirs(schedule)
        theirs._load_csv(str(tmp_path / "mine.csv"))
        theirs._dump_csv(str(tmp_path / "theirs.csv"), format="compute_comms")
        check(model, params, rows(8), pp.from_csv(tmp_path / "theirs.csv"), zero(3), dp=2)
    bare = SimpleNamespace(_num_stages=4, _n_microbatches=3)
    with (tmp_path / "bare.csv").open("w", newline="") as file:
        csv.writer(file).writerows(ScheduleGPipe._get_pipeline_order(bare).values())
    check(model, params, rows(6), pp.from_csv(tmp_path / "bare.csv"))


def test_gathers_are_the_schedules_own() -> None:
    """Each stage is gathered as often as the schedule says, and none is left at the end; ``resident`` is refused."""
    params = weights(4)
    model = pp.stages([layer] * 4, params, loss=error)
    lowered = pp.lower(pp.breadth_first(2, 2), gathers=True, resident=1)

    def program(schedule: pp.Schedule, resident: int | None) -> int:
        mesh = comm.mesh(dp=2, pp=2)
        piped = transforms.pipeline(schedule, model, mesh["pp"], resident=resident)
        step = fds.compose(transforms.zero(3, mesh["dp"]), piped)(fds.train_step(model, fds.sgd(0.1)))
        state, _ = step(step.init(params), rows(4))
        with comm.ledger() as book:
            step(state, rows(4))
        return sum(row.calls for row in book.rows if (row.collective, row.group) == ("all_gather", "dp"))

    expected = [[action.kind for action in lowered[rank]].count(pp.Kind.GATHER) for rank in (0, 1, 0, 1)]
    assert comm.simulate(program, pp.breadth_first(2, 2), 1, world_size=4) == expected
    assert comm.simulate(program, lowered, None, world_size=4) == expected
    with pytest.raises(ValueError, match="resident=1: the schedule itself has the gathers of params"):
        transforms.pipeline(lowered, model, resident=1)


@pytest.mark.parametrize("stage", [None, 2, 3])
def test_a_stages_gradients_are_let_go_when_they_are_reduced(monkeypatch: pytest.MonkeyPatch, stage: int | None) -> None:
    """Except those of shared leaves, whose sums are not complete."""
    plain, held = Runner.reduce, []

    def reduce(self: Runner, stage: int, j: int = -1) -> None:
        before = set(self.grads(stage))
        plain(self, stage, j)
        held.append((before, set(self.grads(stage))))

    monkeypatch.setattr(Runner, "reduce", reduce)
    comm.simulate(partial(on_mesh, zero=stage, dp=1), pp.zbv(2, 2), 4, world_size=2)
    assert any("embed" in before for before, _ in held)
    assert all(before > after == before & {"embed"} for before, after in held)


def test_a_recorder_notes_no_evaluations() -> None:
    """Times and bytes stay those of the last step."""
    params = weights(2)
    model = pp.stages([layer] * 2, params, loss=error)

    def program() -> bool:
        recorder = pp.Recorder()
        step = transforms.pipeline(pp.one_f_one_b(2, 4), model, recorder=recorder)(fds.train_step(model, fds.sgd(0.1)))
        state, _ = step(step.init(params), rows(8))
        before = list(recorder.times), dict(recorder.saved), recorder.peak
        step.evaluate(state, rows(8))
        same = before == (recorder.times, recorder.saved, recorder.peak)
        return same and min(recorder.saved.values()) > 0 and recorder.run(pp.one_f_one_b(2, 4), comm.world()).makespan > 0

    assert comm.simulate(program, world_size=2) == [True, True]


@pytest.mark.law(36)
def test_each_rank_of_data_weighs_the_same_however_its_rows_fall_on_micro_batches() -> None:
    """Plain means, 9 and 8 rows, in 4 micro-batches: as without a pipeline, 1/2 each."""
    params = weights(2)
    check(pp.stages([layer] * 2, params, loss=error), params, rows(17), pp.gpipe(2, 4), zero(1), dp=2)


@pytest.mark.law(36)
def test_a_param_that_is_handed_on_outlives_its_eviction() -> None:
    """A stage gives its weight to the next one, and reports it; in stage 3 with resident=1 it is let go in between."""

    def first(p: Any, x: Tensor) -> Any:
        return layer(p, x), p["w"]

    def between(p: Any, x: Any) -> Any:
        return layer(p, x[0] @ x[1]), p["w"]

    def last(p: Any, x: Any) -> Tensor:
        return layer(p, x[0] @ x[1])

    params = weights(4)
    model = pp.stages([first, between, between, last], params, loss=error)
    check(model, params, rows(12), pp.breadth_first(2, 3), zero(3), dp=2)


@pytest.mark.law(36)
def test_a_shared_leaf_without_a_gradient_on_one_of_its_ranks() -> None:
    """In bf16, where the other rank's sum has grown in fp32."""
    params = {"table": torch.eye(4), "a": torch.eye(4), "b": torch.eye(4)}
    pieces = [
        pp.Piece(lambda p, x: torch.tanh(x @ p[0] @ p[1]), uses=("table", "a")),
        pp.Piece(lambda p, x: torch.tanh((x + p[0].detach().mean()) @ p[1]), uses=("table", "b")),
    ]
    model = pp.stages(pieces, params, loss=error)

    def program(piped: bool) -> Any:
        step = fds.train_step(model, fds.sgd(0.1))
        step = fds.compose(
            transforms.mixed_precision("bf16"), *([transforms.pipeline(pp.one_f_one_b(2, 3), model)] if piped else [])
        )(step)
        state, _ = step(step.init(params), rows(6))
        return step.params(state)

    for found in comm.simulate(program, True, world_size=2):
        torch.testing.assert_close(found, program(False), rtol=0, atol=2e-3)


def test_an_evaluation_of_fewer_rows_than_micro_batches() -> None:
    params = weights(4)
    model = pp.stages([layer] * 4, params, loss=error)

    def program() -> list[float]:
        step = transforms.pipeline(pp.zbv(2, 4), model)(fds.train_step(model, fds.sgd(0.1)))
        state = step.init(params)
        return [step.evaluate(state, rows(count)).item() for count in (5, 3, 1)]

    expected = [model(params, rows(count)).item() for count in (5, 3, 1)]
    for found in comm.simulate(program, world_size=2):
        assert found == pytest.approx(expected, rel=1e-5)


def test_ranks_of_data_may_evaluate_different_numbers_of_rows() -> None:
    """Stage 3 with resident=1: they gather together, however many micro-batches each has."""
    params = weights(4)
    model = pp.stages([layer] * 4, params, loss=error)

    def program() -> float:
        mesh = comm.mesh(dp=2, pp=2)
        piped = transforms.pipeline(pp.breadth_first(2, 3), model, mesh["pp"], resident=1)
        step = fds.compose(transforms.zero(3, mesh["dp"]), piped)(fds.train_step(model, fds.sgd(0.1)))
        mine = fds.tree.map(lambda x: x[:4] if mesh["dp"].rank else x[4:], rows(5))
        return step.evaluate(step.init(params), mine).item()

    assert comm.simulate(program, world_size=4) == [pytest.approx(_weighed(model, params), rel=1e-5)] * 4


def _weighed(model: pp.Stages, params: Any) -> float:
    four, one = (model(params, fds.tree.map(lambda x, cut=cut: x[cut], rows(5))).item() for cut in (slice(4), slice(4, 5)))
    return (four + one) / 2  # plain means of ranks weigh alike


def test_shapes_are_not_kept_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """The cache of shapes is emptied when a run's batches have ever new shapes."""
    monkeypatch.setattr("functional_ds.pipelining.execution.gradients._CAPACITY", 3)
    params = weights(2)
    model = pp.stages([layer] * 2, params, loss=error)

    def program() -> tuple[list[float], int]:
        step = transforms.pipeline(pp.gpipe(2, 1), model)(fds.train_step(model, fds.sgd(0.1)))
        state = step.init(params)
        found = [step.evaluate(state, rows(count)).item() for count in (1, 2, 3, 4, 5, 1, 5)]
        return found, max(map(len, state.slots["pipeline"].cache.crossing.values()))

    expected = [model(params, rows(count)).item() for count in (1, 2, 3, 4, 5, 1, 5)]
    for found, most in comm.simulate(program, world_size=2):
        assert found == pytest.approx(expected, rel=1e-5)
        assert most <= 3


@pytest.mark.law(36)
def test_leaves_with_several_rows_for_each_of_another() -> None:
    """They are cut where the others are; numbers that do not fit are refused by name."""

    def loss(y: Tensor, batch: Any) -> Any:
        return fds.Weighted((y.repeat_interleave(2, 0) - batch[1]).square().sum(), batch[1].numel())

    params = weights(2)
    model = pp.stages([layer] * 2, params, loss=loss)
    check(model, params, (rows(5)[0], rows(10)[1]), pp.gpipe(2, 2))
    with pytest.raises(
        ValueError, match=r"leaf at '1' has 6 rows and another 4, which cannot be split into 3 micro-batches alike"
    ):
        comm.simulate(lambda: run(model, params, (rows(4)[0], rows(6)[1]), pp.gpipe(2, 3)), world_size=2)


def test_another_step_on_the_same_state_has_metrics_of_its_own() -> None:
    params = weights(2)
    plain = pp.stages([layer] * 2, params, loss=error)
    more = pp.stages([layer] * 2, params, loss=lambda y, batch: (error(y, batch), {"mean": y.mean()}))

    def program() -> set[str]:
        first, second = (
            transforms.pipeline(pp.gpipe(2, 2), model)(fds.train_step(model, fds.sgd(0.1))) for model in (plain, more)
        )
        state = first.init(params)
        first.evaluate(state, rows(4))
        return set(second.measure(state, rows(4)))

    assert comm.simulate(program, world_size=2) == [{"loss", "mean"}] * 2


def test_frozen_leaves_come_back_as_such_on_every_rank() -> None:
    params = fds.freeze(weights(2), r"^0")
    model = pp.stages([layer] * 2, params, loss=error)

    def program() -> list[bool]:
        step = transforms.pipeline(pp.gpipe(2, 2), model)(fds.train_step(model, fds.sgd(0.1)))
        return [is_trainable(leaf) for leaf in fds.tree.leaves(step.params(step.init(params)))]

    assert comm.simulate(program, world_size=2) == [[False, True]] * 2


@pytest.mark.law(36)
@pytest.mark.parametrize("stage", [0, 1, 3])
def test_a_pattern_that_names_leaves_of_another_rank(stage: int) -> None:
    """In route and decay=, with ZeRO of any stage along the other axis, also inside of a route."""
    params = weights(2)
    inside = fds.adamw(0.01, eps=1e-3, weight_decay=0.1, decay=r"^0")
    rule = fds.param_groups({r"^1": fds.sgd(0.1)}, inside)
    check(pp.stages([layer] * 2, params, loss=error), params, rows(8), pp.one_f_one_b(2, 2), zero(stage), dp=2, rule=rule)


def squashed(mesh: Any) -> Any:
    def view(inner: Any, step: Any, state: Any, trains: bool, whole: bool) -> fds.View:
        return inner(step, state, trains, whole).map(partial(fds.tree.map, torch.tanh))

    return fds.wrap("squash", view=view)


@pytest.mark.sample(2)
@pytest.mark.law(36)
@pytest.mark.parametrize("stage", [None, 0, 1, 3])
def test_a_view_of_ones_own(stage: int | None) -> None:
    """On top of ZeRO's or alone, also where the params have been let go before their reduction, which needs them again."""
    params = weights(4)
    model = pp.stages([layer] * 4, params, loss=error)
    strategy, dp = ([], 1) if stage is None else ([zero(stage)], 2)
    plain = pp.breadth_first(2, 2)
    for schedule in (plain, pp.lower(plain, gathers=True, resident=1, reduces=False)):
        check(model, params, rows(8), schedule, *strategy, squashed, dp=dp)


@pytest.mark.law(36)
def test_units_whose_leaves_stand_apart() -> None:
    """The names of a stage's leaves put others between them; a unit is gathered once for the passes, once more if let go."""
    params = {f"net{i}": {"a_stem": torch.eye(4), "blocks": weights(3), "tail": torch.eye(4) / 2} for i in range(2)}

    def net(p: Any, x: Tensor) -> Any:
        for block in p["blocks"]:
            x = layer(block, x)
        return x @ p["a_stem"] @ p["tail"]

    model = pp.stages([pp.Piece(net, uses=f"net{i}") for i in range(2)], params, loss=error)
    check(model, params, rows(8), pp.one_f_one_b(2, 2), zero(3), dp=2)


@pytest.mark.law(36)
def test_whole_numbers_as_metrics() -> None:
    """Ranks of data whose rows fall unevenly on micro-batches weigh them, others do not; a mean is floating point on all."""

    def loss(y: Tensor, batch: Any) -> Any:
        return error(y, batch), {"width": torch.tensor(y.shape[-1]), "fits": torch.tensor(True)}

    params = weights(2)
    model = pp.stages([layer] * 2, params, loss=loss)
    check(model, params, rows(7), pp.gpipe(2, 2), zero(1), dp=2)


@pytest.mark.law(29)
def test_rows_are_those_of_the_leaf_with_the_fewest() -> None:
    """Of a leaf with several rows for each of another's, named before it: draws are the same, and evaluations of few rows."""

    def first(p: Any, x: Tensor, key: Any) -> Tensor:
        return layer(p, x) if key is None else key.dropout(layer(p, x), 0.5, "layer")

    def loss(y: Tensor, batch: Any) -> Tensor:
        return (y.repeat_interleave(2, 0) - batch["a"]).square().mean()

    params = weights(2)
    model = pp.stages([first, layer], params, inputs=lambda batch: batch["x"], loss=loss)

    def program(*strategy: Any, dp: int = 1) -> Any:
        step = fds.compose(*strategy)(fds.train_step(model, fds.sgd(0.1), seed=3))
        state = step.init(params)
        few = step.evaluate(state, {"a": rows(2)[1], "x": rows(1)[0]})
        batch = {"a": rows(8)[1], "x": rows(4)[0]}
        mine = fds.tree.map(lambda x: x.tensor_split(dp)[comm.world().rank % dp], batch)
        state, metrics = step(state, mine)
        return few, metrics, step.params(state)

    alone = program()
    torch.testing.assert_close(program(transforms.accumulate(2)), alone)
    for found in comm.simulate(lambda: program(transforms.zero(1), dp=2), world_size=2):
        torch.testing.assert_close(found, alone)
    for found in comm.simulate(lambda: program(transforms.pipeline(pp.gpipe(2, 3), model)), world_size=2):
        torch.testing.assert_close(found, alone)
