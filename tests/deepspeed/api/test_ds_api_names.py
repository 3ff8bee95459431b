"""Which of DeepSpeed's names are here, which are refused and why; a script that imports ``deepspeed`` gets ours."""

import inspect
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from functional_ds.deepspeed.api_names import ALIASES, HERE, INDEXES, PIPELINE_ENGINE, REFUSED, REST, module_at, why_missing
from functional_ds.deepspeed.api_names import ENGINE as ENGINE_PATH
from functional_ds.deepspeed.engine import DeepSpeedEngine
from functional_ds.deepspeed.pipe import PipelineEngine
from tests.deepspeed.api.api_page import PAGE, written
from tests.deepspeed.api.real_imports import ENGINE, IMPORTS
from tests.deepspeed.real import real

ROOT = Path(__file__).resolve().parents[3]

# Names of our modules that DeepSpeed's modules of the same path do not have.
OURS = {
    "accelerator": {"CPUAccelerator", "CUDAAccelerator"},
    "comm": {"Work", "get_backend"},
    "moe": {"MoE"},
    "moe.layer": {"LocalExperts"},
    "moe.utils": {"expert_sharers"},
    "pipe": {
        "PipeDataParallelTopology",
        "PipeModelDataParallelTopology",
        "PipelineEngine",
        "PipelineParallelGrid",
        "PipelineParts",
        "ProcessTopology",
        "pipeline_engine",
        "pipeline_parts",
    },
    "utils": {"clone_tensors_for_torch_save"},  # DeepSpeed has it in checkpoint.utils
    "utils.groups": {"expert_data_ranks", "expert_ranks"},
}

# Parameters of theirs that are not here, and of ours that are not there.
OTHERWISE: dict[str, tuple[set[str], set[str]]] = {
    "checkpointing.non_reentrant_checkpoint": (set(), {"kwargs"}),
    "moe.layer.MOELayer": ({"num_local_experts", "use_tutel"}, set()),
}


def here(path: str) -> bool:
    """Whether a name is in one of our modules, or is one."""
    if module_at(path) is not None:
        return True
    parent, _, name = path.rpartition(".")
    module = module_at(parent)
    return module is not None and hasattr(module, name)


def theirs(path: str) -> Any:
    """DeepSpeed's own module or name; None where it has none."""
    if path.startswith((f"{ENGINE_PATH}.", f"{PIPELINE_ENGINE}.")):
        of, _, name = path.rpartition(".")
        engine = getattr(real(f"deepspeed.{of.rpartition('.')[0]}"), of.rpartition(".")[2])
        return name if hasattr(engine, name) or f"self.{name} = " in inspect.getsource(engine) else None
    attributes = {"checkpointing": "runtime.activation_checkpointing.checkpointing", "zero": "runtime.zero"}  # of the package
    path = re.sub(r"^\w+", lambda word: attributes.get(word[0], word[0]), path)
    parent, _, name = path.rpartition(".")
    try:
        return real(f"deepspeed.{path}" if path else "deepspeed")
    except ImportError:
        try:
            return getattr(real(f"deepspeed.{parent}" if parent else "deepspeed"), name, None)
        except ImportError:
            return None


def test_what_programs_import_is_here_or_refused_for_a_reason() -> None:
    reasons = {*REFUSED.values(), *REST.values()}
    assert {path: why_missing(path) for path in IMPORTS if not here(path) and why_missing(path) not in reasons} == {}


def test_what_programs_import_is_deepspeeds() -> None:
    gone = {
        "compression.compress.init_compression",
        "compression.compress.redundancy_clean",
        "ops.sparse_attention.SparseSelfAttention",
    }
    assert {path for path in (*IMPORTS, *ENGINE) if theirs(path) is None} == gone


def test_names_of_our_modules_are_deepspeeds() -> None:
    for path in filter(None, HERE):
        module, other = module_at(path), theirs(path)
        assert module is not None, path
        assert {name for name in module.__all__ if not hasattr(other, name)} == OURS.get(path, set()), path


def test_other_paths_and_refused_names_are_deepspeeds() -> None:
    assert {path for path in (*ALIASES, *REFUSED) if theirs(path) is None} == {"ops.sparse_attention"}
    assert {path for path in ALIASES if module_at(path) is None} <= {"runtime.zero", "runtime.zero.partition_parameters"}


def _defined(path: str) -> list[str]:
    """The public names that a module of DeepSpeed's defines, its constants among them."""
    module = real(f"deepspeed.{path}" if path else "deepspeed")
    held = []
    for name, value in vars(module).items():
        home = getattr(value, "__module__", None) or ""
        own = home.startswith(module.__name__) if inspect.isclass(value) or inspect.isroutine(value) else name.isupper()
        if not name.startswith("_") and not isinstance(value, ModuleType) and own and name != "TYPE_CHECKING":
            held.append(name)
    return held


