"""Which of DeepSpeed's names are here: modules by their paths, other paths of the same modules, and names that are refused."""

import difflib
import importlib
from collections.abc import Callable, Mapping
from types import MappingProxyType, ModuleType
from typing import Any

import attrs

from .indexed_names import INDEXES, REST, IndexModule
from .version_info import version

__all__ = ["ALIASES", "ENGINE", "HERE", "PIPELINE_ENGINE", "REFUSED", "VERSION", "found", "lazily", "why_missing"]

VERSION = version  # whose names these are
_US = "functional_ds.deepspeed"

# Modules of ``functional_ds.deepspeed`` that have the path that they have in DeepSpeed; "" is the package itself.
HERE = (
    "",
    "accelerator",
    "checkpointing",
    "comm",
    "moe",
    "moe.layer",
    "moe.utils",
    "ops",
    "ops.adagrad",
    "ops.adam",
    "ops.lamb",
    "ops.lion",
    "pipe",
    "runtime",
    "runtime.lr_schedules",
    "runtime.utils",
    "utils",
    "utils.groups",
    "utils.zero_to_fp32",
)

# From a path in DeepSpeed to one of those, or to a module that is an attribute of the package.
ALIASES: Mapping[str, str] = MappingProxyType(
    {
        "accelerator.abstract_accelerator": "accelerator",
        "accelerator.cpu_accelerator": "accelerator",
        "accelerator.cuda_accelerator": "accelerator",
        "accelerator.real_accelerator": "accelerator",
        "checkpoint": "",
        "checkpoint.utils": "utils",
        "comm.comm": "comm",
        "comm.reduce_op": "comm",
        "compression.helper": "utils",
        "moe.sharded_moe": "moe.top_k_gate",
        "ops.adagrad.cpu_adagrad": "ops.adagrad",
        "ops.adam.cpu_adam": "ops.adam",
        "ops.adam.fused_adam": "ops.adam",
        "ops.lamb.fused_lamb": "ops.lamb",
        "ops.lion.cpu_lion": "ops.lion",
        "ops.lion.fused_lion": "ops.lion",
        "runtime.activation_checkpointing": "",
        "runtime.activation_checkpointing.checkpointing": "checkpointing",
        "runtime.dataloader": "utils",
        "runtime.engine": "",
        "runtime.pipe": "pipe",
        "runtime.pipe.engine": "pipe",
        "runtime.pipe.module": "pipe",
        "runtime.pipe.topology": "pipe",
        "runtime.zero": "zero",
        "runtime.zero.partition_parameters": "zero",
        "utils.init_on_device": "utils",
        "utils.logging": "utils",
        "utils.module_utils": "utils",
        "utils.tensor_fragment": "utils",
        "utils.z3_leaf_module": "utils",
    }
)

_KERNELS = "DeepSpeed's kernels are not here; torch's are used"
_SERVING = "serving and generation are not here; export the params with fds.export"

_EFFICIENCY = "data efficiency is not here"
_OFFLOAD = "offload_optimizer and offload_param in the config offload for good; see docs/offload.md"
_SUMS = "the last backward pass of an update, or step, sums over ranks; deepspeed.comm has the collectives"
_COMPILE = "compile functions of the model with torch.compile, before initialize"
_KEYS = "engine.plan.value(path) has every key of the config"

