"""Lazy imports: names of packages that are imported on first use, and folders that an installation may omit."""

import ast
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec, resolve_name
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def new_figure(width: float, height: float, *, needs: str, instead: str = "") -> "Figure":
    """A figure of matplotlib's.

    Args:
        width: in inches.
        height: in inches.
        needs: begins the error's sentence: "draw needs".
        instead: what does without, for the error.

    Raises:
        ImportError: matplotlib is not installed (the extra ``train``).
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        without = f"; {instead} does without" if instead else ""
        raise ImportError(f"{needs} matplotlib: pip install 'functional-ds[train]'{without}") from error
    return Figure(figsize=(width, height), layout="constrained")


class _Index(ModuleType):
    """A package with a lazy index, whose names take precedence over submodules of the same name."""

    _index: dict[str, tuple[str, str]]

    def __getattr__(self, name: str) -> Any:
        if name not in self._index:
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        module, attribute = self._index[name]
        try:
            value = import_module(f"{module}.{attribute}") if module == self.__name__ else _imported(module, attribute)
        except ModuleNotFoundError as error:
            if not isinstance(sys.modules.get(str(error.name).rpartition(".")[0]), _Index):
                raise  # an error inside an installed folder
            raise AttributeError(f"{self.__name__}.{name} needs {error.name}, which is not installed") from error
        self.__dict__[name] = value
        return value

    def __setattr__(self, name: str, value: Any) -> None:
        """Ignores the import system's binding of a submodule if the index lists another object of that name."""
        if not (isinstance(value, ModuleType) and self._index.get(name, (self.__name__, name)) != (self.__name__, name)):
            super().__setattr__(name, value)

    def __dir__(self) -> list[str]:
        return list(self.__all__)


def lazy_index(package: str) -> None:
    """Makes the imports under ``if TYPE_CHECKING:`` in a package's ``__init__.py`` lazy: names are imported on first use.

    Type checkers and editors read the same imports; ``__all__`` must list the names.
    """
    module = sys.modules[package]
    tree = ast.parse(Path(str(module.__file__)).read_text(encoding="utf-8"))
    blocks = [node for node in tree.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"]
    index: dict[str, tuple[str, str]] = {}
    for node in (inner for block in blocks for inner in block.body):
        if isinstance(node, ast.ImportFrom):
            source = resolve_name("." * node.level + (node.module or ""), package) if node.level else str(node.module)
            index |= {name.asname or name.name: (source, name.name) for name in node.names}
    module.__dict__["_index"] = index
    module.__class__ = _Index


def _imported(module: str, attribute: str) -> Any:
    """``from module import attribute``."""
    owner = import_module(module)
    return getattr(owner, attribute) if hasattr(owner, attribute) else import_module(f"{module}.{attribute}")


@contextmanager
def optional(*modules: str) -> Iterator[None]:
    """Ignores ImportError inside the block if one of these modules is not installed."""
    try:
        yield
    except ImportError:
        if all(find_spec(module) is not None for module in modules):
            raise
