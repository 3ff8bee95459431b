"""``holds``: the library's methods and the docs' pass, wrong ones do not, and what cannot be tested is refused."""

import os
import subprocess
import sys
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from torch import Tensor

import functional_ds as fds
from functional_ds import comm, testing
from functional_ds import transforms as T
from functional_ds.comm.table.errors import CommError
from functional_ds.testing.laws import LAWS
from tests.planting import Bug, planted
from tests.testing import model_axes
from tests.testing.methods import METHODS, SLICES, at_every_second, trained_apart
from tests.testing.wrong_axes import WRONG_OVER_AXES
from tests.testing.wrong_methods import WRONG, centred, changed, descent, one_rank_sums, with_slot

NAMES = [law.name for law in LAWS]


@cache
def bound(name: str) -> dict[str, testing.BoundLaw]:
    tested = METHODS[name]
    return {law.law.name: law for law in testing.laws(tested.make, **tested.options)}


@pytest.mark.sample(24)
@pytest.mark.parametrize("law", NAMES)
@pytest.mark.parametrize("name", METHODS)
def test_methods_hold(name: str, law: str) -> None:
    """Each row of the table is ok, or what tests/testing/methods.py says."""
    result = bound(name)[law].result()
    assert result.outcome == METHODS[name].outcome(law), str(result)


EVERYDAY = {
    "ademamix": "bf16",
    "research diloco": "stages",
    "research dp_sgd": "skipped steps",
    "research noise_scale": "replicated",
    "research own_zero": "skipped steps",
    "research sam": "replicated",
    "research sophia": "bf16",
    "research streaming": "skipped steps",
    "round_robin": "skipped steps",
}


@pytest.mark.parametrize("name", EVERYDAY)
def test_worked_examples_hold_where_they_failed(name: str) -> None:
    test_methods_hold(name, EVERYDAY[name])


@pytest.mark.parametrize("make", WRONG, ids=lambda make: make.__name__)
def test_wrong_methods_are_caught(make: Any) -> None:
    law, options = WRONG[make]
    table = testing.holds(make, only=[law], **options)
    assert table.outcomes() == {law: "wrong"}, str(table)
    with pytest.raises(AssertionError, match=law):
        table.check()


@pytest.mark.parametrize("make", [make for make, (law, _) in WRONG.items() if law in ("stages", "replicated")])
def test_the_program_of_a_wrong_row_fails(make: Any) -> None:
    """It stands alone, and raises; what no program can import is named in a comment."""
    law, options = WRONG[make]
    program = testing.holds(make, only=[law], **options)[law].program
    with pytest.raises((AssertionError, CommError)):
        exec(program, {})
    unnamed = testing.holds(make(), only=[law], **options)[law].program
    assert "# method = ..., as holds was given it" in unnamed
    with pytest.raises((AssertionError, CommError)):
        exec(unnamed, {"method": make()})


def test_a_row_that_raises_an_error_prints_the_composition() -> None:
    row = testing.holds(one_rank_sums, only=["stages"])["stages"]
    assert row.words.startswith("DeadlockError")
    assert row.program.endswith("\ncomm.simulate(lambda: program(T.zero(0), method), world_size=2)")
    with pytest.raises(CommError):
        exec(row.program, {})


def test_the_program_of_a_row_that_is_refused() -> None:
    row = testing.holds(beside_replicated, only=["replicated"])["replicated"]
    assert row.outcome == "refused"
    with pytest.raises(ValueError, match="beside_replicated: leave it out"):
        exec(row.program, {})


def test_a_program_runs_by_itself(tmp_path: Path) -> None:
    file = tmp_path / "program.py"
    file.write_text(testing.holds(centred, only=["stages"])["stages"].program)
    run = subprocess.run([sys.executable, file], check=False, env=_environment(), capture_output=True, text=True)
    assert " are not close!" in run.stderr, run.stderr


def _environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "OMP_NUM_THREADS": "1"}


# -- what is refused before anything runs ----------------------------------------------------------------------------------


def not_elementwise() -> fds.Optimizer:
    """Moves by the gradient over the norm of whatever tensors it gets."""

    def update(params: list[Tensor], grads: fds.Weighted, state: Any, rate: Any) -> Any:
        length = torch.stack([g.norm() for g in grads.sum]).norm() + 1e-8
        return [p.sub_(0.1 * rate * g.view_as(p) / length) for p, g in zip(params, grads.sum, strict=True)], state

    return fds.Optimizer(lambda params: (), update, "by_norm")


