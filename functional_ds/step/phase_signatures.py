"""What each phase of a step takes and returns: one typed method per phase, from which everything else is derived."""

import inspect
from collections.abc import Callable, Collection, Mapping
from types import MappingProxyType
from typing import Any, Concatenate, ParamSpec, TypedDict, TypeVar, get_args, get_origin, get_type_hints

import torch
from torch import Tensor

from functional_ds.base.weighted import Weighted
from functional_ds.sharding.leaf_map import LeafMap

from .state.state import State
from .views.view import View

P = ParamSpec("P")
R = TypeVar("R")

Metrics = dict[str, Tensor]
Losses = tuple[Weighted, dict[str, Weighted]]
Passed = tuple[State, Weighted, dict[str, Weighted]]  # what gradients gives
Phase = Callable[..., Any]
Wraps = Callable[Concatenate[Callable[Concatenate[Any, P], R], Any, P], R]  # of (inner, step, *what the phase takes)


class Phases:
    """The phases of a step, as finally composed. A transform's function takes ``(inner, step, ...)`` and their arguments.

    Attributes:
        phases: each as a function of (step, ...).
    """

    phases: Mapping[str, Phase]

    def prepare(self, params: Any) -> Any:
        """Marks the params, before any transform changes the tree."""
        return self.phases["prepare"](self, params)

    def init(self, params: Any) -> State:
        """The state before the first update: params, the optimizer's state, slots."""
        return self.phases["init"](self, params)  # type: ignore[no-any-return]

    def view(self, state: State, trains: bool = True, whole: bool = False) -> View:
        """The params that the loss sees, and how gradients flow back from them.

        Args:
            state: whose params.
            trains: whether gradients are wanted.
            whole: whether the loss needs all params before it begins, as one that uses torch.func does.
        """
        return self.phases["view"](self, state, trains, whole)  # type: ignore[no-any-return]

    def loss(self, state: State, params: Any, batch: Any) -> Losses:
        """The loss of a batch and further metrics."""
        return self.phases["loss"](self, state, params, batch)  # type: ignore[no-any-return]

    def forward(self, state: State, function: Callable[[Any], Any], batch: Any) -> Any:
        """``function(batch)``, run like the user's loss function."""
        return self.phases["forward"](self, state, function, batch)

    def measure(self, state: State, batch: Any) -> dict[str, Any]:
        """This rank's share of the loss and further metrics, without gradients: sums with their weights."""
        return self.phases["measure"](self, state, batch)  # type: ignore[no-any-return]

    def gradients(self, state: State, batch: Any, carry: Weighted | None, last: bool) -> Passed:
        """The state after the forward and backward passes, ``carry`` plus a batch's gradients, and the batch's metrics.

        The sums may be this rank's only: ``reduce`` gives those over all ranks. The state is not donated yet: a phase puts new
        tensors into the one that it returns and changes none in place.
        """
        return self.phases["gradients"](self, state, batch, carry, last)  # type: ignore[no-any-return]

    def reduce(self, state: State, grads: Weighted) -> tuple[State, Weighted]:
        """The gradients over all ranks, after the last micro-batch, as the update needs them; and the state.

        The state is not donated yet: a phase puts new tensors into the one that it returns and changes none in place.
        """
        return self.phases["reduce"](self, state, grads)  # type: ignore[no-any-return]

    def comm_dtype(self, state: State, dtype: torch.dtype) -> torch.dtype:
        """The dtype in which gradients of a dtype are reduced."""
        return self.phases["comm_dtype"](self, state, dtype)  # type: ignore[no-any-return]

    def scatter(self, state: State) -> State:
        """The state with the params that the optimizer holds: shards in ZeRO 1 to 3, masters with mixed precision."""
        return self.phases["scatter"](self, state)  # type: ignore[no-any-return]

    def update(self, state: State, grads: Weighted) -> tuple[State, Metrics]:
        """The state after the optimizer's update; it owns the state that it is given."""
        return self.phases["update"](self, state, grads)  # type: ignore[no-any-return]

    def publish(self, state: State) -> State:
        """The inverse of ``scatter``: stores what the optimizer holds. Collective in ZeRO 1 and 2."""
        return self.phases["publish"](self, state)  # type: ignore[no-any-return]

    def rate(self, state: State) -> float | Tensor:
        """The factor of the learning rate in this step."""
        return self.phases["rate"](self, state)  # type: ignore[no-any-return]

    def params(self, state: State) -> Any:
        """The user's tree, unsharded."""
        return self.phases["params"](self, state)

    def leaf_map(self, state: State) -> LeafMap:
        """Which leaf's elements are where in the tensors that the optimizer gets, on every rank."""
        return self.phases["leaf_map"](self, state)  # type: ignore[no-any-return]

    def select(self, state: State, paths: Collection[str]) -> tuple[State, tuple[int, ...]]:
        """A state restricted to the leaves of these paths, which is viewed as a dict of them, and their gradients' indices."""
        return self.phases["select"](self, state, paths)  # type: ignore[no-any-return]


