"""Differentiable steps over data-parallel ranks: their derivatives are the single device's, and finite differences."""

import gc
from collections.abc import Callable
from typing import Any

import attrs
import pytest
import torch
from torch import Tensor, nn
from torch.autograd.gradcheck import GradcheckError

import functional_ds as fds
from functional_ds import comm
from functional_ds import transforms as T
from tests.planting import Bug, planted

D = torch.float64
GENERATOR = torch.Generator().manual_seed(0)
SHAPES = {"w": (3, 4), "b": (4,), "head": (4, 1)}
PARAMS = {path: torch.randn(shape, dtype=D, generator=GENERATOR) for path, shape in SHAPES.items()}
BATCHES = [
    (torch.randn(12, 3, dtype=D, generator=GENERATOR), torch.randn(12, 1, dtype=D, generator=GENERATOR)) for _ in range(5)
]
STAGES = range(4)
HYPER = (0.1, 0.8, 0.5, 0.7)  # learning rate, momentum, limit of the norm, the schedule's last factor


def loss(params: Any, batch: Any, key: fds.Key | None = None) -> Tensor:
    x, y = batch
    hidden = torch.tanh(x @ params["w"] + params["b"])
    return ((hidden if key is None else key.dropout(hidden, 0.3, "hidden")) @ params["head"] - y).square().mean()


def own(rows: Tensor) -> Tensor:
    """This rank's rows."""
    here = comm.world()
    return rows.chunk(here.size)[here.rank]


def after(zero: Any, steps: int, hyper: Any, params: Any, batches: Any, accumulates: int = 1) -> Tensor:
    """A loss of the params after some steps, of their average, and of the last step's metric."""
    rate, beta, limit, factor = hyper
    strategy = fds.compose(
        T.ema(0.5),
        *zero,
        T.accumulate(accumulates),
        T.clip(limit),
        T.schedule(lambda count: torch.where(count > 0, factor, 1.0)),
    )
    step = fds.differentiable(strategy(fds.train_step(loss, fds.adamw(rate, betas=(beta, 0.9), eps=1e-2))))
    state = step.init(params)
    for batch in batches[:steps]:
        state, metrics = step(state, batch)
    average = sum(leaf.square().sum() for leaf in T.averaged(step, state).values())
    return step.evaluate(state, batches[steps]) + metrics["loss"] + average


def inputs(steps: int) -> tuple[list[Tensor], dict[str, Tensor], list[tuple[Tensor, ...]]]:
    """Hyperparameters, first params and this rank's rows, to differentiate by."""
    hyper = [torch.tensor(value, dtype=D, requires_grad=True) for value in HYPER]
    params = {path: leaf.clone().requires_grad_() for path, leaf in PARAMS.items()}
    return hyper, params, [tuple(own(x).clone().requires_grad_() for x in batch) for batch in BATCHES[: steps + 1]]


def derivatives(zero: Any, steps: int, accumulates: int = 1, second: bool = False) -> tuple[list[Tensor], list[Tensor]]:
    """Value and gradients: equal on all ranks, and by this rank's rows. ``second``: of the norm of the first gradient."""
    hyper, params, batches = inputs(steps)
    value = after(zero, steps, hyper, params, batches, accumulates)
    if second:
        value = sum(slope.square() for slope in torch.autograd.grad(value, hyper, create_graph=True))  # type: ignore[assignment]
    rows = [x for batch in batches for x in batch]
    found = torch.autograd.grad(value, [*hyper, *params.values(), *rows])
    equal = len(HYPER) + len(PARAMS)
    return [value.detach(), *found[:equal]], list(found[equal:])


