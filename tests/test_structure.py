"""The library's sources keep their structure: layers, sizes, names, folders that can be left out, and public docstrings."""

import ast
import inspect
import os
import re
import shutil
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Never

import pytest

import functional_ds as fds
from functional_ds import comm, transforms
from functional_ds.deepspeed import api_names
from tests.sources import ROOT, TOPS, Source, circles, library

# A file imports only from its own folder and from folders on lines above its own.
LAYERS = (
    ("base",),
    ("base.disk",),
    ("comm.backends",),
    ("comm.table",),
    ("comm.record",),
    ("comm.variance",),
    ("comm.worlds",),
    ("comm.simulation",),
    ("comm.calls",),
    ("comm",),
    ("simulated_cuda",),
    ("comm.agreement", "comm.algorithms", "comm.codecs", "comm.debug"),
    ("sharding",),
    ("optim",),
    ("optim.matrix",),
    ("step.state",),
    ("step.over_ranks", "step.views"),
    ("step",),
    ("remat", "second_order", "state_dict"),
    ("modules",),
    ("dry_run",),
    ("compiling",),
    ("parallel.tensor", "parallel.sequence", "parallel.sequence.tiling", "parallel.experts"),
    ("memory", "checkpointing", "interchange"),
    ("profiling",),
    ("fitting",),
    ("pipelining.schedules",),
    ("pipelining.planning",),
    ("scaling",),
    ("pipelining.stages",),
    ("pipelining.execution", "pipelining.tracing"),
    ("transforms.zero.units",),
    ("transforms.offloading", "transforms.parallel", "transforms.precision", "transforms.zero"),
    (
        "transforms.data_parallel",
        "transforms.differentiation",
    ),
    ("transforms",),
    ("compiling.graphs",),
    ("compiling.jitted",),
    ("testing",),
    ("deepspeed.config.keys", "deepspeed.config.model"),
    ("deepspeed.config.schedules",),
    ("deepspeed.config",),
    ("jobs.entries",),
    ("jobs",),
    ("deepspeed.accelerator", "deepspeed.comm", "deepspeed.engine.loop"),
    ("deepspeed.engine.common",),
    ("deepspeed.utils",),
    ("deepspeed.moe", "deepspeed.ops", "deepspeed.runtime"),
    ("deepspeed",),
    ("deepspeed.pipe",),
    ("deepspeed.engine",),
    ("cli.words",),
    ("cli.planning", "cli.stored"),
    ("cli.tuning",),
    ("cli",),
)

# Package indexes that library files import: files above comm use the collectives by the names that users know, and testing
# composes what a user would write.
INDEXES = {"comm.__init__", "transforms.__init__"}

