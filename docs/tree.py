"""Prints the folders of the library with their sizes, and its core's reading order; ``--write`` puts both into contributing.md.

``docs/tree.py comm/codecs`` lists the files of a folder with what each holds.

A folder's line is the first line of its ``__init__.py``'s docstring. Code lines are counted without blank lines, comments and
docstrings.
"""

import ast
import re
import sys
import tokenize
from collections.abc import Iterable
from pathlib import Path

TOP = Path(__file__).resolve().parents[1]
LAYERS = ("functional_ds", "comm", "transforms")  # folders at the root: one import package, functional_ds

READING = {
    "what is computed with": """functional_ds/base/tree.py functional_ds/base/weighted.py functional_ds/base/marks.py
        functional_ds/base/prng.py functional_ds/sharding/segment.py""",
    "collectives": """comm/table/collective.py comm/table/rows.py comm/table/tiling.py comm/backends/reduction.py comm/api.py
        comm/calls/dispatch.py comm/record/group.py comm/record/pending.py comm/worlds/current.py
        comm/worlds/rng_state.py comm/algorithms/bruck.py comm/simulation/simulator.py comm/simulation/schedule.py""",
    "a step on one device": """functional_ds/step/phase_signatures.py functional_ds/step/phases.py
        functional_ds/step/over_ranks/mesh_axes.py
        functional_ds/step/compose.py functional_ds/step/step.py functional_ds/step/train_step.py
        functional_ds/step/views/view.py functional_ds/step/pass_scope.py functional_ds/step/state/state.py
        functional_ds/optim/bind.py functional_ds/optim/adam.py functional_ds/optim/kernels.py""",
    "three transforms": """transforms/clip.py transforms/accumulate.py
        transforms/precision/mixed_precision.py""",
    "ZeRO": """transforms/zero/zero.py transforms/zero/lazy_params.py transforms/zero/units/lazy_tensor.py
        transforms/zero/units/saved_places.py transforms/zero/gather.py transforms/zero/units/prefetch.py
        transforms/zero/reduce.py
        transforms/zero/collectives.py transforms/zero/process_groups.py""",
    "what is refused on the way": """functional_ds/step/checks.py functional_ds/step/views/graph_checks.py""",
    "of torch, what is private": "functional_ds/base/torch_private.py",
    "the wire, between processes": """comm/worlds/process.py comm/worlds/process_handle.py comm/worlds/worker.py
        comm/record/failed_steps.py comm/backends/malloc.py comm/backends/pool.py comm/backends/gloo.py
        comm/backends/primitives.py comm/table/packing.py comm/exchange.py comm/table/exchanges.py comm/table/permutation.py
        functional_ds/base/device_streams.py""",
}

SATELLITES = {
    "pipelines": "functional_ds/pipelining transforms/pipeline.py",
    "tensor, sequence and expert parallelism": "functional_ds/parallel transforms/parallel",
    "checkpoints": "functional_ds/checkpointing functional_ds/state_dict",
    "the training loop": "functional_ds/fitting",
    "optimizers": "functional_ds/optim",
    "offloading": "transforms/offloading transforms/offload.py",
    "recomputation": "functional_ds/remat transforms/remat.py",
    "compilation": "functional_ds/compiling transforms/compiled.py",
    "interchange with other tools": "functional_ds/interchange",
    "memory accounts": "functional_ds/memory",
    "profiles": "functional_ds/profiling",
    "runs on paper": "functional_ds/scaling",
    "training jobs from files": "functional_ds/jobs",
    "the command line": "functional_ds/cli",
    "debugging, compression and algorithms of collectives": "comm/debug comm/codecs comm/algorithms",
}


def files(folder: Path) -> list[Path]:
    """The modules directly in a folder."""
    return sorted(folder.glob("*.py"))


def lines(path: Path) -> tuple[int, int]:
    """(Code lines, docstring lines) of a module; blank lines and comments count in neither."""
    docs = set[int]()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and ast.get_docstring(node):
            text = node.body[0]
            docs.update(range(text.lineno, (text.end_lineno or text.lineno) + 1))
    blank = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
    code = set[int]()
    with path.open("rb") as file:
        for token in tokenize.tokenize(file.readline):
            if token.type not in blank and token.type != tokenize.ENCODING:
                code.update(range(token.start[0], token.end[0] + 1))
    source = path.read_text(encoding="utf-8").splitlines()
    return len(code - docs), sum(bool(source[number - 1].strip()) for number in docs)


