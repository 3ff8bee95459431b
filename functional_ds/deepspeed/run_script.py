"""Runs a script in which the name ``deepspeed`` means ``functional_ds.deepspeed``."""

import importlib.abc
import importlib.machinery
import importlib.metadata
import os
import runpy
import socket
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from .api_names import VERSION, module_at, why_missing

__all__ = ["DeepSpeedFinder", "main"]

_US = "functional_ds.deepspeed"

_USAGE = """usage: python -m functional_ds.deepspeed [--local_rank] script.py [arguments]
       python -m functional_ds.deepspeed [--local_rank] -m module [arguments]

Runs a DeepSpeed script as it is, with functional_ds.deepspeed in place of deepspeed. On several processes:
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
        raise FileNotFoundError(f"{path}: {_US} stands for deepspeed, and has none of its files")


class DeepSpeedFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds ``deepspeed`` and its sub-modules in this library.

    A missing sub-module is an ImportError that explains why, or suggests the nearest one.
    """

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """The spec of ``deepspeed`` or a part of it; None for other modules."""
        if fullname.startswith(f"{_US}.") and importlib.machinery.PathFinder.find_spec(fullname, path) is None:
            raise _missing(fullname, fullname.removeprefix(f"{_US}."))  # of "from deepspeed.x import y"
        if fullname.partition(".")[0] != "deepspeed":
            return None
        inner = fullname.partition(".")[2]
        if module_at(inner) is None:
            raise _missing(fullname, inner)
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def find_distributions(self, context: importlib.metadata.DistributionFinder.Context) -> Iterable["DeepSpeedMetadata"]:
        """The distribution of ``deepspeed`` for ``importlib.metadata``: libraries ask for its version before they import it."""
        return [DeepSpeedMetadata()] if (context.name or "deepspeed").lower() == "deepspeed" else []

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        """The module itself, unchanged under its own name."""
        held = module_at(spec.name.partition(".")[2])
        if held is None:
            return None
        spec.loader_state = held.module.__spec__
        return held.module

    def exec_module(self, module: ModuleType) -> None:
        """Restores the module's own spec, which the import system has replaced; there is nothing to run."""
        spec: Any = module.__spec__
        if spec is not None and spec.loader is self:
            module.__spec__ = spec.loader_state


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
    sys.meta_path.insert(0, DeepSpeedFinder())
    sys.argv = rest
    if as_module:
        sys.path.insert(0, str(Path.cwd()))
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    else:
        sys.path.insert(0, str(Path(rest[0]).resolve().parent))
        runpy.run_path(rest[0], run_name="__main__")


def _missing(fullname: str, inner: str) -> ImportError:
    return ImportError(f"deepspeed.{inner} is not in {_US}: {why_missing(inner)}", name=fullname)


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
