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
            Bug(
                "a schedule is an update ahead", "deepspeed.config.schedules.ds_schedules:_between.rates", "b = k - 1", "b = k"
            ),
            Bug("nothing is clipped", "deepspeed.config.transform_parts:_others", "if limit:\n    ...", "if False:\n    ..."),
            Bug(
                "rates are absolute",
                "deepspeed.config.schedules.lr_scheduler:RateSchedule.__call__",
                "self.rates(torch.as_tensor(updates).to(torch.float64)) / self.reference",
                "self.rates(torch.as_tensor(updates).to(torch.float64))",
            ),
        ],
    ),
    (
        (plans.test_optimizers_are_torchs_with_deepspeeds_defaults, "Adam", {"weight_decay": 0.1}, torch.optim.AdamW, DECAY),
        [Bug("Adam is Adam", "deepspeed.config.ds_optimizers:_adam", "decoupled or a['adam_w_mode']", "decoupled")],
    ),
    (
        (plans.test_fp16_has_deepspeeds_loss_scale,),
        [
            Bug(
                "the scale grows a step early",
                "deepspeed.config.ds_transforms:_loss_scale",
                "DynamicScale(2.0 ** s['fp16.initial_scale_power'], window=s['fp16.loss_scale_window'], "
                "hysteresis=s['fp16.hysteresis'] if stage else 1, consecutive=bool(stage) and "
                "s['fp16.consecutive_hysteresis'], minimum=float(s['fp16.min_loss_scale']), maximum=2.0 ** 60, "
                "settle=1)",
                "DynamicScale(2.0 ** s['fp16.initial_scale_power'], window=s['fp16.loss_scale_window'], "
                "hysteresis=s['fp16.hysteresis'] if stage else 1, consecutive=bool(stage) and "
                "s['fp16.consecutive_hysteresis'], minimum=float(s['fp16.min_loss_scale']), maximum=2.0 ** 60, "
                "settle=0)",
            ),
            Bug(
                "stage 0 is patient",
                "deepspeed.config.ds_transforms:_loss_scale",
                "s['fp16.hysteresis'] if stage else 1",
                "s['fp16.hysteresis']",
            ),
        ],
    ),
    (
        (plans.test_an_overflow_at_the_lowest_scale_raises_on_all_ranks_and_changes_nothing,),
        [
            Bug(
                "an overflow at the minimum is forgotten",
                "deepspeed.config.transform_parts:stop_at_minimum.update",
                "not skipped.is_meta",
                "False",
            ),
        ],
    ),
    (
        (plans.test_sums_instead_of_means,),
        [
            Bug(
                "a sum is a mean",
                "deepspeed.config.transform_parts:sum_gradients.update",
                "grads.weight / ranks",
                "grads.weight",
            ),
        ],
    ),
    (
        (plans.test_transforms, {"zero_optimization": {"stage": 1}}, f"{plans.FP32} -> zero(1, world) -> clip(1.0)"),
        [
            Bug(
                "fp32 is not checked",
                "deepspeed.config.ds_transforms:checks_finite",
                "s[f'{_ZERO}.compute_grad_norm']",
                "False",
            ),
        ],
    ),
    (
        (plans.test_kernels_of_deepspeeds_own, "Lamb", True),
        [
            Bug(
                "LAMB corrects its moments",
                "deepspeed.config.ds_optimizers:_lamb",
                "'rate' if a['bias_correction'] else None",
                "'moments'",
            ),
            Bug("LAMB is not corrected", "optim.lamb:lamb.make.update", "correction == 'rate'", "False"),
        ],
    ),
    (
        (plans.test_kernels_of_deepspeeds_own, "Adam", False),
        [
            Bug(
                "Adam corrects its moments",
                "optim.adam:adam_optimizer.update",
                "state.steps if corrects else [torch.full_like(count, _MANY) for count in state.steps]",
                "state.steps if True else [torch.full_like(count, _MANY) for count in state.steps]",
            ),
        ],
    ),
    (
        (plans.test_the_optimizers_rate_follows_the_scheduler_from_zero,),
        [
            Bug(
                "a rate of nothing stays",
                "deepspeed.config.named_parts:_base_rate",
                "arguments['lr'] or 1.0",
                "arguments['lr']",
            ),
        ],
    ),
    (
        (reader.test_two_spellings_side_by_side_are_refused,),
        [
            Bug("the second spelling counts", "deepspeed.config.config_reader:read", "canonical in settings.spelled", "False"),
        ],
    ),
    (
        (plans.test_offloaded_params_are_for_stage_3, 2),
        [
            Bug(
                "params leave the device below stage 3",
                "deepspeed.config.ds_transforms:offload_places",
                "block == 'offload_param'",
                "False",
            )
        ],
    ),
    (
        (plans.test_half_precision_params_may_run_in_autocast, "bf16", False),
        [
            Bug(
                "autocast is off",
                "deepspeed.config.ds_transforms:precision",
                "mixed_precision(policy, scale, autocast=autocast, states=states)",
                "mixed_precision(policy, scale, autocast=False, states=states)",
            )
        ],
    ),
    (
        (plans.test_reasons_are_of_the_value,),
        [
            Bug(
                "reasons are sentences of the table",
                "deepspeed.config.keys.config_key:ConfigKey.reason",
                "self.says.get('else', self.text)",
                "self.text",
            )
        ],
    ),
    (
        (plans.test_explain_says_what_became_of_each_value,),
        [Bug("a switch is on", "deepspeed.config.config_reader:Settings._why_off", "value is False", "value is None")],
    ),
    (
        (reader.test_known_dead_names_can_warn,),
        [
            Bug("every unknown name only warns", "deepspeed.config.config_reader:_unknown", "path in DEAD and warn", "warn"),
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
