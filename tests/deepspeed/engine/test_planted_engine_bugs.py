"""Silent bugs of engines, planted here: each breaks a test."""

import inspect
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.deepspeed.api import test_ds_own_tests as own_tests
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
        (own_tests.test_zero_grad_of_the_optimizer, 3),
        [Bug("stage 3 keeps them", "deepspeed.engine.ds_optimizer:EngineOptimizer.zero_grad", "(0, 3)", "(0,)")],
    ),
    (
        (own_tests.test_a_module_of_stage_3_goes_on_in_another_engine,),
        [
            Bug(
                "empty params are taken",
                "deepspeed.engine.loop.gathered_parameters:fill_again",
                "module.parameters()",
                "()",
                RuntimeError,
            ),
        ],
    ),
    (
        (own_tests.test_blocks_of_zero_init_within_each_other_and_around_initialize, 3),
        [
            Bug(
                "values are broadcast as if they were built",
                "deepspeed.engine.loop.zero_init:broadcast_deferred",
                "with suspended(), torch.no_grad():\n    ...",
                "with torch.no_grad():\n    ...",
                Exception,
            ),
        ],
    ),
    (
        (stage_params.test_own_params_are_the_whole_rows,),
        [
            Bug(
                "counting params draws",
                "deepspeed.pipe.pipeline_module:_sizes",
                "with torch.random.fork_rng([here] if here.type == 'cuda' else []), kept_rng():\n    ...",
                "if True:\n    ...",
            ),
        ],
    ),
    (
        (stage_params.test_beside_its_own_a_rank_has_one_layer_that_is_built, "uniform"),
        [Bug("others' layers stay", "deepspeed.pipe.pipeline_module:_Freed._without", "p.data = p.data.new_empty(0)", "pass")],
    ),
    (
        (stage_params.test_of_ranks_with_one_stage_the_first_ones_params_count,),
        [
            Bug(
                "each rank trains the params that it drew",
                "deepspeed.engine.loop.live_module:take_over",
                "here.rank in ranks and len(ranks) > 1",
                "False",
            ),
        ],
    ),
    (
        (files.test_a_batch_that_fails_leaves_an_engine_as_it_was, 0),
        [
            Bug(
                "a failed batch's gradients are summed",
                "deepspeed.engine.whole_batches:WholeBatches.train_batch",
                "self._loop.discard()",
                "pass",
            ),
            Bug(
                "a set boundary stays",
                "deepspeed.engine.whole_batches:WholeBatches.train_batch",
                "self.__dict__['_boundary'] = None",
                "pass",
            ),
        ],
    ),
    (
        (files.test_a_load_amid_an_accumulation_begins_it_anew, 1),
        [
            Bug(
                "the next update has fewer micro-batches",
                "deepspeed.engine.common.engine_counts:EngineCounts.restart",
                "self.micro_steps -= self.micro_steps % self.micro_batches",
                "pass",
            ),
        ],
    ),
    (
        (engines.test_a_value_that_is_assigned_is_the_parameters, 1, False),
        [
            Bug(
                "a forward pass takes the value before",
                "deepspeed.engine.loop.live_module:LiveModule.follow_values",
                "parameter.data = shown.copy_(parameter.detach())",
                "parameter.data = shown",
            ),
            Bug(
                "an update takes the value before",
                "deepspeed.engine.loop.engine_loop:EngineLoop.update",
                "self.live.follow_values(self.rest)",
                "pass",
            ),
        ],
    ),
    (
        (law.test_an_engine_is_the_step, "stage 1", 2),
        [
            Bug(
                "each micro-batch is an update",
                "deepspeed.engine.engine:DeepSpeedEngine.is_gradient_accumulation_boundary",
                "self._loop.micro_batches",
                "1",
            ),
        ],
    ),
    (
        (engines.test_several_losses_of_one_step_are_summed, 1),
        [
            Bug(
                "losses are averaged",
                "deepspeed.engine.loop.engine_loop:EngineLoop.update",
                "self.micro_batches / self._passes",
                "1.0",
            ),
        ],
    ),
    (
        (engines.test_boundaries_may_be_set_by_the_caller, 2),
        [
            Bug(
                "a set boundary is forgotten",
                "deepspeed.engine.engine:DeepSpeedEngine.is_gradient_accumulation_boundary",
                "self._boundary is not None",
                "False",
                RuntimeError,
            )
        ],
    ),
    (
        (engines.test_loss_backward_of_torch, 2),
        [
            Bug(
                "nobody collects",
                "deepspeed.engine.loop.engine_loop:EngineLoop.collect",
                "self._direct and self._run is not None",
                "False",
                RuntimeError,
            )
        ],
    ),
    (
        (engines.test_two_networks,),
        [
            Bug(
                "what a dropped pass wrote is lost",
                "deepspeed.engine.loop.engine_loop:EngineLoop._end_pass",
                "not self._begun and self.grads is None",
                "False",
            ),
            Bug(
                "another engine's backward counts",
                "deepspeed.engine.loop.engine_loop:EngineLoop.forward.reached",
                "not getattr(_HERE, 'backward', False)",
                "True",
                RuntimeError,
            ),
        ],
    ),
    (
        (engines.test_counts_are_deepspeeds,),
        [
            Bug(
                "left-out steps are not counted",
                "deepspeed.engine.common.engine_counts:EngineCounts.updated",
                "self.global_steps += 1",
                "pass",
            )
        ],
    ),
    (
        (engines.test_the_module_has_the_states_values, 2, False),
        [
            Bug(
                "the module's buffers are stale",
                "deepspeed.engine.loop.live_module:LiveModule.show",
                "held[key] is not buffer",
                "False",
            )
        ],
    ),
    (
        (engines.test_the_module_has_a_loaded_states_values,),
        [
            Bug(
                "the module is stale",
                "deepspeed.engine.loop.live_module:LiveModule.show",
                "tensor.data_ptr() != self._seen[index]",
                "self._seen[index] is None",
            )
        ],
    ),
    (
        (engines.test_modes_are_the_modules,),
        [
            Bug(
                "modes are not followed",
                "deepspeed.engine.loop.live_module:LiveModule.follow_modes",
                "modes != self._modes",
                "False",
            )
        ],
    ),
    (
        (optimizers.test_what_is_written_into_groups_holds, 1),
        [
            Bug(
                "a written rate is ignored",
                "deepspeed.engine.common.optimizer_groups:_asks.update",
                "rate if factor is None else factor",
                "rate",
            ),
            Bug(
                "written decay is ignored",
                "deepspeed.engine.common.optimizer_groups:LiveGroup.rule",
                "self._last[0] != key",
                "False",
            ),
        ],
    ),
    (
        (optimizers.test_a_left_out_update_moves_no_scheduler,),
        [
            Bug(
                "schedulers count left-out updates",
                "deepspeed.engine.common.engine_counts:EngineCounts.settle",
                "len(skipped) - sum(skipped)",
                "len(skipped)",
            )
        ],
    ),
    (
        (parts.test_norms_without_clipping, 2, 2),
        [
            Bug(
                "the norm is of a rank's sums",
                "deepspeed.engine.loop.engine_loop:LossShare.transform.update",
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
                "deepspeed.engine.loop.parameter_values:_Local.set",
                "role == 'params' and self.persists",
                "False",
            ),
        ],
    ),
    (
        (parts.test_leaf_modules_are_units,),
        [Bug("leaf modules change nothing", "deepspeed.config.ds_transforms:sharding", "units is not None", "False")],
    ),
    (
        (zero_init.test_rank_0s_values_count,),
        [
            Bug(
                "ranks draw apart",
                "deepspeed.engine.loop.zero_init:Init.__enter__",
                "not torch.equal(generator_state, first)",
                "False",
                ValueError,
            )
        ],
    ),
    (
        (zero_init.test_values_are_set_before_initialize,),
        [
            Bug("nobody compares", "deepspeed.engine.loop.zero_init:_check_agreement", "comm.world().size == 1", "True"),
            Bug(
                "a copy over itself forgets",
                "modules.init_recorder:Initialisation._note",
                "[x.storage for x in reads].count(p.storage) == 1",
                "[x.storage for x in reads].count(p.storage)",
            ),
        ],
    ),
    (
        (kinds.test_in_stage_0_in_fp32_it_is_the_optimizer_that_was_passed,),
        [
            Bug(
                "every stage's optimizer is the one that was passed",
                "deepspeed.engine.ds_optimizer:EngineOptimizer.__init__",
                "client is not None and wrapper is None",
                "client is not None",
            )
        ],
    ),
    (
        (kinds.test_params_of_stage_3_say_whether_they_stay_gathered, {"stage3_model_persistence_threshold": 10}, PERSIST),
        [
            Bug(
                "one limit counts",
                "deepspeed.engine.loop.gathered_parameters:own_parameters",
                "min(small, remaining)",
                "small",
            )
        ],
    ),
    (
        (kinds.test_a_scheduler_has_deepspeeds_attributes_as_an_object_and_of_a_config, "WarmupCosineLR", COSINE),
        [
            Bug(
                "the config's scheduler stands still",
                "deepspeed.engine.common.config_scheduler:ConfigScheduler.__getattr__",
                "twin.last_batch_iteration = self.last_batch_iteration",
                "pass",
            )
        ],
    ),
    (
        (files.test_the_loader_has_this_ranks_rows,),
        [Bug("all ranks have rank 0's rows", "deepspeed.utils.loaders:data_loader", "world.rank", "0")],
    ),
]


def run(number: int) -> None:
    """Runs a case, in a folder of its own if it asks for one."""
    test, *arguments = BUGS[number][0]
    with tempfile.TemporaryDirectory() as folder:
        test(*arguments, *([Path(folder)] if "tmp_path" in inspect.signature(test).parameters else []))


@cache
def holds(number: int) -> bool:
    """Runs a case in the unchanged library, once."""
    run(number)
    return True


@pytest.mark.sample(8)
@pytest.mark.parametrize(("number", "bug"), [pytest.param(n, b, id=b.name) for n, (_, bugs) in enumerate(BUGS) for b in bugs])
def test_a_bug_breaks_its_test(number: int, bug: Bug) -> None:
    """The test passes, and does not with the bug."""
    assert holds(number)
    with planted(bug), pytest.raises((AssertionError, pytest.fail.Exception, bug.shows)):
        run(number)
