"""What a job's calls name: functions of this library or of the user's, and their arguments as objects."""

from collections.abc import Callable, Mapping
from importlib import import_module
from types import UnionType
from typing import Any, Union, get_args, get_origin

import attrs
import torch
from torch import nn

from functional_ds import comm
from functional_ds.sharding.grouping import UnitPolicy

from .call_entry import KINDS, CallEntry, call_entry, check_arguments, parameters_of
from .job import Job
from .job_errors import JobError, joined, nearest
from .job_imports import user_object

__all__ = ["Surroundings", "function_and_arguments", "made"]


@attrs.frozen
class Surroundings:
    """What arguments may refer to.

    Attributes:
        mesh: whose axes are groups; None before there are ranks.
        model: for a plan of its modules; None before it is built.
    """

    mesh: comm.Mesh | None = None
    model: nn.Module | None = None


def made(call: CallEntry, kind: str, job: Job, *, entry: str, around: Surroundings = Surroundings(), **given: Any) -> Any:
    """What a call of a job makes.

    Args:
        call: the entry.
        kind: one of ``KINDS``.
        job: for its folder and seed.
        entry: the entry's place in the job.
        around: what arguments may refer to.
        given: arguments that the function gets where it has parameters of these names, unless the job says otherwise.

    Raises:
        JobError: there is no such function, or it refuses its arguments.
    """
    place = joined(entry, call.name)
    try:
        function, arguments = function_and_arguments(call, kind, job, around)
        parameters = parameters_of(function)
        extra = {name: value for name, value in given.items() if name in parameters and name not in arguments}
        return function(**arguments, **extra)
    except JobError as error:
        raise error.within(place) from None
    except (TypeError, ValueError) as error:
        raise JobError(str(error), entry=place, value=call.arguments) from error


def function_and_arguments(
    call: CallEntry, kind: str, job: Job, around: Surroundings
) -> tuple[Callable[..., Any], dict[str, Any]]:
    """The function that a call names, and its arguments as objects, without calling it."""
    if ":" in call.name:
        function = user_object(call.name, job)
        if not callable(function):
            raise JobError("it is no function or class")
        check_arguments(function, call.arguments, partial=True)
    else:
        function = KINDS[kind].function(call.name)
    parameters = parameters_of(function)
    found = {}
    for name, value in call.arguments.items():
        annotation = parameters[name].annotation if name in parameters else Any
        try:
            found[name] = _argument(name, value, annotation, job, around)
        except JobError as error:
            raise error.within(name) from None
        except ValueError as error:
            raise JobError(str(error), entry=name, value=value) from error
    return function, found


def _argument(name: str, value: Any, annotation: Any, job: Job, around: Surroundings) -> Any:
    kinds = get_args(annotation) if get_origin(annotation) in (Union, UnionType) else (annotation,)
    record = next((kind for kind in kinds if isinstance(kind, type) and attrs.has(kind)), None)
    if comm.Group in kinds and isinstance(value, str | list):
        return _group(value, around)
    if torch.dtype in kinds and isinstance(value, str):
        return _dtype(value)
    if UnitPolicy in kinds and isinstance(value, str | Mapping) and not _is_reference(value):
        unit = call_entry(value, "unit partition")
        function, arguments = function_and_arguments(unit, "unit partition", job, around)
        return function(**arguments) if unit.name == "by_bytes" else function
    if comm.Codec in kinds and isinstance(value, str | Mapping):
        return made(call_entry(value, "codec"), "codec", job, entry="")
    if name in ("others", "rules") and isinstance(value, Mapping | str):
        return _optimizers(name, value, job)
    if name == "plan" and value == "auto":
        return _plan_of(around)
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
    found = getattr(torch, _DTYPES.get(value, value), None)
    if not isinstance(found, torch.dtype):
        raise JobError(f"there is no dtype {value!r}; use bfloat16, float16 or float32", value=value)
    return found


def _optimizers(name: str, value: Any, job: Job) -> Any:
    """Optimizers within an optimizer: for the params that it leaves to others, or by rule."""
    if name == "others":
        return made(call_entry(value, "optimizer"), "optimizer", job, entry="")
    return {rule: made(call_entry(each, "optimizer"), "optimizer", job, entry=str(rule)) for rule, each in value.items()}


def _plan_of(around: Surroundings) -> Any:
    if around.model is None:
        return {}
    return import_module("functional_ds.parallel.tensor").plan_of(around.model)
