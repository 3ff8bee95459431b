"""Gradients combined by a function where stages or slices divide them: means of the whole batch, and steps skipped together."""

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

import functional_ds as fds
from functional_ds import comm
from functional_ds import pipelining as pp
from functional_ds import transforms as T
from functional_ds.testing import assert_same
from tests.planting import Bug, planted
from tests.transforms.zero.test_combine import feedback


def clamp(grads: Any, memory: Any, group: comm.Group) -> Any:
    """Of the mean over the ranks: a function that is not linear, so sums and means differ."""
    return [comm.all_reduce(grad, group, op="avg").clamp(-0.5, 0.5) for grad in grads], memory


PIPED = {
    "top k": lambda group: T.compressed_gradients(comm.codecs.TopK(0.5), group),
    "one bit": lambda group: T.compressed_gradients(comm.codecs.OneBit(), group),
    "clamp": lambda group: T.replicated(group, reduce=clamp),
    "zero, clamp": lambda group: T.zero(1, group, aggregate=T.Combine(clamp)),
}


def weighing(name: str, piped: bool, tied: bool, dp: int) -> tuple[Any, list[Tensor]]:
    """The params, and this rank's copy, if it has one, of a leaf that both stages may use, after batches of other weights."""
    params = {"a": torch.tensor([3.0, 2.0], dtype=torch.float64), "t": torch.tensor([1.0, 2.0], dtype=torch.float64)}
    last = pp.Piece(lambda t, x: x * t, uses="t") if tied else pp.Piece(lambda p, x: x, uses=())
    pieces = [pp.Piece(lambda p, x: x * p[0] * p[1], uses=("a", "t")), last]
    loss = lambda y, batch: fds.Weighted((y * batch[1]).sum(), batch[1].sum())  # noqa: E731
    model, mesh = pp.stages(pieces, params, inputs=lambda batch: batch[0], loss=loss), comm.mesh(dp=dp, pp=2 if piped else 1)
    more = [T.pipeline(pp.one_f_one_b(2, 2), model, mesh["pp"])] if piped else []
    step = fds.compose(PIPED[name](mesh["dp"]), *more)(fds.train_step(model, fds.sgd(0.1)))
    state = step.init(params)
    for weight in (1.0, 4.0, 2.0, 8.0, 1.0):
        x = torch.tensor([[1.0, 0.5], [0.5, 2.0]], dtype=torch.float64) / (1 + mesh["dp"].rank)
        state, _ = step(state, (x, torch.tensor([[weight], [weight / 2]], dtype=torch.float64)))
    return step.params(state), [leaf for path, leaf in fds.tree.named(state.params) if path == "t"]


@pytest.mark.law(36)
@pytest.mark.parametrize("name", PIPED)
@pytest.mark.parametrize(("tied", "dp"), [(False, 1), (True, 1), (True, 2)])
def test_every_stage_of_a_pipeline_combines_means(name: str, tied: bool, dp: int) -> None:
    """Only the last stage knows the weight of a batch, which changes; copies of a shared leaf stay equal."""
    want = comm.simulate(weighing, name, False, tied, dp, world_size=dp)[0][0]
    for params, copies in comm.simulate(weighing, name, True, tied, dp, world_size=2 * dp):
        torch.testing.assert_close(params, want)
        assert_same(copies, [params["t"]] * len(copies))


def counted(grads: Any, memory: Any, group: comm.Group) -> Any:
    """Makes numbers of infinities, which the ranks of other slices do not see."""
    return clamp(grads, memory, group)[0], memory + 1


def unit(grads: Any, memory: Any, group: comm.Group) -> Any:
    """Couples the leaves, which a rank of a pipeline has in part."""
    means = [comm.all_reduce(grad, group, op="avg") for grad in grads]
    return [mean / torch.stack([x.norm() for x in means]).norm() for mean in means], memory


def noisy(grads: Any, memory: Any, group: comm.Group) -> Any:
    """Each leaf by itself, with other random numbers in each call."""
    return [mean + torch.randn_like(mean) for mean in clamp(grads, memory, group)[0]], memory


