"""zero's arguments: whatever is chosen, it is the single-device step, and sends what the plan says, to the byte."""

from functools import cache
from typing import Any

import attrs
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import functional_ds as fds
from functional_ds import comm, transforms, units
from functional_ds.testing import assert_same
from tests.transforms.models import CASES, own_rows, run

TOLERANCE = 2e-5  # as in test_zero: rounding of sums in other orders


@attrs.frozen
class Grid:
    """How the ranks of a world lie: blocks of ``intra`` ranks, ``inter`` of them, ``replicas`` times."""

    replicas: int
    inter: int
    intra: int

    @property
    def size(self) -> int:
        return self.replicas * self.inter * self.intra

    def groups(self, *, blocks: bool, numbers: bool = False) -> dict[str, Any]:
        """zero's groups, in the world of this size."""
        mesh = comm.mesh(replica=self.replicas, inter=self.inter, intra=self.intra)
        found: dict[str, Any] = {"group": mesh["inter", "intra"]}
        if blocks:
            found["intra_node"] = self.intra if numbers else mesh["intra"]
        if self.replicas > 1:
            found["replicate"] = mesh["replica"]
        return found


GRIDS = [Grid(r, a, i) for r in (1, 2, 3) for a in (1, 2, 3) for i in (1, 2, 3) if r * a * i <= 6]
SMALL = [grid for grid in GRIDS if grid.size <= 4]
UNITS = (None, units.by_leaf, units.single_unit, units.by_bytes(300))


@st.composite
def arguments(draw: st.DrawFn, stages: tuple[int, ...] = (0, 1, 2, 3)) -> dict[str, Any]:
    """What ``zero`` takes beside groups; ``blocks`` says whether the ranks are taken in blocks."""
    stage = draw(st.sampled_from(stages))
    found: dict[str, Any] = {"stage": stage, "blocks": False, "unit_of": draw(st.sampled_from(UNITS))}
    found["gradient_predivide_factor"] = draw(st.sampled_from((1.0, 4.0)))
    if stage:
        found["aggregate"] = draw(st.sampled_from(("reduce_scatter", "all_reduce", "owner")))
        found["blocks"] = found["aggregate"] != "owner" and draw(st.booleans())
    if stage == 3:
        found["reshard_last_units"] = draw(st.booleans())
        found["prefetch"] = draw(st.integers(0, 3))
        found["max_live_units"] = draw(st.integers(1, 3))
        found["persistence_threshold"] = draw(st.sampled_from((0, 8, 64, 10**6)))
        found["hpz"] = found["blocks"] and draw(st.booleans())
    return found


def strategy(grid: Grid, chosen: dict[str, Any]) -> transforms.Zero:
    """In the world of the grid's size."""
    groups = grid.groups(blocks=chosen["blocks"], numbers=chosen.get("gradient_predivide_factor") == 4.0)
    return transforms.zero(**{name: value for name, value in chosen.items() if name != "blocks"}, **groups)


@cache
def alone(name: str, rows: int) -> tuple[list[float], list[float], Any]:
    return run(CASES[name], (), rows=rows)


# -- nothing changes --------------------------------------------------------------------------------------------------


@pytest.mark.law(19)
@given(
    name=st.sampled_from(sorted(CASES)),
    grid=st.sampled_from(GRIDS),
    chosen=arguments(),
    k=st.sampled_from((1, 2)),
    seed=st.integers(0, 99),
)
def test_any_arguments_are_the_single_device_step(name: str, grid: Grid, chosen: dict[str, Any], k: int, seed: int) -> None:
    """zero with any arguments on any grid of ranks = the step on the concatenated batch."""
    agrees_with_one_device(name, grid, chosen, k, seed)


