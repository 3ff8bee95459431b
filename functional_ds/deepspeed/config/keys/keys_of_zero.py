"""DeepSpeed's keys of ``zero_optimization``, offloading and asynchronous files."""

import sys
from typing import Any

from .config_key import ConfigKey, Fate, Kind

__all__ = ["KEYS", "OF_STAGE_3"]

_UNITS = "ZeRO moves FSDP units, not buckets of elements; `T.zero(unit_of=)` says what a unit is."
_ALWAYS = "It is always so."
_KERNELS = "It chooses among DeepSpeed's implementations of the same function."
_LIVE = "`T.zero(max_live_units=)` counts units, and they are freed after their use."
_BUFFERS = "`T.offload` overlaps reads, updates and writes with `buffers` of `buffer_bytes`."


def _zero(fate: Fate, name: str, kind: Kind, default: Any, text: str, **more: Any) -> ConfigKey:
    return ConfigKey(f"zero_optimization.{name}", kind, default, fate, text, auto=True, **more)


def _became(name: str, kind: Kind, default: Any, text: str, **more: Any) -> ConfigKey:
    return _zero(Fate.BECAME, name, kind, default, text, **more)


def _ignored(name: str, kind: Kind, default: Any, text: str, **more: Any) -> ConfigKey:
    return _zero(Fate.IGNORED, name, kind, default, text, **more)


def _refused(name: str, kind: Kind, default: Any, text: str, **more: Any) -> ConfigKey:
    return _zero(Fate.REFUSED, name, kind, default, text, **more)


ZERO = (
    _became("stage", "int", 0, "`T.zero(stage)`.", choices=(0, 1, 2, 3)),
    _became("reduce_scatter", "bool", True, '`T.zero(aggregate="all_reduce")` if false.'),
    _became(
        "compute_grad_norm",
        "bool",
        True,
        "Without it, fp32 in stages 1 and 2 is not checked for overflow, and `get_global_grad_norm()` is None.",
    ),
    _ignored("reduce_bucket_size", "int", 500_000_000, _UNITS, least=1),
    _ignored("allgather_bucket_size", "int", 500_000_000, _UNITS, least=0),
    _ignored("allgather_partitions", "bool", True, _KERNELS),
    _ignored("contiguous_gradients", "bool", True, _ALWAYS),
    _ignored("overlap_comm", "bool", None, _ALWAYS),
    _ignored("use_multi_rank_bucket_allreduce", "bool", True, _KERNELS),
    _ignored("round_robin_gradients", "bool", False, _KERNELS),
    _ignored("parameter_alignment", "bool", False, _KERNELS),
    _ignored("legacy_stage1", "bool", False, _KERNELS),
    _ignored(
        "sub_group_size",
        "int",
        1_000_000_000,
        "`T.offload(buffer_bytes=)` says how large the pieces of an update are.",
        least=0,
    ),
    _ignored("ignore_unused_parameters", "bool", True, "Unused params are left alone, as in `torch.optim`; nothing raises."),
    _ignored("load_from_fp32_weights", "bool", True, "`fds.from_deepspeed` reads the fp32 masters."),
    _ignored("elastic_checkpoint", "bool", False, "Every checkpoint loads on any number of ranks."),
    _ignored("pipeline_loading_checkpoint", "bool", False, "Every checkpoint loads on any number of ranks."),
    _ignored("enable_sanity_checks", "bool", False, "`comm.debug` has checked calls."),
    _ignored("log_trace_cache_warnings", "bool", False, "There is no trace cache."),
    _refused(
        "zenflow",
        "dict",
        None,
        "ZenFlow updates some params with old gradients, which no transform here does; leave the block out.",
        harmless=({},),
    ),
)

STAGE_3 = (
    _became(
        "prefetch_bucket_size",
        "int",
        50_000_000,
        "`T.zero(prefetch=)` in units: 0 fetches none ahead, all else one.",
        aliases=("stage3_prefetch_bucket_size",),
        least=0,
    ),
    _became(
        "param_persistence_threshold",
        "int",
        100_000,
        "`T.zero(persistence_threshold=)`; 0 with `offload_param`.",
        aliases=("stage3_param_persistence_threshold",),
        least=0,
    ),
    _ignored(
        "model_persistence_threshold",
        "int",
        sys.maxsize,
        "It bounds the memory of persistent params; lower `param_persistence_threshold` does.",
        aliases=("stage3_model_persistence_threshold",),
        least=0,
    ),
    _ignored("max_live_parameters", "int", 1_000_000_000, _LIVE, aliases=("stage3_max_live_parameters",), least=0),
    _ignored("max_reuse_distance", "int", 1_000_000_000, _LIVE, aliases=("stage3_max_reuse_distance",), least=0),
    _ignored(
        "gather_16bit_weights_on_model_save",
        "bool",
        False,
        "`fds.export` writes whole weights from any stage.",
        aliases=("stage3_gather_16bit_weights_on_model_save",),
    ),
    _ignored("stage3_gather_fp16_weights_on_model_save", "bool", False, "`fds.export` writes whole weights from any stage."),
    _ignored("module_granularity_threshold", "int", 0, _UNITS, aliases=("stage3_module_granularity_threshold",)),
    _ignored("use_all_reduce_for_fetch_params", "bool", False, _KERNELS, aliases=("stage3_use_all_reduce_for_fetch_params",)),
    _ignored("allgather_sequential", "bool", False, _KERNELS, aliases=("stage3_allgather_sequential",)),
    _ignored("memory_efficient_linear", "bool", True, "Gathered units are freed after each use."),
    _ignored("override_module_apply", "bool", True, "Modules are not patched."),
    _ignored("save_muon_momentum_buffer_in_memory", "bool", False, "`T.offload` keeps all states of one kind in one place."),
    _became(
        "leaf_module",
        "dict",
        None,
        "`T.zero(3, unit_of=)` of the marked modules, where `model=` is a module; DeepSpeed's own default marks are left out.",
    ),
    _became("zero_hpz_partition_size", "int", 1, "`T.zero(intra_node=, hpz=True)`.", least=0),
    _became(
        "zero_quantized_weights",
        "bool",
        False,
        "`T.zero(all_gather=comm.codecs.compressed(comm.all_gather, comm.codecs.Blocks(8)))` in stage 3.",
    ),
    _refused(
        "zero_quantized_nontrainable_weights",
        "bool",
        False,
        "Frozen params are stored in the policy's dtype; quantize them in the module.",
    ),
    _became(
        "zero_quantized_gradients",
        "bool",
        False,
        "`T.zero(reduce_scatter=comm.codecs.compressed(comm.reduce_scatter, comm.codecs.Blocks(4)))` in stage 3.",
    ),
)


