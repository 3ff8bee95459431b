"""Silent bugs of configs, planted here: each breaks a test, without DeepSpeed at hand."""

from functools import cache
from typing import Any

import pytest
import torch

from tests.deepspeed import test_ds_plan as plans
from tests.deepspeed import test_ds_reader as reader
from tests.planting import Bug, planted

CONFIG = "deepspeed.config"
DECAY = {"weight_decay": 0.1}

BUGS: list[tuple[tuple[Any, ...], list[Bug]]] = [
    (
        (plans.test_a_plan_trains_on_two_ranks_as_torch_on_one, 1),
        [
            Bug("a schedule is an update ahead", f"{CONFIG}.ds_schedules", "b = k - 1\n        gamma", "b = k\n        gamma"),
            Bug("nothing is clipped", f"{CONFIG}.transform_parts", "    elif limit:", "    elif False:"),
            Bug("rates are absolute", f"{CONFIG}.ds_schedules", " / self.reference).float()", ").float()"),
        ],
    ),
    (
        (plans.test_optimizers_are_torchs_with_deepspeeds_defaults, "Adam", {"weight_decay": 0.1}, torch.optim.AdamW, DECAY),
        [Bug("Adam is Adam", f"{CONFIG}.ds_optimizers", 'decays = decoupled or a["adam_w_mode"]', "decays = decoupled")],
    ),
    (
        (plans.test_fp16_has_deepspeeds_loss_scale,),
        [
            Bug("the scale grows a step early", f"{CONFIG}.ds_transforms", "settle=1,", "settle=0,"),
            Bug(
                "stage 0 is patient", f"{CONFIG}.ds_transforms", 's["fp16.hysteresis"] if stage else 1', 's["fp16.hysteresis"]'
            ),
        ],
    ),
    (
        (plans.test_an_overflow_at_the_lowest_scale_raises_on_all_ranks_and_changes_nothing,),
        [
            Bug(
                "an overflow at the minimum is forgotten",
                f"{CONFIG}.extra_transforms",
                "if not skipped.is_meta and",
                "if False and",
            ),
        ],
    ),
    (
        (plans.test_sums_instead_of_means,),
        [
            Bug("a sum is a mean", f"{CONFIG}.extra_transforms", "weight=grads.weight / ranks", "weight=grads.weight"),
        ],
    ),
    (
        (plans.test_transforms, {"zero_optimization": {"stage": 1}}, f"{plans.FP32} -> zero(1, world) -> clip(1.0)"),
        [
            Bug("fp32 is not checked", f"{CONFIG}.ds_transforms", 'else s[f"{_ZERO}.compute_grad_norm"])', "else False)"),
        ],
    ),
    (
        (plans.test_kernels_of_deepspeeds_own, "Lamb", True),
        [
            Bug(
                "LAMB corrects its moments", f"{CONFIG}.ds_optimizers", '"rate" if a["bias_correction"] else None', '"moments"'
            ),
            Bug("LAMB is not corrected", "optim.lamb", 'if correction == "rate":', "if False:"),
        ],
    ),
    (
        (plans.test_kernels_of_deepspeeds_own, "Adam", False),
        [
            Bug("Adam corrects its moments", "optim.adam", "state.steps if corrects else", "state.steps if True else"),
        ],
    ),
    (
        (plans.test_the_optimizers_rate_follows_the_scheduler_from_zero,),
        [
            Bug("a rate of nothing stays", f"{CONFIG}.named_parts", 'arguments["lr"] or 1.0}', 'arguments["lr"]}'),
        ],
    ),
    (
        (reader.test_two_spellings_side_by_side_are_refused,),
        [
            Bug("the second spelling counts", f"{CONFIG}.config_reader", "if canonical in settings.spelled:", "if False:"),
        ],
    ),
    (
        (plans.test_offloaded_params_are_for_stage_3, 2),
        [
            Bug(
                "params leave the device below stage 3",
                f"{CONFIG}.ds_transforms",
                'if block == "offload_param" and',
                "if False and",
            )
        ],
    ),
    (
        (plans.test_half_precision_params_may_run_in_autocast, "bf16", False),
        [Bug("autocast is off", f"{CONFIG}.ds_transforms", "autocast=autocast, states", "autocast=False, states")],
    ),
    (
        (reader.test_known_dead_names_can_warn,),
        [
            Bug("every unknown name only warns", f"{CONFIG}.config_reader", "if path in DEAD and warn:", "if warn:"),
        ],
    ),
]


@cache
def holds(number: int) -> bool:
    """Runs a case in the unchanged library, once."""
    test, *arguments = BUGS[number][0]
    test(*arguments)
    return True


@pytest.mark.parametrize(("number", "bug"), [pytest.param(n, b, id=b.name) for n, (_, bugs) in enumerate(BUGS) for b in bugs])
def test_a_bug_breaks_its_test(number: int, bug: Bug) -> None:
    """The test passes, and does not with the bug."""
    assert holds(number)
    test, *arguments = BUGS[number][0]
    with planted(bug), pytest.raises((AssertionError, pytest.fail.Exception, UserWarning, ZeroDivisionError)):
        test(*arguments)