def test_every_module_and_name_of_deepspeeds_is_here_or_has_a_reason() -> None:
    """A reason says what to use; in deepspeed.utils and deepspeed itself a name may also be answered by those that are here."""
    root = Path(str(real("deepspeed").__file__)).parent
    paths = [".".join(file.relative_to(root).with_suffix("").parts) for file in root.rglob("*.py")]
    reasons = ("did you mean ", "the nearest module is deepspeed.", "deepspeed.utils has ", "deepspeed has ")

    def answered(path: str) -> bool:
        why = why_missing(path)
        return why in REFUSED.values() or why in REST.values() or why.startswith(reasons)

    modules = {path.removesuffix(".__init__") for path in paths} - {"__init__"}
    assert {path for path in modules if module_at(path) is None and not answered(path)} == set()
    for path in (*HERE, *ALIASES, *INDEXES):
        named = {"zero": "runtime.zero", "checkpointing": "runtime.activation_checkpointing.checkpointing"}.get(path, path)
        names = [] if path == "version" else _defined(named)
        held = module_at(path)
        assert held is not None
        lacking = [name for name in names if not hasattr(held, name)]
        assert [name for name in lacking if not answered(f"{path}.{name}".lstrip("."))] == [], path


def test_constants_are_deepspeeds() -> None:
    for path in ("runtime.lr_schedules", "runtime.constants", "runtime.config"):
        ours, other = module_at(path), theirs(path)
        assert ours is not None
        named = [name for name in _defined(path) if name.isupper() and isinstance(getattr(other, name), str)]
        same = {name: getattr(ours, name) for name in named if hasattr(ours, name)}
        assert {name: getattr(other, name) for name in same} == same, path
        assert len(same) > 4, path


def _parameters(function: Any) -> list[str] | None:
    """Names of a function's parameters, without those of the log of collectives; None where there are none to read."""
    inner = [cell.cell_contents for cell in getattr(function, "__closure__", None) or ()]
    wrapped = next((each for each in inner if inspect.isfunction(each)), function)  # DeepSpeed's wrapper hides its function
    try:
        given = inspect.signature(function if hasattr(function, "__wrapped__") else wrapped).parameters
    except (TypeError, ValueError):
        return None
    return [name for name in given if name not in ("prof", "log_name", "debug")]


def test_arguments_are_deepspeeds() -> None:
    """By name and order, as they may be passed in either way."""
    for path in filter(None, HERE):
        module, other = module_at(path), theirs(path)
        assert module is not None
        for name in set(module.__all__) - OURS.get(path, set()):
            ours = getattr(module, name)
            if isinstance(ours, ModuleType) or not callable(ours) or name == "ReduceOp":
                continue
            mine, expected = _parameters(ours), _parameters(getattr(other, name))
            lacking, more = OTHERWISE.get(f"{path}.{name}", (set(), set()))
            if mine is not None and expected is not None:
                assert [each for each in mine if each not in more] == [each for each in expected if each not in lacking], name


def test_the_pages_tables_are_current() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert written(page) == page, "python -m tests.deepspeed.api.api_page --write"


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("ops.adam.FusedAdm", "did you mean FusedAdam?"),
        ("config", "did you mean ConfigPlan?"),
        ("runtime.config.config", "deepspeed.runtime.config.DeepSpeedConfig(config).plan.value(path)"),
        ("runtime.pipe.schedule.TrainSchedule", "schedules are data in fds.pipelining"),
        ("runtme", "did you mean runtime?"),
        ("nothing.of.the.kind", "the nearest module is deepspeed."),
        ("utils.zzz", "deepspeed.utils has OnDevice, RepeatingLoader"),
        ("ops.transformer.inference.Config", "DeepSpeed's kernels are not included"),
    ],
)
def test_what_is_said_of_a_missing_name(path: str, message: str) -> None:
    assert why_missing(path).startswith(message)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("from functional_ds.deepspeed import init_inference", "deepspeed.init_inference is not in .* fds.export$"),
        ("from functional_ds.deepspeed import intialize", "did you mean initialize"),
        ("import functional_ds.deepspeed.autotuning", "functional-ds tune and plan choose settings"),
        ("from functional_ds.deepspeed.ops.adam import FusedAdm", "did you mean FusedAdam"),
        ("from functional_ds.deepspeed.runtime.config import X", "has every key"),
        ("import functional_ds.deepspeed.runtme", "did you mean runtime"),
    ],
)
def test_what_is_said_of_a_missing_import(line: str, message: str) -> None:
    with pytest.raises(ImportError, match=message):
        exec(line)