# Imports inside of functions, and why they are not at the top of the file. They count for layers and circles, too.
LATE = {
    ("comm.simulation.simulate", "comm.simulation.nccl_rules"): "most simulations ask for no rules",
    ("comm.simulation.simulate", "comm.variance.watch"): "most simulations follow no values",
    ("comm.simulation.simulate", "comm.worlds.shapes"): "most simulations have values",
    ("transforms.zero.cost_report", "comm.worlds.shapes"): "a step is no prediction of it",
    ("transforms.zero.cost_report", "optim.sgd"): "a step is no prediction of it",
    ("cli.planning.subject", "interchange.load_params"): "interchange may be left out",
    ("cli.entry", "cli.app"): "it imports typer, which may not be installed",
    ("checkpointing.load", "checkpointing.dcp"): "it imports torch.distributed.checkpoint, which is slow",
    ("deepspeed.config.transform_parts", "transforms.offload"): "offloading may be left out",
    ("deepspeed.engine.initialize", "deepspeed.moe.utils"): "parallel may be left out",
    ("deepspeed.engine.initialize", "deepspeed.pipe.pipeline_engine"): "pipelining may be left out",
    ("deepspeed.engine.initialize", "deepspeed.pipe.pipeline_module"): "pipelining may be left out",
    ("deepspeed.engine.common.engine_files", "checkpointing.load"): "checkpointing may be left out",
    ("deepspeed.engine.common.engine_files", "checkpointing.save"): "checkpointing may be left out",
    ("deepspeed.engine.common.engine_files", "interchange.deepspeed"): "interchange may be left out",
    ("deepspeed.engine.common.engine_files", "interchange.deepspeed_files"): "interchange may be left out",
    ("deepspeed.engine.common.engine_files", "interchange.export"): "interchange may be left out",
    ("deepspeed.engine.loop.monitors", "fitting.loggers"): "fitting may be left out",
    ("deepspeed.engine.engine_reports", "profiling.profiler"): "profiling may be left out",
    ("fitting.checkpoints", "checkpointing.load"): "checkpointing may be left out",
    ("fitting.checkpoints", "checkpointing.save"): "checkpointing may be left out",
    ("sharding.leaf_map", "comm.debug.page"): "only notebooks show it",
    ("comm.mesh", "comm.record.notebook"): "only notebooks show it",
    ("comm.record.ledger", "comm.record.notebook"): "only notebooks show it",
    ("step.state.state", "comm.record.notebook"): "only notebooks show it",
    ("step.step", "comm.record.notebook"): "only notebooks show it",
    ("transforms.zero.cost_report", "comm.record.notebook"): "only notebooks show it",
    ("sharding.leaf_map", "comm.debug.trace"): "only notebooks show it",
    ("transforms.zero.cost_report", "dry_run.dry_run"): "a step is no prediction of it",
    ("testing.fixtures", "testing.holds"): "pytest starts without torch",
    ("testing.laws", "checkpointing.load"): "checkpointing may be left out",
    ("testing.laws", "checkpointing.save"): "checkpointing may be left out",
    ("testing.collective_laws", "compiling.jitted.jit_step"): "compiling may be left out",
    ("testing.laws", "compiling.jitted.jit_step"): "compiling may be left out",
    ("testing.recipe", "pipelining.schedules.generators"): "pipelining may be left out",
    ("testing.recipe", "pipelining.stages.from_functions"): "pipelining may be left out",
    ("testing.strategies", "pipelining.schedules.action"): "pipelining may be left out",
    ("testing.strategies", "pipelining.schedules.schedule"): "pipelining may be left out",
}

# File names that occur in more than one folder, and why each is what a reader would look for there.
SAME_FILE_NAMES = {
    "adagrad": "the optimizer; DeepSpeed's classes of it",
    "adam": "the optimizer; DeepSpeed's classes of it",
    "axis": "what a model's functions know of sequences that are split; of experts",
    "checks": "the checks of a step's arguments; the checks of fit's arguments",
    "errors": "each layer that has errors of its own keeps them in errors.py",
    "files": "files of the operating system; the offload's files",
    "lamb": "the optimizer; DeepSpeed's class of it",
    "lion": "the optimizer; DeepSpeed's classes of it",
    "policy": "the policy of rematerialisation; the policy of mixed precision",
    "prefetch": "prefetch of ZeRO's units; prefetch of offloaded pieces",
    "remat": "the function; the transform of the same name",
    "schedule": "a pipeline's schedule; a schedule of learning rates",
    "state": "the state of a step; zero's part of it",
    "storage": "storage of checkpoints; storage of offloaded tensors",
    "utils": "deepspeed.moe.utils; deepspeed.runtime.utils: DeepSpeed's paths",
}

LINES, FILES = 400, 12


@pytest.fixture(scope="module")
def sources() -> dict[str, Source]:
    return library()


def _edges(sources: Mapping[str, Source]) -> dict[str, set[str]]:
    return {name: {each.target for each in source.imports} for name, source in sources.items()}


def _folder(target: str) -> str:
    return target.rpartition(".")[0] or "root"


# -- imports -----------------------------------------------------------------------------------------------------------


def test_circles_are_found() -> None:
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": {"a"}}) == [["b", "c"]]


def test_files_are_in_no_import_circle(sources: Mapping[str, Source]) -> None:
    assert circles(_edges(sources)) == []


def test_folders_are_in_no_import_circle(sources: Mapping[str, Source]) -> None:
    edges: dict[str, set[str]] = defaultdict(set)
    for name, targets in _edges(sources).items():
        edges[_folder(name)] |= {_folder(target) for target in targets} - {_folder(name)}
    assert circles(edges) == []


def test_layers_point_down(sources: Mapping[str, Source]) -> None:
    level = {folder: number for number, folders in enumerate(LAYERS) for folder in folders}
    assert {source.folder for source in sources.values()} == level.keys()
    upward = [
        f"{name}, line {each.line}: imports {each.target}"
        for name, source in sources.items()
        for each in source.imports
        if source.folder != _folder(each.target) and level[source.folder] <= level[_folder(each.target)]
    ]
    assert upward == []


