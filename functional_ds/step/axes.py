"""The axes of a running step: how a model's functions get the groups of its parallelism.

Functions that are registered once per process, such as attention in Hugging Face's registries, must not hold a group, because
simulated ranks are threads of one process. They look it up in the running step.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from functional_ds.base.tree import setting

from .pass_scope import Pass, current_pass

EAGER_FIRST = "a step of this kind runs eagerly before it is traced"  # in the message of what a trace cannot do, for jit
IN_ORDER = "the order of what a rank holds"  # what functions ask for that are known to depend on it: drops, other attentions
_FOR_SHAPES = "results of the right shape will do"
SUMS_EXPERTS = "tp sums experts"  # the slot of a pass that means: the caller of an experts function sums its results over tp


def axis(name: str) -> Any:
    """The value that a transform of the running step has set for the name; None if there is no such transform, or no step."""
    note_asked(name)
    return axes().get(name)


def note_asked(name: str) -> None:
    """Records for ``asked`` that a function of the current pass has asked for the name."""
    pass_ = current_pass()
    if pass_ is not None:
        pass_.asked.add(name)


def asked(name: str) -> bool:
    """Whether a function has asked for this axis in the current pass."""
    pass_ = current_pass()
    return pass_ is not None and name in pass_.asked


def axes() -> Mapping[str, Any]:
    """All axes of the running step, by name."""
    pass_ = current_pass()
    return {} if pass_ is None else pass_.axes


def with_axes(by_name: Mapping[str, Any]) -> AbstractContextManager[None]:
    """A context in which these are the axes."""
    pass_ = current_pass()
    return nullcontext() if pass_ is None else setting(pass_, axes=by_name)


@contextmanager
def for_shapes() -> Iterator[None]:
    """A context in which a model runs only for the shapes of its results, on whole leaves and outside of any axis."""
    with nullcontext() if current_pass() else Pass(trains=False), with_axes({_FOR_SHAPES: True}):
        yield


def is_for_shapes() -> bool:
    """Whether a function has no axis because it runs ``for_shapes``."""
    return bool(axes().get(_FOR_SHAPES))


def with_axis(name: str, value: Any, function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """The function of a batch, run, and recomputed, with ``axis(name)`` set to the value.

    For a transform's ``forward`` phase: ``lambda inner, step, state, function, batch: inner(step, state, with_axis("tp", group,
    function), batch)``.
    """

    def run(batch: Any) -> Any:
        pass_ = current_pass()
        if pass_ is not None:  # it stays: a recomputation in the backward pass asks again
            pass_.axes = {**pass_.axes, name: value}
        return function(batch)

    return run
