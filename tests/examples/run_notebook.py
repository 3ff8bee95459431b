"""Runs the code cells of a notebook in order and in one namespace, without Jupyter.

    python tests/examples/run_notebook.py examples/notebooks/first_step.ipynb [--write]

It prints each cell's outputs as JSON, and with ``--write`` puts them into the notebook.
"""

import ast
import contextlib
import io
import json
import linecache
import sys
from pathlib import Path
from typing import Any


def outputs_of(source: str, name: str, names: dict[str, Any]) -> list[dict[str, Any]]:
    """What a cell prints, and its last expression, as notebooks store them."""
    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
    body, shown = ast.parse(source).body, io.StringIO()
    last = ast.Expression(body.pop().value) if body and isinstance(body[-1], ast.Expr) else None  # type: ignore[attr-defined]
    with contextlib.redirect_stdout(shown):
        exec(compile(ast.Module(body, []), name, "exec"), names)
        value = eval(compile(last, name, "eval"), names) if last else None
    found: list[dict[str, Any]] = []
    if shown.getvalue():
        found.append({"output_type": "stream", "name": "stdout", "text": shown.getvalue().splitlines(keepends=True)})
    if value is not None:
        data = {"text/plain": repr(value).splitlines(keepends=True)}
        if hasattr(value, "_repr_html_"):
            data["text/html"] = value._repr_html_().splitlines(keepends=True)
        found.append({"output_type": "execute_result", "execution_count": None, "metadata": {}, "data": data})
    return found


def main(path: Path, *, write: bool) -> list[list[dict[str, Any]]]:
    """The outputs of all code cells."""
    notebook = json.loads(path.read_text(encoding="utf-8"))
    names: dict[str, Any] = {"__name__": "__main__"}
    found = []
    for place, cell in enumerate(notebook["cells"]):
        if cell["cell_type"] == "code":
            found.append(outputs_of("".join(cell["source"]), f"cell {place}", names))
            cell["outputs"] = found[-1]
    if write:
        path.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    return found


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]), write="--write" in sys.argv)))