def test_imports_name_the_defining_module(sources: Mapping[str, Source]) -> None:
    found = {each.target for source in sources.values() for each in source.imports if each.target.endswith("__init__")}
    assert found <= INDEXES


def test_late_imports_have_a_reason(sources: Mapping[str, Source]) -> None:
    assert {(name, each.target) for name, source in sources.items() for each in source.imports if each.late} == LATE.keys()


# -- sizes and names ---------------------------------------------------------------------------------------------------


def test_files_are_short(sources: Mapping[str, Source]) -> None:
    assert {name: source.lines for name, source in sources.items() if source.lines > LINES} == {}


def test_folders_are_small(sources: Mapping[str, Source]) -> None:
    count = Counter(source.folder for source in sources.values())
    assert {folder: files for folder, files in count.items() if files > FILES} == {}


def test_class_names_stand_once(sources: Mapping[str, Source]) -> None:
    """A leading underscore makes no other name."""
    found: dict[str, list[str]] = defaultdict(list)
    for name, source in sources.items():
        for each in source.classes:
            found[each.lstrip("_")].append(name)
    assert not {each for each, names in found.items() if len(names) > 1}


def test_file_names_stand_once(sources: Mapping[str, Source]) -> None:
    count = Counter(name.rpartition(".")[2] for name in sources)
    assert {name for name, times in count.items() if times > 1} == SAME_FILE_NAMES.keys()


def test_every_package_says_what_is_in_it() -> None:
    for top in TOPS:
        for path in (ROOT / top).rglob("__init__.py"):
            words = ast.get_docstring(ast.parse(path.read_text()))
            assert words, path
            assert words.splitlines()[0].endswith("."), path


# -- public names ------------------------------------------------------------------------------------------------------

PACKAGES = (fds, comm, transforms)

# Modules with a list of names: users reach them as namespaces, or a test goes through the list. In others a name without
# underscore may be imported from elsewhere in the library.
NAMESPACES = {
    "base.torch_private",
    "base.torch_replaced",
    "base.tree",
    "comm.algorithms.cost",
    "comm.backends.torch_groups",
    "comm.table.errors",
    "compiling.torch_compiler",
    "sharding.grouping",
}


def _imported_whole() -> Iterator[str]:
    """Modules of ``deepspeed`` that an index imports with a star."""
    for index in (ROOT / "functional_ds/deepspeed").rglob("__init__.py"):
        for node in ast.walk(ast.parse(index.read_text())):
            if isinstance(node, ast.ImportFrom) and node.names[0].name == "*":
                above = ".".join(index.parent.relative_to(ROOT / "functional_ds").parts)
                yield f"{above}.{node.module}" if node.level else str(node.module).removeprefix("functional_ds.")


def test_indexes_alone_list_their_names() -> None:
    """Beside these, modules that stand for one of DeepSpeed's do, whose names are compared, and those imported whole."""
    listing = {source.name for source in library().values() if re.search("^__all__", source.path.read_text(), re.MULTILINE)}
    stand_ins = {
        f"deepspeed.{path}" for path in (*api_names.HERE, *(path for paths in api_names.INDEXES.values() for path in paths))
    }
    assert listing - stand_ins - {*_imported_whole()} == NAMESPACES


@pytest.mark.parametrize("package", PACKAGES, ids=lambda package: package.__name__)
def test_dir_shows_the_public_names(package: object) -> None:
    assert dir(package) == sorted(package.__all__)  # type: ignore[attr-defined]
    assert all(hasattr(package, name) for name in dir(package))


def test_the_version_is_that_of_the_installation() -> None:
    from importlib.metadata import version

    assert fds.__version__ == version("functional-ds")


_FUNCTIONS_STAY = """
import functional_ds as fds
import functional_ds.remat.report, functional_ds.comm.mesh, functional_ds.transforms.zero.gather
import functional_ds.transforms.pipeline, functional_ds.transforms.offload, functional_ds.transforms.schedule
import functional_ds.memory.predict, functional_ds.pipelining.tracing.cut
for owner, names in ((fds, ["remat", "units"]), (fds.comm, ["mesh", "spawn"]), (fds.transforms, [
    "accumulate", "clip", "ema", "offload", "pipeline", "remat", "replicated", "schedule", "tensor_parallel", "zero"])):
    for name in names:
        assert callable(getattr(owner, name)) or name == "units", name
"""


