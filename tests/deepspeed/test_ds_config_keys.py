"""The table of keys has what DeepSpeed reads, with its defaults; docs/deepspeed-config.md is written from it."""

import enum
import re
from pathlib import Path
from typing import Any

import pytest

from functional_ds.deepspeed import engine as engines
from functional_ds.deepspeed.config.ds_optimizers import OPTIMIZERS
from functional_ds.deepspeed.config.keys.config_key import ConfigKey, Fate
from functional_ds.deepspeed.config.keys.config_table import BLOCKS, DEAD, KEYS, SECTIONS, key_of, nearest
from functional_ds.deepspeed.config.schedules.ds_schedules import SCHEDULERS
from tests.deepspeed.keys_page import PAGE, written
from tests.deepspeed.real import real

# The blocks that DeepSpeed reads with pydantic: the module and the class, by path.
MODELS = {
    "zero_optimization": ("deepspeed.runtime.zero.config", "DeepSpeedZeroConfig"),
    "zero_optimization.offload_param": ("deepspeed.runtime.zero.offload_config", "DeepSpeedZeroOffloadParamConfig"),
    "zero_optimization.offload_optimizer": ("deepspeed.runtime.zero.offload_config", "DeepSpeedZeroOffloadOptimizerConfig"),
    "fp16": ("deepspeed.runtime.precision_config", "DeepSpeedFP16Config"),
    "bf16": ("deepspeed.runtime.precision_config", "DeepSpeedBF16Config"),
    "tensorboard": ("deepspeed.monitor.config", "TensorBoardConfig"),
    "wandb": ("deepspeed.monitor.config", "WandbConfig"),
    "csv_monitor": ("deepspeed.monitor.config", "CSVConfig"),
    "comet": ("deepspeed.monitor.config", "CometConfig"),
    "comms_logger": ("deepspeed.comm.config", "CommsLoggerConfig"),
    "timers.throughput": ("deepspeed.utils.config", "DeepSpeedThroughputTimerConfig"),
    "hybrid_engine": ("deepspeed.runtime.config", "HybridEngineConfig"),
    "compile": ("deepspeed.compile.config", "CompileConfig"),
    "tensor_parallel": ("deepspeed.runtime.tensor_parallel.config", "TPTrainingConfig"),
}

# What DeepSpeed looks up in dicts: the module of constants and the names of keys in it, by path.
NAMES = {
    "": (
        "deepspeed.runtime.constants",
        "TRAIN_BATCH_SIZE TRAIN_MICRO_BATCH_SIZE_PER_GPU GRADIENT_ACCUMULATION_STEPS MANAGED_GRADIENT_ACCUMULATION "
        "STEPS_PER_PRINT DUMP_STATE DISABLE_PYTHON_GC DISABLE_ALLGATHER COMMUNICATION_DATA_TYPE "
        "SEQ_PARALLEL_COMMUNICATION_DATA_TYPE PRESCALE_GRADIENTS GRADIENT_PREDIVIDE_FACTOR GRADIENT_ALLREDUCE_OP "
        "GRADIENT_CLIPPING ZERO_ALLOW_UNTESTED_OPTIMIZER ZERO_FORCE_DS_CPU_OPTIMIZER WALL_CLOCK_BREAKDOWN MEMORY_BREAKDOWN "
        "DATALOADER_DROP_LAST LOG_LEVEL VOCABULARY_SIZE",
    ),
    "data_types": ("deepspeed.runtime.constants", "GRAD_ACCUM_DTYPE PARAM_DTYPE BUFFER_DTYPE KEEP_IN_FP32_MODULES"),
    "aio": (
        "deepspeed.runtime.swap_tensor.constants",
        "AIO_BLOCK_SIZE AIO_QUEUE_DEPTH AIO_INTRA_OP_PARALLELISM AIO_SINGLE_SUBMIT AIO_OVERLAP_EVENTS AIO_USE_GDS",
    ),
    "flops_profiler": (
        "deepspeed.profiling.constants",
        "FLOPS_PROFILER_ENABLED FLOPS_PROFILER_RECOMPUTE_FWD_FACTOR FLOPS_PROFILER_PROFILE_STEP FLOPS_PROFILER_MODULE_DEPTH "
        "FLOPS_PROFILER_TOP_MODULES FLOPS_PROFILER_DETAILED FLOPS_PROFILER_OUTPUT_FILE",
    ),
    "activation_checkpointing": (
        "deepspeed.runtime.activation_checkpointing.config",
        "ACT_CHKPT_PARTITION_ACTIVATIONS ACT_CHKPT_NUMBER_CHECKPOINTS ACT_CHKPT_CONTIGUOUS_MEMORY_OPTIMIZATION "
        "ACT_CHKPT_SYNCHRONIZE_CHECKPOINT_BOUNDARY ACT_CHKPT_PROFILE ACT_CHKPT_CPU_CHECKPOINTING",
    ),
}

_OWN = {"zero_optimization.leaf_module", "tensor_parallel.dtype"}  # whose defaults are no words of JSON


