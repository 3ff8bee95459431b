"""A fit of a machine's factors finds those that the times were made with."""

import attrs
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from functional_ds.cli.tuning.calibration import fitted, non_negative_least_squares
from functional_ds.scaling.machine import FACTORS, Machine

CPU = Machine("m", 1e12, 1e12, 1e12, 1e9, device="cpu")
TRUE = dict(zip(FACTORS, (1.5, 4.0, 0.7, 1.0, 0.2, 0.5, 3.0, 2.0), strict=True))


def runs(machine: Machine, count: int, *, seed: int = 0) -> list[tuple[dict[str, float], float]]:
    """Steps of many mixtures, and the seconds that they take on a machine."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for _ in range(count):
        row = torch.rand(len(FACTORS), generator=generator, dtype=torch.float64).pow(3)
        perfect = dict(zip(FACTORS, row.tolist(), strict=True))
        found.append((perfect, sum(machine.scaled(perfect).values())))
    return found


@pytest.mark.parametrize("seed", range(3))
def test_the_fit_finds_the_factors(seed: int) -> None:
    real = attrs.evolve(CPU, factors=TRUE)
    found = fitted(CPU, runs(real, 20, seed=seed))
    assert found.factors == pytest.approx(TRUE, rel=0.02, abs=0.01)
    assert attrs.evolve(found, factors=CPU.factors) == CPU


@pytest.mark.parametrize("seed", range(3))
def test_a_run_that_is_held_out_is_predicted(seed: int) -> None:
    """Whichever it is, as long as the others have its kinds of work."""
    real = attrs.evolve(CPU, factors=TRUE)
    made = runs(real, 20, seed=seed)
    for place, (perfect, seconds) in enumerate(made):
        found = fitted(CPU, made[:place] + made[place + 1 :])
        assert sum(found.scaled(perfect).values()) == pytest.approx(seconds, rel=0.02)


@pytest.mark.parametrize("seed", range(3))
def test_a_few_wrong_times_move_the_fit_little(seed: int) -> None:
    """Every tenth run took three times as long, since another program ran beside it."""
    real = attrs.evolve(CPU, factors=TRUE)
    made = runs(real, 40, seed=seed)
    found = fitted(CPU, [(perfect, seconds * (3 if place % 10 == 0 else 1)) for place, (perfect, seconds) in enumerate(made)])
    for perfect, seconds in made:
        assert sum(found.scaled(perfect).values()) == pytest.approx(seconds, rel=0.05)


def test_on_a_gpu_what_is_hidden_is_not_fitted_to() -> None:
    """In half of the runs the host counts, in half the device."""
    sheet = attrs.evolve(CPU, device="cuda")
    real = attrs.evolve(sheet, factors=TRUE)
    made = [
        (scaled := {**perfect, "starts": perfect["starts"] * 4}, sum(real.scaled(scaled).values()))
        for perfect, _ in runs(real, 40)
    ]
    found = fitted(sheet, made)
    for perfect, seconds in made:
        assert sum(found.scaled(perfect).values()) == pytest.approx(seconds, rel=0.02)


def test_what_no_run_has_stays() -> None:
    machine = attrs.evolve(CPU, factors={"attention": 7.0, "communicate": 0.0})
    perfect = dict.fromkeys(FACTORS, 0.0) | {"products": 1.0, "starts": 0.5}
    found = fitted(machine, [(perfect, 3.0)])
    assert found.factors["attention"] == pytest.approx(7.0)
    assert found.factors["communicate"] == 0.0
    assert sum(found.scaled(perfect).values()) == pytest.approx(3.0, rel=0.01)
    assert fitted(machine, []) == machine


def test_no_factor_is_negative() -> None:
    """The more products, the faster: no machine is like that."""
    base = dict.fromkeys(FACTORS, 0.0)
    found = fitted(CPU, [({**base, "products": float(n), "copies": 1.0}, 5.0 - n) for n in range(4)])
    assert min(found.factors.values()) >= 0.0


@settings(max_examples=15)
@given(st.integers(0, 10_000), st.integers(1, 4), st.integers(1, 6))
def test_least_squares_are_least(seed: int, columns: int, count: int) -> None:
    """The conditions of Karush, Kuhn and Tucker: no slope where x > 0, none downwards where x = 0."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(count, columns, generator=generator, dtype=torch.float64)
    wanted = torch.randn(count, generator=generator, dtype=torch.float64)
    x = non_negative_least_squares(rows, wanted)
    slope = rows.T @ (rows @ x - wanted)
    assert (x >= 0).all()
    assert (slope > -1e-8).all()
    assert (slope[x > 0].abs() < 1e-8).all()
