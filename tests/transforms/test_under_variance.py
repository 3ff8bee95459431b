"""The library's strategies, followed value by value (law 51): clean they pass, and with a bug planted the line is named."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import functional_ds as fds
from functional_ds import comm, transforms
from functional_ds import pipelining as pp
from functional_ds.step.axes import axis
from functional_ds.testing import assert_like_one_rank
from tests.planting import Bug, planted

WIDTH, ROWS = 6, 8
DIMS = {"up": 1, "bias": 0, "down": 0}


def params() -> list[Any]:
    generator = torch.Generator().manual_seed(1)

    def leaf(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator) / 2

    return [{"scale": leaf(WIDTH), "up": leaf(WIDTH, 12), "bias": leaf(12), "down": leaf(12, WIDTH)} for _ in range(2)]


def layer(dp: comm.Group, tp: comm.Group) -> Any:
    """A block whose params are replicated over dp, and cut or invariant over tp."""

    def block(p: Any, x: Tensor) -> Tensor:
        comm.replicated({name: value for name, value in p.items() if name == "scale"}, dp)
        comm.varying({name: p[name] for name in DIMS}, tp)
        x = comm.invariant(x * comm.invariant(p["scale"], tp), tp)
        hidden = torch.tanh(comm.copy_to(x, tp) @ p["up"] + p["bias"])
        return x + comm.reduce_from(comm.partial(hidden @ p["down"], tp), tp)

    return block


def trained(sizes: dict[str, int], strategy: str, steps: int = 2) -> Any:
    """Losses and params after some steps; a world of one rank has axes of one."""
    n = comm.world().size
    mesh = comm.mesh(**(dict.fromkeys(sizes, 1) if n == 1 else sizes))
    dp, pipe, tp = mesh["dp"], mesh["pp"], mesh["tp"]
    schedule = pp.one_f_one_b(pipe.size, 2)
    stages = [layer(dp, tp)] * 2 if pipe.size == 2 else [lambda p, x: layer(dp, tp)(p[1], layer(dp, tp)(p[0], x))]

    def loss(y: Tensor, batch: Any) -> fds.Weighted:
        return fds.Weighted(comm.invariant((y - batch[1]).square().sum(), tp), len(y))

    model = pp.stages(stages, params() if pipe.size == 2 else [params()], loss=loss)
    chain = {
        "clip": [transforms.clip(0.1)],
        "zero 0": [transforms.zero(0, dp)],
        "zero 1": [transforms.zero(1, dp), transforms.clip(0.1)],
        "zero 2": [transforms.zero(2, dp), transforms.accumulate(2)],
        "zero 3": [transforms.zero(3, dp), transforms.clip(0.1)],
        "bf16": [transforms.mixed_precision("bf16"), transforms.zero(2, dp)],
        "int8": [transforms.zero(2, dp, reduce_scatter=comm.codecs.compressed(comm.reduce_scatter, comm.codecs.Blocks(8)))],
        "owner": [transforms.zero(1, dp, aggregate="owner")],
    }[strategy]
    piped = [transforms.pipeline(schedule, model, pipe)] if sizes["pp"] > 1 else []
    sliced = [transforms.tensor_parallel({f"{name}$": dim for name, dim in DIMS.items()}, tp)]
    step = fds.compose(*chain, *piped, *sliced)(fds.train_step(model, fds.adamw(1e-2, eps=1e-4)))
    state = step.init(params() if pipe.size == 2 else [params()])
    whole = torch.linspace(-1, 1, ROWS * WIDTH).view(ROWS, WIDTH), torch.linspace(1, -2, ROWS * WIDTH).view(ROWS, WIDTH)
    batch = tuple(x.tensor_split(dp.size)[dp.rank] for x in whole)
    found = []
    for _ in range(steps):
        state, metrics = step(state, batch)
        found.append(metrics["loss"])
    return found, fds.tree.leaves(step.params(state))


EXACT = ("zero 0", "zero 1", "zero 2", "zero 3", "owner")


@pytest.mark.sample(2)
@pytest.mark.law(51)
@pytest.mark.parametrize("strategy", EXACT)
def test_data_and_tensor_parallel_is_clean_and_one_rank(strategy: str) -> None:
    assert_like_one_rank(trained, {"dp": 2, "pp": 1, "tp": 2}, strategy, world_size=4, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("strategy", ["bf16", "int8"])
def test_what_rounds_is_clean(strategy: str) -> None:
    comm.simulate(trained, {"dp": 2, "pp": 1, "tp": 1}, strategy, world_size=2, variance=True)


@pytest.mark.parametrize("strategy", ["zero 0", "zero 3"])
def test_pipelines_are_clean(strategy: str) -> None:
    comm.simulate(trained, {"dp": 2, "pp": 2, "tp": 1}, strategy, 1, world_size=4, variance=True)


def module(*strategy: fds.Transform, rule: fds.Optimizer) -> float:
    """A module's loss after some steps."""
    torch.manual_seed(0)
    apply, leaves = fds.functional(
        nn.Sequential(nn.Linear(WIDTH, 8), nn.Sequential(nn.Tanh(), nn.Linear(8, 8)), nn.LayerNorm(8))
    )
    here = comm.world()

    def loss(p: Any, x: Tensor) -> fds.Weighted:
        return fds.Weighted(comm.partial(apply(comm.replicated(p, here), x).square().sum(), here), len(x))

    step = fds.compose(*strategy)(fds.train_step(loss, rule))
    state = step.init(leaves)
    rows = torch.linspace(-1, 1, ROWS * WIDTH).view(ROWS, WIDTH).sin().chunk(here.size)[here.rank]
    for _ in range(3):
        state, metrics = step(state, rows)
    return metrics["loss"].item()


