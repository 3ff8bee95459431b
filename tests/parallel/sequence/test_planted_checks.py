"""Bugs planted into the checks of a first step over sequences, of half-precision sums and of stages."""

import functools
from collections.abc import Callable

import pytest

from functional_ds.comm.table.errors import DeadlockError
from tests.parallel.sequence import test_order_check
from tests.planting import Bug, planted

pytestmark = pytest.mark.timeout(60)

RIGHT, WRONG = test_order_check.test_right_models_pass, test_order_check.test_what_acts_along_a_piece_is_refused
CHECKS = "transforms.parallel.loss_checks"
BUGS: dict[Callable[[], None], Bug] = {
    functools.partial(RIGHT, "a sum in bf16"): Bug(
        "sums in another order are compared in bf16",
        f"{CHECKS}:_losses",
        "sums if wide else nullcontext()",
        "nullcontext()",
        ValueError,
    ),
    functools.partial(RIGHT, "a sum in bf16"): Bug(
        "a scalar sum stays in half",
        "transforms.parallel.wide_sums:WideSums.__torch_function__",
        "losses.sum(dtype=torch.float32)",
        "losses.sum()",
        ValueError,
    ),
    functools.partial(WRONG, "a little, in a bf16 sum"): Bug(
        "what bf16 does not show passes", f"{CHECKS}:check_order", "max(1e-5, 2 * eps)", "2**-6"
    ),
    functools.partial(test_order_check.test_stages_are_checked, "a mean over positions"): Bug(
        "stages go unchecked",
        "transforms.parallel.sequence:_SequenceParallel.guard_gradients",
        "not state.step.is_meta",
        "not (step.has(AxisRole.STAGES) or state.step.is_meta)",
    ),
    functools.partial(test_order_check.test_right_stages_pass, test_order_check.with_sums): Bug(
        "only the stage with another attention knows of it",
        f"{CHECKS}:_over_ranks",
        "{IN_ORDER: IN_ORDER, HALF: _SUMMED_WIDE}",
        "{HALF: _SUMMED_WIDE}",
        DeadlockError,
    ),
}


@pytest.mark.parametrize(("law", "bug"), BUGS.items(), ids=[bug.name for bug in BUGS.values()])
def test_each_bug_breaks_its_law(law: Callable[[], None], bug: Bug) -> None:
    """A law that no bug breaks is no law."""
    with planted(bug), pytest.raises((bug.shows, AssertionError, pytest.fail.Exception)):
        law()
