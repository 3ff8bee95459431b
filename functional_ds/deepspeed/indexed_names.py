"""Modules of DeepSpeed's that are indexes here: their names are those of a few modules of this library."""

import contextlib
import importlib
from collections.abc import Mapping, Sequence
from types import MappingProxyType, ModuleType
from typing import Any

__all__ = ["INDEXES", "REST", "IndexModule"]

_CONFIG, _KINDS = "config_objects", "engine.optimizer_kinds"

# By a path in DeepSpeed, the modules of functional_ds.deepspeed whose names it has.
INDEXES: Mapping[str, Sequence[str]] = MappingProxyType(
    {
        "git_version_info": ("version_info",),
        "ops.op_builder": ("ops.builders",),
        "ops.op_builder.builder": ("ops.builders",),
        "runtime.base_optimizer": (_KINDS,),
        "runtime.bf16_optimizer": (_KINDS,),
        "runtime.config": (_CONFIG, "config_words"),
        "runtime.config_utils": ("config_words",),
        "runtime.constants": ("config_words",),
        "runtime.fp16": (),
        "runtime.fp16.fused_optimizer": (_KINDS,),
        "runtime.fp16.unfused_optimizer": (_KINDS,),
        "runtime.precision_config": (_CONFIG,),
        "runtime.zero.config": (_CONFIG,),
        "runtime.zero.offload_config": (_CONFIG,),
        "runtime.zero.stage3": (_KINDS,),
        "runtime.zero.stage_1_and_2": (_KINDS,),
        "utils.torch": ("utils.torch_versions",),
        "version": ("version_info",),
    }
)