def vote(grads: list[Tensor], memory: object, group: comm.Group) -> tuple[list[Tensor], object]:
    return [comm.all_reduce(grad.sign(), group).sign() for grad in grads], memory


def mean(grads: list[Tensor], memory: object, group: comm.Group) -> tuple[list[Tensor], object]:
    return comm.all_reduce(grads, group, op="avg"), memory


def nothing(grads: list[Tensor], memory: object, group: comm.Group) -> tuple[list[Tensor], object]:
    return grads, memory


STRATEGIES = {
    "remat": lambda: [transforms.remat("1"), transforms.zero(3)],
    "averages": lambda: [transforms.ema(0.9), transforms.zero(1), transforms.clip(1.0)],
    "fp16": lambda: [transforms.mixed_precision("fp16"), transforms.zero(2)],
    "compressed": lambda: [transforms.compressed_gradients(comm.codecs.OneBit())],
    "top-k": lambda: [transforms.compressed_gradients(comm.codecs.TopK(0.25)), transforms.clip(0.1)],
    "4 bits": lambda: [transforms.mixed_precision("fp16"), transforms.compressed_gradients(comm.codecs.Blocks(4))],
    "votes": lambda: [transforms.replicated(reduce=vote)],
    "means": lambda: [transforms.accumulate(2), transforms.replicated(reduce=mean), transforms.clip(0.1)],
    "one bit": lambda: [transforms.local_gradients()],
    "one bit of fp16": lambda: [transforms.mixed_precision("fp16"), transforms.local_gradients()],
    "zero-one": lambda: [transforms.local_gradients()],
}
RULES = {
    "one bit": lambda: fds.one_bit_adam(0.01, warmup=1),
    "one bit of fp16": lambda: fds.one_bit_adam(0.01, warmup=1),
    "zero-one": lambda: fds.zero_one_adam(0.01, freeze=1, each=1),
}


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", STRATEGIES)
def test_other_strategies_are_clean(name: str) -> None:
    rule = RULES[name]() if name in RULES else fds.adamw(0.01)
    comm.simulate(lambda: module(*STRATEGIES[name](), rule=rule), world_size=2, variance=True)


def test_a_strategy_that_sums_no_gradients_is_named() -> None:
    with pytest.raises(comm.errors.VarianceError, match=r"(eq|fused_adamw) at .* is not linear, and acts on a partial sum"):
        comm.simulate(lambda: module(rule=fds.adamw(0.01)), world_size=2, variance=True)


def slices_trained(bug: str, *strategy: fds.Transform) -> float:
    """A step on slices, whose loss sums by collectives of its own."""
    draw = torch.Generator().manual_seed(0)
    sizes = {"up": (8, 4), "down": (5, 8), "bias": (5,), "head": (6, 5)}
    leaves = {name: torch.randn(size, generator=draw) for name, size in sizes.items()}
    x = torch.randn(3, 4, generator=draw)

    def loss(p: Any, batch: Any) -> fds.Weighted:
        tp, bias = axis("tp"), p["bias"]
        hidden = fds.tp.column(batch["x"], p["up"]).tanh()
        if bug == "addmm":
            y = comm.reduce_from(nn.functional.linear(hidden, p["down"], bias), tp)
        elif bug == "addmm of 3 dims":
            y = comm.reduce_from(nn.functional.linear(hidden[:, None], p["down"], bias), tp)[:, 0]
        elif bug == "broadcast":
            y = comm.reduce_from(nn.functional.linear(hidden, p["down"]) + bias, tp)
        else:
            y = fds.tp.row(hidden, p["down"]) + bias
        logits = (comm.all_gather if bug == "gather" else comm.gather_from)(fds.tp.column(y, p["head"]), tp, dim=1)
        return fds.Weighted(nn.functional.cross_entropy(logits, batch["labels"], reduction="sum"), len(logits))

    plan = {"up": "colwise", "down": "rowwise", "head": "colwise"}
    step = fds.compose(*strategy, transforms.tensor_parallel(plan))(fds.train_step(loss, fds.sgd(0.1)))
    return step(step.init(leaves), {"x": x, "labels": torch.arange(3)})[1]["loss"].item()


IN_SLICES = {
    "addmm": r"reduce_from at .* sums what addmm at .* made of a value that all ranks",
    "addmm of 3 dims": r"reduce_from at .* sums what addmm at .* made of a value that all ranks",
    "broadcast": r"reduce_from at .* sums what add at .* made of a value that all ranks",
    "gather": r"the backward pass of all_gather at .* sums a gradient that all ranks of group 'world' \[0, 1\] have alike",
}