def equals_one_device(stage: int, n: int, steps: int, accumulates: int = 1, *, second: bool = False) -> None:
    wanted, wanted_rows = derivatives((), steps, accumulates, second)
    ranks = comm.simulate(derivatives, (T.zero(stage),), steps, accumulates, second, world_size=n)
    for found, _ in ranks:
        torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-9)
    rows = [torch.cat(parts) for parts in zip(*(parts for _, parts in ranks), strict=True)]
    torch.testing.assert_close(rows, wanted_rows, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(("n", "steps", "accumulates"), [(1, 2, 1), (2, 4, 2), (3, 3, 4), (4, 1, 3)])
@pytest.mark.parametrize("stage", STAGES)
def test_derivatives_are_the_single_devices(stage: int, n: int, steps: int, accumulates: int) -> None:
    equals_one_device(stage, n, steps, accumulates)


@pytest.mark.parametrize("stage", STAGES)
def test_second_derivatives_are_the_single_devices(stage: int) -> None:
    equals_one_device(stage, 2, 2, second=True)


def finite_differences(stage: int) -> None:
    def program() -> None:
        hyper, params, batches = inputs(2)
        rows = [tuple(x.detach() for x in batch) for batch in batches]

        def of(*given: Tensor) -> Tensor:
            return after((T.zero(stage),), 2, given[:4], dict(zip(params, given[4:], strict=True)), rows)

        torch.autograd.gradcheck(of, [*hyper, *params.values()], fast_mode=True)

    comm.simulate(program, world_size=2)


@pytest.mark.parametrize("stage", STAGES)
def test_derivatives_are_finite_differences(stage: int) -> None:
    finite_differences(stage)


def same_steps(stage: int, *, different_params: bool = False) -> None:
    """k steps are k ordinary ones, from the first rank's params."""

    def program(differentiable: bool) -> Any:
        step = fds.compose(T.zero(stage), T.clip(0.5))(fds.train_step(loss, fds.adamw(0.1, eps=1e-2)))
        step = fds.differentiable(step) if differentiable else step
        state = step.init({path: leaf + (comm.world().rank if different_params else 0) for path, leaf in PARAMS.items()})
        for x, y in BATCHES[:3]:
            state, metrics = step(state, (own(x), own(y)))
        return step.params(state), metrics, step.evaluate(state, [own(x) for x in BATCHES[3]])

    torch.testing.assert_close(*(comm.simulate(program, d, world_size=2) for d in (True, False)), rtol=0, atol=1e-13)


@pytest.mark.parametrize("stage", STAGES)
def test_they_are_the_ordinary_steps(stage: int) -> None:
    same_steps(stage)
    same_steps(stage, different_params=True)


def test_gradients_reach_each_ranks_own_params() -> None:
    """Although rank 0's are used, as in ordinary steps."""
    torch.testing.assert_close(comm.simulate(derivatives, (T.zero(3),), 1, world_size=2)[1][0], derivatives((), 1)[0])


def hybrid_shards() -> None:
    def program() -> Any:
        mesh = comm.mesh(outer=2, inner=2)
        return derivatives((T.zero(3, mesh["inner"], replicate=mesh["outer"], prefetch=2),), 2)

    wanted, _ = derivatives((), 2)
    for found, _ in comm.simulate(program, world_size=4):
        torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-9)


def test_with_replicas_and_other_arguments() -> None:
    hybrid_shards()


# -- draws, modules, ranks without rows ----------------------------------------------------------------------------------------


def draws(module: bool) -> None:
    """The second run draws what the first drew: by key, and by modules from the global generator."""
    apply, weights = fds.functional(nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5), nn.Linear(4, 1)).double())

    def of_module(params: Any, batch: Any) -> Tensor:
        return (apply(params, batch[0]) - batch[1]).square().mean()

    def program() -> None:
        def of(rate: Tensor) -> Tensor:
            torch.manual_seed(comm.world().rank)
            rule = fds.sgd(rate, momentum=0.9)
            step = fds.differentiable(T.zero(3)(fds.train_step(of_module if module else loss, rule)))
            state = step.init(weights if module else PARAMS)
            for x, y in BATCHES[:3]:
                state, metrics = step(state, (own(x), own(y)))
            torch.manual_seed(-1)
            return metrics["loss"]

        torch.autograd.gradcheck(of, torch.tensor(0.1, dtype=D, requires_grad=True))

    comm.simulate(program, world_size=2)


@pytest.mark.parametrize("module", [False, True])
def test_draws_are_repeated(module: bool) -> None:
    draws(module)