def agrees_with_one_device(name: str, grid: Grid, chosen: dict[str, Any], k: int, seed: int) -> None:
    rows = 2 * grid.size

    def program() -> Any:
        return run(CASES[name], (strategy(grid, chosen), transforms.accumulate(k)), rows=rows)

    expected = alone(name, rows)
    results = comm.simulate(program, world_size=grid.size, seed=seed)
    for losses, evaluated, params in results:
        torch.testing.assert_close([losses, evaluated], list(expected[:2]), rtol=TOLERANCE, atol=TOLERANCE, equal_nan=True)
        for leaf, other in zip(fds.tree.leaves(params), fds.tree.leaves(expected[2]), strict=True):
            torch.testing.assert_close(leaf, other, rtol=TOLERANCE, atol=TOLERANCE, equal_nan=True)
        assert_same(params, results[0][2])


@pytest.mark.law(31)
@given(grid=st.sampled_from(SMALL), chosen=arguments(), narrow=st.booleans())
def test_donation_changes_nothing(grid: Grid, chosen: dict[str, Any], narrow: bool) -> None:
    """With donate=False a state can be used again, and gives the same, whatever is kept in the slot."""
    chosen = {**chosen, **(compressed(chosen, comm.codecs.Blocks(8, size=16)) if narrow else {})}

    def program(donate: bool) -> Any:
        params, loss = CASES["lora"].make()
        step = strategy(grid, chosen)(fds.train_step(loss, fds.adamw(1e-2)))
        batch = own_rows(CASES["lora"].batch(grid.size), comm.world())
        state, losses = step.init(params), []
        for _ in range(2):
            kept = state
            state, metrics = step(state, batch, donate=donate)
            if not donate:
                _, again = step(kept, batch, donate=False)
                assert_same(again["loss"], metrics["loss"])
            losses.append(metrics["loss"])
        return losses, step.params(state)

    assert_same(*(comm.simulate(program, donate, world_size=grid.size) for donate in (True, False)))


def compressed(chosen: dict[str, Any], codec: comm.codecs.Codec) -> dict[str, Any]:
    """The collectives that these arguments use, with a codec."""
    groupless = {name: value for name, value in chosen.items() if name not in ("blocks", "hpz")}
    return {name: comm.codecs.compressed(getattr(comm, name), codec) for name in transforms.zero(**groupless).used}


@pytest.mark.law(38)
@given(
    name=st.sampled_from(("tied", "lora", "branching", "odd leaves")),
    grid=st.sampled_from(SMALL),
    chosen=arguments(),
    codec=st.sampled_from((comm.codecs.Cast(torch.float64), comm.codecs.TopK(1.0))),
)
def test_a_lossless_codec_changes_nothing(name: str, grid: Grid, chosen: dict[str, Any], codec: comm.codecs.Codec) -> None:
    """Any arguments with compressed(·, id) = the same arguments without, bitwise, over as many levels as there are."""

    def program(**means: Any) -> Any:
        return run(CASES[name], (strategy(grid, {**chosen, **means}),), rows=grid.size, steps=2)

    plainly = comm.simulate(program, world_size=grid.size)
    if chosen["stage"] == 0 and grid.replicas > 1 and grid.inter * grid.intra > 1 and isinstance(codec, comm.codecs.Cast):
        return  # an all-reduce between replicas rounds sums in fp64 once less
    assert_same(comm.simulate(lambda: program(**compressed(chosen, codec)), world_size=grid.size), plainly)


@pytest.mark.law(38)
@pytest.mark.parametrize("hpz", [False, True])
def test_integers_lose_nothing_in_two_levels(hpz: bool) -> None:
    """int8 is exact where absmax is 127 times a power of two, inside nodes and then between them: the same bits as in fp32."""

    def program(narrow: bool) -> Any:
        mesh = comm.mesh(inter=2, intra=2)
        w = torch.randint(-2, 3, (32,), generator=torch.Generator().manual_seed(5)).float()
        w[::4] = 127
        x = torch.randint(0, 2, (32,), generator=torch.Generator().manual_seed(mesh["inter"].rank)).float()
        x[::4], x[1::4] = 0.0, 127 if mesh["inter"].rank else -127
        codec = comm.codecs.Blocks(8, size=4)
        means = {name: comm.codecs.compressed(getattr(comm, name), codec) for name in ("all_gather", "reduce_scatter")}
        chosen = transforms.zero(
            3, mesh["inter", "intra"], intra_node=mesh["intra"], hpz=hpz, reshard_last_units=True, **(means if narrow else {})
        )
        step = chosen(fds.train_step(lambda p, x: (p["w"] * x).sum(), fds.sgd(4.0)))
        state, losses = step.init({"w": w}), []
        for _ in range(2):
            state, metrics = step(state, x)
            losses.append(metrics["loss"].item())
        return losses, step.params(state)

    exact = comm.simulate(program, False, world_size=4)
    assert_same(comm.simulate(program, True, world_size=4), exact)
    assert exact[0][0][0] != exact[0][0][1]


