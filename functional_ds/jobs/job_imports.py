"""Which modules a job may name, and what it names in them."""

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from types import BuiltinFunctionType, ModuleType
from typing import Any

from .job import Job
from .job_errors import JobError, nearest

__all__ = ["LIBRARY", "user_object"]

# Functions of which models, losses and steps are made. Others of torch and of this library run files, write files or unpickle.
LIBRARY = (
    "functional_ds.base.weighted",
    "functional_ds.comm.compression",
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
    """What "module:name" names in a job.

    A job is data, and may come from elsewhere. So it names functions of the files beside it, or of ``LIBRARY``, unless
    ``job.allow_import`` has the module: an import runs a module, and many functions do harm with the right argument.

    Raises:
        JobError: there is no such module, or it has no such name; the job may not name it.

    >>> user_object("os:system", Job(model="a:B", steps=1, optimizer={"sgd": 0.1}))
    Traceback (most recent call last):
        ...
    functional_ds.jobs.job_errors.JobError: a job may not name 'os:system' unless its reader allows it: ...
    """
    module_name, _, attribute = name.partition(":")
    found: Any = _module(module_name, name, job)
    own = _is_own(found, job)
    for part in attribute.split("."):
        if not hasattr(found, part):
            public = [each for each in vars(found) if not each.startswith("_")] if hasattr(found, "__dict__") else []
            raise JobError(f"{module_name} has no {part!r}" + (f"; {nearest(part, public)}" if public else ""))
        found = getattr(found, part)
        if part.startswith("__") or (isinstance(found, ModuleType) and not _may_import(found.__name__, job)):
            raise _refused(name, found.__name__ if isinstance(found, ModuleType) else module_name, job)
    if not (own or _is_within(module_name, job.allow_import) or _is_of_library(found)):
        raise _refused(name, module_name, job)
    return found


def _module(module_name: str, name: str, job: Job) -> ModuleType:
    parts = module_name.split(".")
    if not all(part.isidentifier() for part in parts):
        raise JobError(f"{module_name!r} is no module's name; write module:function")
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


# -- what may be named ---------------------------------------------------------------------------------------------------


def _trusted(job: Job) -> Path:
    """A file cannot say which folder is its own; a job that is built in Python can."""
    return (Path(job.folder) if job.file is None else Path(job.file).parent).resolve()


def _is_in(file: Path, job: Job) -> bool:
    return file.parent.resolve().is_relative_to(_trusted(job))


def _is_own(module: ModuleType, job: Job) -> bool:
    file = getattr(module, "__file__", None)
    return file is not None and _is_in(Path(file), job)


def _is_within(module: str, packages: Sequence[str]) -> bool:
    return any(module == each or module.startswith(f"{each}.") for each in packages)


def _may_import(module: str, job: Job) -> bool:
    return module in _INDICES or _is_within(module, (*LIBRARY, *job.allow_import)) or module == "functional_ds.comm"


def _is_of_library(found: Any) -> bool:
    """Whether a function, class or record is defined in one of the library's modules."""
    module = getattr(found, "__module__", None) or type(found).__module__
    of_tensors = module == "torch" and isinstance(found, BuiltinFunctionType)  # others of torch.nn.functional
    return of_tensors or _is_within(module, LIBRARY)


# -- imports -------------------------------------------------------------------------------------------------------------


def _file(parts: Sequence[str], folder: str) -> Path | None:
    place = Path(folder, *parts)
    return next((file for file in (place.with_suffix(".py"), place / "__init__.py") if file.is_file()), None)


def _is_free(parts: Sequence[str], file: Path) -> bool:
    """Whether importing the name runs this file: no other module has the name, nor its package's."""
    known = [sys.modules.get(".".join(parts[:count])) for count in (1, len(parts))]
    root = file.resolve().parents[len(parts) - (file.name != "__init__.py")]
    return all(each is None or _is_under(each, root) for each in known)


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
    """A module whose name another one has already."""
    alias = f"{name} of {file.parent.resolve()}"
    if alias not in sys.modules:
        spec = spec_from_file_location(alias, file)
        if spec is None or spec.loader is None:
            raise ModuleNotFoundError(name=name)
        module = module_from_spec(spec)
        sys.modules[alias] = module
        try:
            spec.loader.exec_module(module)
        except BaseException:  # as an import does: the next one shall not find half a module
            del sys.modules[alias]
            raise
    return sys.modules[alias]