def lone_rows() -> None:
    """Only rank 0 has rows, and the loss of the others does not depend on params."""

    def one(params: Any, batch: Any) -> fds.Weighted:
        found = loss(params, batch) if len(batch[0]) else torch.zeros((), dtype=D)
        return fds.Weighted(found * len(batch[0]), torch.tensor(float(len(batch[0])), dtype=D))

    def program(*strategy: fds.Transform) -> tuple[Tensor, ...]:
        rate = torch.tensor(0.1, dtype=D, requires_grad=True)
        params = {path: leaf.clone().requires_grad_() for path, leaf in PARAMS.items()}
        step = fds.differentiable(fds.compose(*strategy)(fds.train_step(one, fds.sgd(rate, momentum=0.9))))
        state = step.init(params)
        for batch in BATCHES[:2]:
            state, metrics = step(state, batch if comm.world().rank == 0 else tuple(x[:0] for x in batch))
        found = step.evaluate(state, BATCHES[2] if comm.world().rank == 0 else tuple(x[:0] for x in BATCHES[2]))
        return torch.autograd.grad(found + metrics["loss"], [rate, *params.values()])

    wanted = program()
    for stage in STAGES:
        for found in comm.simulate(program, T.zero(stage), world_size=3):
            torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-9)


def test_ranks_without_rows() -> None:
    lone_rows()


def test_a_closure_of_the_loss_has_its_ranks_share() -> None:
    """And the whole gradient through ``comm.copy_to``."""

    def program(whole: bool, *strategy: fds.Transform) -> Tensor:
        decay = torch.tensor(0.3, dtype=D, requires_grad=True)

        def decayed(params: Any, batch: Any) -> Tensor:
            by = comm.copy_to(decay) if whole else decay
            return loss(params, batch) + by * params["w"].square().sum()

        step = fds.differentiable(fds.compose(*strategy)(fds.train_step(decayed, fds.sgd(0.1))))
        state = step.init(PARAMS)
        for x, y in BATCHES[:2]:
            state, metrics = step(state, (own(x), own(y)))
        return torch.autograd.grad(metrics["loss"], decay)[0]

    wanted = program(False)
    assert all(torch.allclose(found, wanted) for found in comm.simulate(program, True, T.zero(2), world_size=2))
    assert torch.allclose(sum(comm.simulate(program, False, T.zero(2), world_size=2)), wanted)  # type: ignore[arg-type]


# -- memory and communication --------------------------------------------------------------------------------------------------

WIDE = {"w": torch.randn(64, 128, dtype=D, generator=GENERATOR)}
WIDE_SIZE = 64 * 128


def wide_run(stage: int, steps: int) -> tuple[Any, Any, Tensor]:
    rows = torch.ones(2, 64, dtype=D)
    step = fds.differentiable(T.zero(stage)(fds.train_step(lambda p, x: torch.tanh(x @ p["w"]).square().mean(), fds.adam(0.1))))
    state = step.init({"w": WIDE["w"].clone().requires_grad_()})
    for _ in range(steps):
        state, _ = step(state, rows)
    return step, state, step.evaluate(state, rows)


def live_bytes() -> int:
    gc.collect()
    held = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in gc.get_objects() if type(x) is Tensor}
    return sum(held.values())


def kept_elements(stage: int, n: int = 2) -> float:
    """Elements of fp64 that each step more keeps on a rank."""
    sizes = []
    for steps in (2, 4):
        before = live_bytes()
        found = comm.simulate(wide_run, stage, steps, world_size=n)
        sizes.append(live_bytes() - before)
        del found
    return (sizes[1] - sizes[0]) / 2 / 8 / n


def keeps_its_part(stage: int) -> None:
    wanted = {0: 3.0, 1: 1 + 2 / 2, 2: 1 + 2 / 2, 3: 3 / 2}[stage] * WIDE_SIZE  # params and the two moments of Adam
    assert wanted <= kept_elements(stage) < wanted + 0.1 * WIDE_SIZE


@pytest.mark.parametrize("stage", STAGES)
def test_each_step_keeps_a_ranks_part_of_its_state(stage: int) -> None:
    keeps_its_part(stage)