def size(paths: Iterable[Path]) -> tuple[int, int, int]:
    """(Files, code lines, code and docstring lines) of modules."""
    counts = [lines(path) for path in paths]
    return len(counts), sum(code for code, _ in counts), sum(code + doc for code, doc in counts)


def modules(names: str) -> list[Path]:
    """The modules that a list of files and folders names."""
    found: list[Path] = []
    for name in names.split():
        path = TOP / name
        found += sorted(path.rglob("*.py")) if path.is_dir() else [path]
    return found


def summary(folder: Path) -> str:
    """The first line of a package's docstring."""
    return heading(folder / "__init__.py")


def heading(path: Path) -> str:
    """The first line of a module's docstring."""
    docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))
    if not docstring:
        raise SystemExit(f"{path.relative_to(TOP)} has no docstring: its first line says what the file holds")
    return docstring.splitlines()[0].rstrip(".")


def tree() -> str:
    """A line for each folder: its name, its modules, their code lines, what is in it."""
    rows, total = [], (0, 0)
    for layer in LAYERS:
        for folder in sorted({path.parent for path in (TOP / layer).rglob("__init__.py")}):
            count, code, _ = size(files(folder))
            total = (total[0] + count, total[1] + code)
            depth = len(folder.relative_to(TOP).parts) - 1
            rows.append((f"{'  ' * depth}{folder.name}/", count, code, summary(folder)))
    rows.append(("", *total, "in all"))
    head = f"{'':<20}{'files':>6}{'code':>8}\n"
    return "```text\n" + head + "".join(f"{name:<20}{n:>6}{code:>8,}   {what}\n" for name, n, code, what in rows) + "```\n"


def reading() -> str:
    """The core's files in reading order, with their sizes."""
    rows = [(what, modules(names)) for what, names in READING.items()]
    table = "| read | files, in this order | code lines | with docstrings |\n|---|---|---|---|\n"
    for what, paths in rows:
        _, code, both = size(paths)
        names = ", ".join(f"`{path.relative_to(TOP).as_posix()}`" for path in paths)
        table += f"| {what} | {names} | {code:,} | {both:,} |\n"
    count, code, both = size(path for _, paths in rows for path in paths)
    return table + f"| together | {count} files | {code:,} | {both:,} |\n"


def satellites() -> str:
    """The parts that the core does not need, with their sizes."""
    table = "| part | where | files | code lines |\n|---|---|---|---|\n"
    for what, names in SATELLITES.items():
        count, code, _ = size(modules(names))
        where = ", ".join(f"`{name}`" if name.endswith(".py") else f"`{name}/`" for name in names.split())
        table += f"| {what} | {where} | {count} | {code:,} |\n"
    return table


BLOCKS = {"tree": tree, "reading": reading, "satellites": satellites}


def written(page: str) -> str:
    """A page with its generated blocks renewed: what stands between ``<!-- name -->`` and ``<!-- /name -->``."""
    for name, make in BLOCKS.items():
        block = f"<!-- {name} -->\n{make()}<!-- /{name} -->"
        page, found = re.subn(f"<!-- {name} -->\n.*?<!-- /{name} -->", lambda _, block=block: block, page, flags=re.DOTALL)
        if found != 1:
            raise SystemExit(f"contributing.md has {found} blocks <!-- {name} -->, not one")
    return page


def listed(folder: Path) -> str:
    """A line for each module below a folder: what it holds."""
    paths = [path for path in sorted(folder.rglob("*.py")) if path.name != "__init__.py"]
    return "".join(f"{path.relative_to(TOP).as_posix()}\n    {heading(path)}\n" for path in paths)


def main() -> None:
    """Prints the blocks, renews them in contributing.md (``--write``), or lists the files of a folder."""
    page = TOP / "docs/contributing.md"
    if sys.argv[1:] == ["--write"]:
        page.write_text(written(page.read_text(encoding="utf-8")), encoding="utf-8")
    elif sys.argv[1:]:
        print("".join(listed(Path(name).resolve()) for name in sys.argv[1:]), end="")
    else:
        print("\n".join(make() for make in BLOCKS.values()), end="")


if __name__ == "__main__":
    main()
