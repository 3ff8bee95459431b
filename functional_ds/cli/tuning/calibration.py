"""Fits the factors of a machine to the times of runs."""

from collections.abc import Mapping, Sequence

import attrs
import torch
from torch import Tensor

from functional_ds.dry_run.operations import WORK_KINDS
from functional_ds.scaling.machine import FACTORS, Machine

_TRUST = 0.01  # in the factors as they are: doubling one costs as much as predicting a run 1 % wrong
_USUAL = 0.05  # a relative error up to which a run counts in full
_ROUNDS = 30


def fitted(machine: Machine, runs: Sequence[tuple[Mapping[str, float], float]]) -> Machine:
    """The machine with the non-negative factors for which predictions are nearest to runs.

    It minimises Huber's loss (1964) of relative errors: squares up to 5 %, absolute values beyond, so a run that another
    program slowed down has little weight. Factors that the runs hardly determine stay near the machine's own. Law: if times are
    a machine's, and runs differ enough, the fit recovers it, even if a few of the times are wrong.

    Args:
        machine: its rates stay; its factors are the starting point.
        runs: the machine's ``perfect_seconds`` of each run's step, and the seconds that a step took.

    >>> here = Machine("m", flops=1e12, flops_fp32=1e12, memory_bandwidth=1e12, link_bandwidth=1e9, device="cpu")
    >>> found = fitted(here, [({**dict.fromkeys(FACTORS, 0.0), "products": 1.0}, 3.0)])
    >>> round(found.factors["products"], 2), round(found.factors["copies"], 2)
    (3.0, 1.0)
    """
    if not runs:
        return machine
    scale = torch.tensor([machine.factors[name] or 1.0 for name in FACTORS], dtype=torch.float64)
    now = torch.tensor([machine.factors[name] for name in FACTORS], dtype=torch.float64)
    near, ones = _TRUST * torch.eye(len(FACTORS), dtype=torch.float64), torch.ones(len(runs), dtype=torch.float64)
    calibrated, weights = machine, ones
    for _ in range(_ROUNDS):  # on a GPU, either the device or the host is the bottleneck, and the fit may change which
        rows = torch.stack([_counting(calibrated, perfect) / seconds for perfect, seconds in runs]) * scale
        weighted = torch.cat([weights[:, None] * rows, near])
        factors = non_negative_least_squares(weighted, torch.cat([weights * ones, _TRUST * now / scale]))
        errors = (rows @ factors - 1).abs()
        factors = scale * factors
        calibrated = attrs.evolve(calibrated, factors=dict(zip(FACTORS, factors.tolist(), strict=True)))
        before, weights = weights, (_USUAL / errors.clamp(min=_USUAL)).sqrt()
        if machine.device == "cpu" and torch.allclose(before, weights, rtol=1e-4):
            break
    return calibrated


def _counting(machine: Machine, perfect: Mapping[str, float]) -> Tensor:
    """The seconds that matter: on a GPU those of the device or of the host, whichever are longer."""
    hidden: tuple[str, ...] = ()
    if machine.device != "cpu":
        hidden = WORK_KINDS if machine.scaled(perfect)["starts"] > 0 else ("starts",)
    return torch.tensor([0.0 if name in hidden else perfect[name] for name in FACTORS], dtype=torch.float64)


def non_negative_least_squares(rows: Tensor, wanted: Tensor) -> Tensor:
    """The x >= 0 with the least ``|rows x - wanted|``, by active sets (Lawson & Hanson 1974).

    >>> rows = torch.tensor([[1.0, 1.0], [1.0, 2.0]], dtype=torch.float64)
    >>> [round(x, 6) for x in non_negative_least_squares(rows, torch.tensor([3.0, 1.0], dtype=torch.float64)).tolist()]
    [2.0, 0.0]
    """
    x = torch.zeros_like(rows[0])
    free = torch.zeros_like(x, dtype=torch.bool)
    least = 1e-12 * float(rows.norm() * wanted.norm())
    for _ in range(10 * len(x)):
        slope = (rows.T @ (wanted - rows @ x)).masked_fill(free, 0.0)
        if slope.max() <= least:
            break
        free[slope.argmax()] = True
        while True:
            best = torch.zeros_like(x)
            best[free] = torch.linalg.lstsq(rows[:, free], wanted[:, None], driver="gelsd").solution[:, 0]
            below = free & (best <= 0)
            if not below.any():
                break
            share = (x[below] / (x[below] - best[below])).min()  # so far, and the first of them is 0
            x = x + share * (best - x)
            free &= x > 1e-15
            x = x * free
        x = best
    return x