@pytest.mark.parametrize("stage", STAGES)
def test_elements_sent(stage: int) -> None:
    """Forward 2Ψ(n-1)/n in each step; backward twice as much, and the parts of the state."""
    n, sent = 4, WIDE_SIZE * 3 / 4

    def program(steps: int) -> tuple[int, int]:
        with comm.ledger() as forward:
            _, _, loss = wide_run(stage, steps)
        with comm.ledger() as backward:
            loss.backward()
        return forward.elements, backward.elements

    one, more = (comm.simulate(program, steps, world_size=n)[0] for steps in (1, 3))
    forward, backward = ((b - a) / 2 for a, b in zip(one, more, strict=True))
    gathered = {0: 0, 1: 2, 2: 2, 3: 3}[stage]
    assert 2 * sent <= forward < 2 * sent + 50
    assert (4 + gathered) * sent <= backward < (4 + gathered) * sent + 100


# -- errors, processes ---------------------------------------------------------------------------------------------------------


def written_since() -> None:
    def program() -> None:
        rows = torch.ones(2, 64, dtype=D)
        step = fds.differentiable(T.zero(3)(fds.train_step(lambda p, x: (p["w"].sum() - x).square().mean(), fds.sgd(0.1))))
        first = WIDE["w"].clone().requires_grad_()
        _, metrics = step(step.init({"w": first}), rows)
        rows.add_(1)
        with pytest.raises(RuntimeError, match="was written to in place"):
            metrics["loss"].backward()

    comm.simulate(program, world_size=2)


def written_within() -> None:
    def overwrites(params: Any, x: Tensor) -> Tensor:
        hidden = (x @ params["w"]).exp()
        hidden.add_(1)
        return hidden.square().mean()

    step = fds.differentiable(T.zero(0)(fds.train_step(overwrites, fds.sgd(0.1))))
    with pytest.raises(RuntimeError, match="a tensor that a derivative needs was written to in place"):
        step(step.init({"w": WIDE["w"].clone().requires_grad_()}), torch.ones(2, 64, dtype=D))


def test_a_loss_that_overwrites_what_its_gradient_needs_is_refused() -> None:
    written_within()


def test_a_batch_that_was_written_to_is_refused() -> None:
    written_since()


def test_a_loss_that_changes_is_refused() -> None:
    calls = []

    def fickle(params: Any, x: Tensor) -> Tensor:
        calls.append(1)
        return (x @ params["w"][:, : 4 + len(calls)]).square().mean()

    step = fds.differentiable(T.zero(0)(fds.train_step(fickle, fds.sgd(0.1))))
    _, metrics = step(step.init({"w": WIDE["w"].clone().requires_grad_()}), torch.ones(2, 64, dtype=D))
    with pytest.raises(RuntimeError, match="computed again in the backward pass, and its loss saved"):
        metrics["loss"].backward()


def test_without_gradients_nothing_is_kept() -> None:
    def program() -> bool:
        with torch.no_grad():
            return wide_run(3, 2)[1].params["w"].requires_grad  # type: ignore[no-any-return]

    assert comm.simulate(program, world_size=2) == [False, False]


def on_any_world() -> list[Tensor]:
    return derivatives((T.zero(3),), 2, 2)[0]


def test_processes_have_the_simulated_gradients() -> None:
    for found, wanted in zip(comm.spawn(on_any_world, world_size=2), comm.simulate(on_any_world, world_size=2), strict=True):
        torch.testing.assert_close(found, wanted, rtol=0, atol=0)


def unused_by(rule: Callable[[Any], Any], zero: Any) -> Tensor:
    """The derivative by the learning rate, where a loss uses one leaf in every other step."""

    def sometimes(params: Any, batch: Any) -> Tensor:
        x, odd = batch
        hidden = torch.tanh(x @ params["w"] + params["b"])
        return hidden.square().mean() if odd[0] else (hidden @ params["head"]).square().mean()

    lr = torch.tensor(0.1, dtype=D, requires_grad=True)
    step = fds.differentiable(fds.compose(*zero)(fds.train_step(sometimes, rule(lr))))
    state = step.init(PARAMS)
    for count in range(3):
        state, _ = step(state, (own(BATCHES[count][0]), own(torch.full((12,), count % 2))))
    return torch.autograd.grad(step.evaluate(state, (own(BATCHES[3][0]), own(torch.zeros(12)))), lr)[0]


def tried(lr: Tensor) -> fds.Optimizer:
    return attrs.evolve(fds.adamw(lr), elementwise=False)


UNUSED: dict[str, Callable[[Any], Any]] = {
    "adamw": fds.adamw,
    "tried": tried,
    "groups": lambda lr: fds.param_groups({"w": fds.sgd(lr, momentum=lr)}, fds.adam(lr)),
}


