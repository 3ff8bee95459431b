"""One typed method a phase: the table of phases, what ``wrap`` takes and what type checkers see are the same."""

from typing import Any, get_args, get_type_hints

import pytest

import functional_ds as fds
from functional_ds.step.over_ranks.mesh_axes import OVER_RANKS
from functional_ds.step.phase_signatures import PHASES, PhaseFunctions, Phases


def test_what_wrap_takes_is_what_the_methods_take() -> None:
    """By number of arguments and results; the base step has a function for each."""
    wraps = get_type_hints(PhaseFunctions)
    assert wraps.keys() == PHASES.keys()
    for phase, names in PHASES.items():
        arguments, result = get_args(wraps[phase])
        hints = get_type_hints(getattr(Phases, phase))
        assert result == hints["return"], phase
        inner, step, *others = arguments
        assert step is Any
        assert len(others) == len(names), phase
        assert get_args(inner) == ([Any, *others], result), phase
    assert fds.train_step(lambda params, batch: batch, fds.sgd(0.1)).base.keys() == PHASES.keys()


def test_each_phase_says_what_it_means() -> None:
    assert all(getattr(Phases, phase).__doc__ for phase in PHASES)


def test_what_follows_from_axes_is_a_method_and_no_phase() -> None:
    """Nobody wraps it; the error says what the phases are."""
    for name in OVER_RANKS:
        assert getattr(fds.Step, name).__doc__
        with pytest.raises(ValueError, match="must be a positive" if name == "micro_batches" else rf"wraps \['{name}'\]"):
            fds.wrap("mine", **{name: lambda inner, step, state: inner(step, state)})  # type: ignore[arg-type]
