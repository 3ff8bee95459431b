"""``CallEntry``: a function's name with its arguments, as an entry of a job."""

import inspect
from collections.abc import Mapping
from importlib import import_module
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin

import attrs
from torch import Tensor

from .job_errors import JobError, nearest, within


def plain(value: Any) -> Any:
    """A value as files have it: tuples as lists, paths as strings, entries as tables."""
    if isinstance(value, CallEntry):
        return value.to_plain()
    if isinstance(value, Mapping):
        return {str(name): plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return str(value) if hasattr(value, "__fspath__") else value


@attrs.frozen
class CallEntry:
    """A call in a job: ``{zero = {stage = 3}}`` is ``T.zero(stage=3)``.

    >>> CallEntry("zero", {"stage": 3})
    CallEntry('zero', {'stage': 3})

    Attributes:
        name: a function's name, or your "module:function".
        arguments: by name, as plain data.
    """

    name: str
    arguments: dict[str, Any] = attrs.field(factory=dict, converter=plain)

    def to_plain(self) -> dict[str, Any]:
        """A table with one key."""
        return {self.name: plain(self.arguments)}

    def __repr__(self) -> str:
        return f"CallEntry({self.name!r}{f', {self.arguments!r}' if self.arguments else ''})"


_OWN = "functional_ds.jobs.job_model"


@attrs.frozen
class CallKind:
    """Which functions an entry may name.

    Attributes:
        what: what such a function makes.
        place: the module that has them by name; None if all are the user's.
        names: those that may be named.
        instead: other public names, and what to use instead of them.
        job_names: names in ``functional_ds.jobs.job_model``, whose arguments depend on the job.
    """

    what: str
    place: str | None = None
    names: tuple[str, ...] = ()
    instead: dict[str, str] = attrs.field(factory=dict)
    job_names: tuple[str, ...] = ()

    def function(self, name: str) -> Any:
        """The function of that name.

        Raises:
            JobError: there is none, or this installation lacks it.
        """
        if name in self.instead:
            raise JobError(self.instead[name])
        if name not in self.names or self.place is None:
            raise JobError(f"there is no {self.what} {name!r}; {nearest(name, self.names)}, or module:function of your own")
        function = getattr(import_module(_OWN if name in self.job_names else self.place), name, None)
        if function is None:
            raise JobError(f"this installation is without {name!r}")
        return function


KINDS = {
    "transform": CallKind(
        "transform",
        "functional_ds.transforms",
        (
            *("accumulate", "balance", "clip", "compressed_gradients", "ema", "experts", "local_gradients", "mixed_precision"),
            *("offload", "pipeline", "remat", "sequence", "tensor_parallel", "zero"),
        ),
        {
            "replicated": "it takes a function; name a transform of your own as module:function",
            "schedule": "the schedule has an entry of its own: [schedule.warmup_cosine]",
        },
        job_names=("pipeline",),
    ),
    "optimizer": CallKind(
        "optimizer",
        "functional_ds",
        ("adagrad", "adam", "adamw", "lamb", "lion", "muon", "one_bit_adam", "param_groups", "sgd", "zero_one_adam"),
    ),
    "schedule": CallKind(
        "schedule", "functional_ds.transforms", ("one_cycle", "range_test", "warmup", "warmup_cosine", "warmup_decay")
    ),
    "codec": CallKind("codec", "functional_ds.comm.codecs", ("Blocks", "Cast", "OneBit", "TopK")),
    "unit partition": CallKind(
        "unit partition", "functional_ds.sharding.grouping", ("by_block", "by_bytes", "by_leaf", "single_unit")
    ),
    "model": CallKind("model", _OWN, ("huggingface",)),
    "loss": CallKind("loss", _OWN, ("next_token", "vocab_parallel")),
    "text": CallKind("text"),
}


def call_entry(value: Any, kind: str) -> CallEntry:
    """An entry as it is written, with its arguments by name.

    Args:
        value: ``"adamw"``, ``{"zero": 3}``, ``{"zero": {"stage": 3}}``, or a ``CallEntry``.
        kind: one of ``KINDS``.

    Raises:
        JobError: the name is unknown, or an argument is, or has another type, or one is missing.

    >>> call_entry({"zero": 3}, "transform")
    CallEntry('zero', {'stage': 3})
    """
    name, given = _named(value, kind)
    if ":" in name:
        if not isinstance(given, Mapping):
            raise JobError("give its arguments by name, in a table", entry=name, value=given)
        return CallEntry(name, dict(given))
    function = KINDS[kind].function(name)
    arguments = dict(given) if isinstance(given, Mapping) else {next(iter(parameters_of(function))): given}
    with within(name):
        check_arguments(function, arguments, partial=kind in ("loss", "unit partition"))  # these get more when they are called
    return CallEntry(name, arguments)


def _named(value: Any, kind: str) -> tuple[str, Any]:
    if isinstance(value, CallEntry):
        return value.name, value.arguments
    if isinstance(value, str):
        return value, {}
    if isinstance(value, Mapping) and len(value) == 1:
        name, given = next(iter(value.items()))
        return str(name), given
    raise JobError(f"it must name one {KINDS[kind].what} with its arguments, as {{name = {{argument = value}}}}", value=value)


def parameters_of(function: Any) -> Mapping[str, inspect.Parameter]:
    """A function's parameters by name, with annotations as objects if they can be resolved."""
    try:
        return inspect.signature(function, eval_str=True).parameters
    except (NameError, SyntaxError, TypeError):
        return inspect.signature(function).parameters


def check_arguments(function: Any, arguments: Mapping[str, Any], *, partial: bool = False) -> None:
    """Raises an error for unknown, missing (unless ``partial``) or wrongly typed arguments of a function."""
    parameters = parameters_of(function)
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values()):
        return
    for name, value in arguments.items():
        if name not in parameters:
            raise JobError(f"there is no such argument; {nearest(name, list(parameters))}", entry=name, value=value)
        wanted = _mismatch(value, parameters[name].annotation)
        if wanted:
            raise JobError(f"it must be {wanted}", entry=name, value=value)
    lacking = [
        name
        for name, parameter in parameters.items()
        if parameter.default is inspect.Parameter.empty and name not in arguments and parameter.kind.name[:3] != "VAR"
    ]
    if lacking and not partial:
        raise JobError(f"it needs {', '.join(lacking)}")


