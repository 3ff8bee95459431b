"""Silent bugs of engines, planted here: each breaks a test."""

from functools import cache
from typing import Any

import pytest

from tests.deepspeed.api import test_ds_stage_params as stage_params
from tests.deepspeed.engine import test_ds_engine as engines
from tests.deepspeed.engine import test_ds_engine_files as files
from tests.deepspeed.engine import test_ds_engine_kinds as kinds
from tests.deepspeed.engine import test_ds_engine_law as law
from tests.deepspeed.engine import test_ds_engine_optimizers as optimizers
from tests.deepspeed.engine import test_ds_engine_parts as parts
from tests.deepspeed.engine import test_ds_zero_init as zero_init
from tests.planting import Bug, planted

ENGINE = "deepspeed.engine"
PERSIST, COSINE = [True, True, False, True], {"total_num_steps": 10, "warmup_num_steps": 4}

BUGS: list[tuple[tuple[Any, ...], list[Bug]]] = [
    (
        (stage_params.test_own_params_are_the_whole_rows,),
        [
            Bug(
                "counting params draws",
                "deepspeed.pipe.pipeline_module",
                'with torch.random.fork_rng([here] if here.type == "cuda" else []), kept_rng():',
                "if True:",
            ),
        ],
    ),
    (
        (stage_params.test_beside_its_own_a_rank_has_one_layer_that_is_built, "uniform"),
        [Bug("others' layers stay", "deepspeed.pipe.pipeline_module", "p.data = p.data.new_empty(0)", "pass")],
    ),
    (
        (stage_params.test_of_ranks_with_one_stage_the_first_ones_params_count,),
        [
            Bug(
                "each rank trains the params that it drew",
                "deepspeed.pipe.pipeline_engine",
                "if here.rank in ranks and len(ranks) > 1 and tensors:",
                "if False:",
            ),
        ],
    ),
    (
        (files.test_a_batch_that_fails_leaves_an_engine_as_it_was, 0),
        [
            Bug(
                "a failed batch's gradients are summed",
                f"{ENGINE}.engine",
                "self._loop.discard()  # or the next",
                "pass  # or the next",
            ),
            Bug(
                "a set boundary stays",
                f"{ENGINE}.engine",
                'finally:\n            self.__dict__["_boundary"] = None',
                "finally:\n            pass",
            ),
        ],
    ),
    (
        (law.test_an_engine_is_the_step, "stage 1", 2),
        [
            Bug("each micro-batch is an update", f"{ENGINE}.engine", "% self._loop.micro_batches == 0", "% 1 == 0"),
        ],
    ),
    (
        (engines.test_several_losses_of_one_step_are_summed, 1),
        [
            Bug(
                "losses are averaged",
                f"{ENGINE}.loop.engine_loop",
                "self._backwards > 1, self.micro_batches / self._passes",
                "self._backwards > 1, 1.0",
            ),
        ],
    ),
    (
        (engines.test_boundaries_may_be_set_by_the_caller, 2),
        [Bug("a set boundary is forgotten", f"{ENGINE}.engine", "if self._boundary is not None:", "if False:", RuntimeError)],
    ),
    (
        (engines.test_loss_backward_of_torch, 2),
        [
            Bug(
                "nobody collects",
                f"{ENGINE}.loop.engine_loop",
                "if self._direct and self._run is not None:",
                "if False:",
                RuntimeError,
            )
        ],
    ),
    (
        (engines.test_two_networks,),
        [
            Bug(
                "what a dropped pass wrote is lost",
                f"{ENGINE}.loop.engine_loop",
                "if not self._begun and self.grads is None:",
                "if False:",
            ),
            Bug(
                "another engine's backward counts",
                f"{ENGINE}.loop.engine_loop",
                'not getattr(_HERE, "backward", False)',
                "True",
                RuntimeError,
            ),
        ],
    ),
    (
        (engines.test_counts_are_deepspeeds,),
        [Bug("left-out steps are not counted", f"{ENGINE}.engine_counts", "self.global_steps += 1", "pass")],
    ),
    (
        (engines.test_the_module_has_the_states_values, 2, False),
        [Bug("the module's buffers are stale", f"{ENGINE}.loop.live_module", "if held[key] is not buffer:", "if False:")],
    ),
    (
        (engines.test_the_module_has_a_loaded_states_values,),
        [
            Bug(
                "the module is stale",
                f"{ENGINE}.loop.live_module",
                "if tensor.data_ptr() != self._seen[index]:",
                "if self._seen[index] is None:",
            )
        ],
    ),
    (
        (engines.test_modes_are_the_modules,),
        [Bug("modes are not followed", f"{ENGINE}.loop.live_module", "if modes != self._modes:", "if False:")],
    ),
    (
        (optimizers.test_what_is_written_into_groups_holds, 1),
        [
            Bug("a written rate is ignored", f"{ENGINE}.optimizer_groups", "rate if factor is None else factor)", "rate)"),
            Bug("written decay is ignored", f"{ENGINE}.optimizer_groups", "self._last[0] != key:", "False:"),
        ],
    ),
    (
        (optimizers.test_a_left_out_update_moves_no_scheduler,),
        [
            Bug(
                "schedulers count left-out updates",
                f"{ENGINE}.engine_counts",
                "made = len(skipped) - sum(skipped)",
                "made = len(skipped)",
            )
        ],
    ),
    (
        (parts.test_norms_without_clipping, 2, 2),
        [
            Bug(
                "the norm is of a rank's sums",
                f"{ENGINE}.loop.engine_loop",
                "self.norm_times / grads.weight",
                "self.norm_times",
            )
        ],
    ),
    (
        (parts.test_parts_of_all_ranks_are_the_parameter, 1000, False),
        [
            Bug(
                "other ranks' copies are stale",
                f"{ENGINE}.loop.local_values",
                'if role == "params" and self.persists:',
                "if False:",
            ),
        ],
    ),
    (
        (parts.test_leaf_modules_are_units,),
        [Bug("leaf modules change nothing", "deepspeed.config.ds_transforms", "if units is not None:", "if False:")],
    ),
    (
        (zero_init.test_rank_0s_values_count,),
        [Bug("ranks draw apart", f"{ENGINE}.loop.zero_init", "if not torch.equal(own, first):", "if False:", ValueError)],
    ),
    (
        (zero_init.test_values_are_set_before_initialize,),
        [
            Bug("nobody compares", f"{ENGINE}.loop.zero_init", "if comm.world().size == 1:", "if True:"),
            Bug("a copy over itself forgets", "modules.init_recorder", ".count(p.storage) == 1}", ".count(p.storage)}"),
        ],
    ),
    (
        (kinds.test_in_stage_0_in_fp32_it_is_the_optimizer_that_was_passed,),
        [
            Bug(
                "every stage's optimizer is the one that was passed",
                f"{ENGINE}.ds_optimizer",
                "self._bare = client is not None and wrapper is None",
                "self._bare = client is not None",
            )
        ],
    ),
    (
        (kinds.test_params_of_stage_3_say_whether_they_stay_gathered, {"stage3_model_persistence_threshold": 10}, PERSIST),
        [
            Bug(
                "one limit counts",
                f"{ENGINE}.loop.gathered_parameters",
                "held.ds_numel <= min(small, left)",
                "held.ds_numel <= small",
            )
        ],
    ),
    (
        (kinds.test_a_scheduler_has_deepspeeds_attributes_as_an_object_and_of_a_config, "WarmupCosineLR", COSINE),
        [
            Bug(
                "the config's scheduler stands still",
                f"{ENGINE}.config_scheduler",
                "twin.last_batch_iteration = self.last_batch_iteration",
                "pass",
            )
        ],
    ),
    (
        (files.test_the_loader_has_this_ranks_rows,),
        [Bug("all ranks have rank 0's rows", f"{ENGINE}.data_loader", "rank=world.rank)", "rank=0)")],
    ),
]


@cache
def holds(number: int) -> bool:
    """Runs a case in the unchanged library, once."""
    test, *arguments = BUGS[number][0]
    test(*arguments)
    return True


@pytest.mark.sample(8)
@pytest.mark.parametrize(("number", "bug"), [pytest.param(n, b, id=b.name) for n, (_, bugs) in enumerate(BUGS) for b in bugs])
def test_a_bug_breaks_its_test(number: int, bug: Bug) -> None:
    """The test passes, and does not with the bug."""
    assert holds(number)
    test, *arguments = BUGS[number][0]
    with planted(bug), pytest.raises((AssertionError, pytest.fail.Exception, bug.shows)):
        test(*arguments)