def identity() -> fds.Transform:
    return changed("identity", lambda step, state, grads: grads)


def refused() -> fds.Transform:
    def check(step: fds.Step) -> None:
        raise ValueError("refused: not on this step")

    return fds.wrap("refused", check=check)


def momentum_of(lr: float, momentum: float) -> fds.Optimizer:
    return fds.sgd(lr, momentum=momentum)


def beside_nothing() -> fds.Transform:
    def init(inner: Any, step: fds.Step, params: Any) -> fds.State:
        if comm.world().size > 1:
            raise ValueError("beside_nothing: on one device only")
        return inner(step, params)

    return fds.wrap("beside_nothing", init=init)


def local_sgd_of_models(group: comm.Group | None) -> fds.Transform:
    """Models of several ranks are averaged in every second update."""

    def average(step: fds.Step, state: fds.State) -> fds.State:
        leaves, spec = fds.tree.flatten(state.params)
        means = comm.all_reduce([leaf.clone() for leaf in leaves], group, op="avg")
        return fds.tree.replace(state, params=fds.tree.unflatten(spec, means))

    return T.every(2, average)


def beside_replicated() -> fds.Transform:
    def check(step: fds.Step) -> None:
        if any("replicated" in name for name in step.names):
            raise ValueError("beside_replicated: leave it out")

    return fds.wrap("beside_replicated", check=check)