def begin(reduce: Any, zero: bool, where: int, stages: int) -> Any:
    """A state of a step that combines three leaves by the function, on ranks of a pipeline; ``where`` has two of them."""
    params = {"a": torch.tensor([3.0, 2.0]), "b": torch.tensor([1.0, 2.0]), "c": torch.ones(2)}
    uses = [("a", "b"), ("c",)] if where == 0 else [("a",), ("b", "c")]
    pieces = [pp.Piece(lambda p, x: x * sum(fds.tree.leaves(p)), uses=each) for each in uses]
    model, mesh = pp.stages(pieces, params, loss=lambda y, batch: y.mean()), comm.mesh(dp=1, pp=stages)
    combines = T.zero(2, mesh["dp"], aggregate=T.Combine(reduce)) if zero else T.replicated(mesh["dp"], reduce=reduce)
    more = [T.pipeline(pp.one_f_one_b(2, 2), model, mesh["pp"])] if stages > 1 else []
    return fds.compose(combines, *more)(fds.train_step(model, fds.sgd(0.1))).init(params)


COUPLES = "reduce gets the leaves of one rank's stages, so it must treat each leaf by itself"


@pytest.mark.parametrize("zero", [False, True])
@pytest.mark.parametrize("where", [0, 1])
def test_a_function_that_couples_leaves_is_refused_in_a_pipeline(zero: bool, where: int) -> None:
    """By the ranks of all stages, also those with one leaf; without a pipeline it is taken, and so is one by leaves."""
    with pytest.raises(ValueError, match=COUPLES):
        comm.simulate(begin, unit, zero, where, 2, world_size=2)
    comm.simulate(begin, unit, zero, where, 1, world_size=1)
    for reduce in (clamp, noisy):
        comm.simulate(begin, reduce, zero, where, 2, world_size=2)


def test_processes_refuse_it_too() -> None:
    with pytest.raises(ValueError, match=COUPLES):
        comm.spawn(begin, unit, True, 1, 2, world_size=2)


def test_deferred_leaves_are_combined_in_a_pipeline() -> None:
    """They have no values yet when ``init`` looks at the function."""

    def losses(reduce: Any) -> list[float]:
        mesh = comm.mesh(dp=1, pp=2)
        torch.manual_seed(0)
        applies, params = zip(*(fds.deferred(lambda: torch.nn.Linear(2, 2)) for _ in range(2)), strict=True)
        model = pp.stages([*applies], [*params], loss=lambda y, batch: y.square().mean())
        parts = T.zero(2, mesh["dp"], aggregate=T.Combine(reduce)), T.pipeline(pp.gpipe(2, 2), model, mesh["pp"])
        step = fds.compose(*parts)(fds.train_step(model, fds.sgd(0.1)))
        drawn = torch.get_rng_state()
        state = step.init([*params])
        assert torch.equal(drawn, torch.get_rng_state())
        _, metrics = step(state, torch.ones(4, 2))
        return [metrics["loss"].item()]

    for reduce in (clamp, noisy):
        one, other = comm.simulate(losses, reduce, world_size=2)
        assert one == other
    with pytest.raises(ValueError, match="it must treat each leaf by itself"):
        comm.simulate(losses, unit, world_size=2)


KEPT = {
    "top k": (lambda group: feedback(None, group), "compressed_gradients"),
    "zero, top k": (lambda group: feedback(1, group), "combine"),
    "counted": (lambda group: T.replicated(group, reduce=counted, init=lambda *_: torch.zeros(())), "replicated"),
}
OVERFLOWS = {
    "slices": lambda mesh, model: T.tensor_parallel({"a": "colwise", "b": "rowwise"}, mesh["other"]),
    "stages": lambda mesh, model: T.pipeline(pp.one_f_one_b(2, 1), model, mesh["other"]),
}


def amplified(loud: bool) -> Any:
    """A ``reduce`` that makes the gradients of the third step infinite on one rank, after they were combined."""
    steps = itertools.count()

    def reduce(inner: Any, step: fds.Step, state: fds.State, grads: fds.Weighted) -> Any:
        state, grads = inner(step, state, grads)
        here = next(steps) == 2 and loud and comm.world().rank == 0
        return state, fds.Weighted([grad + torch.inf if here else grad for grad in grads.sum], grads.weight)

    return reduce


