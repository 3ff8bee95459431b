"""Which of DeepSpeed's names exist here: modules by their paths, aliases of them, and unsupported names.

``api_names.toml`` lists them.
"""

import contextlib
import difflib
import importlib
import sys
import tomllib
from collections.abc import Callable, Mapping, Sequence
from importlib.resources import files
from types import MappingProxyType, ModuleType
from typing import Any

from .version_info import version

VERSION = version  # whose names these are
_US = "functional_ds.deepspeed"
ENGINE, PIPELINE_ENGINE = "runtime.engine.DeepSpeedEngine", "runtime.pipe.engine.PipelineEngine"

_TABLE = tomllib.loads(files(_US).joinpath("api_names.toml").read_text(encoding="utf-8"))


def _reasons(names: Mapping[str, str]) -> Mapping[str, str]:
    return MappingProxyType({name: _TABLE["reasons"].get(why, why) for name, why in names.items()})


HERE: tuple[str, ...] = tuple(_TABLE["here"])
ALIASES: Mapping[str, str] = MappingProxyType(_TABLE["aliases"])
INDEXES: Mapping[str, Sequence[str]] = MappingProxyType(_TABLE["indexes"])
_OF_ENGINES = {f"{ENGINE}.{name}": group["why"] for group in _TABLE["engine"] for name in group["names"]}
REFUSED = _reasons(_OF_ENGINES | _TABLE["refused"])  # by the name's or module's path
REST = _reasons(_TABLE["rest"])
BUILDERS: Mapping[str, Mapping[str, str]] = MappingProxyType(_TABLE["builders"])


class IndexModule(ModuleType):
    """A module that looks up its names in other modules."""

    def __init__(self, name: str, package: str, modules: Sequence[str]) -> None:
        super().__init__(name)
        self.__path__ = []  # the import system then asks for names that are missing as for sub-modules
        self._paths = [f"{package}.{module}" for module in modules]

    @property
    def __all__(self) -> list[str]:
        held = (importlib.import_module(module) for module in self._paths)
        return sorted({name for module in held for name in module.__all__})

    def __getattr__(self, name: str) -> Any:
        for path in () if name.startswith("__") else self._paths:
            module = importlib.import_module(path)
            if name in module.__all__ or "__getattr__" in vars(module):
                with contextlib.suppress(AttributeError):
                    return getattr(module, name)
        raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")


def module_at(path: str) -> ModuleType | None:
    """The module for a path of DeepSpeed's, such as "ops.adam.fused_adam"; None if there is none.

    >>> module_at("runtime.pipe.module").__name__
    'functional_ds.deepspeed.pipe'
    """
    if path in INDEXES:
        return IndexModule(f"{_US}.{path}", _US, INDEXES[path])
    target = ALIASES.get(path, path if path in HERE else None)
    if target is None:
        return None
    try:
        return importlib.import_module(f"{_US}.{target}".rstrip("."))
    except ModuleNotFoundError:  # the folder that it stands on is left out of the installation
        return None


def is_deepspeeds(path: str) -> bool:
    """Whether a path belongs to DeepSpeed, whose module, package or refused name it or the path above it is.

    >>> is_deepspeeds("runtime.nothing"), is_deepspeeds("config.from_ds_config")  # the latter is this library's own
    (True, False)
    """
    above = [path.rsplit(".", count)[0] for count in range(path.count(".") + 1)]
    known = (HERE, ALIASES, INDEXES)
    return any(path.rpartition(".")[0] in names for names in known) or any(x in REFUSED or x in REST for x in above)


def why_missing(path: str) -> str:
    """Why a DeepSpeed name does not exist here, or the nearest one that does.

    >>> why_missing("ops.transformer.DeepSpeedTransformerLayer")
    "DeepSpeed's kernels are not included; torch's are used"
    >>> why_missing("ops.adam.FusedAdm")
    'did you mean FusedAdam?'
    """
    words = path.split(".")
    above = [".".join(words[:count]) for count in range(len(words), 0, -1)]
    reason = next((REFUSED[ancestor] for ancestor in above if ancestor in REFUSED), None)
    if reason:
        return reason
    rest = next((REST[ancestor] for ancestor in above if ancestor in REST), None)
    prefix = ".".join(words[:-1])
    parent = module_at(prefix)
    if parent is None:
        near = difflib.get_close_matches(
            path, [module_path for module_path in (*HERE, *ALIASES, *INDEXES) if module_path], 1, 0.8 if rest else 0.0
        )
        return f"the nearest module is deepspeed.{near[0]}" if near else str(rest)
    below = [
        full_name.removeprefix(f"{prefix}.")
        for full_name in (*HERE, *ALIASES, *INDEXES)
        if full_name.startswith(f"{prefix}.") or not prefix
    ]
    names = [*getattr(parent, "__all__", ()), *(name for name in below if name and "." not in name)]
    near = difflib.get_close_matches(words[-1], set(names) - {words[-1]}, 1, 0.8 if rest else 0.6)
    if near:
        return f"did you mean {near[0]}?"
    return rest or f"deepspeed{'.' * bool(prefix)}{prefix} has {', '.join(sorted(set(names)))}"


def answer_missing_names() -> None:
    """Sets ``__getattr__`` of the loaded modules: for sub-modules and aliases, and for errors about missing names."""
    for path in (*HERE, "runtime.zero"):
        module = sys.modules.get(f"{_US}.{ALIASES.get(path, path)}".rstrip("."))
        if module is not None:
            vars(module)["__getattr__"] = _answers(path, vars(module).get("__getattr__"))
            vars(module).setdefault("__path__", [])  # "from module import name" then asks the finder for missing names


def _answers(path: str, getter: Callable[[str], Any] | None) -> Callable[[str], Any]:
    """The ``__getattr__`` of a module, by its path in DeepSpeed, after its own."""

    def attribute(name: str) -> Any:
        if getter is not None:
            with contextlib.suppress(AttributeError):
                return getter(name)
        inner = f"{path}.{name}".lstrip(".")
        module = module_at(inner) if inner in INDEXES or inner in ALIASES else None
        if module is not None:
            return module
        why = "" if name.startswith("__") else f": {why_missing(inner)}"
        raise AttributeError(f"deepspeed.{inner} is not in {_US}{why}")

    return attribute