_WORDS = {int: "a whole number", float: "a number", str: "a string", bool: "true or false", type(None): "left out"}


def _mismatch(value: Any, annotation: Any) -> str | None:
    """What the value must be instead; None if it matches the annotation, or only the function can tell."""
    origin = get_origin(annotation)
    if origin is Literal:
        words = get_args(annotation)
        matches = value in words and type(value) in {type(word) for word in words}
        return None if matches else f"one of {', '.join(map(repr, words))}"
    if origin in (Union, UnionType):
        mismatches = [_mismatch(value, choice) for choice in get_args(annotation) if choice is not Tensor]  # no file has one
        named = dict.fromkeys(mismatch for mismatch in mismatches if mismatch and mismatch != "left out")
        return None if None in mismatches else " or ".join(named)
    if origin is tuple and isinstance(value, list | tuple):
        parts = get_args(annotation)
        fits = len(parts) == len(value) and not any(_mismatch(*pair) for pair in zip(value, parts, strict=True))
        return None if fits else f"{len(parts)} values, each {_WORDS.get(parts[0], 'as documented')}"
    if origin is tuple:
        return "a list"
    if annotation is float:
        return None if type(value) in (int, float) else _WORDS[float]
    if annotation in (int, bool, str):
        return None if type(value) is annotation else _WORDS[annotation]
    if annotation is type(None):
        return None if value is None else "left out"
    return None
