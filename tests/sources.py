"""The library's sources as data: files, imports, classes. Nothing is imported."""

import ast
from collections.abc import Iterator, Mapping
from pathlib import Path

import attrs

__all__ = ["ROOT", "TOPS", "Import", "Source", "circles", "library"]

ROOT = Path(__file__).resolve().parents[1]
TOPS = ("comm", "functional_ds", "transforms")  # side by side in a checkout, one package when installed


@attrs.frozen
class Import:
    """One import of a library file: of which, in which line, and whether it runs inside a function."""

    target: str
    line: int
    late: bool


@attrs.frozen
class Source:
    """One file of the library. ``name`` and ``folder`` are dotted and leave out ``functional_ds.``; its root is ``root``."""

    path: Path
    name: str
    folder: str
    tree: ast.Module
    imports: tuple[Import, ...]

    @property
    def lines(self) -> int:
        return len(self.path.read_text().splitlines())

    @property
    def classes(self) -> list[str]:
        return [node.name for node in self.tree.body if isinstance(node, ast.ClassDef)]


def library() -> dict[str, Source]:
    """All files but the package indexes, by name. An import of a package index counts as an import of ``folder.__init__``."""
    paths = {_name(path): path for top in TOPS for path in (ROOT / top).rglob("*.py")}
    trees = {name: ast.parse(path.read_text()) for name, path in paths.items()}
    return {
        name: Source(paths[name], name, _folder(name), tree, tuple(_imports(name, tree, paths)))
        for name, tree in trees.items()
        if not name.endswith("__init__")
    }


def _name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[1:] if parts[0] == "functional_ds" else parts)


def _folder(name: str) -> str:
    return name.rpartition(".")[0] or "root"


def _imports(name: str, tree: ast.Module, known: Mapping[str, Path]) -> Iterator[Import]:
    for node, late in _import_nodes(tree, False):
        if isinstance(node, ast.Import):
            asked = [(alias.name, "") for alias in node.names]
        else:
            package = ["functional_ds", *name.split(".")[:-1]]
            above = package[: len(package) - node.level + 1] if node.level else []
            asked = [(".".join([*above, *filter(None, [node.module])]), alias.name) for alias in node.names]
        for module, attribute in asked:
            if module == "functional_ds" or module.startswith("functional_ds."):
                inner = module.removeprefix("functional_ds").removeprefix(".")
                joined = [".".join(filter(None, (inner, attribute, tail))) for tail in ("", "__init__")]
                index = ".".join(filter(None, (inner, "__init__")))
                found = next((each for each in (*joined, inner, index) if each in known), None)
                assert found is not None, f"{name}, line {node.lineno}: {module}.{attribute} is not a file"
                yield Import(found, node.lineno, late)


def _import_nodes(tree: ast.AST, late: bool) -> Iterator[tuple[ast.Import | ast.ImportFrom, bool]]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            yield node, late
        else:
            yield from _import_nodes(node, late or isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)))


def circles(edges: Mapping[str, set[str]]) -> list[list[str]]:
    """The strongly connected parts of a graph that have more than one node (Tarjan)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(node: str) -> None:
        index[node] = low[node] = len(index)
        stack.append(node)
        for other in sorted(edges.get(node, ())):
            if other not in index:
                visit(other)
                low[node] = min(low[node], low[other])
            elif other in stack:
                low[node] = min(low[node], index[other])
        if low[node] == index[node]:
            at = stack.index(node)
            part = stack[at:]
            del stack[at:]
            if len(part) > 1:
                found.append(sorted(part))

    for node in sorted(edges):
        if node not in index:
            visit(node)
    return found
