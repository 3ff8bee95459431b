"""The axes of a running step: what transforms let a model's functions know of its parallelism, such as groups.

Functions that are registered once for a process, as attention is in Hugging Face's registries, must not hold a group, as
simulated ranks are threads of one process. They find it through the step that runs.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import torch

from .tape import Tape, current_tape

__all__ = [
    "IN_ORDER",
    "SUMS_EXPERTS",
    "asked",
    "axes",
    "axis",
    "for_shapes",
    "is_for_shapes",
    "note_asked",
    "with_axes",
    "with_axis",
]

_SLOT, _ASKED = "axes", "axes asked for"
IN_ORDER = "the order of what a rank holds"  # what functions ask for that are known to depend on it: drops, other attentions
_FOR_SHAPES = "results of the right shape will do"
SUMS_EXPERTS = "tp sums experts"  # the slot of a pass that says: what calls an experts function sums its results over tp


def axis(name: str) -> Any:
    """What a transform of the running step has put under the name; None where there is no such transform, or no step."""
    note_asked(name)
    return axes().get(name)


def note_asked(name: str) -> None:
    """Notes for ``asked`` that a function of the pass that runs has asked for this."""
    tape = current_tape()
    if tape is not None:
        tape.slots.setdefault(_ASKED, set()).add(name)


def asked(name: str) -> bool:
    """Whether a function has asked for this axis in the pass that runs."""
    tape = current_tape()
    return tape is not None and name in tape.slots.get(_ASKED, ())


def axes() -> Mapping[str, Any]:
    """All that transforms have put there, by name."""
    tape = current_tape()
    return {} if tape is None else tape.slots.get(_SLOT, {})


@contextmanager
def with_axes(found: Mapping[str, Any]) -> Iterator[None]:
    """Within the block these are the axes: a function that runs again finds those of its first run."""
    tape = current_tape()
    if tape is None:
        yield
        return
    before, tape.slots[_SLOT] = tape.slots.get(_SLOT, {}), found
    try:
        yield
    finally:
        tape.slots[_SLOT] = before


@contextmanager
def for_shapes() -> Iterator[None]:
    """Within the block a model runs for the shapes of its results alone, on whole leaves and outside of any axis."""
    records = torch.is_grad_enabled()
    with (
        nullcontext() if current_tape() else Tape(records=False),
        torch.set_grad_enabled(records),
        with_axes({_FOR_SHAPES: True}),
    ):
        yield


def is_for_shapes() -> bool:
    """Whether a function that needs an axis has none because it runs ``for_shapes``."""
    return bool(axes().get(_FOR_SHAPES))


def with_axis(name: str, value: Any, function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """The function of a batch, inside of which and in whose recomputation ``axis(name)`` is the value.

    For a transform's ``forward`` phase: ``lambda inner, step, state, function, batch: inner(step, state, with_axis("tp", group,
    function), batch)``.
    """

    def run(batch: Any) -> Any:
        tape = current_tape()
        if tape is not None:  # it stays: a recomputation in the backward pass asks again
            tape.slots[_SLOT] = {**axes(), name: value}
        return function(batch)

    return run
