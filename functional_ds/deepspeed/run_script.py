"""Runs a script in which the name ``deepspeed`` means ``functional_ds.deepspeed``."""

import importlib.metadata
import os
import runpy
import socket
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from .api_names import VERSION
from .module_finder import ModuleFinder

_USAGE = """usage: python -m functional_ds.deepspeed [--local_rank] script.py [arguments]
       python -m functional_ds.deepspeed [--local_rank] -m module [arguments]

Runs an unmodified DeepSpeed script, with functional_ds.deepspeed in place of deepspeed. On several processes:
       torchrun --nproc-per-node 2 -m functional_ds.deepspeed script.py [arguments]

--local_rank appends --local_rank=N to the script's arguments, as DeepSpeed's launcher does."""


class DeepSpeedMetadata(importlib.metadata.Distribution):
    """The metadata of a package ``deepspeed`` of the version whose names are here."""

    def read_text(self, filename: str) -> str | None:
        """Its name and version."""
        return f"Metadata-Version: 2.1\nName: deepspeed\nVersion: {VERSION}\n" if filename == "METADATA" else None

    def locate_file(self, path: Any) -> Any:
        """Raises an error: there are no files.

        Raises:
            FileNotFoundError: always.
        """
        raise FileNotFoundError(f"{path}: functional_ds.deepspeed stands for deepspeed, and has none of its files")


class DeepSpeedFinder(ModuleFinder):
    """Finds ``deepspeed``, its sub-modules and its distribution in this library."""

    def find_distributions(self, context: importlib.metadata.DistributionFinder.Context) -> Iterable["DeepSpeedMetadata"]:
        """The distribution of ``deepspeed`` for ``importlib.metadata``: libraries ask for its version before they import it."""
        return [DeepSpeedMetadata()] if (context.name or "deepspeed").lower() == "deepspeed" else []


def main(arguments: Sequence[str]) -> None:
    """Runs the script or module that the arguments name.

    Raises:
        SystemExit: there is none, or by the script.
    """
    rest = list(arguments)
    adds_rank = bool(rest) and rest[0] == "--local_rank"
    rest = rest[adds_rank:]
    as_module = bool(rest) and rest[0] == "-m"
    rest = rest[as_module:]
    if not rest or rest[0] in ("-h", "--help") or rest[0].startswith("-"):
        sys.stdout.write(f"{_USAGE}\n")
        raise SystemExit(0 if rest and rest[0] in ("-h", "--help") else 2)
    if not as_module and not Path(rest[0]).exists():
        sys.stderr.write(f"{rest[0]}: there is no such script\n")
        raise SystemExit(2)
    _set_environment()
    if adds_rank:
        rest.append(f"--local_rank={os.environ['LOCAL_RANK']}")
    sys.meta_path.insert(0, DeepSpeedFinder("deepspeed"))
    sys.argv = rest
    if as_module:
        sys.path.insert(0, str(Path.cwd()))
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    else:
        sys.path.insert(0, str(Path(rest[0]).resolve().parent))
        runpy.run_path(rest[0], run_name="__main__")


def _set_environment() -> None:
    """Sets what a launcher of one process would, unless a launcher has."""
    if "RANK" not in os.environ and "WORLD_SIZE" not in os.environ and "OMPI_COMM_WORLD_RANK" not in os.environ:
        os.environ.update(RANK="0", WORLD_SIZE="1")
        os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
        os.environ.setdefault("MASTER_PORT", str(_free_port()))
    os.environ.setdefault("LOCAL_RANK", os.environ.get("OMPI_COMM_WORLD_LOCAL_RANK", "0"))


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port: int = one.getsockname()[1]
        return port