def _plain(value: Any) -> Any:
    return value.value if isinstance(value, enum.Enum) else value


@pytest.mark.parametrize("block", MODELS)
def test_the_table_has_every_field_of_deepspeeds_models(block: str) -> None:
    module, name = MODELS[block]
    lacking, other = [], []
    for field, info in getattr(real(module), name).model_fields.items():
        path = f"{block}.{field}"
        if path in BLOCKS:  # a block of its own
            continue
        for spelled in (field, info.alias or field):
            key = key_of(f"{block}.{spelled}")
            if key is None:
                lacking.append(spelled)
            elif path not in _OWN and _plain(info.default) != key.default:
                other.append((spelled, info.default, key.default))
    assert (lacking, other) == ([], [])


@pytest.mark.parametrize("block", NAMES)
def test_the_table_has_every_name_that_deepspeed_looks_up(block: str) -> None:
    module, names = NAMES[block]
    constants = vars(real(module))
    lacking, other = [], []
    for name in names.split():
        path = f"{block}.{constants[name]}".removeprefix(".")
        key = KEYS.get(path)
        if key is None:
            lacking.append(path)
        elif name != "VOCABULARY_SIZE" and constants[f"{name}_DEFAULT"] != key.default:
            other.append((path, constants[f"{name}_DEFAULT"], key.default))
    assert (lacking, other) == ([], [])


def test_the_table_has_the_fields_of_expert_parallelism_and_the_tuner() -> None:
    experts = real("deepspeed.module_inject.auto_ep_presets.base").AutoEPConfig
    for name, field in experts.__dataclass_fields__.items():
        if field.init:
            key = KEYS[f"expert_parallel.{name}"]
            assert (
                field.default == key.default
                or "UNSET" in repr(field.default)
                or not isinstance(field.default, str | int | float)
            )
    constants = vars(real("deepspeed.autotuning.constants"))
    defaults = {
        name: value for name, value in constants.items() if name.startswith("AUTOTUNING_") and name.endswith("_DEFAULT")
    }
    for name, default in defaults.items():
        assert KEYS[f"autotuning.{constants[name.removesuffix('_DEFAULT')]}"].default == default


def test_what_deepspeed_has_removed_is_marked() -> None:
    config = real("deepspeed.runtime.config")
    removed = {*config._REMOVED_TOP_LEVEL_CONFIG_KEYS}
    removed |= {f"zero_optimization.{name}" for name in config._REMOVED_ZERO_CONFIG_KEYS}
    assert {path for path, key in KEYS.items() if key.removed} == removed


def _all_keys() -> list[ConfigKey]:
    found = [*KEYS.values()]
    for rule in OPTIMIZERS:
        found += rule.keys
    for scheduler in SCHEDULERS.values():
        found += scheduler.keys
    return found


def test_keys_are_consistent() -> None:
    assert len(KEYS) == sum(map(len, SECTIONS.values()))
    for key in _all_keys():
        assert "|" not in key.text, key.path
        assert key.path.startswith(("optimizer.params.", "scheduler.params.")) or key.text.endswith("."), key.path
        assert key.default in (None, "auto") or key.kind == "any" or key.parse(key.default) == key.default, key.path
        assert key.fate is not Fate.REFUSED or key.is_harmless(key.default), key.path
        assert not set(key.aliases) & {each.name for each in KEYS.values() if each.block == key.block}
    assert not {path for path in DEAD if key_of(path)}


def test_what_the_engine_reads_has_a_meaning() -> None:
    """Each key that an engine's reports and monitors read is a key of the plan or of the engine."""
    engine = Path(engines.__file__).parent
    text = "".join((engine / name).read_text(encoding="utf-8") for name in ("engine_reports.py", "initialize.py"))
    blocks = re.findall(r'"(tensorboard|csv_monitor|wandb|comet)"', (engine / "loop/monitors.py").read_text(encoding="utf-8"))
    paths = set(re.findall(r'value\("([a-z_.]+)"\)', text))
    paths |= {path for path, key in KEYS.items() if key.block in blocks}
    assert {"wall_clock_breakdown", "comms_logger.enabled", "wandb.project"} <= paths | {"wall_clock_breakdown"}
    assert [path for path in sorted(paths) if (key := key_of(path)) is None or key.fate is Fate.IGNORED] == []


def test_unknown_names_have_a_nearest() -> None:
    assert "`zero_optimization.stage3_max_live_parameters`" in nearest("zero_optimization.stage3_max_live_params")
    assert "it belongs at `scheduler`" in nearest("optimizer.scheduler")
    assert "it belongs at `gradient_clipping`" in nearest("fp16.gradient_clipping")
    assert "comms_logger" in nearest("comms_config")


def test_the_page_has_these_tables() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert text == written(text), "run `python -m tests.deepspeed.keys_page --write`"
    assert not re.search(r"\bNone\b \|", text.partition("<!-- keys -->")[2].partition("`None`")[0])
