"""Finds modules by their paths in DeepSpeed, and says why one is missing."""

import importlib.abc
import importlib.machinery
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import attrs

from .api_names import is_deepspeeds, module_at, why_missing


@attrs.frozen
class ModuleFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds DeepSpeed's modules under a package's name.

    A missing one is an ImportError that explains why, or suggests the nearest one. ``from module import name`` asks here for a
    name that the module lacks, too.
    """

    package: str

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """The spec of the package or a part of it; None for other modules.

        Raises:
            ModuleNotFoundError: DeepSpeed's module, or one near it, is missing.
        """
        inner = self._inner(fullname)
        if inner is None or not is_deepspeeds(inner):
            return None
        if module_at(inner) is None:
            raise ModuleNotFoundError(f"deepspeed.{inner} is not in functional_ds.deepspeed: {why_missing(inner)}")
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def _inner(self, fullname: str) -> str | None:
        """The name within the package; None for other modules."""
        package, dot, inner = fullname.partition(f"{self.package}.")
        return "" if fullname == self.package else inner if dot and not package else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        """The module itself, unchanged under its own name."""
        inner = self._inner(spec.name)
        module = None if inner is None else module_at(inner)
        if module is None:
            return None
        spec.loader_state = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Restores the module's own spec, which the import system has replaced; there is nothing to run."""
        spec: Any = module.__spec__
        if spec is not None and spec.loader is self:
            module.__spec__ = spec.loader_state