@pytest.mark.parametrize("bug", IN_SLICES)
def test_a_bug_of_a_loss_on_slices_is_named(bug: str) -> None:
    """The transform declares batch and loss, and has sent the leaves that all ranks have; clean, it is one rank's."""
    alone = slices_trained("")
    for strategy in ([], [transforms.clip(0.1)], [transforms.accumulate(1)]):
        clean = comm.simulate(slices_trained, "", *strategy, world_size=2, variance=True)
        assert clean == [pytest.approx(alone, rel=1e-5)] * 2
    with pytest.raises(comm.errors.VarianceError, match=IN_SLICES[bug]):
        comm.simulate(slices_trained, bug, world_size=2, variance=True)


# -- bugs in the library -----------------------------------------------------------------------------------------------

BUGS = (
    (
        Bug(
            "tensor_parallel counts what all ranks have n times",
            "step.over_ranks.gradient_sums:_total",
            "whole.append(comm.all_reduce(functools.reduce(operator.add, divided), axis.ranks()))",
            "whole = [comm.all_reduce(functools.reduce(operator.add, [*whole, *divided]), axis.ranks())]",
        ),
        {"dp": 1, "pp": 1, "tp": 2},
        "clip",
        r"sums what add at .* made of a value that all ranks of group 'tp' \[0, 1\] have and one that differs",
    ),
    (
        Bug(
            "zero leaves gradients as they are",
            "transforms.zero.collectives:Collectives.reduce",
            "self._reduce_whole(flats, groups)",
            "comm.Pending.of(flats)",
        ),
        {"dp": 2, "pp": 1, "tp": 1},
        "zero 0",
        r"fused_adamw at .* is not linear, and acts on a partial sum along group 'dp' \[0, 1\]",
    ),
    (
        Bug(
            "zero cuts gradients without a sum",
            "transforms.zero.collectives:Collectives._scatter",
            "start(self.config.reduce_scatter, rows, _channel(level), tiled=False)",
            "comm.Pending.of([x[level.rank] for x in rows])",
        ),
        {"dp": 2, "pp": 1, "tp": 1},
        "zero 3",
        r"is not linear, and acts on a partial sum along group 'dp' \[0, 1\]",
    ),
)


@pytest.mark.parametrize(("bug", "sizes", "strategy", "says"), BUGS, ids=[case[0].name for case in BUGS])
def test_a_bug_of_the_library_is_named(bug: Bug, sizes: dict[str, int], strategy: str, says: str) -> None:
    with planted(bug), pytest.raises(comm.errors.VarianceError, match=says):
        comm.simulate(trained, sizes, strategy, world_size=2, variance=True)


@pytest.mark.parametrize("begin", ["at once", "later", "loaded"])
@pytest.mark.parametrize("stage", [None, 0, 3])
def test_a_bias_that_each_rank_adds_is_named_in_any_step(stage: int | None, begin: str, tmp_path: Path) -> None:
    """Also in the third step, and in a state that was loaded: what is whole is declared in every pass."""

    def program(bug: bool) -> None:
        mesh = comm.mesh(dp=2, tp=2)
        tp, wrong = mesh["tp"], bug and begin != "later"

        def loss(p: Any, x: Tensor) -> Tensor:
            y = nn.functional.linear(fds.tp.column(x, p["up"]).tanh(), p["down"], p["bias"] if wrong else None)
            return (comm.reduce_from(y, tp) + (0 if wrong else p["bias"])).square().mean()

        zero = [] if stage is None else [transforms.zero(stage, mesh["dp"])]
        cut = transforms.tensor_parallel({"up": "colwise", "down": "rowwise"}, tp)
        step = fds.compose(*zero, cut)(fds.train_step(loss, fds.adamw(0.1)))
        draw = torch.Generator().manual_seed(0)
        sizes = {"up": (4, 3), "down": (3, 4), "bias": (3,)}
        state = step.init({name: torch.randn(size, generator=draw) for name, size in sizes.items()})
        if begin == "loaded":
            fds.save(state, tmp_path / str(bug))
            state = fds.load(tmp_path / str(bug), like=state)
        for _ in range(2):
            state, _ = step(state, torch.randn(4, 3, generator=draw)[mesh["dp"].rank :: 2])
        wrong = bug
        step(state, torch.ones(2, 3))

    comm.simulate(program, False, world_size=4, variance=True)
    with pytest.raises(
        comm.errors.VarianceError, match=r"reduce_from at .* sums what addmm at .* made of a value that all ranks"
    ):
        comm.simulate(program, True, world_size=4, variance=True)


def test_a_combination_that_differs_between_ranks_is_named() -> None:
    with pytest.raises(comm.errors.VarianceError, match=r"'0' .*, invariant along .* differs between its ranks"):
        comm.simulate(lambda: module(transforms.replicated(reduce=nothing), rule=fds.adamw(0.01)), world_size=2, variance=True)
