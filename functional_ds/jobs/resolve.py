"""Resolves a job's calls: functions of this library or of the user, with their arguments as objects."""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from types import BuiltinFunctionType, ModuleType, UnionType
from typing import Any, Protocol, Union, get_args, get_origin

import attrs
import torch

from functional_ds import comm
from functional_ds.jobs.entries.call_entry import KINDS, CallEntry, call_entry, check_arguments, parameters_of
from functional_ds.jobs.entries.job_errors import JobError, joined, nearest, within
from functional_ds.sharding.grouping import UnitPolicy

from .job import Job


class ModelWords(Protocol):
    """What a model specifies about itself, and the stages that it is split into."""

    @property
    def sequence(self) -> Mapping[str, Any] | None: ...
    @property
    def experts(self) -> str | None: ...
    @property
    def stages(self) -> Any: ...
    def layer_plan(self) -> Mapping[str, Any]: ...


@attrs.frozen
class Surroundings:
    """What arguments may refer to.

    Attributes:
        mesh: whose axes are groups; None before there are ranks.
        subject: for what the model specifies about itself; None before it is built.
    """

    mesh: comm.Mesh | None = None
    subject: ModelWords | None = None


def made(call: CallEntry, kind: str, job: Job, *, entry: str, around: Surroundings = Surroundings(), **given: Any) -> Any:
    """The result of a call in a job.

    Args:
        call: the entry.
        kind: one of ``KINDS``.
        job: for its folder and seed.
        entry: the entry's place in the job.
        around: what arguments may refer to.
        given: arguments to pass if the function has parameters of these names, unless the job has others.

    Raises:
        JobError: there is no such function, or it does not accept these arguments.
    """
    with within(joined(entry, call.name), value=call.arguments):
        function, arguments = function_and_arguments(call, kind, job, around)
        parameters = parameters_of(function)
        extra = {name: value for name, value in given.items() if name in parameters and name not in arguments}
        return function(**arguments, **extra)


def function_and_arguments(
    call: CallEntry, kind: str, job: Job, around: Surroundings
) -> tuple[Callable[..., Any], dict[str, Any]]:
    """The function that a call names, and its arguments as objects, without calling it."""
    if ":" in call.name:
        function = user_object(call.name, job)
        if not callable(function):
            raise JobError("it is not a function or class")
        check_arguments(function, call.arguments, partial=True)
    else:
        function = KINDS[kind].function(call.name)
    parameters = parameters_of(function)
    resolved = {}
    for name, value in call.arguments.items():
        annotation = parameters[name].annotation if name in parameters else Any
        with within(name, value=value):
            resolved[name] = _argument(name, value, annotation, job, around)
    return function, resolved


def _argument(name: str, value: Any, annotation: Any, job: Job, around: Surroundings) -> Any:
    kinds = get_args(annotation) if get_origin(annotation) in (Union, UnionType) else (annotation,)
    record = next((cls for cls in kinds if isinstance(cls, type) and attrs.has(cls)), None)
    if comm.Group in kinds and isinstance(value, str | list):
        return _group(value, around)
    if torch.dtype in kinds and isinstance(value, str):
        return _dtype(value)
    if UnitPolicy in kinds and isinstance(value, str | Mapping) and not _is_reference(value):
        unit = call_entry(value, "unit partition")
        function, arguments = function_and_arguments(unit, "unit partition", job, around)
        return function(**arguments) if unit.name == "by_bytes" else function
    if comm.codecs.Codec in kinds and isinstance(value, str | Mapping):
        return made(call_entry(value, "codec"), "codec", job, entry="")
    if name in ("others", "rules") and isinstance(value, Mapping | str):
        return _optimizers(name, value, job)
    if name == "pattern" and value == "auto":
        return "" if around.subject is None else around.subject.experts
    if name == "plan" and value == "auto":
        return {} if around.subject is None else around.subject.layer_plan()
    if _is_reference(value) and str not in kinds:
        return user_object(value, job)
    if record is not None and isinstance(value, Mapping):
        check_arguments(record, value)
        return record(**value)
    return tuple(value) if isinstance(value, list) else value


def _is_reference(value: Any) -> bool:
    """Whether it names an object of the user's: "module:name"."""
    return isinstance(value, str) and ":" in value


def _group(value: str | list[str], around: Surroundings) -> comm.Group | None:
    axes = [part.strip() for part in value.split(",")] if isinstance(value, str) else value
    if around.mesh is None:
        return None
    unknown = [axis for axis in axes if axis not in around.mesh.axes]
    if unknown:
        known = list(around.mesh.axes)
        raise JobError(f"the job's mesh has no axis {unknown[0]!r}; {nearest(unknown[0], known)}", value=value)
    return around.mesh[tuple(axes)]


_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "fp64": "float64"}


def _dtype(value: str) -> torch.dtype:
    dtype = getattr(torch, _DTYPES.get(value, value), None)
    if not isinstance(dtype, torch.dtype):
        raise JobError(f"there is no dtype {value!r}; use bfloat16, float16 or float32", value=value)
    return dtype


def _optimizers(name: str, value: Any, job: Job) -> Any:
    """Optimizers within an optimizer: for the params that it leaves to others, or by rule."""
    if name == "others":
        return made(call_entry(value, "optimizer"), "optimizer", job, entry="")
    return {rule: made(call_entry(call, "optimizer"), "optimizer", job, entry=str(rule)) for rule, call in value.items()}


# -- what a job may name -----------------------------------------------------------------------------------------------------