# Why the rest of a module's names are not here; prefixes count, the longest first.
REST: Mapping[str, str] = MappingProxyType(
    {
        "accelerator": "there is CUDA's accelerator and the CPU's; get_accelerator() has the one of this machine",
        "checkpointing": "how a checkpoint keeps and cuts activations is inside T.remat; see docs/remat.md",
        "comm": "torch.distributed's functions are here; what DeepSpeed's back ends keep beside them is not",
        "compat": "import from the module that has the name",
        "constants": "use torch.distributed's own constants",
        "datastates": "fds.save writes in the background; see docs/checkpoints.md",
        "env_report": "python -m torch.utils.collect_env reports the environment",
        "git_version_info": "deepspeed.__version__ has the version",
        "io": "fds.save writes files, and T.offload reads and writes them; see docs/offload.md",
        "moe": "deepspeed.moe.layer has MoE; fds.experts has routers, exchanges and expert layers; see docs/experts.md",
        "nvme": "T.offload reads and writes files; see docs/offload.md",
        "ops": "DeepSpeed's kernels are not here; torch's are used",
        "pipe": "schedules are data in fds.pipelining; see docs/pipelines.md",
        "runtime.activation_checkpointing": "activation_checkpointing in the config, or T.remat; see docs/remat.md",
        "runtime.base_optimizer": "isinstance alone: stages are T.zero's",
        "runtime.checkpoint_engine": "fds.save writes checkpoints; see docs/checkpoints.md",
        "runtime.bf16_optimizer": "ds_config's bf16 block becomes T.mixed_precision",
        "runtime.chunked_cross_entropy": "fds.seq.tiled computes a loss in pieces; see docs/sequence-parallel.md",
        "runtime.comm": "fds.comm has the collectives, and fds.comm.compressed compresses them",
        "runtime.compiler": "T.compiled runs blocks by torch.compile; see docs/compiled.md",
        "runtime.config": "deepspeed.runtime.config.DeepSpeedConfig(config).plan.value(path) has every key",
        "runtime.config_utils": "config blocks are DeepSpeedZeroConfig and the like, without pydantic",
        "runtime.constants": "write the key's name, such as 'train_batch_size'; docs/deepspeed-config.md has all",
        "runtime.dataloader": "initialize(training_data=) and engine.deepspeed_io make loaders",
        "runtime.domino": "T.tensor_parallel cuts modules as they are; see docs/tensor-parallel.md",
        "runtime.engine": "deepspeed.initialize makes engines; a step of your own is composed of fds.transforms",
        "runtime.fp16": "ds_config's fp16 block becomes T.mixed_precision; its one-bit optimizers are in the config",
        "runtime.hybrid_engine_graph": "serving and generation are not here; export the params with fds.export",
        "runtime.keep_in_fp32": "T.mixed_precision('bf16,pattern=f32') keeps leaves in fp32",
        "runtime.lr_schedules": "get_config_from_args makes the config's scheduler block, which initialize reads",
        "runtime.model_checkpointing": "fds.save writes checkpoints; see docs/checkpoints.md",
        "runtime.pipe": "schedules are data in fds.pipelining; see docs/pipelines.md",
        "runtime.precision_config": "T.mixed_precision has the policies and loss scales; see docs/steps.md",
        "runtime.python_gc": "call gc.collect() where you want it",
        "runtime.rollout": "serving and generation are not here; export the params with fds.export",
        "runtime.sparse_tensor": "gradients are dense; DeepSpeed 0.19.8 has removed sparse_gradients",
        "runtime.superoffload": "T.offload keeps states on the host or a disk; see docs/offload.md",
        "runtime.torch_autocast": "torch_autocast in the config becomes T.mixed_precision(..., autocast=True)",
        "runtime.utils": "norms, clipping and overflow over ranks are the step's; see docs/steps.md",
        "runtime.weight_quantizer": "serving and generation are not here; export the params with fds.export",
        "runtime.zenflow": "ZenFlow updates some params with old gradients, which no transform here does",
        "runtime.zero": "stages are T.zero's; deepspeed.zero has what scripts touch of them",
        "utils.config": "fds.profile measures; see docs/profile.md",
        "utils.exceptions": "errors here are functional_ds.deepspeed.ConfigError, UsageError, and Python's own",
        "utils.torch": "torch has it: Tensor.register_post_accumulate_grad_hook, torch.jit.script",
        "utils.types": "serving and generation are not here; export the params with fds.export",
        "version": "deepspeed.__version__ has the version",
        "utils.bwc": "deepspeed.utils.groups has the groups",
        "utils.comms_logging": "deepspeed.comm.log_summary() and fds.profile show messages",
        "utils.debug": "comm.debug and errors name params and ranks; see docs/comm.md",
        "utils.groups": "axes of fds.comm.mesh are the groups of tensor, expert and sequence parallelism",
        "utils.logging": "deepspeed.utils.logger is a logging.Logger, and log_dist writes on chosen ranks",
        "utils.mixed_precision_linkage": "safe_get_full_fp32_param and its like read masters and states",
        "utils.pin_memory": "torch's tensor.pin_memory() pins; T.offload pins what it uses",
        "utils.pin_memory_tracker": "torch's tensor.pin_memory() pins; T.offload pins what it uses",
        "utils.static_cache": "serving and generation are not here; export the params with fds.export",
        "utils.tensor_fragment": "safe_get_full_fp32_param and its like read masters and states",
        "utils.zero_to_fp32": "its three functions read whole params; fds.from_deepspeed reads shards",
        "utils.zero_to_torch": "fds.from_deepspeed reads DeepSpeed's files, and fds.export writes whole weights",
        "zero": "stages are T.zero's; deepspeed.zero has what scripts touch of them",
    }
)


class IndexModule(ModuleType):
    """A module that looks its names up in others."""

    def __init__(self, name: str, package: str, modules: Sequence[str]) -> None:
        super().__init__(name)
        self.__path__ = []  # the import system then asks for names that are missing as for sub-modules
        self._paths = [f"{package}.{module}" for module in modules]

    @property
    def __all__(self) -> list[str]:
        held = (importlib.import_module(module) for module in self._paths)
        return sorted({name for module in held for name in module.__all__})

    def __getattr__(self, name: str) -> Any:
        for path in () if name.startswith("__") else self._paths:
            module = importlib.import_module(path)
            if name in module.__all__ or "__getattr__" in vars(module):
                with contextlib.suppress(AttributeError):
                    return getattr(module, name)
        raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
