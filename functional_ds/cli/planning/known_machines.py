"""Machines by name: data sheets, files, and this one."""

import json
import os
from pathlib import Path

import attrs
import torch

from functional_ds.base.files import parse_json, read_text
from functional_ds.cli.words.errors_in_one_line import CommandError
from functional_ds.scaling.machine import Machine

from .microbenchmarks import measured_here

__all__ = ["MACHINES", "machine_of"]

# Data sheets' dense rates; links are NVLink's in one direction.
MACHINES = {
    "a100-40gb": Machine("A100 40 GB", 312e12, 156e12, 1.555e12, 300e9, memory=40 * 10**9),
    "a100-80gb": Machine("A100 80 GB", 312e12, 156e12, 2.039e12, 300e9, memory=80 * 10**9),
    "h100": Machine("H100 SXM 80 GB", 989e12, 494e12, 3.35e12, 450e9, memory=80 * 10**9),
    "h200": Machine("H200 SXM 141 GB", 989e12, 494e12, 4.8e12, 450e9, memory=141 * 10**9),
}


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