# Functions for models, losses and steps. Others of torch and of this library run files, write files or unpickle.
LIBRARY = (
    "functional_ds.base.weighted",
    "functional_ds.comm.codecs",
    "functional_ds.modules",
    "functional_ds.optim",
    "functional_ds.parallel",
    "functional_ds.remat",
    "functional_ds.sharding",
    "functional_ds.step",
    "functional_ds.transforms",
    "torch._C._nn",  # where some of torch.nn.functional comes from
    "torch.nn",
    "torch.optim",
)
_INDICES = ("functional_ds", "torch")  # packages whose public names come from the modules above


def user_object(name: str, job: Job) -> Any:
    """The object that "module:name" refers to in a job.

    A job is data, and may come from elsewhere. So it may only name functions of the files next to it, or of ``LIBRARY``, unless
    ``job.allow_import`` has the module: an import runs a module, and many functions do harm with the right argument.

    Raises:
        JobError: there is no such module, or it has no such name; the job may not name it.

    >>> user_object("os:system", Job(model="a:B", steps=1, optimizer={"sgd": 0.1}))
    Traceback (most recent call last):
        ...
    functional_ds.jobs.entries.job_errors.JobError: a job may not name 'os:system' unless its reader allows it: ...
    """
    module_name, _, attribute = name.partition(":")
    target: Any = _module(module_name, name, job)
    is_own = _is_own(target, job)
    for part in attribute.split("."):
        if not hasattr(target, part):
            public = [member for member in vars(target) if not member.startswith("_")] if hasattr(target, "__dict__") else []
            raise JobError(f"{module_name} has no {part!r}" + (f"; {nearest(part, public)}" if public else ""))
        target = getattr(target, part)
        if part.startswith("__") or (isinstance(target, ModuleType) and not _may_import(target.__name__, job)):
            raise _refused(name, target.__name__ if isinstance(target, ModuleType) else module_name, job)
    if not (is_own or _is_within(module_name, job.allow_import) or _is_of_library(target)):
        raise _refused(name, module_name, job)
    return target


def _module(module_name: str, name: str, job: Job) -> ModuleType:
    parts = module_name.split(".")
    if not all(part.isidentifier() for part in parts):
        raise JobError(f"{module_name!r} is not a module's name; write module:function")
    file = _file(parts, job.folder)
    if not (_may_import(module_name, job) or (file is not None and _is_in(file, job))):
        if file is None and find_spec(parts[0]) is None:
            raise JobError(f"there is no module {parts[0]!r}, neither in {job.folder} nor installed")
        raise _refused(name, module_name, job)
    with _first_on_path(job.folder):
        try:
            return import_module(module_name) if file is None or _is_free(parts, file) else _aside(module_name, file)
        except ModuleNotFoundError as error:
            if error.name is None or not (module_name == error.name or module_name.startswith(f"{error.name}.")):
                raise
            raise JobError(f"there is no module {error.name!r}, neither in {job.folder} nor installed") from None


def _refused(name: str, module: str, job: Job) -> JobError:
    return JobError(
        f"a job may not name {name!r} unless its reader allows it: it names functions of files in {_trusted(job)}, of torch.nn "
        f"and torch.optim, or this library's transforms, optimizers and layers; if you trust what it does with it, pass "
        f"allow_import=[{module!r}], or --allow-import {module}"
    )


def _trusted(job: Job) -> Path:
    """A file cannot specify its own folder; a job that is built in Python can."""
    return (Path(job.folder) if job.file is None else Path(job.file).parent).resolve()


def _is_in(file: Path, job: Job) -> bool:
    return file.parent.resolve().is_relative_to(_trusted(job))


def _is_own(module: ModuleType, job: Job) -> bool:
    file = getattr(module, "__file__", None)
    return file is not None and _is_in(Path(file), job)


def _is_within(module: str, packages: Sequence[str]) -> bool:
    return any(module == package or module.startswith(f"{package}.") for package in packages)


def _may_import(module: str, job: Job) -> bool:
    return module in _INDICES or _is_within(module, (*LIBRARY, *job.allow_import)) or module == "functional_ds.comm"


def _is_of_library(target: Any) -> bool:
    """Whether a function, class or record is defined in one of the library's modules."""
    module = getattr(target, "__module__", None) or type(target).__module__
    of_tensors = module == "torch" and isinstance(target, BuiltinFunctionType)  # others of torch.nn.functional
    return of_tensors or _is_within(module, LIBRARY)


def _file(parts: Sequence[str], folder: str) -> Path | None:
    place = Path(folder, *parts)
    return next((file for file in (place.with_suffix(".py"), place / "__init__.py") if file.is_file()), None)


def _is_free(parts: Sequence[str], file: Path) -> bool:
    """Whether importing the name runs this file: no other module has the name, nor its package's."""
    known = [sys.modules.get(".".join(parts[:count])) for count in (1, len(parts))]
    root = file.resolve().parents[len(parts) - (file.name != "__init__.py")]
    return all(module is None or _is_under(module, root) for module in known)


def _is_under(module: ModuleType, folder: Path) -> bool:
    places = [module.__file__] if getattr(module, "__file__", None) else list(getattr(module, "__path__", []))
    return any(Path(str(place)).resolve().is_relative_to(folder) for place in places)


@contextmanager
def _first_on_path(folder: str) -> Iterator[None]:
    place = str(Path(folder).resolve())
    sys.path.insert(0, place)
    try:
        yield
    finally:
        sys.path.remove(place)


def _aside(name: str, file: Path) -> ModuleType:
    """Loads a module whose name is already taken by another one."""
    alias = f"{name} of {file.parent.resolve()}"
    if alias not in sys.modules:
        spec = spec_from_file_location(alias, file)
        if spec is None or spec.loader is None:
            raise ModuleNotFoundError(name=name)
        module = module_from_spec(spec)
        sys.modules[alias] = module
        try:
            spec.loader.exec_module(module)
        except BaseException:  # as an import does: the next one must not find half a module
            del sys.modules[alias]
            raise
    return sys.modules[alias]
