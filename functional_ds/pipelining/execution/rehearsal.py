"""``Rehearsal``: a rank's gathers and reductions without its computing, by which predictions find out what memory they take."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from functional_ds import comm
from functional_ds.base import tree
from functional_ds.base.weighted import Weighted
from functional_ds.pipelining.schedules.action import Action

from .boundary import Crossing
from .gathered import GatheredParams
from .runner import MicroBatch, Runner

__all__ = ["Rehearsal"]


class Rehearsal(Runner):
    """Carries out a row on the device "meta", alone: forwards gather, backwards leave gradients, messages are not sent."""

    @staticmethod
    def fits(batch: Any, group: comm.Group) -> bool:
        """Whether the other ranks do not run, and there is nothing to compute."""
        return comm.is_symmetric(group) and any(isinstance(leaf, Tensor) and leaf.is_meta for leaf in tree.leaves(batch))

    @staticmethod
    def of(spec: Any, step: Any, state: Any, gathered: dict[str, GatheredParams], parts: dict[int, list[str]]) -> "Rehearsal":
        """For a pipeline's rank.

        Args:
            spec: what runs where.
            step: the finished step.
            state: its state.
            gathered: the params of this rank's stages, by the names of their parts.
            parts: for each stage of this rank the names of its parts.
        """
        micros = [MicroBatch(None, state, None, Crossing((), {}))] * spec.schedule.microbatches
        made = Rehearsal(step, spec.stages, spec.schedule.placement, spec.group, micros, gathered, parts, records=True)
        zero = torch.zeros((), device="meta")
        made.losses[0] = Weighted(zero, torch.ones_like(zero)), {}
        return made

    def exchange(self, actions: Sequence[Action]) -> None:
        """Sends nothing."""

    def forward(self, stage: int, j: int) -> None:
        """Gathers the stage's params."""
        self.params(stage)

    def backward(self, stage: int, j: int) -> None:
        """Gathers, and leaves gradients of the sums' dtype."""
        for weight in self.weights(stage):
            weight.grad = torch.empty_like(weight, dtype=weight.grad_dtype or weight.dtype)

    def backward_inputs(self, stage: int, j: int) -> None:
        """Gathers the stage's params."""
        self.params(stage)

    def backward_weights(self, stage: int, j: int) -> None:
        """As a whole backward."""
        self.backward(stage, j)
