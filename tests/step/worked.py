"""The transforms that the README and the docs work out, as they stand there."""

import ast
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import functional_ds as fds

__all__ = ["defined", "worked"]

TOP = Path(__file__).parents[2]


@cache
def defined(page: str) -> dict[str, Any]:
    """What a page's examples import, define and set to plain values, without running the rest."""
    blocks = re.findall(r"^```python\n(.*?)^```", (TOP / page).read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    kept = (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.ClassDef)
    body = [node for block in blocks for node in ast.parse(block).body if isinstance(node, kept)]
    namespace: dict[str, Any] = {"__name__": page}
    exec(compile(ast.Module(body, []), page, "exec"), namespace)
    return namespace


def worked() -> dict[str, fds.Transform]:
    """Each worked transform by its name, for params ``a`` [3, 5] and ``b`` [5, 1] and a batch that is one tensor."""
    readme, phases, first = defined("README.md"), defined("docs/phases.md"), defined("docs/quickstart-optimizer.md")
    coordinates, steps, second = defined("docs/phases.md"), defined("docs/steps.md"), defined("docs/second-order.md")
    wraps: dict[str, Callable[..., Any]] = {name: phases[name] for name in ("sign_gradient", "within_the_box", "add_l2")}
    return {
        "unit_gradient": readme["unit_gradient"](),
        "half_rate": fds.wrap("half_rate", rate=phases["half_rate"]),
        "ridge": fds.wrap("ridge", loss=phases["ridge"]),
        "scaled_input": fds.wrap("scaled_input", forward=phases["scaled_input"]),
        **{name: fds.wrap(name, update=update) for name, update in wraps.items()},
        "count_rows": fds.wrap("count_rows", slot="rows", init=phases["no_rows"], gradients=phases["count_rows"]),
        "gradient_memory": phases["gradient_memory"](),
        "power_sgd": phases["power_sgd"](1),
        "clip_spikes": first["clip_spikes"](),
        "sam": coordinates["sam"](0.05),
        "lookahead": coordinates["lookahead"](2),
        "ema": steps["ema"](0.9),
        "clip_weights": fds.wrap("clip_weights", update=defined("docs/steps.md")["clip_weights"]),
        "diagonal": second["diagonal"](),
    }