def everything_on_processes() -> list[Any]:
    mesh = comm.mesh(replica=1, inter=2, intra=1)
    codec = comm.codecs.Blocks(8, size=16)
    narrow = {name: comm.codecs.compressed(getattr(comm, name), codec) for name in ("all_gather", "reduce_scatter")}
    strategies = [
        transforms.zero(3, intra_node=1, hpz=True, prefetch=3, **narrow),
        transforms.zero(3, intra_node=2, persistence_threshold=8, prefetch=0, max_live_units=1),
        transforms.zero(2, aggregate="owner", gradient_predivide_factor=2.0),
        transforms.zero(3, aggregate="owner"),
        transforms.zero(1, aggregate="all_reduce"),
        transforms.zero(3, mesh["intra"], replicate=mesh["inter"]),
        transforms.zero(0, mesh["intra"], replicate=mesh["inter"]),
    ]
    return [run(CASES["branching" if chosen is strategies[1] else "tied"], (chosen,)) for chosen in strategies]


@pytest.mark.law(18)
def test_processes_give_the_bits_of_the_simulator() -> None:
    """Gloo processes, with blocks of one and two ranks, owners, replicas."""
    simulated = comm.simulate(everything_on_processes, world_size=2)
    assert_same(comm.spawn(everything_on_processes, world_size=2), simulated)


# -- ranges, dtypes ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("aggregate", ["reduce_scatter", "all_reduce", "owner"])
def test_predivision_keeps_sums_in_range(aggregate: str) -> None:
    """Two gradients of 40,000 overflow fp16 when they are added; divided by two before, they do not, and all is as it was.

    Those of a plain mean are divided by the number of ranks in any case.
    """

    def program(factor: float) -> tuple[float, float]:
        chosen = transforms.zero(2, aggregate=aggregate, gradient_predivide_factor=factor)
        step = fds.compose(transforms.mixed_precision("fp16", 1.0), chosen, transforms.clip(1e9))(
            fds.train_step(lambda p, x: fds.Weighted((p["w"] * x).sum(), 1.0), fds.sgd(2.0**-12))
        )
        state, metrics = step(step.init({"w": torch.zeros(4)}), torch.full((4,), 40000.0))
        return metrics["skipped"].item(), step.params(state)["w"][0].item()

    assert comm.simulate(program, 1.0, world_size=2) == [(1.0, 0.0)] * 2
    assert comm.simulate(program, 2.0, world_size=2) == [(0.0, -40000 / 4096)] * 2


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_gradients_travel_as_the_policy_says(stage: int) -> None:
    """``reduce=f32`` needs nothing but the policy: sums of bf16 gradients are not rounded."""
    values = torch.tensor([1.0, 2.0**-10])  # their sum is none of bf16's numbers

    def program() -> tuple[float, torch.dtype]:
        seen = []

        def update(inner: Any, step: fds.Step, state: fds.State, grads: fds.Weighted) -> Any:
            seen.append(grads.sum[0].dtype)
            return inner(step, state, grads)

        chain = transforms.mixed_precision("bf16,reduce=f32"), transforms.zero(stage), fds.wrap("look", update=update)
        step = fds.compose(*chain)(fds.train_step(lambda p, x: (p["w"] * x).sum() * 2, fds.sgd(1.0)))
        state, _ = step(step.init({"w": torch.zeros(2)}), values[comm.world().rank].expand(2))
        return step.params(state)["w"][0].item(), seen[0]

    assert comm.simulate(program, world_size=2) == [(-1 - 2.0**-10, torch.float32)] * 2
