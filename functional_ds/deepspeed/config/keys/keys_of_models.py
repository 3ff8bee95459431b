"""DeepSpeed's keys of blocks that change a model or how it is run: parallelism, compilers, data, tuners."""

from typing import Any

from .config_key import ConfigKey, Kind, ignored, refused

__all__ = ["KEYS"]

_PIPELINE = "DeepSpeed's `PipelineModule` takes it as an argument; `T.pipeline` cuts a model by `fds.pipelining`."
_TENSOR = (
    "Tensor parallelism needs a plan for the model's matrices: compose `T.tensor_parallel(...)`, and give `group=mesh['dp']`."
)
_EXPERTS = "Expert parallelism needs to know the model's experts: compose `T.experts(...)`, and leave the block out."
_SEQUENCE = (
    "Sequence parallelism needs a mesh: compose `T.sequence(...)`, leave the key out, and give `world_size` and `group=`."
)
_UNLESS = "It is read only where its block is active, which is refused."


def _inactive(block: str, *keys: tuple[str, Kind, Any], auto: bool = False, **aliases: str) -> tuple[ConfigKey, ...]:
    return tuple(
        ignored(f"{block}.{name}", kind, default, _UNLESS, auto=auto, aliases=(aliases[name],) if name in aliases else ())
        for name, kind, default in keys
    )


PARALLEL = (
    refused("sequence_parallel_size", "int", 1, _SEQUENCE),
    ignored("data_parallel_size", "int", None, "`world_size` says it."),
    ignored("use_data_before_expert_parallelism", "bool", False, "A mesh names its axes in the order of its ranks."),
    ignored("pipeline.stages", "any", "auto", _PIPELINE),
    ignored("pipeline.partition", "str", "best", _PIPELINE),
    ignored("pipeline.seed_layers", "bool", False, _PIPELINE),
    ignored("pipeline.activation_checkpoint_interval", "int", 0, _PIPELINE),
    ignored("pipeline.pipe_partitioned", "bool", True, _PIPELINE),
    ignored("pipeline.grad_partitioned", "bool", True, _PIPELINE),
    ignored("pipeline.use_reentrant", "bool", True, _PIPELINE),
    refused("tensor_parallel.autotp_size", "int", 0, _TENSOR, harmless=(1,), auto=True),
    *_inactive(
        "tensor_parallel",
        ("dtype", "any", None),
        ("tp_overlap_comm", "bool", False),
        ("vocab_parallel_lm_head", "bool", None),
        ("vocab_parallel_ce_backend", "str", "torch"),
        ("tensor_parallel", "dict", {}),
        ("injection_policy_tuple", "any", None),
        ("partition_config", "dict", None),
        ("preset_model", "str", None),
        ("keep_module_on_host", "bool", False),
        ("replace_with_kernel_inject", "bool", False),
        auto=True,
        tensor_parallel="tp",
        replace_with_kernel_inject="kernel_inject",
    ),
    refused("expert_parallel.enabled", "bool", False, _EXPERTS),
    *_inactive(
        "expert_parallel",
        ("autoep_size", "int", 1),
        ("expert_tensor_parallel_size", "int", 1),
        ("validate_folding_routing", "bool", False),
        ("async_split_plan", "bool", False),
        ("preset_model", "str", None),
        ("moe_layer_pattern", "str", None),
        ("expert_pattern", "str", None),
        ("router_pattern", "str", None),
        ("use_grouped_mm", "bool", True),
        ("disable_triton_grouped_mm", "bool", False),
        ("route_norm", "bool", None),
        ("route_scale", "float", 1.0),
        ("score_apply", "str", "auto"),
        ("combine_impl", "str", "auto"),
        ("row_weighting_impl", "str", "auto"),
        ("gate_up_impl", "str", "separate"),
        ("comm_backend", "str", "comm"),
        ("comm_num_sm", "int", 12),
        ("comm_qp_margin", "int", 4),
        ("comm_max_tokens_per_rank", "int", 0),
        ("num_expert_groups", "int", None),
        ("num_limited_groups", "int", None),
        ("score_func", "str", "auto"),
        ("top_k", "any", "auto"),
        ("load_balance_coeff", "any", None),
        ("routed_scaling_factor", "any", "auto"),
        ("expert_w1", "str", None),
        ("expert_w2", "str", None),
        ("expert_w3", "str", None),
        ("num_experts_attr", "str", None),
        ("top_k_attr", "str", None),
        ("has_shared_experts", "bool", None),
        ("shared_experts_pattern", "str", None),
        ("shared_experts_gate_pattern", "str", None),
        ("expert_activation", "str", None),
    ),
)