# Attributes of DeepSpeed's engines, by what would do.
_OF_ENGINES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        _EFFICIENCY: (
            "curriculum_learning_config",
            "data_efficiency_config",
            "data_sampling_config",
            "random_ltd_config",
            "random_ltd_initialize",
            "random_ltd_scheduler",
            "set_custom_curriculum_learning_schedule",
        ),
        _OFFLOAD: ("aio_config", "offload_states", "reload_states", "swap_tensor_config", "zenflow_config"),
        _SUMS: (
            "all_gather_scalar",
            "allreduce_and_copy",
            "allreduce_bucket",
            "allreduce_no_retain",
            "buffered_allreduce_fallback",
            "sparse_all_gather",
            "sparse_allreduce",
            "sparse_allreduce_bucket",
            "sparse_allreduce_no_retain",
        ),
        _COMPILE: (
            "compile",
            "compile_autosp",
            "compile_autotp",
            "compile_zero_optimization_stage",
            "get_autosp_backend",
            "get_autotp_backend",
            "get_compile_time",
            "get_deepcompile_backend",
            "get_deepspeed_compile_backend",
            "register_compile_pass",
            "uses_parallelization_pass_only",
        ),
        _KEYS: (
            "autotuning_end_profile_step",
            "autotuning_metric",
            "autotuning_metric_path",
            "autotuning_model_info_path",
            "autotuning_profile_model_info",
            "autotuning_start_profile_step",
            "checkpoint_serialization_enabled",
            "checkpoint_writer_enabled",
            "cpuadam_cores_perc",
            "dynamic_loss_scale_args",
            "tensor_parallel_config",
            "torch_autocast_lower_precision_safe_modules",
        ),
        "the config's gradient_clipping clips in step()": ("clip_fp32_gradients",),
        "use no_sync, or several backward passes of one step, which are summed in every stage": ("coalesce_grad_reduction",),
        "nothing is to be freed: gathered params live as long as a pass needs them": ("empty_partition_cache",),
        "engine.plan.optimizer is the config's optimizer": ("get_optimizer_configuration",),
        "isinstance(data, torch.utils.data.IterableDataset) says it": ("is_iterable_style_dataset", "is_map_style_dataset"),
        "call gc.collect() where you want it": ("collect_python_gc",),
        "use load_checkpoint(folder, load_module_only=True), or safe_set_full_fp32_param for each parameter": (
            "load_module_state_dict",
            "load_moe_state_dict",
        ),
        "fds.profile shows times by module; see docs/profile.md": ("print_forward_breakdown",),
        "give initialize a collate_fn": ("set_data_post_process_func",),
        "engine.get_wall_clock_timers() and fds.profile have the times": ("timers", "tput_timer", "flops_profiler"),
    }
)
ENGINE, PIPELINE_ENGINE = "runtime.engine.DeepSpeedEngine", "runtime.pipe.engine.PipelineEngine"

# By the name's or module's path in DeepSpeed.
_TENSOR = "T.tensor_parallel cuts modules as they are; see docs/tensor-parallel.md"
REFUSED: Mapping[str, str] = MappingProxyType(
    {
        **{f"{ENGINE}.{name}": why for why, names in _OF_ENGINES.items() for name in names},
        f"{PIPELINE_ENGINE}.log_for_device": "print what you want, where engine.grid says",
        f"{PIPELINE_ENGINE}.set_has_attention_mask": "any tensor of a tuple may pass between stages, with or without gradients",
        f"{PIPELINE_ENGINE}.set_train_batch_size": "a schedule has its number of micro-batches: initialize another engine",
        f"{PIPELINE_ENGINE}.tput_log": "print what you want, where engine.grid says",
        "autotuning": "functional-ds tune and plan choose settings; see docs/command-line.md",
        "checkpoint": "universal checkpoints are not here; fds.from_deepspeed reads ZeRO's, for any number of ranks",
        "checkpointing.get_cuda_rng_tracker": "ranks draw alike or apart by fds.Key; see docs/tensor-parallel.md",
        "checkpointing.model_parallel_cuda_manual_seed": "ranks draw alike or apart by fds.Key; see docs/tensor-parallel.md",
        "comm.ccl": "Gloo and NCCL carry messages",
        "comm.initialize_mesh_device": "use fds.comm.mesh",
        "compile": "T.compiled and fds.jit; see docs/compiled.md",
        "compression": "DeepSpeed 0.19.8 has removed its compression library",
        "default_inference_config": _SERVING,
        "inference": _SERVING,
        "init_inference": _SERVING,
        "DeepSpeedDataLoader": "initialize(training_data=) and engine.deepspeed_io make loaders",
        "DeepSpeedHybridEngine": _SERVING,
        "DeepSpeedInferenceConfig": _SERVING,
        "DeepSpeedOptimizerCallable": "initialize(optimizer=) takes any function of parameters",
        "DeepSpeedSchedulerCallable": "initialize(lr_scheduler=) takes any function of an optimizer",
        "DeepSpeedTransformerConfig": _KERNELS,
        "DeepSpeedTransformerLayer": _KERNELS,
        "DualPipeVEngine": "a schedule is data: fds.pipelining.dualpipe_v",
        "DualPipeVModule": "a schedule is data: fds.pipelining.dualpipe_v",
        "InferenceEngine": _SERVING,
        "merge_tp_model_init_into_config": _TENSOR,
        "record_tp_model_init_args": _TENSOR,
        "set_autotp_mode": _TENSOR,
        "set_optimizer_flags": "fds.muon chooses its matrices by matrices=; see docs/matrices.md",
        "launcher": "torchrun launches; functional-ds hosts prints its commands for a hostfile",
        "linear": "freeze params with fds.freeze, and add adapters in the model",
        "model_implementations": _SERVING,
        "module_inject": _TENSOR,
        "moe.mappings": "fds.tp has such functions",
        "monitor": "the engine honours a config's monitors; fit has loggers; see docs/fitting.md",
        "ops.aio": "T.offload reads and writes files; see docs/offload.md",
        "ops.deepspeed4science": _KERNELS,
        "ops.fp_quantizer": _KERNELS,
        "ops.random_ltd": _EFFICIENCY,
        "ops.sparse_attention": "DeepSpeed 0.19.8 has removed it",
        "ops.transformer": _KERNELS,
        "pipe.DualPipeVModule": "a schedule is data: fds.pipelining.dualpipe_v",
        "profiling": "fds.profile counts operations and bytes; see docs/profile.md",
        "replace_transformer_layer": _SERVING,
        "runtime.data_pipeline": _EFFICIENCY,
        "runtime.hybrid_engine": _SERVING,
        "runtime.sequence_parallel": "T.sequence and fds.seq; see docs/sequence-parallel.md",
        "runtime.state_dict_factory": "fds.from_deepspeed reads DeepSpeed's files",
        "runtime.swap_tensor": "T.offload reads and writes files; see docs/offload.md",
        "runtime.tensor_parallel": _TENSOR,
        "sequence": "T.sequence and fds.seq.ulysses; see docs/sequence-parallel.md",
        "tp_model_init": _TENSOR,
        "utils.numa": "torchrun or the launcher binds processes to cores",
        "utils.nvtx": "torch.cuda.nvtx.range",
        "utils.timer": "fds.profile measures; see docs/profile.md",
    }
)


