"""The axes of a running step: what transforms let a model's functions know of its parallelism, such as groups.

Functions that are registered once for a process, as attention is in Hugging Face's registries, must not hold a group, as
simulated ranks are threads of one process. They find it through the step that runs.
"""

from collections.abc import Callable
from typing import Any

from .tape import current_tape

__all__ = ["axis", "with_axis"]

_SLOT = "axes"


def axis(name: str) -> Any:
    """What a transform of the running step has put under the name; None where there is no such transform, or no step."""
    tape = current_tape()
    return None if tape is None else tape.slots.get(_SLOT, {}).get(name)


def with_axis(name: str, value: Any, function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """The function of a batch, inside of which and in whose recomputation ``axis(name)`` is the value.

    For a transform's ``forward`` phase: ``lambda inner, step, state, function, batch: inner(step, state, with_axis("tp", group,
    function), batch)``.
    """

    def run(batch: Any) -> Any:
        tape = current_tape()
        if tape is not None:  # it stays: a recomputation in the backward pass asks again
            tape.slots.setdefault(_SLOT, {})[name] = value
        return function(batch)

    return run