COMPILE = (
    refused("compile.deepcompile", "bool", False, "DeepCompile's passes are not here; leave the block out.", auto=True),
    *_inactive(
        "compile",
        ("autoep_non_moe", "bool", False),
        ("free_activation", "bool", False),
        ("free_activation_threshold", "int", 10 * 2**20),
        ("offload_activation", "bool", False),
        ("offload_activation_pin_memory", "bool", True),
        ("offload_opt_states", "bool", False),
        ("double_buffer", "bool", True),
        ("symmetric_memory", "bool", False),
        ("debug_log", "bool", False),
        ("offload_parameters", "bool", False),
        ("sync_before_reduce", "bool", False),
        ("sync_after_reduce", "bool", False),
        ("sync_before_allgather", "bool", False),
        ("sync_after_allgather", "bool", False),
        ("keep_int_input_tensors", "bool", True),
        ("keep_all_input_tensors", "bool", False),
        ("passes", "list", None),
        auto=True,
    ),
)

OTHERS = (
    refused(
        "data_efficiency.enabled",
        "bool",
        False,
        "Curricula and random layer-token dropping are not here; sample in the data's iterator.",
    ),
    *_inactive("data_efficiency", ("seed", "int", 1234), ("data_sampling", "dict", {}), ("data_routing", "dict", {})),
    refused("hybrid_engine.enabled", "bool", False, "Generation inside of training is not here; set it to false.", auto=True),
    *_inactive(
        "hybrid_engine",
        ("max_out_tokens", "int", 512),
        ("inference_tp_size", "int", 1),
        ("release_inference_cache", "bool", False),
        ("pin_parameters", "bool", True),
        ("tp_gather_partition_size", "int", 8),
        ("enable_cuda_graph", "bool", False),
        auto=True,
    ),
    refused("weight_quantization", "dict", None, "It is for inference; leave the block out.", harmless=({},)),
    refused(
        "autotuning.enabled", "bool", False, "It makes DeepSpeed's launcher run a tuner instead of the script; set it to false."
    ),
    *_inactive(
        "autotuning",
        ("fast", "bool", True),
        ("results_dir", "str", "autotuning_results"),
        ("exps_dir", "str", "autotuning_exps"),
        ("overwrite", "bool", True),
        ("start_profile_step", "int", 3),
        ("end_profile_step", "int", 5),
        ("metric", "str", "throughput"),
        ("metric_path", "str", None),
        ("tuner_type", "str", "gridsearch"),
        ("tuner_early_stopping", "int", 5),
        ("tuner_num_trials", "int", 50),
        ("arg_mappings", "dict", None),
        ("model_info", "dict", None),
        ("model_info_path", "str", None),
        ("mp_size", "int", 1),
        ("max_train_batch_size", "int", None),
        ("min_train_batch_size", "int", 1),
        ("max_train_micro_batch_size_per_gpu", "int", 1024),
        ("min_train_micro_batch_size_per_gpu", "int", 1),
        ("num_tuning_micro_batch_sizes", "int", 3),
    ),
)

KEYS: dict[str, tuple[ConfigKey, ...]] = {
    "Parallelism": PARALLEL,
    "DeepCompile": COMPILE,
    "Other blocks": OTHERS,
}
