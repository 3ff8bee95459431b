"""Exponential moving average of the params."""

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from functional_ds.base import tree
from functional_ds.base.marks import is_trainable
from functional_ds.base.weighted import Weighted
from functional_ds.step.compose import wrap
from functional_ds.step.phase_signatures import Metrics
from functional_ds.step.phases import Trait
from functional_ds.step.state.slots import Role
from functional_ds.step.state.state import State
from functional_ds.step.step import Step, Transform


@tree.record
class Mean:
    """ema's slot in the state: the mean of each trained stored leaf, None for the others.

    Attributes:
        leaves: in fp32 at least, sharded like the optimizer's state.
        shown: whether ``step.params`` returns the mean.
    """

    leaves: list[Tensor | None]
    shown: bool = tree.static(default=False)

    roles: ClassVar[Mapping[str, Role]] = {"leaves": Role.AVERAGE}


def ema(decay: float) -> Transform:
    """Keeps an exponential moving average of the params: ``mean ← decay · mean + (1 - decay) · params`` after each update.

    The mean starts as the initial params; a skipped update leaves it unchanged. ``averaged(step, state)`` returns it. Law: in
    every stage of ZeRO it equals the single-device mean.

    Put it before ``mixed_precision``, ``offload`` and ``zero``, so that it averages the fp32 master weights and is sharded. It
    costs 4 bytes a parameter (4/n in stages 1 to 3) and no communication.

    Raises:
        ValueError: the decay is not in [0, 1); a transform before this one wraps ``params``.

    >>> import functional_ds as fds
    >>> step = ema(0.5)(fds.train_step(lambda params, x: (params["w"] * x).sum(), fds.sgd(1.0)))
    >>> state = step.init({"w": torch.zeros(1)})
    >>> for _ in range(2):
    ...     state, _ = step(state, torch.ones(1))
    >>> step.params(state)["w"].item(), averaged(step, state)["w"].item()
    (-2.0, -1.25)
    """
    if not 0 <= decay < 1:
        raise ValueError(f"decay={decay} must be in [0, 1)")

    def init(inner: Any, step: Step, params: Any) -> State:
        state: State = inner(step, params)
        return state.put(ema=Mean([_wide(leaf) if is_trainable(leaf) else None for leaf in tree.leaves(state.params)]))

    def update(inner: Any, step: Step, state: State, grads: Weighted) -> tuple[State, Metrics]:
        skip = state.skip
        state, metrics = inner(step, state, grads)
        pairs = zip(state.slots["ema"].leaves, tree.leaves(state.params), strict=True)
        towards = Tensor.lerp if step.keeps_graph else Tensor.lerp_  # in place: the update owns the mean's memory
        moved = [
            None if mean is None else towards(mean, leaf.to(mean.dtype), _part(mean, 1 - decay, skip)) for mean, leaf in pairs
        ]
        return state.put(ema=Mean(moved)), metrics

    def params(inner: Any, step: Step, state: State) -> Any:
        if state.slots["ema"].shown:
            leaves, spec = tree.flatten(state.params)
            pairs = zip(state.slots["ema"].leaves, leaves, strict=True)
            shown = [leaf if mean is None else mean for mean, leaf in pairs]
            state = tree.replace(state, params=tree.unflatten(spec, shown))
        return inner(step, state)

    def check(step: Step) -> None:
        if step.wraps("params"):
            raise ValueError(
                f"ema({decay}): this step stores params in its own way already ({step}); put ema before "
                "mixed_precision, offload and zero, and use one ema"
            )

    traits = [Trait.COPIES_PARAMS, Trait.HEEDS_SKIPS]
    return wrap(f"ema({decay})", slot="ema", traits=traits, check=check, init=init, update=update, params=params)


def averaged(step: Step, state: State) -> Any:
    """The mean that ``ema`` keeps, as a tree like ``step.params(state)``; a collective where that is one.

    Raises:
        ValueError: the step has no ema.

    >>> import functional_ds as fds
    >>> step = ema(0.5)(fds.train_step(lambda params, x: (params["w"] * x).sum(), fds.sgd(1.0)))
    >>> state, _ = step(step.init({"w": torch.zeros(1)}), torch.ones(1))
    >>> averaged(step, state)
    {'w': tensor([-0.5000])}
    """
    mean = state.slots.get("ema")
    if not isinstance(mean, Mean):
        raise ValueError(f"averaged: this step keeps no mean of its params ({step}); add T.ema(decay)")
    return step.params(state.put(ema=tree.replace(mean, shown=True)))


def _wide(leaf: Tensor) -> Tensor:
    return leaf.to(torch.promote_types(leaf.dtype, torch.float32), copy=True)


def _part(mean: Tensor, part: float, skip: Tensor | None) -> float | Tensor:
    """The weight of the new params: 0 where ``skip`` is true."""
    return part if skip is None else skip.logical_not().to(mean.dtype) * part