def overflowing(name: str, strategy: str, loud: bool = False) -> list[bool]:
    """Whether each of four steps keeps what is owed; in the third, one rank overflows, or a transform outside of the sum."""
    mesh = comm.mesh(dp=1, other=2)
    params = {"a": torch.tensor([[1.0, 2.0], [3.0, 0.5]]), "b": torch.tensor([[1.0, 1.5]])}

    def sliced(p: Any, batch: Any) -> Tensor:
        x, z = batch
        return fds.tp.row(fds.tp.column(x, p["a"]) * z[:, [mesh["other"].rank]], p["b"]).float().sum()

    first = pp.Piece(lambda a, x: (x * 100) @ a.float().T, uses="a")  # its gradients alone leave fp16
    pieces = [first, pp.Piece(lambda b, x, batch: x + batch[1] * b.float(), uses="b")]
    model = pp.stages(pieces, params, inputs=lambda batch: batch[0].float(), loss=lambda y, batch: y.float().sum())
    half = T.mixed_precision("fp16", T.DynamicScale(256.0, hysteresis=1))
    base = fds.train_step(sliced if name == "slices" else model, fds.sgd(0.125))
    make, slot = KEPT[strategy]
    step = fds.compose(half, make(mesh["dp"]), OVERFLOWS[name](mesh, model), fds.wrap("loud", reduce=amplified(loud)))(base)
    state, kept = step.init(params), []
    for index in range(4):
        x, z = torch.tensor([[1.0, 2.0]]), torch.ones(1, 2)
        if index == 2 and not loud:
            x, z = (x, torch.tensor([[6e4, 1.0]])) if name == "slices" else (x * 1e3, z)
        before = [leaf.clone() for leaf in fds.tree.leaves(state.slots[slot])]
        state, metrics = step(state, (x, z))
        assert metrics["skipped"] == (index == 2)
        kept.append(all(map(torch.equal, before, fds.tree.leaves(state.slots[slot]))))
    return kept


@pytest.mark.law(25)
@pytest.mark.parametrize("loud", [False, True])
@pytest.mark.parametrize(
    ("name", "strategy"),
    [("slices", "top k"), ("slices", "counted"), ("stages", "top k"), ("stages", "zero, top k"), ("stages", "counted")],
)
def test_a_step_skipped_for_another_rank_keeps_what_is_owed(name: str, strategy: str, loud: bool) -> None:
    """The ranks skip it together."""
    assert comm.simulate(overflowing, name, strategy, loud, world_size=2) == [[False, False, True, False]] * 2


BUGS = [
    Bug(
        "each stage takes the weight that it knows",
        "transforms.zero.combine:Combine.combined",
        "step.sum_over_ranks(state, torch.stack([grads.weight, bad.to(grads.weight.dtype)]))",
        "comm.all_reduce(torch.stack([grads.weight, bad.to(grads.weight.dtype)]), ranks)",
    ),
    Bug(
        "each slice asks its own gradients",
        "transforms.zero.combine:Combine.combined",
        "step.finite(state, [torch.where(finite, torch.zeros_like(weight), torch.inf)])",
        "finite",
    ),
    Bug(
        "a step that another transform overflows changes what is owed",
        "transforms.data_parallel.replicated:replicated",
        "[Trait.RESIDENT_SLOT]",
        "[Trait.RESIDENT_SLOT, Trait.HEEDS_SKIPS]",
    ),
    Bug(
        "in zero it does",
        "transforms.zero.combine:combining",
        "[Trait.RESIDENT_SLOT]",
        "[Trait.RESIDENT_SLOT, Trait.HEEDS_SKIPS]",
    ),
]


COUPLED = Bug(
    "what a function does to other leaves is not looked at",
    "transforms.zero.combine:Combine.check_separate",
    "not step.has(AxisRole.STAGES)",
    "True",
)


def test_a_planted_bug_of_coupled_leaves_is_found() -> None:
    with planted(COUPLED), pytest.raises(pytest.fail.Exception):
        test_a_function_that_couples_leaves_is_refused_in_a_pipeline(False, 1)


@pytest.mark.parametrize("bug", BUGS, ids=[bug.name for bug in BUGS])
def test_a_planted_bug_is_found(bug: Bug) -> None:
    def holds() -> None:
        test_every_stage_of_a_pipeline_combines_means("top k", True, 1)
        test_a_step_skipped_for_another_rank_keeps_what_is_owed("slices", "counted", False)
        test_a_step_skipped_for_another_rank_keeps_what_is_owed("slices", "top k", True)
        test_a_step_skipped_for_another_rank_keeps_what_is_owed("stages", "zero, top k", True)

    with planted(bug), pytest.raises(AssertionError):
        holds()