PHASES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        name: tuple(inspect.signature(method).parameters)[1:]
        for name, method in vars(Phases).items()
        if inspect.isfunction(method)
    }
)


def _results(phase: str) -> tuple[str, tuple[type, ...]] | None:
    """What a phase returns, in words and as types; None for any type."""
    hint = get_type_hints(getattr(Phases, phase))["return"]
    parts = get_args(hint) if get_origin(hint) is tuple else (hint,)
    types = tuple(get_origin(part) or part for part in parts)
    if not {State, View, Weighted, dict}.intersection(types):
        return None
    words = ["dict of metrics" if type_ is dict else type_.__name__ for type_ in types]
    return (f"a {words[0]}" if len(words) == 1 else f"({', '.join(words)})"), types


RESULTS: Mapping[str, tuple[str, tuple[type, ...]]] = MappingProxyType(
    {phase: result for phase in PHASES if (result := _results(phase)) is not None}
)


class PhaseFunctions(TypedDict, total=False):
    """What ``wrap`` takes by phase, for type checkers; a test compares it with ``Phases``."""

    prepare: Wraps[[Any], Any]
    init: Wraps[[Any], State]
    view: Wraps[[State, bool, bool], View]
    loss: Wraps[[State, Any, Any], Losses]
    forward: Wraps[[State, Callable[[Any], Any], Any], Any]
    measure: Wraps[[State, Any], dict[str, Any]]
    gradients: Wraps[[State, Any, Weighted | None, bool], Passed]
    reduce: Wraps[[State, Weighted], tuple[State, Weighted]]
    comm_dtype: Wraps[[State, torch.dtype], torch.dtype]
    scatter: Wraps[[State], State]
    update: Wraps[[State, Weighted], tuple[State, Metrics]]
    publish: Wraps[[State], State]
    rate: Wraps[[State], float | Tensor]
    params: Wraps[[State], Any]
    leaf_map: Wraps[[State], LeafMap]
    select: Wraps[[State, Collection[str]], tuple[State, tuple[int, ...]]]


def bound(name: str, phase: str, outer: Phase, inner: Phase) -> Phase:
    """A phase of (step, ...): that of the transform ``name``, which gets the phase so far as ``inner``.

    Raises:
        TypeError: it returns another type than the phase; names the transform and the phase.
    """
    return lambda step, *args: _check_result(name, phase, outer(inner, step, *args))


def _check_result(name: str, phase: str, result: Any) -> Any:
    if phase in RESULTS:
        words, types = RESULTS[phase]
        values = result if isinstance(result, tuple) and len(types) > 1 else (result,)
        if len(values) != len(types) or not all(map(isinstance, values, types)):
            shown = f"({', '.join(type(x).__name__ for x in result)})" if isinstance(result, tuple) else type(result).__name__
            raise TypeError(f"{name}: its {phase} returned {shown}, and must return {words}")
    return result