@pytest.mark.sample(2)
@pytest.mark.parametrize("first", ["transforms.pipeline", "transforms.offload", "transforms.zero.gather", "remat.report"])
def test_imports_of_sub_modules_leave_functions_in_place(first: str, server: "subprocess.Popen[str]", tmp_path: Path) -> None:
    """``fds.remat`` and ``T.zero`` are functions, and folders of the same name; whichever is imported first."""
    _run(server, f"import functional_ds.{first}\n{_FUNCTIONS_STAY}", ROOT, tmp_path)


def _public() -> list[tuple[str, object]]:
    folders = [fds.checkpointing, fds.deepspeed, fds.interchange, fds.jobs, fds.memory, fds.pipelining, fds.profiling]
    packages = [*PACKAGES, *folders, comm.algorithms, comm.algorithms.cost]
    return [(f"{package.__name__}.{name}", getattr(package, name)) for package in packages for name in package.__all__]


def test_functions_with_three_parameters_describe_them() -> None:
    """In a section Args of their docstrings."""
    lacking = []
    for name, found in _public():
        if not inspect.isfunction(found):
            continue
        given = inspect.signature(found).parameters.values()
        parameters = [
            each.name for each in given if each.kind is not inspect.Parameter.VAR_KEYWORD or each.annotation is not Never
        ]
        described = re.findall(r"^    (\w+):", (inspect.getdoc(found) or "").partition("\nArgs:\n")[2], re.MULTILINE)
        if len(parameters) >= 3:
            lacking += [f"{name}: {each}" for each in parameters if each not in described]
    assert lacking == []


# -- what an import loads ----------------------------------------------------------------------------------------------

_CORE = """
import sys
import torch, functional_ds as fds

def loaded():
    return {name for name in sys.modules if name.startswith("functional_ds")}

assert len(loaded()) <= 3, loaded()
from functional_ds import comm, transforms as T

def program():
    apply, params = fds.functional(torch.nn.Linear(2, 1))
    step = fds.train_step(lambda params, x: apply(params, x).square().mean(), fds.adamw(0.1))
    step = fds.compose(T.zero(3), T.accumulate(2), T.clip(1.0))(step)
    step(step.init(params), torch.ones(4, 2))

comm.simulate(program, world_size=2)
assert not {"torch._dynamo", "sympy"} & sys.modules.keys(), "over a second that no step needs"
assert len(loaded()) <= 150, len(loaded())
satellites = {name.split(".")[1] for name in loaded() if "." in name}
assert satellites == {"base", "comm", "modules", "optim", "remat", "sharding", "step", "transforms"}, satellites
"""


def test_an_import_loads_what_is_used() -> None:
    """Nothing at first; for a ZeRO-3 step its own modules alone, and nothing of torch's compiler."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    run = subprocess.run([sys.executable, "-c", _CORE], check=False, env=environment, capture_output=True, text=True)
    assert not run.returncode, run.stderr


# -- folders that can be left out --------------------------------------------------------------------------------------

# By folder: what is deleted with it, and the public names that go.
SATELLITES: dict[str, tuple[tuple[str, ...], dict[str, set[str]]]] = {
    "checkpointing": ((), {"": {"checkpointing", "load", "save"}}),
    "cli": ((), {}),
    "compiling": (
        ("transforms/compiled.py",),
        {"": {"CompileReport", "compile_report", "compiling", "jit"}, "transforms": {"compiled"}},
    ),
    "deepspeed": ((), {"": {"deepspeed", "from_ds_config"}}),
    "fitting": ((), {"": {"Checkpoints", "Evaluation", "Logging", "fit", "fitting", "run_job"}}),
    "interchange": ((), {"": {"export", "from_deepspeed", "interchange", "load_params"}}),
    "jobs": ((), {"": {"Job", "jobs", "load_job", "run_job"}}),
    "memory": ((), {"": {"memory", "scaling"}}),
    "parallel": (
        ("transforms/parallel",),
        {"": {"moe", "seq", "tiled", "tp"}, "transforms": {"Experts", "balance", "experts", "sequence", "tensor_parallel"}},
    ),
    "pipelining": (("transforms/pipeline.py",), {"": {"pipelining", "pp", "scaling"}, "transforms": {"pipeline"}}),
    "profiling": ((), {"": {"profile", "profiling", "record"}}),
    "scaling": ((), {"": {"scaling"}}),
    "transforms/offloading": (("transforms/offload.py",), {"transforms": {"OffloadError", "offload", "offloading"}}),
}

_SMALL = """
import sys