def unused_leaves(name: str) -> None:
    alone = unused_by(UNUSED[name], ())
    for found in comm.simulate(unused_by, UNUSED[name], (T.zero(1),), world_size=2):
        torch.testing.assert_close(found, alone, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", UNUSED)
def test_derivatives_where_leaves_are_unused(name: str) -> None:
    unused_leaves(name)


# -- planted bugs --------------------------------------------------------------------------------------------------------------

OVER = "transforms.differentiation.over_ranks"
BUGS: list[tuple[Bug, Callable[[], None]]] = [
    (
        Bug("curvature of own rows", f"{OVER}:entering", "comm.copy_to([*leaves, token], axis.ranks())", "[*leaves, token]"),
        lambda: equals_one_device(3, 2, 2),
    ),
    (
        Bug("sums count their gradient n times", f"{OVER}:_summed", "comm.reduce_from", "comm.all_reduce"),
        lambda: equals_one_device(1, 2, 1),
    ),
    (
        Bug("a rank without rows stays away", f"{OVER}:entering.linked", "x + token.sum().to(x.dtype)", "x", RuntimeError),
        lone_rows,
    ),
    (
        Bug(
            "each rank has its own params",
            f"{OVER}:of_first_rank",
            "zip(Graft.of(leaves, list)(first), leaves, strict=True)",
            "zip(leaves, leaves, strict=True)",
        ),
        lambda: same_steps(0, different_params=True),
    ),
    (
        Bug(
            "whole states are kept",
            f"{OVER}:StepOverRanks._kept",
            "_KeptShard.of(x, group) if id(x) in chosen else _KeptLeaf.of(x)",
            "_KeptLeaf.of(x)",
        ),
        lambda: keeps_its_part(3),
    ),
    (
        Bug(
            "parts have no graph",
            f"{OVER}:_KeptShard.whole",
            "self.strides.restore(flat[: self.numel]).requires_grad_(self.trains)",
            "self.strides.restore(flat[: self.numel])",
            RuntimeError,
        ),
        lambda: equals_one_device(3, 2, 2),
    ),
    (
        Bug(
            "replicas are forgotten",
            f"{OVER}:_axes_alone",
            '[Axis(axis.group, AxisRole.BATCH, summed_in="reduce") for axis in layer.axes]',
            '[Axis(axis.group, AxisRole.BATCH, summed_in="reduce") for axis in layer.axes[-1:]]',
        ),
        hybrid_shards,
    ),
    (
        Bug("graphs are kept", f"{OVER}:_Replay.first", "one.tensor = None", "pass"),
        lambda: keeps_its_part(0),
    ),
    (
        Bug("draws go on", f"{OVER}:_Replay._as_before", "self._rng.copies(1)[0].restore()", "pass", GradcheckError),
        lambda: draws(True),
    ),
    (
        Bug(
            "later writes are not seen",
            f"{OVER}:_KeptLeaf.again",
            "isinstance(self.leaf, Tensor) and version_of(self.leaf) != self.version",
            "False",
            pytest.fail.Exception,
        ),
        written_since,
    ),
    (
        Bug(
            "writes are not seen",
            f"{OVER}:_Saved.get",
            "self.tensor is None or version_of(self.tensor) != self.version",
            "self.tensor is None",
            pytest.fail.Exception,
        ),
        written_within,
    ),
    (
        Bug(
            "the first run saves more",
            "optim.elementwise_trial:counting",
            "torch.no_grad()",
            "torch.enable_grad()",
            RuntimeError,
        ),
        lambda: unused_leaves("adamw"),
    ),
    (
        Bug(
            "new tensors are written into old ones",
            "sharding.leaf_selection:LeafSelection.put",
            "view.shape == tensors[place].shape",
            "False",
            RuntimeError,
        ),
        lambda: unused_leaves("groups"),
    ),
]


@pytest.mark.parametrize(("bug", "law"), BUGS, ids=[bug.name for bug, _ in BUGS])
def test_a_planted_bug_breaks_its_law(bug: Bug, law: Callable[[], None]) -> None:
    with planted(bug), pytest.raises(bug.shows):
        law()
