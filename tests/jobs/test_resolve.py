"""A job names functions of its own folder, of torch.nn and of the library; more only where its reader allows it."""

import os
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import functional_ds as fds
from functional_ds.jobs import Job, JobError
from functional_ds.jobs.resolve import LIBRARY, user_object
from tests.planting import Bug, planted

MODELS = """
import os
from torch import nn

def model(width=4):
    return nn.Sequential(nn.Embedding(256, width), nn.Linear(width, 256))
"""


def job(folder: Path, *, model: Any = "models:model", **more: Any) -> Job:
    """A job of a file in this folder."""
    data = {"model": model, "steps": 1, "optimizer": {"sgd": 0.1}, "data": {"rows": 2, "context": 4}, **more}
    file = folder / "job.toml"
    (folder / "models.py").write_text(MODELS)
    file.write_text(Job(folder=str(folder), **data).to_toml())
    return fds.load_job(file)


HARMFUL = [
    "os:system",
    "posix:mkdir",
    "builtins:exec",
    "subprocess:run",
    "runpy:run_path",
    "pickle:loads",
    "pathlib:Path.unlink",
    "torch:load",
    "torch:os.system",
    "torch.hub:load",
    "torch.utils.cpp_extension:load_inline",
    "torch.nn:Module.__init_subclass__",
    "torch.nn.modules.module:torch.load",
    "torch.nn.functional:importlib.import_module",
    "torch.optim.optimizer:functools.reduce",
    "functional_ds:load_job",
    "functional_ds:jobs.load_job",
    "functional_ds:export",
    "functional_ds:comm.spawn",
    "functional_ds.comm:spawn",
    "functional_ds.base.disk.files:write_synced",
    "functional_ds.deepspeed.run_script:main",
    "functional_ds.cli.entry:main",
    "functional_ds.transforms.offloading.files:Path.unlink",
    "functional_ds.transforms.offloading.files:os.unlink",
    "functional_ds.transforms:__loader__.set_data",
    "models:os.system",
    "models:model.__globals__.clear",
    "models:__builtins__.get",
]


@pytest.mark.parametrize("name", HARMFUL)
def test_harmful_functions_are_not_called(tmp_path: Path, name: str) -> None:
    before = set(sys.modules)
    with pytest.raises(
        JobError, match=r"model\.\S+: a job may not name .* pass allow_import=\['[a-z_.]+'\], or --allow-import"
    ):
        fds.jobs.check_job(job(tmp_path, model={name: {}}))
    root = name.partition(":")[0]
    assert root in before or root not in sys.modules or root.startswith(("torch.", "functional_ds.")) or root == "models"


@given(st.sampled_from(["model", "loss", "strategy", "optimizer", "schedule", "data.text"]))
def test_no_entry_names_more(entry: str) -> None:
    least = Job(model="torch.nn:Identity", steps=1, optimizer={"sgd": 0.1}, data={"context": 4})
    found = least.changed({entry: ["os:system"] if entry == "strategy" else "os:system"})
    with pytest.raises(JobError, match=rf"{entry}\.os:system: a job may not name 'os:system'"):
        fds.jobs.check_job(found)


def test_no_argument_names_more(tmp_path: Path) -> None:
    with pytest.raises(JobError, match=r"model\.models:model\.width: a job may not name 'os:getcwd'"):
        fds.jobs.check_job(job(tmp_path, model={"models:model": {"width": "os:getcwd"}}))


def test_a_file_cannot_take_another_folder_for_its_own(tmp_path: Path) -> None:
    elsewhere, here = tmp_path / "elsewhere", tmp_path / "here"
    elsewhere.mkdir(), here.mkdir()
    (elsewhere / "models.py").write_text("raise SystemExit('it ran')")
    found = job(here)
    stray = fds.load_job(found.file, {"folder": str(elsewhere)})
    with pytest.raises(JobError, match="a job may not name 'models:model'"):
        fds.jobs.check_job(stray)
    with pytest.raises(SystemExit, match="it ran"):
        fds.jobs.check_job(fds.load_job(found.file, {"folder": str(elsewhere)}, allow_import=["models"]))
    with pytest.raises(SystemExit, match="it ran"):  # a program says itself which folder it trusts
        fds.jobs.check_job(Job(model="models:model", steps=1, optimizer={"sgd": 0.1}, folder=str(elsewhere)))


