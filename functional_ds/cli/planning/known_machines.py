"""Machines by name: data sheets, files, and this one."""

import json
import os
from pathlib import Path

import attrs
import torch

from functional_ds.base.files import parse_json, read_text
from functional_ds.cli.words.errors_in_one_line import CommandError
from functional_ds.scaling.machine import MACHINES, Machine

from .microbenchmarks import measured_here

__all__ = ["machine_of"]


def machine_of(name: str, *, ranks: int = 1) -> Machine:
    """A machine by name, by a JSON file of its fields, or ``here``: measured in some seconds.

    Args:
        name: which.
        ranks: of the job; ``here`` measures as many at once as this machine has GPUs or cores, at most.

    Raises:
        CommandError: an unknown name; a file with unknown or missing fields.
    """
    if name == "here":
        places = torch.cuda.device_count() if torch.cuda.is_available() else os.cpu_count() or 1
        return measured_here(min(ranks, places))
    if name in MACHINES:
        return MACHINES[name]
    path = Path(name)
    if not path.is_file():
        raise CommandError(f"--machine: {name!r} is no file, and none of here, {', '.join(MACHINES)}")
    try:
        found = parse_json(read_text(path))
        return Machine(**found)
    except (OSError, json.JSONDecodeError, UnicodeDecodeError, TypeError) as error:
        names = ", ".join(field.name for field in attrs.fields(Machine))
        raise CommandError(f"--machine: {name} should be JSON with {names}: {error}") from error
    except ValueError as error:
        raise CommandError(f"--machine: {error}") from error
