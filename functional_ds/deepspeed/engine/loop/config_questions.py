"""An engine's questions that its config alone answers, by DeepSpeed's names."""

from collections.abc import Callable
from typing import Any

import torch

from functional_ds import comm
from functional_ds.deepspeed.config.ds_optimizers import rule_of
from functional_ds.deepspeed.config.ds_plan import ConfigPlan

__all__ = ["ConfigQuestions"]

_DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
_SPELLED = {"bfp16": "bf16", "bfloat16": "bf16", "float16": "fp16", "half": "fp16", "float32": "fp32"}
_ZERO = "zero_optimization"


def _asks(path: str) -> Callable[[Any], Any]:
    def value(self: Any) -> Any:
        return self.plan.value(path)

    value.__doc__ = f"``{path}``."
    return value


def _named(dtype: str) -> str:
    return _SPELLED.get(dtype, dtype)


class ConfigQuestions:
    """Methods of engines that only read a plan. ``plan.value(path)`` gives any key.

    Law: each returns what DeepSpeed's engine does for the same config, but for the dtype of sums in ``get_data_types``, which
    are fp32 here, and ``zero_gather_16bit_weights_on_model_save``.
    """

    plan: ConfigPlan

    @property
    def config(self) -> dict[str, Any]:
        """The config with nothing left open."""
        return self.plan.to_ds_config()

    # -- ranks ---------------------------------------------------------------------------------------------------------

    @property
    def local_rank(self) -> int:
        """This rank's place on its host."""
        return comm.get_local_rank()

    @property
    def global_rank(self) -> int:
        """This rank's place in the world."""
        return comm.world().rank

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return comm.world().size

    @property
    def dp_world_size(self) -> int:
        """The number of data-parallel ranks."""
        return self.plan.batch.world_size

    @property
    def mp_world_size(self) -> int:
        """The number of model-parallel ranks, which an engine here has none of."""
        return 1

    def get_model_parallel_rank(self) -> int:
        """0: engines here have no model parallelism beside a pipeline's."""
        return 0

    get_tensor_parallel_rank = get_model_parallel_rank

    def get_sequence_parallel_group(self) -> None:
        """None: sequence parallelism is ``T.sequence``'s."""

    # -- precision and gradients ---------------------------------------------------------------------------------------

    fp16_enabled = _asks("fp16.enabled")
    fp16_auto_cast = _asks("fp16.auto_cast")
    fp16_master_weights_and_gradients = _asks("fp16.fp16_master_weights_and_grads")
    bfloat16_enabled = _asks("bf16.enabled")
    bf16_master_weights_and_gradients = _asks("bf16.bf16_master_weights_and_grads")
    bf16_optimizer_states = _asks("bf16.bf16_optimizer_states")
    torch_autocast_enabled = _asks("torch_autocast.enabled")
    gradient_clipping = _asks("gradient_clipping")
    gradient_predivide_factor = _asks("gradient_predivide_factor")

    def postscale_gradients(self) -> bool:
        """Whether gradients are divided after their sum over ranks: without ``prescale_gradients``."""
        return not self.plan.value("prescale_gradients")

    @property
    def communication_data_type(self) -> torch.dtype:
        """The dtype that gradients are summed in over ranks: ``communication_data_type``, or the forward pass's."""
        asked = self.plan.value("communication_data_type")
        return _DTYPES[_named(asked)] if asked else self.get_data_types()[0]

    def get_data_types(self) -> tuple[torch.dtype, torch.dtype]:
        """The dtypes of the forward pass and of sums of gradients."""
        found = next((_DTYPES[name] for name in ("fp16", "bf16") if self.plan.value(f"{name}.enabled")), torch.float32)
        return found, torch.float32

    def dynamic_loss_scale(self) -> bool:
        """Whether the loss scale moves, where there is one: ``fp16.loss_scale`` is 0."""
        return not self.plan.value("fp16.loss_scale")

    def loss_scale(self) -> float:
        """``fp16.loss_scale``: 0 where the scale moves; ``optimizer.cur_scale`` is what the next loss is multiplied by."""
        return float(self.plan.value("fp16.loss_scale"))

    def initial_dynamic_scale(self) -> int:
        """A moving loss scale's first value."""
        return 1 << int(self.plan.value("fp16.initial_scale_power"))

    def torch_autocast_dtype(self) -> torch.dtype | None:
        """``torch_autocast.dtype``; None where it is off."""
        return _DTYPES[_named(self.plan.value("torch_autocast.dtype"))] if self.torch_autocast_enabled() else None

    # -- optimizer and scheduler ---------------------------------------------------------------------------------------

    optimizer_legacy_fusion = _asks("optimizer.legacy_fusion")

    def optimizer_name(self) -> str | None:
        """``optimizer.type``; DeepSpeed's own optimizers in lower case."""
        name: str | None = self.plan.value("optimizer.type")
        return name.lower() if name and rule_of(name) else name

    scheduler_name = _asks("scheduler.type")

    def optimizer_params(self) -> dict[str, Any]:
        """``optimizer.params``."""
        return dict(self.config.get("optimizer", {}).get("params", {}))

    def scheduler_params(self) -> dict[str, Any] | None:
        """``scheduler.params``; None without a scheduler."""
        return dict(self.config["scheduler"].get("params", {})) if self.scheduler_name() else None

    # -- logs and data -------------------------------------------------------------------------------------------------

    def steps_per_print(self) -> Any:
        """``steps_per_print``."""
        found = self.plan.value("steps_per_print")
        return int(found) if found and found != float("inf") else found

    log_level = _asks("log_level")
    dump_state = _asks("dump_state")
    wall_clock_breakdown = _asks("wall_clock_breakdown")
    memory_breakdown = _asks("memory_breakdown")
    flops_profiler_enabled = _asks("flops_profiler.enabled")
    flops_profiler_profile_step = _asks("flops_profiler.profile_step")
    flops_profiler_module_depth = _asks("flops_profiler.module_depth")
    flops_profiler_top_modules = _asks("flops_profiler.top_modules")
    flops_profiler_detailed = _asks("flops_profiler.detailed")
    flops_profiler_output_file = _asks("flops_profiler.output_file")
    flops_profiler_recompute_fwd_factor = _asks("flops_profiler.recompute_fwd_factor")
    autotuning_enabled = _asks("autotuning.enabled")
    data_efficiency_enabled = _asks("data_efficiency.enabled")
    dataloader_drop_last = _asks("dataloader_drop_last")
    load_universal_checkpoint = _asks("checkpoint.load_universal")
    use_node_local_storage = _asks("checkpoint.use_node_local_storage")

    def checkpoint_tag_validation_enabled(self) -> bool:
        """Whether ranks are asked for equal tags: ``checkpoint.tag_validation`` is not "Ignore"."""
        return bool(self.plan.value("checkpoint.tag_validation").lower() != "ignore")

    def checkpoint_tag_validation_fail(self) -> bool:
        """Whether other tags are an error: ``checkpoint.tag_validation`` is "Fail"."""
        return bool(self.plan.value("checkpoint.tag_validation").lower() == "fail")

    def curriculum_learning_enabled(self) -> bool:
        """False: a config that has it is refused."""
        return False

    data_sampling_enabled = random_ltd_enabled = is_compiled = curriculum_learning_enabled
    is_deepcompile_enabled = is_deepcompile_active = curriculum_learning_enabled

    # -- ZeRO ----------------------------------------------------------------------------------------------------------

    zero_allow_untested_optimizer = _asks("zero_allow_untested_optimizer")
    zero_force_ds_cpu_optimizer = _asks("zero_force_ds_cpu_optimizer")
    zero_allgather_bucket_size = _asks(f"{_ZERO}.allgather_bucket_size")
    zero_allgather_partitions = _asks(f"{_ZERO}.allgather_partitions")
    zero_allgather_sequential = _asks(f"{_ZERO}.allgather_sequential")
    zero_compute_grad_norm = _asks(f"{_ZERO}.compute_grad_norm")
    zero_contiguous_gradients = _asks(f"{_ZERO}.contiguous_gradients")
    zero_elastic_checkpoint = _asks(f"{_ZERO}.elastic_checkpoint")
    zero_hpz_partition_size = _asks(f"{_ZERO}.zero_hpz_partition_size")
    zero_ignore_unused_parameters = _asks(f"{_ZERO}.ignore_unused_parameters")
    zero_legacy_stage1 = _asks(f"{_ZERO}.legacy_stage1")
    zero_load_from_fp32_weights = _asks(f"{_ZERO}.load_from_fp32_weights")
    zero_log_trace_cache_warnings = _asks(f"{_ZERO}.log_trace_cache_warnings")
    zero_max_live_parameters = _asks(f"{_ZERO}.max_live_parameters")
    zero_max_reuse_distance = _asks(f"{_ZERO}.max_reuse_distance")
    zero_model_persistence_threshold = _asks(f"{_ZERO}.model_persistence_threshold")
    zero_module_granularity_threshold = _asks(f"{_ZERO}.module_granularity_threshold")
    zero_multi_rank_bucket_allreduce = _asks(f"{_ZERO}.use_multi_rank_bucket_allreduce")
    zero_param_persistence_threshold = _asks(f"{_ZERO}.param_persistence_threshold")
    zero_parameter_alignment = _asks(f"{_ZERO}.parameter_alignment")
    zero_prefetch_bucket_size = _asks(f"{_ZERO}.prefetch_bucket_size")
    zero_quantized_gradients = _asks(f"{_ZERO}.zero_quantized_gradients")
    zero_quantized_nontrainable_weights = _asks(f"{_ZERO}.zero_quantized_nontrainable_weights")
    zero_quantized_weights = _asks(f"{_ZERO}.zero_quantized_weights")
    zero_reduce_bucket_size = _asks(f"{_ZERO}.reduce_bucket_size")
    zero_reduce_scatter = _asks(f"{_ZERO}.reduce_scatter")
    zero_round_robin_gradients = _asks(f"{_ZERO}.round_robin_gradients")
    zero_sub_group_size = _asks(f"{_ZERO}.sub_group_size")
    zero_save_muon_momentum_buffer_in_memory = _asks(f"{_ZERO}.save_muon_momentum_buffer_in_memory")
    is_sanity_checks_enabled = _asks(f"{_ZERO}.enable_sanity_checks")
    super_offload = _asks(f"{_ZERO}.offload_optimizer.super_offload")
    autotp_size = _asks("tensor_parallel.autotp_size")
    zero_partial_offload = _asks(f"{_ZERO}.offload_optimizer.ratio")

    def zero_overlap_comm(self) -> bool:
        """``zero_optimization.overlap_comm``, by default in stage 3 alone. Here messages always overlap."""
        found = self.plan.value("zero_optimization.overlap_comm")
        return self.zero_optimization_stage() == 3 if found is None else bool(found)

    def zero_optimization_stage(self) -> int:
        """The stage."""
        return int(self.plan.value("zero_optimization.stage"))

    def zero_optimization(self) -> bool:
        """Whether the stage is not 0."""
        return self.zero_optimization_stage() > 0

    def zero_optimization_partition_gradients(self) -> bool:
        """Whether gradients are sharded: stages 2 and 3."""
        return self.zero_optimization_stage() >= 2

    def zero_optimization_partition_weights(self) -> bool:
        """Whether params are sharded: stage 3."""
        return self.zero_optimization_stage() == 3

    is_first_weights_partition_group = zero_optimization_partition_weights

    def zero_offload_optimizer(self) -> bool:
        """Whether the optimizer's state is offloaded."""
        return bool(self.plan.value("zero_optimization.offload_optimizer.device") != "none")

    zero_use_cpu_optimizer = zero_offload_optimizer

    def zero_offload_param(self) -> bool:
        """Whether params are offloaded."""
        return bool(self.plan.value("zero_optimization.offload_param.device") != "none")

    def zero_cpu_offload(self) -> bool:
        """Whether the optimizer's state is on the host."""
        return bool(self.plan.value("zero_optimization.offload_optimizer.device") == "cpu")

    def zero_nvme_offload_optimizer(self) -> bool:
        """Whether the optimizer's state is in files."""
        return bool(self.plan.value("zero_optimization.offload_optimizer.device") == "nvme")

    def zero_gather_16bit_weights_on_model_save(self) -> bool:
        """True: ``save_16bit_model`` writes whole weights in every stage."""
        return True
