"""ZeRO-3 whatever units a rank uses, and in whatever order: the result is plain PyTorch's on all rows."""

from typing import Any

import attrs
import pytest
import torch
from hypothesis import event, given, settings
from hypothesis import strategies as st
from torch import Tensor

import functional_ds as fds
from functional_ds import comm, transforms
from tests.transforms.zero.test_config import Grid

LAWS = settings.default.max_examples > 100
WIDTH, ROWS, LR = 4, 2, 0.2
NODES = Grid(replicas=1, inter=2, intra=2)
GRIDS = [NODES, NODES, Grid(1, 3, 2), Grid(1, 2, 3), Grid(2, 2, 1), Grid(1, 1, 3), *([Grid(2, 2, 2)] if LAWS else [])]

Order = tuple[int, ...]


@attrs.frozen
class Program:
    """A training run, as data.

    Attributes:
        steps: for each step the units that each rank uses, in its order.
        grid: how the ranks lie.
        knobs: zero's arguments beside its groups.
        micro_batches: in how many parts each step takes a rank's rows.
        units: how many units there are.
    """

    steps: tuple[tuple[Order, ...], ...]
    grid: Grid
    knobs: tuple[tuple[str, Any], ...]
    micro_batches: int = 1
    units: int = 4


def weights(count: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(7)
    return {f"h.{i}.w": torch.randn(WIDTH, WIDTH, generator=generator) / 2 for i in range(count)}


def rows(ranks: int) -> Tensor:
    """[ranks, rows, width]"""
    return torch.randn(ranks, ROWS, WIDTH, generator=torch.Generator().manual_seed(8))


def through(params: Any, order: Order, x: Tensor) -> Tensor:
    for unit in order:
        x = torch.tanh(x @ params[f"h.{unit}.w"])
    return x.square().mean()


def plainly(program: Program) -> tuple[list[float], dict[str, Tensor]]:
    """The run by plain PyTorch on one device: rank r's rows go through rank r's units."""
    params = {name: leaf.requires_grad_() for name, leaf in weights(program.units).items()}
    batch, losses = rows(program.grid.size), []
    optimizer = torch.optim.SGD(params.values(), LR)
    for orders in program.steps:
        optimizer.zero_grad()
        total = torch.stack([through(params, order, x) for order, x in zip(orders, batch, strict=True)]).mean()
        total.backward()
        for leaf in params.values():
            leaf.grad = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
        optimizer.step()
        losses.append(total.item())
    return losses, {name: leaf.detach() for name, leaf in params.items()}


def on_ranks(program: Program) -> tuple[list[float], Any]:
    """The run on one rank of the grid."""
    rank, current = comm.world().rank, [()]
    knobs = dict(program.knobs)
    groups = program.grid.groups(blocks=knobs.pop("blocks", True))
    zero = transforms.zero(3, **knobs, **groups)
    base = fds.train_step(lambda params, x: through(params, current[0], x), fds.sgd(LR))
    step = fds.compose(zero, transforms.accumulate(program.micro_batches))(base)
    state, losses = step.init(weights(program.units)), []
    for orders in program.steps:
        current[0] = orders[rank]
        state, metrics = step(state, rows(program.grid.size)[rank])
        losses.append(metrics["loss"].item())
    return losses, step.params(state)


def agrees(found: tuple[list[float], Any], expected: tuple[list[float], dict[str, Tensor]]) -> None:
    torch.testing.assert_close(found[0], expected[0], rtol=1e-5, atol=1e-6)
    for name, leaf in expected[1].items():
        torch.testing.assert_close(found[1][name], leaf, rtol=1e-5, atol=1e-6)


def alike(order: Order, steps: int, **knobs: Any) -> Program:
    """A run in which all ranks of two nodes use the same units in the same order."""
    return Program(((order,) * NODES.size,) * steps, NODES, tuple(knobs.items()))


@st.composite
def programs(draw: st.DrawFn) -> Program:
    grid, units = draw(st.sampled_from(GRIDS)), draw(st.integers(1, 5))
    orders = st.lists(st.integers(0, units - 1), min_size=1, max_size=7).map(tuple)
    one_step = st.one_of(
        orders.map(lambda order: (order,) * grid.size),
        st.tuples(*[orders] * grid.size),  # gated: each rank its own units, in its own order
    )
    phases = draw(st.lists(one_step, min_size=1, max_size=2))
    steps = tuple(phases[draw(st.integers(0, len(phases) - 1))] for _ in range(draw(st.integers(2, 4))))
    blocks = draw(st.sampled_from([True, True, False]))
    knobs = {
        "blocks": blocks,
        "hpz": blocks and draw(st.booleans()),
        "max_live_units": draw(st.integers(1, 3)),
        "prefetch": draw(st.integers(0, 3)),
        "reshard_last_units": draw(st.booleans()),
        "persistence_threshold": draw(st.sampled_from([0, 0, WIDTH**2])),
        "aggregate": draw(st.sampled_from(["reduce_scatter", "reduce_scatter", "all_reduce"])),
        "gradient_predivide_factor": draw(st.sampled_from([1.0, 1.0, 4.0])),
        "unit_of": draw(st.sampled_from([None, lambda path: f"pair {int(path.split('.')[1]) // 2}"])),
    }
    return Program(steps, grid, tuple(knobs.items()), draw(st.sampled_from([1, 1, 2])), units)


@pytest.mark.law(19)
@pytest.mark.parametrize("part", range(5 if LAWS else 1))  # of the examples: workers share them
@settings(max_examples=300 if LAWS else 12)
@given(program=programs(), seed=st.integers(0, 9999))
def test_any_units_in_any_order(program: Program, seed: int, part: int) -> None:
    """Stage 3 with any knobs together on any levels, whatever each rank uses and when, is plain PyTorch.

    ``make laws`` draws 3,000 programs, on up to 8 ranks in nodes and replicas.
    """
    event(f"{program.grid}, hpz {dict(program.knobs)['hpz']}")
    expected = plainly(program)
    for found in comm.simulate(on_ranks, program, world_size=program.grid.size, seed=seed):
        agrees(found, expected)


@pytest.mark.parametrize(
    ("order", "knobs"),
    [((0, 1, 0), {"max_live_units": 1}), ((0, 3, 2, 1, 2, 1), {"max_live_units": 1, "prefetch": 2})],
    ids=str,
)
def test_secondary_shards_in_other_orders(order: Order, knobs: dict[str, int]) -> None:
    """A repeated gather inside a node beside gathers across nodes: equal sizes would swap values, others would hang."""
    program = alike(order, 3, hpz=True, **knobs)
    expected = plainly(program)
    for seed in range(10):
        for found in comm.simulate(on_ranks, program, world_size=4, seed=seed):
            agrees(found, expected)


def test_secondary_shards_on_processes() -> None:
    program = alike((0, 1, 0), 3, hpz=True, max_live_units=1)
    for found in comm.spawn(on_ranks, program, world_size=4):
        agrees(found, plainly(program))


# -- over several communicators ---------------------------------------------------------------------------------------


def launches(program: Program) -> list[list[tuple[str, str]]]:
    """What this rank started in each step, over all groups."""
    log: list[tuple[str, str]] = []

    def logged(name: str) -> Any:
        def noted(x: Any, group: comm.Group, **options: Any) -> comm.table.Request[Any]:
            log.append((name, group.name))
            return comm.table.prepare(getattr(comm, name), x, group, **options)

        return comm.table.collective(noted)

    rank = comm.world().rank
    knobs = {**dict(program.knobs), "all_gather": logged("all_gather"), "reduce_scatter": logged("reduce_scatter")}
    current: list[Order] = [()]
    zero = transforms.zero(3, **knobs, **program.grid.groups(blocks=False))
    step = zero(fds.train_step(lambda params, x: through(params, current[0], x), fds.sgd(LR)))
    state, found = step.init(weights(program.units)), []
    for orders in program.steps:
        current[0] = orders[rank]
        log.clear()
        state, _ = step(state, rows(program.grid.size)[rank])
        found.append([*log])
    return found


def launches_agree(program: Program, seed: int = 0) -> None:
    """The last step's launches, since the ranks need a few steps to learn each other's order."""
    first, *others = comm.simulate(launches, program, world_size=program.grid.size, seed=seed)
    assert all(other[-1] == first[-1] for other in others)


PAIR = Grid(1, 1, 2)
UP, DOWN = (0, 0, 1, 2, 3), (3, 3, 2, 1, 0)  # the first unit twice, or its backward would not need it
GATED = Program(((UP, (3, 1)),) * 5, PAIR, (("max_live_units", 2), ("prefetch", 1)))
# The plan stays: the same units are fetched, but rank 0 completes them later.
REGATED = Program(((UP, UP),) * 4 + ((DOWN, UP),) * 4, PAIR, (("max_live_units", 4), ("reshard_last_units", True)))


@pytest.mark.law(19)
@given(data=st.data(), seed=st.integers(0, 99))
def test_communicators_are_used_in_one_order(data: st.DataObject, seed: int) -> None:
    """NCCL may block where ranks launch gathers and reductions in different orders, though each has a group of its own."""
    grid = Grid(1, 1, data.draw(st.integers(2, 3)))
    orders = st.lists(st.integers(0, 3), min_size=1, max_size=6).map(tuple)
    phases = data.draw(st.lists(st.tuples(*[orders] * grid.size), min_size=1, max_size=2))
    knobs = {"max_live_units": data.draw(st.integers(1, 3)), "prefetch": data.draw(st.integers(0, 2))}
    steps = tuple(gated for gated in phases for _ in range(8))
    launches_agree(Program(steps, grid, tuple(knobs.items())), seed)
