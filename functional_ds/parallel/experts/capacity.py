"""Expert capacity: how many tokens an expert accepts, and which choices are dropped."""

import math
from typing import Any, Literal, get_args

import attrs
import torch
from torch import Tensor

from functional_ds.step.axes import IN_ORDER, note_asked

Drop = Literal["error", "position", "probability"]


def _positive(record: "Capacity", field: "attrs.Attribute[Any]", value: float) -> None:
    if not value > 0:
        raise ValueError(f"{field.name}={value!r}: a number above 0")


def _whole(record: "Capacity", field: "attrs.Attribute[int]", value: int) -> None:
    if not isinstance(value, int) or value < 1:  # type: ignore[redundant-expr]
        raise ValueError(f"{field.name}={value!r}: an integer above 0")


def _known(record: "Capacity", field: "attrs.Attribute[str]", value: str) -> None:
    if value not in get_args(Drop):
        raise ValueError(f"drop={value!r}: one of {', '.join(map(repr, get_args(Drop)))}")


@attrs.frozen
class Capacity:
    """Capacity: at most ``ceil(factor · rows · k / E)`` choices per expert in each group of ``rows`` tokens, as in GShard.

    Groups are counted from the first token, so as long as ranks and micro-batches hold whole groups, which choices are dropped
    does not depend on their number. A good value for ``rows`` is the sequence length.

    Attributes:
        factor: 1 accepts as many as an even routing gives.
        rows: the number of tokens in a group.
        drop: which choices to drop beyond the capacity. "position": those of the last tokens; "probability": those with the
            smallest weights, then those of the last tokens; "error": none, and ``exchange`` raises an error on all ranks.

    >>> Capacity(1.25, rows=16).limit(2, 8)
    5
    """

    factor: float = attrs.field(validator=_positive)
    rows: int = attrs.field(validator=_whole, kw_only=True)
    drop: Drop = attrs.field(default="position", validator=_known, kw_only=True)

    def limit(self, k: int, experts: int) -> int:
        """The number of choices that an expert accepts from a group."""
        return math.ceil(self.factor * self.rows * k / experts)

    def apply(self, chosen: Tensor, weights: Tensor, experts: int) -> tuple[Tensor | None, Tensor | None]:
        """Which of the choices [T, k] are kept, and the worst overflow.

        Returns:
            ``(kept, None)``, or with ``drop="error"`` ``(None, overflow)``: the number of choices above the limit (at most 0
            without an overflow), the expert and the group, as integers [3] on the device.

        Raises:
            ValueError: the tokens do not divide into groups.
        """
        tokens, k = chosen.shape
        if tokens % self.rows:
            raise ValueError(
                f"capacity: {tokens} tokens are not a whole number of groups of rows={self.rows}, so what is dropped would "
                "depend on the partition; let rows divide the tokens of every rank and micro-batch, such as the length of a "
                "sequence"
            )
        groups, limit = tokens // self.rows, self.limit(k, experts)
        buckets = (
            chosen + torch.arange(groups, device=chosen.device).repeat_interleave(self.rows)[:, None] * experts
        ).flatten()
        counts = torch.zeros(groups * experts, dtype=torch.int64, device=chosen.device)
        counts.index_add_(0, buckets, torch.ones_like(buckets))
        if self.drop == "error":
            if not groups:
                return None, counts.new_zeros(3)
            worst = counts.argmax()
            return None, torch.stack([counts.max() - limit, worst % experts, worst // experts])
        note_asked(IN_ORDER)
        order = torch.arange(tokens * k, device=chosen.device)
        if self.drop == "probability":
            order = weights.detach().flatten().argsort(descending=True, stable=True)
        order = order[buckets[order].argsort(stable=True)]
        first = (counts.cumsum(0) - counts)[buckets[order]]
        kept = torch.empty(tokens * k, dtype=torch.bool, device=chosen.device)
        kept[order] = torch.arange(tokens * k, device=chosen.device) - first < limit
        return kept.view(tokens, k), None
