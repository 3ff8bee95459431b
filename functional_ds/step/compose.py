"""``wrap`` makes a transform from functions that wrap phases; ``compose`` combines transforms."""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Unpack, cast

import attrs

from .over_ranks.mesh_axes import Axis
from .phase_signatures import PhaseFunctions
from .phases import Trait, check_phases
from .step import Step, Transform

_NONE: PhaseFunctions = {}


def check_step(transform: object, step: object) -> None:
    """Raises TypeError if a transform is applied to something other than a step, such as the loss function."""
    if not isinstance(step, Step):
        raise TypeError(f"{transform} is a transform: give it a step, as fds.train_step(loss, ...) makes them, not {step!r}")


@attrs.frozen(eq=False, repr=False)
class _Wrap:
    """A transform that adds one layer to a step. It prints as its name."""

    name: str
    slot: str | None
    traits: frozenset[Trait]
    check: Callable[[Step], None] | None
    options: Mapping[str, Any] | None
    axes: Sequence[Axis]
    micro_batches: int
    guards: Mapping[str, Callable[..., Any]]
    phases: Mapping[str, Callable[..., Any]]

    def __call__(self, step: Step) -> Step:
        check_step(self.name, step)
        if self.check is not None:
            self.check(step)
        return step.wrapped(
            self.name,
            slot=self.slot,
            traits=self.traits,
            options=self.options,
            axes=self.axes,
            micro_batches=self.micro_batches,
            guards=self.guards,
            **self.phases,
        )

    def __repr__(self) -> str:
        return self.name


@attrs.frozen(eq=False, repr=False)
class _Composition:
    """Transforms applied one after another. It prints as their names."""

    transforms: tuple[Transform, ...]

    def __call__(self, step: Step) -> Step:
        check_step("compose(...)", step)
        for transform in self.transforms:
            step = transform(step)
        return step

    def __repr__(self) -> str:
        return " -> ".join(getattr(transform, "__name__", repr(transform)) for transform in self.transforms) or "identity"


def wrap(
    name: str,
    *,
    slot: str | None = None,
    traits: Collection[Trait] = (),
    check: Callable[[Step], None] | None = None,
    options: Mapping[str, Any] | None = None,
    axes: Sequence[Axis] = (),
    micro_batches: int = 1,
    guards: PhaseFunctions = _NONE,
    **phases: Unpack[PhaseFunctions],
) -> Transform:
    """Makes a transform that wraps phases: ``wrap("half", rate=lambda inner, step, state: inner(step, state) / 2)``.

    Each function takes ``inner``, the phase so far, the finished ``step``, and the phase's arguments (see ``Phases``).
    Functions passed through ``innermost`` or ``outermost`` keep that place in any composition.

    Args:
        name: the transform's name in errors and in ``print(step)``.
        slot: the name of its entry in ``state.slots``, unique among a step's transforms.
        traits: what other transforms may ask the step for.
        check: is called with the step before it is wrapped; raises an error if this transform must not follow its transforms.
        options: values that must be equal on all ranks, by name; None if its name contains them. Ranks compare them at
            ``init``: numbers and functions by what they compute with, groups by their sizes, other objects by their types.
        axes: the mesh axes over which the transform divides a step, or sums or exchanges values: their ranks compare the whole
            step at ``init``. Norms, sums over ranks, shards of batches and buffers follow from them.
        micro_batches: the number of micro-batches into which it splits a rank's batch.
        guards: functions of the same form, by phase, that change nothing and raise errors for misuse. Each runs around the
            transform's own function of the phase; ``step.without_guards()`` omits them.
        phases: the functions, by the phase that they wrap.

    Raises:
        ValueError: an unknown phase; ``micro_batches`` is not a positive integer; when it is applied: another transform of the
            step has this slot.
        TypeError: a function takes other arguments than its phase passes; when it runs: it returns another type.

    >>> import functional_ds as fds
    >>> import torch
    >>> half = wrap("half", rate=lambda inner, step, state: inner(step, state) / 2)
    >>> step = half(fds.train_step(lambda params, x: (params["w"] * x).sum(), fds.sgd(1.0)))
    >>> state, _ = step(step.init({"w": torch.zeros(1)}), torch.ones(1))
    >>> step.params(state)["w"].item()
    -0.5
    """
    functions, looks = cast(dict[str, Any], phases), cast(dict[str, Any], guards)
    check_phases(name, functions)
    check_phases(name, looks)
    if type(micro_batches) is not int or micro_batches < 1:
        raise ValueError(f"{name}: micro_batches={micro_batches!r} must be a positive integer")
    return _Wrap(name, slot, frozenset(traits), check, options, tuple(axes), micro_batches, looks, functions)


def compose(*transforms: Transform) -> Transform:
    """Combines transforms into one, applied from left to right: ``compose(f, g)(step) = g(f(step))``.

    List transforms of the stored params first, and those of the whole step last: ``compose(mixed_precision("bf16"), zero(3))``
    stores fp32 masters, casts to bf16, then shards and gathers.

    Raises:
        TypeError: an argument is not callable, or is a step.

    >>> from functional_ds import transforms as T
    >>> compose(T.accumulate(2), T.clip(1.0))
    accumulate(2) -> clip(1.0)
    """
    for transform in transforms:
        if isinstance(transform, Step):
            raise TypeError(f"compose: {transform} is a step; apply the transforms to it: compose(...)(step)")
        if not callable(transform):
            raise TypeError(f"compose: {transform!r} is not a transform (a function that takes a step and returns one)")
    return _Composition(transforms)