SHAPES = {"a": torch.zeros(2)}
REFUSED: dict[str, tuple[Any, dict[str, Any], type[Exception], str]] = {
    "a number": (3, {}, TypeError, r"transform=3 is neither a transform, nor an optimizer"),
    "a step": (fds.train_step(lambda p, x: p.sum(), fds.sgd(0.1)), {}, TypeError, "is neither a transform"),
    "no step": (lambda step: 3, {}, ValueError, "it makes 3 of a step"),
    "one device": (refused, {}, ValueError, "refused.. does not run on one device: ValueError: refused: not on this step"),
    "no place": (beside_nothing, {}, ValueError, r"beside_nothing.. cannot be composed with T.zero.*on one device only"),
    "a pipeline": (partial(T.local_gradients), {}, ValueError, "local_gradients.*"),
    "a rule": (not_elementwise, {}, ValueError, r"cannot be composed with T.zero.*by_norm is not elementwise"),
    "structure": (identity, {"oracle": lambda params, batches: SHAPES}, ValueError, "oracle: it gives .* and params are"),
    "shape": (
        identity,
        {"oracle": lambda params, batches: fds.tree.map(lambda x: x.reshape(-1, 1), params)},
        ValueError,
        r"oracle: its '0.b' is torch.Size\(\[7, 1\]\), and the parameter is torch.Size\(\[7\]\)",
    ),
    "ranks": (
        identity,
        {"by_ranks": lambda params, batches: [params]},
        ValueError,
        "by_ranks: it gives 1 values for 2 ranks: return a list of each rank's params",
    ),
    "params of ranks": (
        identity,
        {"by_ranks": lambda params, batches: [SHAPES, SHAPES, SHAPES][: len(batches[0])]},
        ValueError,
        "oracle: it gives .* and params are",
    ),
    "order": (identity, {"order": "inside"}, ValueError, "order='inside' is neither"),
    "oracle": (identity, {"oracle": 3}, TypeError, r"oracle=3 is not a function of \(params, batches\)"),
    "by ranks": (identity, {"by_ranks": 3}, TypeError, r"by_ranks=3 is not a function of \(params, batches\)"),
    "sends": (identity, {"sends": 3}, TypeError, r"sends=3 is not a function of \(stage, ranks\)"),
    "bytes": (identity, {"sends": lambda stage, ranks: "few"}, TypeError, "sends: it gives 'few', and not a number of bytes"),
    "within": (identity, {"within": -1}, ValueError, "within=-1 is not a tolerance of 0 or more"),
    "an argument": (partial(momentum_of, 0.1), {}, ValueError, r"momentum_of\(0.1\) does not run .* with all its arguments"),
    "a function": (T.clip, {}, ValueError, "clip does not run on one device: TypeError.* with all its arguments, as partial"),
    "an axis twice": (identity, {"axis": ("tp", "tp")}, ValueError, r"axis=\('tp', 'tp'\): give each axis once"),
    "models apart": (identity, {"axis": ("outer", "tp")}, ValueError, r"axis=\('outer', 'tp'\): .*a model each, alone"),
    "no axes": (identity, {"axis": ()}, ValueError, r"axis=\(\) is not an axis .*: outer, tp, pp, sp, ep"),
    "groups": (identity, {"axis": ["tp", "ep"]}, TypeError, r"axis=\('tp', 'ep'\): .*of 3 groups, tp and ep and edp"),
    "no axis": (identity, {"axis": "dp"}, ValueError, "axis='dp' is not an axis .*: outer, tp, pp, sp, ep"),
    "an axis": (identity, {"axis": True}, ValueError, "axis=True is not an axis .*: outer, tp, pp, sp, ep"),
    "a group": (identity, {"axis": "outer"}, TypeError, "axis='outer': transform=.*must be a function of one group"),
    "two groups": (local_sgd_of_models, {"axis": "ep"}, TypeError, "axis='ep': .*must be a function of 2 groups, ep and edp"),
    "a sum of models": (partial(T.zero, 1), {"axis": "outer"}, ValueError, r"axis='outer': Zero\(1\) reduces gradients itself"),
    "an oracle of models": (
        local_sgd_of_models,
        {"axis": "outer", "oracle": descent},
        ValueError,
        "oracle: with axis='outer' ranks have a model each; pass by_ranks=",
    ),
    "models of one model": (
        local_sgd_of_models,
        {"axis": "sp", "by_ranks": trained_apart},
        ValueError,
        "by_ranks: with axis='sp' ranks have one model; pass oracle=",
    ),
    "rows of models": (
        local_sgd_of_models,
        {"axis": "outer", "problem": testing.Problem(batches=[torch.zeros(12, 5)])},
        ValueError,
        r"axis='outer': its ranks divide a batch, too; give multiples of 24 rows, not \[12\]",
    ),
    "no plain loss": (
        partial(T.tensor_parallel, SLICES),
        {"axis": "tp", "problem": attrs.evolve(model_axes.tensors(), plain=None)},
        ValueError,
        r"the loss without tensor_parallel.* does not run on one device: .*; give one that does: Problem\(plain=\)",
    ),
    "no transform": (lambda group: 3, {"axis": "tp"}, ValueError, r"cannot be composed with T.zero\(1\): .*compose: 3 is not"),
    "law": (identity, {"only": ["stage"]}, ValueError, "there is no law 'stage'; the laws are oracle, ranks, stages"),
    "excuse": (identity, {"excused": {"stage": "no"}}, ValueError, "there is no law 'stage'"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_tested_is_refused(case: str) -> None:
    transform, options, error, words = REFUSED[case]
    with pytest.raises(error, match=f"(?s){words}"):
        testing.holds(transform, **options)


def test_batches_are_divisible() -> None:
    with pytest.raises(ValueError, match="multiples of 12 rows"):
        testing.Problem(batches=[torch.zeros(10, 5)])


def test_the_oracle_is_tried_before_training() -> None:
    """A loss that raises shows that nothing was trained."""

    def loss(params: Any, batch: Any) -> Any:
        raise AssertionError("trained")

    with pytest.raises(ValueError, match="oracle: it gives"):
        testing.holds(identity, oracle=lambda params, batches: SHAPES, problem=testing.Problem(loss=loss))


# -- the table -------------------------------------------------------------------------------------------------------------


def test_an_oracle_is_compared_with() -> None:
    """A transform that changes nothing is sgd with momentum."""
    assert testing.holds(identity, oracle=descent, only=["oracle", "stages"]).outcomes() == {"oracle": "ok", "stages": "ok"}


def undefined() -> fds.Transform:
    """A slot that is NaN from its first step on, and reads no gradient."""

    def update(inner: Any, step: fds.Step, state: fds.State, grads: fds.Weighted) -> Any:
        state, metrics = inner(step, state, grads)
        return state.put(kept=state.slots["kept"] * 0), metrics

    return with_slot("undefined", lambda step, state: torch.tensor(float("nan")), update=update)


def test_a_slot_that_stays_nan_is_not_changed() -> None:
    table = testing.holds(undefined, only=["donation", "skipped steps"])
    assert set(table.outcomes().values()) == {"ok"}, str(table)


@pytest.mark.parametrize("order", ["before", None, "after"])
def test_a_method_that_reduces_gradients_is_tried_on_both_sides(order: str | None) -> None:
    """A ZeRO stage of one's own has masters of its own shards only if mixed precision comes after it."""
    table = testing.holds(METHODS["round_robin"].make, order=order, only=["bf16"])
    assert f"reduces gradients itself, listed {order or 'before'} T.mixed_precision" in table.title
    assert table["bf16"].outcome == ("wrong" if order == "after" else "ok")


# -- methods that depend on the number of ranks ----------------------------------------------------------------------------


def met(step: fds.Step, state: fds.State, divides: float | None = None) -> fds.State:
    """All ranks' params, averaged."""
    leaves, spec = fds.tree.flatten(state.params)
    sums = comm.all_reduce([leaf.clone() for leaf in leaves])
    return fds.tree.replace(state, params=fds.tree.unflatten(spec, [x / (divides or comm.world().size) for x in sums]))


def local_sgd_of_two() -> fds.Transform:
    """Right on 2 ranks."""
    return fds.compose(T.apart(comm.world()), T.every(2, lambda step, state: met(step, state, 2.0)))


of_ranks = partial(trained_apart, meet=at_every_second)


def test_an_oracle_of_ranks_finds_what_is_wrong_on_three() -> None:
    row = testing.holds(local_sgd_of_two, by_ranks=of_ranks, only=["ranks"])["ranks"]
    assert row.outcome == "wrong"
    assert row.words.startswith("compose(method), 3 ranks, 3 steps, rank 0: 0.w differs by"), row.words
    with pytest.raises(AssertionError, match="ranks              wrong: compose"):
        exec(row.program, {"method": local_sgd_of_two, "by_ranks": of_ranks})


# -- methods over an outer axis of a mesh ------------------------------------------------------------------------------------


def mean_of_the_world(group: comm.Group) -> fds.Transform:
    """Averages other shards, too."""
    return local_sgd_of_models(None)


OUTER = dict.fromkeys(("oracle", "pipelines", "bytes"), "not applicable")


@pytest.mark.sample(10)
@pytest.mark.parametrize("law", NAMES)
def test_a_method_over_an_outer_axis(law: str) -> None:
    """Models of two and three ranks in all stages are those of one rank, and of the oracle."""
    result = testing.holds(local_sgd_of_models, axis="outer", by_ranks=of_ranks, only=[law])[law]
    assert result.outcome == OUTER.get(law, "ok"), str(result)


@pytest.mark.parametrize("law", ["ranks", "stages", "slots", "checkpoints", "unused leaves"])
def test_a_mean_over_the_world_in_place_of_the_models_is_found(law: str) -> None:
    row = testing.holds(mean_of_the_world, axis="outer", by_ranks=of_ranks, order="before", only=[law])[law]
    assert row.outcome == "wrong", str(row)
    assert "group=mesh['dp']), T.apart(mesh['outer'])), a mesh of 2 x 2 ranks" in row.words
    if law == "stages":
        with pytest.raises(AssertionError, match="stages             wrong"):
            exec(row.program, {})


# -- methods over an axis of a model -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", WRONG_OVER_AXES)
def test_wrong_methods_over_a_model_axis_are_caught(name: str) -> None:
    """The program that it prints finds it, too."""
    make, axis, law, options = WRONG_OVER_AXES[name]
    table = testing.holds(make, axis=axis, only=[law], **options)
    assert table.outcomes() == {law: "refused" if name == "unknown slices" else "wrong"}, str(table)
    assert f", along {axis}, listed after T.zero" in table.title
    with pytest.raises(AssertionError, match=f"{law} *(wrong|refused)"):
        exec(table[law].program.replace(".check()", ".check(refusals=False)"), dict(options))


def test_an_oracle_of_a_method_over_a_model_axis() -> None:
    """On each rank of the axis."""
    step = fds.train_step(model_axes.feature_loss, fds.sgd(0.1, momentum=0.5))
    for oracle, outcome in ((step, "ok"), (lambda params, batches: params, "wrong")):
        options = {"axis": "tp", "problem": model_axes.flat_problem(), "oracle": oracle, "only": ["oracle"]}
        assert testing.holds(model_axes.features, **options).outcomes() == {"oracle": outcome}


# -- bytes and oracles -------------------------------------------------------------------------------------------------------


def test_bytes_are_those_of_the_formula() -> None:
    """A norm is one more number in stages 1 to 3, where each rank has a part."""
    sends = lambda stage, ranks: 0  # noqa: E731
    assert testing.holds(identity, sends=sends, only=["bytes"])["bytes"].outcome == "ok"


def mean_of_halves() -> fds.Transform:
    """Data parallelism whose sums have two bytes an element; lossy."""

    def reduce(grads: Any, memory: Any, group: comm.Group) -> Any:
        return [x.float() for x in comm.all_reduce([grad.bfloat16() for grad in grads], group, op="avg")], memory

    return T.replicated(reduce=reduce)


@pytest.mark.parametrize("more", [0, 1])
def test_bytes_of_a_method_that_reduces_gradients_itself(more: int) -> None:
    """There is no stage, and they are all that it sends: 2 bytes for each of 59 elements, and 40 for weights and losses."""
    sends = lambda stage, ranks: {(None, 2): 2 * 59 + 40, (None, 3): 2 * 80 + 66}[stage, ranks] + more  # noqa: E731
    assert testing.holds(mean_of_halves, sends=sends, only=["bytes"])["bytes"].outcome == ("wrong" if more else "ok")


def test_bytes_of_an_optimizer_are_those_beyond_sgd() -> None:
    """LAMB sums two squares for each of five leaves."""
    sends = lambda stage, ranks: {2: 40, 3: 56}[ranks] if stage else 0  # noqa: E731
    assert testing.holds(partial(fds.lamb, 0.05), sends=sends, only=["bytes"])["bytes"].outcome == "ok"


@pytest.mark.parametrize(("within", "outcome"), [(1e-4, "wrong"), (0.02, "ok")])
def test_a_lossy_method_is_compared_within_its_tolerance(within: float, outcome: str) -> None:
    """The oracle is a step without loss."""
    table = testing.holds(mean_of_halves, oracle=training(), within=within, only=["oracle", "stages", "clip before"])
    assert table.outcomes() == dict.fromkeys(("oracle", "stages", "clip before"), outcome)


def training() -> fds.Step:
    return fds.train_step(testing.Problem().loss, fds.sgd(0.1, momentum=0.5))


EQUAL = "x.shape == y.shape and bool(((x == y) | (x.isnan() & y.isnan())).all())"
BUGS: list[tuple[Bug, Callable[[], None]]] = [
    (
        Bug("all ranks train one model", "testing.method:Method.model", "rank * setup.parts // setup.ranks", "0"),
        partial(test_a_method_over_an_outer_axis, "ranks"),
    ),
    (
        Bug("zero is over the world", "testing.method:Method.listed", "if axes: ...", ""),
        partial(test_a_method_over_an_outer_axis, "stages"),
    ),
    (
        Bug("ranks of a model get rows of their own", "testing.recipe:Recipe.rows", "AXES[axis][0]", "False"),
        test_an_oracle_of_a_method_over_a_model_axis,
    ),
    (
        Bug("zero does not sum over positions", "testing.method:Method.listed", "[*summed, 'dp']", "['dp']"),
        partial(test_wrong_methods_over_a_model_axis_are_caught, "neighbour alone"),
    ),
    (
        Bug("a model is on two ranks alone", "testing.laws:_stages", "method.on(1, _ZERO[3], along=_WIDE)", "method.on(1)"),
        partial(test_wrong_methods_over_a_model_axis_are_caught, "right on two ranks"),
    ),
    (
        Bug("one device has the method", "testing.method:Method.alone", "if self.recipe.shares_model: ...", ""),
        partial(test_wrong_methods_over_a_model_axis_are_caught, "results of own experts"),
    ),
    (
        Bug("NaN is not NaN", "testing.same:same_or_nan", EQUAL, "torch.equal(x, y)"),
        test_a_slot_that_stays_nan_is_not_changed,
    ),
    (
        Bug(
            "reductions come after mixed precision",
            "testing.method:Method.of",
            "['after', 'before']",
            "['after']",
        ),
        partial(test_a_method_that_reduces_gradients_is_tried_on_both_sides, None),
    ),
    (
        Bug(
            "an optimizer is compared with itself",
            "testing.laws:_bytes",
            "sent(plain, without)",
            "sent(method.recipe, without)",
        ),
        test_bytes_of_an_optimizer_are_those_beyond_sgd,
    ),
]


@pytest.mark.parametrize(("bug", "check"), BUGS, ids=[bug.name for bug, _ in BUGS])
def test_a_planted_bug_is_found(bug: Bug, check: Callable[[], None]) -> None:
    check()
    with planted(bug), pytest.raises((AssertionError, ValueError)):
        check()


def test_rows_are_excused_with_a_reason() -> None:
    row = testing.holds(identity, only=["jit"], excused={"jit": "it prints"})["jit"]
    assert (row.outcome, row.words) == ("not applicable", "it prints")


def test_refusals_can_count_as_wrong() -> None:
    """By default what is refused is right."""
    table = testing.LawTable("method", [testing.LawResult("stages", "says", "refused", "ValueError: no")])
    assert table.check() is table
    with pytest.raises(AssertionError, match="stages             refused: ValueError: no"):
        table.check(refusals=False)
    assert "<td>refused</td>" in table._repr_html_()


@pytest.mark.parametrize("law", testing.laws(identity, only=["stages", "clip after"]))
def test_laws_are_parameters(law: testing.BoundLaw) -> None:
    law.check()


def test_laws_have_names_as_parameters() -> None:
    assert [law.__name__ for law in testing.laws(identity, only=["clip after"])] == ["clip-after"]


def test_a_problem_of_ones_own() -> None:
    """Modules, tuples as batches; without layers there are no pipelines to try."""
    torch.manual_seed(0)
    apply, params = fds.functional(torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1)))
    batches = [(torch.randn(12, 3), torch.randn(12, 1)) for _ in range(3)]
    loss = lambda params, batch: (apply(params, batch[0]) - batch[1]).square().mean()  # noqa: E731
    problem = testing.Problem(params=params, loss=loss, batches=batches)
    table = testing.holds(partial(T.clip, 0.1), problem=problem, only=["stages", "pipelines", "unused leaves"])
    assert table.outcomes() == {"stages": "ok", "unused leaves": "not applicable", "pipelines": "not applicable"}