@attrs.frozen
class FoundModule:
    """A module for one of DeepSpeed's paths, less the first word."""

    path: str
    module: ModuleType


def found(path: str) -> FoundModule | None:
    """The module for a path of DeepSpeed's, such as "ops.adam.fused_adam"; None if there is none.

    >>> found("runtime.pipe.module").module.__name__
    'functional_ds.deepspeed.pipe'
    """
    if path in INDEXES:
        return FoundModule(path, IndexModule(f"deepspeed.{path}", _US, INDEXES[path]))
    target = ALIASES.get(path, path if path in HERE else None)
    if target is None:
        return None
    package = importlib.import_module(_US)
    if not target:
        return FoundModule(path, package)
    try:
        return FoundModule(path, importlib.import_module(f"{_US}.{target}"))
    except ModuleNotFoundError:
        module = getattr(package, target.partition(".")[0], None)
        return FoundModule(path, module) if isinstance(module, ModuleType) else None


def why_missing(path: str) -> str:
    """Why a name of DeepSpeed's is not here, or the nearest one that is.

    >>> why_missing("ops.transformer.DeepSpeedTransformerLayer")
    "DeepSpeed's kernels are not here; torch's are used"
    >>> why_missing("ops.adam.FusedAdm")
    'did you mean FusedAdam?'
    """
    words = path.split(".")
    above = [".".join(words[:count]) for count in range(len(words), 0, -1)]
    reason = next((REFUSED[each] for each in above if each in REFUSED), None)
    if reason:
        return reason
    rest = next((REST[each] for each in above if each in REST), None)
    prefix = ".".join(words[:-1])
    parent = found(prefix)
    if parent is None:
        near = difflib.get_close_matches(path, [each for each in (*HERE, *ALIASES, *INDEXES) if each], 1, 0.8 if rest else 0.0)
        return f"the nearest module is deepspeed.{near[0]}" if near else str(rest)
    below = [
        each.removeprefix(f"{prefix}.") for each in (*HERE, *ALIASES, *INDEXES) if each.startswith(f"{prefix}.") or not prefix
    ]
    names = [*getattr(parent.module, "__all__", ()), *(each for each in below if each and "." not in each)]
    near = difflib.get_close_matches(words[-1], set(names) - {words[-1]}, 1, 0.8 if rest else 0.6)
    if near:
        return f"did you mean {near[0]}?"
    return rest or f"deepspeed{'.' * bool(prefix)}{prefix} has {', '.join(sorted(set(names)))}"


def lazily(path: str) -> Callable[[str], Any]:
    """The ``__getattr__`` of a module: its sub-modules that are indexes or other paths, and why a name is missing.

    Args:
        path: the module's in DeepSpeed.
    """

    def attribute(name: str) -> Any:
        inner = f"{path}.{name}".lstrip(".")
        held = found(inner) if inner in INDEXES or inner in ALIASES else None
        if held is not None:
            return held.module
        why = "" if name.startswith("__") else f": {why_missing(inner)}"
        raise AttributeError(f"deepspeed.{inner} is not in {_US}{why}")

    return attribute
