"""Factors of a machine, fitted to the times of runs."""

from collections.abc import Mapping, Sequence
from itertools import product

import attrs
import torch
from torch import Tensor

from functional_ds.modules.operation_cost import WORK_KINDS
from functional_ds.scaling.machine import FACTORS, Machine

__all__ = ["fitted", "non_negative_least_squares"]

_TRUST = 0.01  # in the factors as they are: doubling one costs as much as predicting a run 1 % wrong
_ROUNDS = 10


def fitted(machine: Machine, runs: Sequence[tuple[Mapping[str, float], float]]) -> Machine:
    """The machine with the factors, none negative, for which predictions are nearest to runs.

    It minimises the sum of squares of relative errors. What the runs say little about stays near the machine's own factors,
    and exactly there where no run has it. Law: where times are a machine's, and runs differ enough, the fit finds it.

    Args:
        machine: its rates stay; its factors are where the fit begins.
        runs: the machine's ``perfect_seconds`` of each run's step, and the seconds that a step took.

    >>> here = Machine("m", flops=1e12, flops_fp32=1e12, memory_bandwidth=1e12, link_bandwidth=1e9, device="cpu")
    >>> found = fitted(here, [({**dict.fromkeys(FACTORS, 0.0), "products": 1.0}, 3.0)])
    >>> round(found.factors["products"], 2), found.factors["copies"]
    (3.0, 1.0)
    """
    if not runs:
        return machine
    own = torch.tensor([machine.factors[name] or 1.0 for name in FACTORS], dtype=torch.float64)
    now = torch.tensor([machine.factors[name] for name in FACTORS], dtype=torch.float64)
    found = machine
    for _ in range(_ROUNDS):  # on a GPU, either the device or the host is what counts, and the fit may change which
        rows = torch.stack([_counting(found, perfect) / seconds for perfect, seconds in runs]) * own
        near = _TRUST * torch.eye(len(FACTORS), dtype=torch.float64)
        wanted = torch.cat([torch.ones(len(runs), dtype=torch.float64), _TRUST * now / own])
        factors = own * non_negative_least_squares(torch.cat([rows, near]), wanted)
        before, found = found, attrs.evolve(found, factors=dict(zip(FACTORS, factors.tolist(), strict=True)))
        if all((_counting(before, perfect) == _counting(found, perfect)).all() for perfect, _ in runs):
            break
    return found


def _counting(machine: Machine, perfect: Mapping[str, float]) -> Tensor:
    """The seconds that count: on a GPU those of the device, or those of the host, whichever takes longer."""
    hidden: tuple[str, ...] = ()
    if machine.device != "cpu":
        hidden = WORK_KINDS if machine.scaled(perfect)["starts"] > 0 else ("starts",)
    return torch.tensor([0.0 if name in hidden else perfect[name] for name in FACTORS], dtype=torch.float64)


def non_negative_least_squares(rows: Tensor, wanted: Tensor) -> Tensor:
    """The x >= 0 with the least ``|rows x - wanted|``.

    The least of the least squares on each set of columns: 2^n problems of at most n columns.

    >>> rows = torch.tensor([[1.0, 1.0], [1.0, 2.0]], dtype=torch.float64)
    >>> [round(x, 6) for x in non_negative_least_squares(rows, torch.tensor([3.0, 1.0], dtype=torch.float64)).tolist()]
    [2.0, 0.0]
    """
    best, least = torch.zeros_like(rows[0]), float(wanted.norm())
    for chosen in product((False, True), repeat=rows.shape[1]):
        columns = torch.tensor(chosen)
        if not columns.any():
            continue
        x = torch.zeros_like(best)
        x[columns] = torch.linalg.lstsq(rows[:, columns], wanted[:, None]).solution[:, 0]
        error = float((rows @ x - wanted).norm())
        if (x >= 0).all() and error < least:
            best, least = x, error
    return best