@pytest.mark.parametrize(
    "line",
    [
        "from functional_ds.deepspeed.runtime.zero.partition_parameters import Init",
        "import functional_ds.deepspeed.runtime.pipe.module",
        "from functional_ds.deepspeed.runtime.config import DeepSpeedConfig",
    ],
)
def test_deepspeeds_paths_are_found_under_the_changed_import(line: str) -> None:
    exec(line)
    assert sys.modules["functional_ds.deepspeed.zero"].__spec__.name == "functional_ds.deepspeed.zero"


SCRIPT = """
import os, sys
import deepspeed
import deepspeed.runtime.pipe.module as pipe
import deepspeed.runtime.zero.config
from deepspeed.ops.op_builder import CPUAdamBuilder
from deepspeed.runtime.config import DeepSpeedConfig, TRAIN_BATCH_SIZE
from deepspeed.runtime.lr_schedules import WARMUP_LR
from deepspeed.runtime.zero.offload_config import OffloadDeviceEnum
from deepspeed.utils.torch import required_torch_version
import beside
from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam
from deepspeed.runtime.activation_checkpointing import checkpointing
from deepspeed.utils.logging import logger

for line in (
    "from deepspeed.ops.adam import FusedAdm",
    "from deepspeed import init_inference",
    "import deepspeed.runtme",
    "from deepspeed.runtime.config import X",
    "from deepspeed.runtime.pipe import schedule",
):
    try:
        exec(line)
    except ImportError as error:
        print(error)
dist.init_distributed()
import torch
print(__name__, sys.argv, beside.NAME, pipe.LayerSpec.__name__, dist is deepspeed.comm, deepspeed.ops.adam.__spec__.name)
print(torch.distributed.get_rank(), dist.get_world_size(), os.environ["LOCAL_RANK"])
print(TRAIN_BATCH_SIZE, WARMUP_LR, OffloadDeviceEnum.cpu.value, required_torch_version(2.0), CPUAdamBuilder().is_compatible())
print(deepspeed.runtime.zero.config.ZeroStageEnum.weights.value, DeepSpeedConfig({"train_batch_size": 2}).train_batch_size)
"""


def run(*words: str, path: Path) -> "subprocess.CompletedProcess[str]":
    """A program under ``python -m functional_ds.deepspeed``."""
    kept = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    environment = {**kept, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "functional_ds.deepspeed", *words]
    return subprocess.run(command, cwd=path, env=environment, capture_output=True, text=True, check=False)


def test_an_unchanged_script_runs(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    (tmp_path / "beside.py").write_text("import deepspeed\nNAME = deepspeed.__name__\n")
    done = run("--local_rank", "script.py", "--epochs", "1", path=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "deepspeed.ops.adam.FusedAdm is not in functional_ds.deepspeed: did you mean FusedAdam?",
        "deepspeed.init_inference is not in functional_ds.deepspeed: "
        "serving and generation are not supported; export the params with fds.export",
        "deepspeed.runtme is not in functional_ds.deepspeed: did you mean runtime?",
        "deepspeed.runtime.config.X is not in functional_ds.deepspeed: "
        "deepspeed.runtime.config.DeepSpeedConfig(config).plan.value(path) has every key",
        "deepspeed.pipe.schedule is not in functional_ds.deepspeed: "
        "schedules are data in fds.pipelining; see docs/pipelines.md",
        "__main__ ['script.py', '--epochs', '1', '--local_rank=0'] functional_ds.deepspeed LayerSpec True "
        "functional_ds.deepspeed.ops.adam",
        "0 1 0",
        "train_batch_size WarmupLR cpu True True",
        "3 2",
    ]


def test_a_script_for_deepspeed_trains() -> None:
    """DeepSpeed 0.19.8 itself prints these losses, where torch's AdamW updates the params."""
    done = run("--local_rank", "cifar_script.py", "--moe", "--stage", "2", path=Path(__file__).parent)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["loss: 2.301452 lr 0.000000", "loss: 2.281780 lr 0.000301"]


@pytest.mark.parametrize(
    ("words", "code", "text"), [(["-h"], 0, "usage: python -m"), ([], 2, "usage: python -m"), (["no.py"], 2, "no such script")]
)
def test_the_runners_own_words(words: list[str], code: int, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    from functional_ds.deepspeed.run_script import main

    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == code
    out = capsys.readouterr()
    assert text in out.out + out.err


@pytest.mark.parametrize("path", [ENGINE_PATH, PIPELINE_ENGINE])
def test_every_call_of_an_engine_is_here_or_refused_by_name(path: str) -> None:
    module, _, name = path.rpartition(".")
    calls = vars(getattr(real(f"deepspeed.{module}"), name)).items()
    methods = {each for each, call in calls if callable(call) and not each.startswith("_")}
    ours = DeepSpeedEngine if path == ENGINE_PATH else PipelineEngine
    refused = {each.rpartition(".")[2] for each in REFUSED if each.startswith((ENGINE_PATH, path))}
    assert {each for each in methods if not hasattr(ours, each)} <= refused
