"""DeepSpeed's keys about loops, logs, profiles and checkpoints, and those that 0.19.8 has removed."""

from typing import Any

from .config_key import ConfigKey, Fate, Kind, ignored, of_engine

__all__ = ["DEAD", "KEYS"]

_LOOP = "It is about the loop, not the step; `plan.value` has it."
_ENGINE = "The engine of `deepspeed.initialize` does it; for a step alone `plan.value` has it."
_REMAT = "DeepSpeed's engine never reads it, `deepspeed.checkpointing.configure` does; compose `T.remat(...)`."


def _block(name: str, *keys: tuple[str, Kind, Any], text: str = _LOOP, auto: bool = False) -> tuple[ConfigKey, ...]:
    return tuple(ignored(f"{name}.{key}", kind, default, text, auto=auto) for key, kind, default in keys)


def _engine_block(name: str, *keys: tuple[str, Kind, Any], auto: bool = False) -> tuple[ConfigKey, ...]:
    return tuple(of_engine(f"{name}.{key}", kind, default, _ENGINE, auto=auto) for key, kind, default in keys)


LOGS = (
    of_engine("steps_per_print", "number", None, _ENGINE),
    of_engine("log_level", "str", None, _ENGINE),
    ignored("dump_state", "bool", False, _LOOP),
    ignored("disable_python_gc", "bool", False, _LOOP),
    of_engine("wall_clock_breakdown", "bool", False, _ENGINE),
    ignored("memory_breakdown", "bool", False, _LOOP),
    ignored("vocabulary_size", "int", None, "DeepSpeed only warns where it is no multiple of 8."),
    *_block("timers.throughput", ("enabled", "bool", True), ("synchronized", "bool", True), auto=True),
    of_engine("flops_profiler.enabled", "bool", False, _ENGINE),
    of_engine("flops_profiler.profile_step", "int", 1, _ENGINE),
    of_engine("flops_profiler.output_file", "str", None, _ENGINE),
    *_block(
        "flops_profiler",
        ("recompute_fwd_factor", "float", 0.0),
        ("module_depth", "int", -1),
        ("top_modules", "int", 1),
        ("detailed", "bool", True),
    ),
    of_engine("comms_logger.enabled", "bool", False, _ENGINE, auto=True),
    *_block(
        "comms_logger",
        ("prof_all", "bool", True),
        ("prof_ops", "list", []),
        ("verbose", "bool", False),
        ("debug", "bool", False),
        auto=True,
    ),
    *_engine_block(
        "tensorboard",
        ("enabled", "bool", False),
        ("output_path", "str", ""),
        ("job_name", "str", "DeepSpeedJobName"),
        auto=True,
    ),
    *_engine_block(
        "csv_monitor",
        ("enabled", "bool", False),
        ("output_path", "str", ""),
        ("job_name", "str", "DeepSpeedJobName"),
        auto=True,
    ),
    *_engine_block(
        "wandb",
        ("enabled", "bool", False),
        ("group", "str", None),
        ("team", "str", None),
        ("project", "str", "deepspeed"),
        auto=True,
    ),
    *_engine_block(
        "comet",
        ("enabled", "bool", False),
        ("samples_log_interval", "int", 100),
        ("project", "str", None),
        ("workspace", "str", None),
        ("api_key", "str", None),
        ("experiment_name", "str", None),
        ("experiment_key", "str", None),
        ("online", "bool", None),
        ("mode", "str", None),
        auto=True,
    ),
)

CHECKPOINTS = (
    ignored("checkpoint.tag_validation", "str", "WARN", _LOOP, choices=("WARN", "IGNORE", "FAIL")),
    *_block(
        "checkpoint",
        ("load_universal", "bool", False),
        ("use_node_local_storage", "bool", False),
        ("checkpoint_serialization", "bool", True),
        ("writer", "dict", None),
        text="`fds.save` and `fds.load` write and read checkpoints of any number of ranks.",
    ),
    ignored("checkpoint.parallel_write.pipeline_stage", "bool", False, "Every rank writes what it holds."),
    ignored("datastates_ckpt", "dict", None, "`fds.checkpointing.Saver` writes beside the loop."),
    *_block(
        "activation_checkpointing",
        ("partition_activations", "bool", False),
        ("number_checkpoints", "any", None),
        ("contiguous_memory_optimization", "bool", False),
        ("synchronize_checkpoint_boundary", "bool", False),
        ("profile", "bool", False),
        ("cpu_checkpointing", "bool", False),
        text=_REMAT,
    ),
)


def _gone(path: str, text: str) -> ConfigKey:
    return ConfigKey(path, "any", None, Fate.REFUSED, text, harmless=(False, {}), removed=True)


REMOVED = (
    _gone("amp", "Apex's mixed precision: use `bf16` or `fp16`."),
    _gone("sparse_gradients", "Sparse sums of embeddings' gradients: leave the key out, and they are summed dense."),
    _gone("elasticity", "Elastic batch sizes: checkpoints here load on any number of ranks; give the batch's sizes."),
    _gone("curriculum_learning", "Curricula: change the data's iterator."),
    _gone("progressive_layer_drop", "Progressive layer drop: drop layers in the module."),
    _gone("compression_training", "Compression of models: do it in the module."),
    _gone("quantize_training", "Mixture of quantization: do it in the module."),
    _gone("eigenvalue", "It was for the mixture of quantization."),
    _gone("sparse_attention", "Sparse attention: do it in the module."),
    _gone("nebula", "Nebula's checkpoints: `fds.checkpointing.Saver` writes beside the loop."),
    _gone("graph_harvesting", "CUDA graphs of updates: leave the key out."),
)

KEYS: dict[str, tuple[ConfigKey, ...]] = {
    "Logs and profiles": LOGS,
    "Checkpoints": CHECKPOINTS,
    "Removed in 0.19.8": REMOVED,
}

# Names that programs have in their configs, and that DeepSpeed has never read, or reads no more.
DEAD: dict[str, str] = {
    "comms_config": "DeepSpeed reads `comms_logger`.",
    "cuda_visible_devices": "CUDA reads the environment's CUDA_VISIBLE_DEVICES.",
    "distributed_data_parallel": "Data parallelism is what DeepSpeed always does.",
    "max_train_batch_size": "It was a key of elasticity's block.",
    "monitor_config": "DeepSpeed reads `tensorboard`, `wandb`, `csv_monitor` and `comet` themselves.",
    "monitor": "DeepSpeed reads `tensorboard`, `wandb`, `csv_monitor` and `comet` themselves.",
    "aio.thread_count": "DeepSpeed reads `aio.intra_op_parallelism`.",
}
