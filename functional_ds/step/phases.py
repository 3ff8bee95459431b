"""Layers: what each transform adds to a step, and how functions that wrap a phase are composed."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from enum import Enum, auto
from typing import Any, TypeVar, cast

import attrs

from .over_ranks.mesh_axes import Axis, AxisRole
from .phase_signatures import PHASES, Phase, bound
from .state.skipped import keeping, marking
from .state.state import State

F = TypeVar("F", bound=Callable[..., Any])
OF_A_STEP = frozenset({"loss", "forward", "gradients", "reduce", "comm_dtype", "update", "rate"})  # others change storage


class Trait(Enum):
    """What a transform does to a step, for the transforms whose order depends on it.

    A transform passes its traits to ``wrap``; ``Step.has`` asks for them.
    """

    SHARDS_PARAMS = auto()  # shards params and gathers them for use: ZeRO-3
    SHARDS_STATE = auto()  # shards the optimizer's state: ZeRO 1 to 3
    KEEPS_WHOLE = auto()  # keeps some params whole although it shards the rest
    DATA_PARALLEL = auto()  # over its axes it computes what one device does with all ranks' rows, up to rounding (law 19)
    SUMS_LAST = auto()  # sums gradients over ranks in the backward pass of the last micro-batch
    SPLITS_BATCHES = auto()  # its ``gradients`` only splits the batch: a caller with micro-batches can do without
    COPIES_PARAMS = auto()  # keeps a copy of the params in its slot: masters, averages
    OFFLOADS = auto()  # moves params, slots or the optimizer's state off the device
    RESIDENT_SLOT = auto()  # its slot must stay on the device
    CASTS = auto()  # stores params in another dtype than the optimizer updates
    MARKS = auto()  # changes nothing, and notes which phase is traced
    HEEDS_SKIPS = auto()  # handles steps that a loss scale skips: update and slot change only as they must


@attrs.frozen(eq=False)
class Layer:
    """What one transform added to a step.

    Attributes:
        name: of the transform, for errors.
        phases: its functions by phase, perhaps with their place.
        guards: functions of the same form that only raise errors for misuse: each around the layer's function of the phase.
        traits: what other transforms may ask the step for.
        slot: the name of its entry in the state's slots.
        options: values that must be equal on all ranks; None if the name contains them.
        axes: the mesh axes over which it divides a step, or sums and exchanges values.
        micro_batches: into how many micro-batches it splits a rank's batch.
        due: whether its phases run in the step of a state; asked on the host, before the step. None for always.
        periodic: whether it has a ``due``, also in the layer that acts in one step.
    """

    name: str
    phases: Mapping[str, Any]
    traits: frozenset[Trait]
    slot: str | None
    options: Mapping[str, Any] | None = None
    axes: Sequence[Axis] = ()
    micro_batches: int = 1
    guards: Mapping[str, Any] = attrs.field(factory=dict)
    due: Callable[[State], bool] | None = None
    periodic: bool = False

    def acting(self, due: bool) -> "Layer":
        """The layer in a step in which it is due; if not, without the phases that a step runs."""
        if due:
            return attrs.evolve(self, due=None)
        phases, guards = ({p: f for p, f in by_phase.items() if p not in OF_A_STEP} for by_phase in (self.phases, self.guards))
        return attrs.evolve(self, due=None, phases=phases, guards=guards, micro_batches=1)

    def has(self, what: Trait | AxisRole) -> bool:
        """Whether it has a trait, or an axis of a role."""
        return what in self.traits or any(axis.role is what for axis in self.axes)

    def is_innermost(self, phase: str) -> bool:
        """Whether its function runs inside all others that wrap the phase."""
        given = self.phases.get(phase)
        return isinstance(given, _Placed) and given.place == "innermost"

    def __repr__(self) -> str:
        return f"Layer({self.name}: {', '.join(self.phases)})"


@attrs.frozen(eq=False)
class _Placed:
    """A phase function with its place among all that wrap the phase."""

    place: str
    function: Phase


def innermost(phase: F) -> F:
    """For ``wrap``: this function runs inside all others that wrap the phase, in any order of composition.

    >>> from functional_ds import compose, sgd, train_step, wrap
    >>> noted = []
    >>> def note(word):
    ...     return lambda inner, step, state: noted.append(word) or inner(step, state)
    >>> step = compose(wrap("a", rate=note("a")), wrap("b", rate=innermost(note("b"))))(train_step(lambda p, x: x, sgd(0.1)))
    >>> _ = step.rate(step.init({"w": torch.ones(1)})), print(noted)
    ['a', 'b']
    """
    return cast(F, _Placed("innermost", phase))


def outermost(phase: F) -> F:
    """For ``wrap``: this function runs around all others that wrap the phase, in any order of composition.

    >>> from functional_ds import compose, sgd, train_step, wrap
    >>> noted = []
    >>> def note(word):
    ...     return lambda inner, step, state: noted.append(word) or inner(step, state)
    >>> step = compose(wrap("a", rate=note("a")), wrap("b", rate=outermost(note("b"))))(train_step(lambda p, x: x, sgd(0.1)))
    >>> _ = step.rate(step.init({"w": torch.ones(1)})), print(noted)
    ['b', 'a']
    """
    return cast(F, _Placed("outermost", phase))


def mapped(layer: Layer, change: Callable[[str, Phase], Phase]) -> Layer:
    """The layer with ``change(phase, function)`` for each of its functions, which keep their places."""

    def changed(phase: str, given: Any) -> Any:
        if isinstance(given, _Placed):
            return _Placed(given.place, change(phase, given.function))
        return change(phase, given)

    return attrs.evolve(layer, phases={phase: changed(phase, given) for phase, given in layer.phases.items()})


def compose_phase(phase: str, base: Phase, layers: tuple[Layer, ...], *, guarded: bool = True) -> Phase:
    """The base function inside of all that wrap it, in their order.

    Guards change no value.
    """
    places: dict[str, list[tuple[str, list[Phase]]]] = {"innermost": [], "": [], "outermost": []}
    for layer in layers:
        guard = layer.guards.get(phase) if guarded else None
        given = layer.phases.get(phase, guard)
        if given is None:
            continue
        place, function = (given.place, given.function) if isinstance(given, _Placed) else ("", given)
        if phase == "update":
            function = marking(layer.name, function)
            if Trait.HEEDS_SKIPS not in layer.traits:
                function = keeping(layer.name, layer.slot, function)
        places[place].append((layer.name, [function] if guard is None or given is guard else [function, guard]))
    composed = base
    for name, functions in (*reversed(places["innermost"]), *places[""], *places["outermost"]):
        for function in functions:
            composed = bound(name, phase, function, composed)
    return composed


def check_phases(name: str, phases: Mapping[str, Any]) -> None:
    """Raises an error for unknown phases and for functions whose arguments differ from their phase's."""
    unknown = phases.keys() - PHASES.keys()
    if unknown:
        raise ValueError(f"{name} wraps {sorted(unknown)}, which are not phases; the phases are {', '.join(PHASES)}")
    for phase, given in phases.items():
        function = given.function if isinstance(given, _Placed) else given
        if not callable(function):
            raise TypeError(f"{name}: its {phase} is {function!r}, not a function of (inner, step, ...)")
        wanted = ("inner", "step", *PHASES[phase])
        try:
            signature = inspect.signature(function)
        except (TypeError, ValueError):  # builtins have none
            continue
        try:
            signature.bind(*wanted)
        except TypeError:
            raise TypeError(f"{name}: its {phase} takes {signature}, and must take ({', '.join(wanted)})") from None