def test_what_a_reader_allows_is_named(tmp_path: Path) -> None:
    found = job(tmp_path, model={"os.path:join": {}})
    with pytest.raises(JobError, match=r"allow_import=\['os\.path'\]"):
        fds.jobs.check_job(found)
    assert user_object("os.path:join", fds.load_job(tmp_path / "job.toml", allow_import=["os"])) is os.path.join
    kept = fds.load_job(tmp_path / "job.toml", allow_import=["os.path"]).changed({"steps": 2})
    assert user_object("os.path:join", kept) is os.path.join
    with pytest.raises(JobError):
        user_object("os:getcwd", kept)
    assert "allow_import" not in kept.to_toml()
    with pytest.raises(TypeError, match=r"allow_import='os' must be a list"):
        fds.load_job(tmp_path / "job.toml", allow_import="os")


def test_a_file_cannot_allow_itself_more(tmp_path: Path) -> None:
    (tmp_path / "job.toml").write_text('steps = 1\nmodel = "os:getcwd"\noptimizer = {sgd = 0.1}\nallow_import = ["os"]\n')
    with pytest.raises(JobError, match=r"allow_import = .*: there is no such entry"):
        fds.load_job(tmp_path / "job.toml")


@pytest.mark.parametrize(
    "name",
    [
        "torch.nn:Flatten",
        "torch.nn.functional:cross_entropy",
        "torch.nn.functional:gelu",
        "torch.nn.functional:softplus",
        "torch.nn:functional.relu",
        "torch.optim:SGD",
        "functional_ds:adamw",
        "functional_ds:optim.sgd.sgd",
        "functional_ds.transforms:clip",
        "functional_ds.comm.codecs:Cast",
        "functional_ds.sharding.grouping:by_leaf",
        "models:model",
        "package.inner:made",
        "package:made",
    ],
)
def test_the_folder_torch_and_the_library_are_named(tmp_path: Path, name: str) -> None:
    (tmp_path / "package").mkdir()
    (tmp_path / "package/inner.py").write_text("made = 1")
    (tmp_path / "package/__init__.py").write_text("from .inner import made")
    user_object(name, job(tmp_path))


def test_a_file_with_an_installed_modules_name_is_the_folders(tmp_path: Path) -> None:
    """Also in a folder with an installed package's name; nothing of what is installed is named by it."""
    (tmp_path / "json").mkdir()
    (tmp_path / "json/tool.py").write_text("main = 'mine'")
    (tmp_path / "time.py").write_text("sleep = 'mine'")
    found = job(tmp_path)
    assert user_object("json.tool:main", found) == user_object("time:sleep", found) == "mine"
    with pytest.raises(JobError, match="a job may not name 'json:loads'"):
        user_object("json:loads", found)


@pytest.mark.parametrize("module", ["../models", "/etc/models", "a b", ".", "models.", ""])
def test_what_is_no_modules_name(tmp_path: Path, module: str) -> None:
    with pytest.raises(JobError, match="is not a module's name"):
        user_object(f"{module}:model", job(tmp_path))


def test_the_modules_that_are_listed_exist() -> None:
    for name in LIBRARY:
        assert name in sys.modules or name == "torch._C._nn" or __import__(name)


def test_a_run_is_what_it_was(tmp_path: Path) -> None:
    assert isinstance(fds.jobs.prepare(job(tmp_path)).apply.module, nn.Module)
    assert fds.run_job(job(tmp_path)).done == 1


BUGS = [
    (
        Bug("modules lead to others", "jobs.resolve:user_object", "not _may_import(target.__name__, job)", "False"),
        "models:os.getcwd",
    ),
    (Bug("all of torch is named", "jobs.resolve:user_object", "_is_of_library(target)", "True"), "functional_ds:load_job"),
]


@pytest.mark.parametrize(("bug", "name"), BUGS, ids=[bug.name for bug, _ in BUGS])
def test_planted(tmp_path: Path, bug: Bug, name: str) -> None:
    with planted(bug), pytest.raises((AssertionError, pytest.fail.Exception)):
        test_harmful_functions_are_not_called(tmp_path, name)


def test_planted_imports(tmp_path: Path) -> None:
    """A module that is refused runs if its name is looked at too late."""
    bug = Bug("any module is imported", "jobs.resolve:_module", "_may_import(module_name, job)", "True")
    with planted(bug), pytest.raises(SystemExit):
        test_a_file_cannot_take_another_folder_for_its_own(tmp_path)