sys.meta_path = [each for each in sys.meta_path if "Editable" not in getattr(each, "__name__", "")]
import torch, functional_ds as fds
from functional_ds import comm, transforms as T

assert fds.__file__.startswith({place!r}), fds.__file__
gone = {gone!r}
for package, key in ((fds, ""), (comm, "comm"), (T, "transforms")):
    missing = {{name for name in package.__all__ if not hasattr(package, name)}}
    assert missing == gone.get(key, set()), missing


def program():
    apply, params = fds.functional(torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Tanh(), torch.nn.Linear(3, 1)))
    step = fds.train_step(lambda params, x: apply(params, x).square().mean(), fds.adamw(0.1))
    step = fds.compose(T.mixed_precision("bf16"), T.remat("[02]"), T.zero(3), T.accumulate(2), T.clip(1.0))(step)
    state, metrics = step(step.init(params), torch.ones(4, 2))
    if hasattr(fds, "memory"):
        fds.memory.measured(state)
    return metrics["loss"].item()


assert len(comm.simulate(program, world_size=2)) == 2
"""


# Compiled files are copied too, else every child compiles the whole library; but not those that another process is writing.
_UNFINISHED = shutil.ignore_patterns("*.pyc.*")


@pytest.mark.parametrize("satellite", SATELLITES)
def test_a_satellite_can_be_left_out(satellite: str, server: "subprocess.Popen[str]", tmp_path: Path) -> None:
    """Without its files the library is imported, all names but its own are there, and a step runs on two ranks."""
    files, gone = SATELLITES[satellite]
    place = tmp_path / "functional_ds"
    for top in TOPS:
        target = place if top == "functional_ds" else place / top
        shutil.copytree(ROOT / top, target, dirs_exist_ok=True, ignore=_UNFINISHED)
    shutil.rmtree(place / satellite)
    for name in files:
        shutil.rmtree(place / name) if (place / name).is_dir() else (place / name).unlink()
    _run(server, _SMALL.format(place=str(tmp_path), gone=gone), tmp_path, tmp_path)


def test_an_error_inside_of_a_satellite_is_no_absence(server: "subprocess.Popen[str]", tmp_path: Path) -> None:
    place = tmp_path / "functional_ds"
    for top in TOPS:
        target = place if top == "functional_ds" else place / top
        shutil.copytree(ROOT / top, target, dirs_exist_ok=True, ignore=_UNFINISHED)
    (place / "memory/counting.py").unlink()
    with pytest.raises(AssertionError, match=r"No module named 'functional_ds\.memory\.counting'"):
        _run(server, _SMALL.format(place=str(tmp_path), gone={}), tmp_path, tmp_path)


# An interpreter that has imported what the library imports of others, and forks a child for each program.
_SERVER = """
import os, runpy, sys
import attrs, numpy, optree, torch._dynamo, torch.distributed, tqdm

for line in sys.stdin:
    path, program, errors = eval(line)
    if not (child := os.fork()):
        os.dup2(os.open(errors, os.O_WRONLY | os.O_CREAT), 2)
        os.chdir(path)
        sys.path.insert(0, path)
        runpy.run_path(program)
        sys.exit()
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


@pytest.fixture(scope="module")
def server() -> Iterator[subprocess.Popen[str]]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    words = [sys.executable, "-c", _SERVER]
    with subprocess.Popen(words, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        yield process


def _run(server: "subprocess.Popen[str]", program: str, path: Path, tmp_path: Path) -> None:
    """A Python program in a process of its own, which finds the library's sources in ``path`` first."""
    (tmp_path / "program.py").write_text(program)
    assert server.stdin is not None
    assert server.stdout is not None
    print((str(path), str(tmp_path / "program.py"), str(tmp_path / "errors")), file=server.stdin, flush=True)
    assert server.stdout.readline() == "0\n", (tmp_path / "errors").read_text()