def test_importing_the_library_does_not_load_this() -> None:
    program = "import functional_ds, sys; functional_ds.train_step; assert 'functional_ds.testing' not in sys.modules"
    program += "; from functional_ds import testing; testing.holds; assert 'hypothesis' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], check=True, env=_environment())


def test_the_page_lists_the_laws() -> None:
    """docs/gallery.md has a row for each, with its statement."""
    page = (Path(__file__).parents[2] / "docs/gallery.md").read_text(encoding="utf-8")
    rows = page.split("<!-- laws -->\n")[1].split("<!-- /laws -->")[0].splitlines()[2:]
    assert rows == [f"| `{law.name}` | {law.says} |" for law in LAWS]


@pytest.mark.parametrize("law", ["stages", "checkpoints"])
def test_methods_over_two_axes(law: str) -> None:
    options = {"axis": ("pp", "tp"), "order": "after", "only": [law]}
    table = testing.holds(model_axes.staged_slices, problem=model_axes.sliced_stage_problem(), **options)
    assert table[law].outcome == "ok", str(table)
    assert table.title == "staged_slices(), along pp and tp, listed after T.zero"


def test_experts_beside_positions() -> None:
    problem = model_axes.mixture_of_positions()
    table = testing.holds(model_axes.experts_of_positions, problem=problem, axis=("sp", "ep"), only=["stages"])
    assert table["stages"].outcome == "ok", str(table)


def test_a_missing_sum_along_one_of_two_axes_is_found() -> None:
    make, problem = partial(model_axes.staged_slices, sums=False), model_axes.sliced_stage_problem(sums=False)
    row = testing.holds(make, axis=("pp", "tp"), order="after", problem=problem, only=["stages"])["stages"]
    assert row.outcome == "wrong"
    assert "a mesh of 2 x 2 ranks" in row.words
    assert "axis=('pp', 'tp')" in row.program
