"""A model from its name on the command line, as a job: a function or class, a Hugging Face config, shapes, or a job file."""

import importlib.util
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from functional_ds.base.disk.files import parse_json, read_text
from functional_ds.cli.words.errors_in_one_line import CommandError, refused
from functional_ds.cli.words.options import existing
from functional_ds.jobs.entries.job_errors import JobError
from functional_ds.jobs.job import Job
from functional_ds.jobs.job_file import load_job
from functional_ds.jobs.job_subject import Subject, subject_of

_SHAPES = "shapes:alone"  # the model of a job that cannot be run


def job_of(name: str, *, seq: int = 1024, allow_import: Sequence[str] = ()) -> Job:
    """The job that trains the model of a name, on one rank, with AdamW and gradients clipped at 1.

    ``package.module:function`` and ``file.py:function`` name a function without arguments, or a class. It gives an
    ``nn.Module``, or a mapping with ``module``, ``loss(model, batch)`` and ``batch(rows)``, perhaps ``tokens`` of a row,
    ``tp_plan``, ``sequence`` and ``experts``. A folder or file with a Hugging Face config gives a
    model for causal language modelling. A JSON file ``{"name": [sizes]}`` or a safetensors file gives shapes alone. A ``.toml``
    or ``.py`` file is a job itself.

    Args:
        name: which.
        seq: tokens of a row, for Hugging Face's models.
        allow_import: modules that a job's file may name, as ``load_job`` takes them.

    Raises:
        CommandError: there is no such thing.
        JobError: the job's file is invalid.
    """
    path = Path(name)
    if path.suffix in (".toml", ".py"):
        return load_job(path, allow_import=allow_import)
    if (path.is_dir() and (path / "config.json").is_file()) or path.name == "config.json":
        folder = path if path.is_dir() else path.parent
        if not (folder / "config.json").is_file():
            raise CommandError(f"MODEL: there is no file {path}")
        return _job({"huggingface": {"config": str(folder)}}, data={"rows": 1, "context": seq})
    if path.suffix in (".json", ".safetensors") or path.is_dir():
        if not path.exists():
            raise CommandError(f"MODEL: there is no file {name}")
        return _job({_SHAPES: {"file": name}})
    head, colon, attribute = name.rpartition(":")
    if not colon or not head or not attribute:
        raise CommandError(
            f"MODEL: {name!r} is neither a file nor 'module:function'; name a function, a job's file, a Hugging Face "
            "config.json, or a file of shapes (.json, .safetensors)"
        )
    if not head.endswith(".py"):
        return _job(name, allow_import=(head,))
    file = existing(head, option="MODEL")
    return _job(f"{file.stem}:{attribute}", folder=str(file.parent))


def _job(model: Any, *, data: Any = None, **more: Any) -> Job:
    return Job(model=model, steps=100, strategy=({"clip": 1.0},), optimizer={"adamw": 1e-3}, data=data or {"rows": 1}, **more)


def shapes_alone(job: Job, subject: Subject) -> bool:
    """Whether only the shapes of a job's model are known, so that it cannot be run."""
    return job.model.name == _SHAPES or (job.file is None and subject.batches is None and subject.config is None)


def planned(job: Job) -> Subject:
    """What a job trains, without values.

    A user's module without ``loss`` and ``batch`` is a model for tokens in a job's file; on the command line only its shapes
    are used.

    Raises:
        CommandError: the model is unsupported, or building it raises an error.
    """
    if job.model.name == _SHAPES:
        name = job.model.arguments["file"]
        return Subject(name, _shapes(Path(name)))
    if job.model.name == "huggingface" and importlib.util.find_spec("transformers") is None:
        raise CommandError("MODEL: a Hugging Face config needs transformers: pip install transformers")
    try:
        subject = subject_of(job, device="meta")
    except JobError as error:
        raise CommandError(f"MODEL: {error}") from error
    except Exception as error:
        raise CommandError(f"MODEL: {job.model.name} raised {type(error).__name__}: {error}") from error
    return Subject(subject.name, subject.params) if shapes_alone(job, subject) else subject


def _shapes(path: Path) -> dict[str, Tensor]:
    if path.suffix == ".json" and not path.name.endswith(".index.json"):
        return _written(path)
    from functional_ds.interchange.load_params import open_files  # may be left out

    with refused("MODEL", OSError, ValueError, ImportError):
        return {name: torch.empty(x.shape, dtype=x.dtype, device="meta") for name, x in open_files(path).tensors.items()}


def _written(path: Path) -> dict[str, Tensor]:
    with refused(f"MODEL: {path} is not JSON", OSError, ValueError):
        rows = parse_json(read_text(path))
    if not isinstance(rows, dict) or not rows:
        raise CommandError(
            f'MODEL: {path} should be {{"name": [sizes]}}, or {{"name": {{"shape": [sizes], "dtype": "float32"}}}}'
        )
    params = {}
    for name, row in rows.items():
        shape, word = (row.get("shape"), row.get("dtype", "float32")) if isinstance(row, dict) else (row, "float32")
        dtype = getattr(torch, str(word), None)
        if not isinstance(shape, list) or not all(type(side) is int and side >= 0 for side in shape):
            raise CommandError(f"MODEL: {path}: {name!r} has the shape {shape!r}, which is not a list of sizes")
        if not isinstance(dtype, torch.dtype):
            raise CommandError(f"MODEL: {path}: {name!r} has the dtype {word!r}, which torch does not have")
        if math.prod(shape) * dtype.itemsize >= 2**63:
            raise CommandError(f"MODEL: {path}: {name!r} has the shape {shape!r}, which no memory holds")
        params[name] = torch.empty(shape, dtype=dtype, device="meta")
    return params