def _of_param(name: str, kind: Kind, default: Any, text: str, fate: Fate = Fate.IGNORED, **more: Any) -> ConfigKey:
    return _zero(fate, f"offload_param.{name}", kind, default, text, **more)


def _of_optimizer(name: str, kind: Kind, default: Any, text: str, fate: Fate = Fate.IGNORED, **more: Any) -> ConfigKey:
    return _zero(fate, f"offload_optimizer.{name}", kind, default, text, **more)


_DEVICES = ("none", "cpu", "nvme")
_FILES = "`T.offload(threads=, buffers=, direct=)` reads and writes files."
_PINNED = "Beside a GPU host memory is pinned."

OFFLOAD = (
    _of_param(
        "device",
        "str",
        "none",
        "`T.offload(params=)` in stage 3: the optimizer's state goes as far. Below it has no effect, as in DeepSpeed.",
        Fate.BECAME,
        choices=_DEVICES,
    ),
    _of_param("nvme_path", "str", None, "`T.offload(path=)`.", Fate.BECAME),
    _of_param("buffer_count", "int", 5, _BUFFERS, least=0),
    _of_param("buffer_size", "int", 100_000_000, _BUFFERS, least=0),
    _of_param("max_in_cpu", "int", 1_000_000_000, "With `nvme` all params are on the disk.", least=0),
    _of_param("pin_memory", "bool", True, _PINNED),
    _of_optimizer("device", "str", "none", "`T.offload(optimizer=)`.", Fate.BECAME, choices=_DEVICES),
    _of_optimizer("nvme_path", "str", None, "`T.offload(path=)`.", Fate.BECAME),
    _of_optimizer("buffer_count", "int", 4, _BUFFERS, least=0),
    _of_optimizer("pin_memory", "bool", True, _PINNED),
    _of_optimizer("pipeline_read", "bool", False, _BUFFERS),
    _of_optimizer("pipeline_write", "bool", False, _BUFFERS),
    _of_optimizer("fast_init", "bool", False, "States are written once, a piece at a time."),
    _of_optimizer("ratio", "float", 1.0, "`T.offload(ratio=)` in stage 3.", Fate.BECAME, least=0, most=1),
    _of_optimizer("super_offload", "bool", False, _KERNELS),
    _of_optimizer("cpuadam_cores_perc", "float", 0.8, "Threads are torch's.", least=0, most=1),
    _became("cpu_offload", "bool", None, "As `offload_optimizer.device: cpu`; DeepSpeed calls it deprecated."),
    _became("cpu_offload_param", "bool", None, "As `offload_param.device: cpu`; DeepSpeed calls it deprecated."),
    _ignored("cpu_offload_use_pin_memory", "bool", None, _PINNED),
    ConfigKey("aio.block_size", "int", 1_048_576, Fate.IGNORED, _FILES),
    ConfigKey("aio.queue_depth", "int", 8, Fate.IGNORED, _FILES),
    ConfigKey("aio.intra_op_parallelism", "int", 1, Fate.IGNORED, _FILES),
    ConfigKey("aio.single_submit", "bool", False, Fate.IGNORED, _FILES),
    ConfigKey("aio.overlap_events", "bool", True, Fate.IGNORED, _FILES),
    ConfigKey("aio.use_gds", "bool", False, Fate.IGNORED, _FILES),
)

_GONE = "MiCS is `T.zero(3, mesh['shard'], replicate=mesh['replica'])`; leave the key out."

REMOVED = (
    _refused("mics_shard_size", "int", -1, _GONE, removed=True),
    _refused("mics_hierarchical_params_gather", "bool", False, _GONE, removed=True),
    _refused("zeropp_loco_param", "any", None, "LoCo's error feedback is not here; leave the key out.", removed=True),
)

KEYS: dict[str, tuple[ConfigKey, ...]] = {
    "ZeRO": ZERO,
    "ZeRO stage 3": STAGE_3,
    "Offloading": OFFLOAD,
    "ZeRO, removed in 0.19.8": REMOVED,
}

# The names of keys that do nothing in the other stages.
OF_STAGE_3 = {key.name for key in STAGE_3 if key.fate is Fate.BECAME}
