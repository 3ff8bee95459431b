"""What a transform of a step tells a model's functions about the axis along which its sequences are cut."""

import attrs
import torch
from torch import Tensor

from functional_ds.base import tree
from functional_ds.comm.record.group import Group
from functional_ds.step.axes import axis

from .sequence_layout import SequenceLayout

__all__ = ["SequenceAxis", "sequence_axis"]

AXIS = "sp"


def _whole(instance: "SequenceAxis", attribute: "attrs.Attribute[Tensor | None]", value: Tensor | None) -> None:
    if value is not None and (value.dim() != 2 or value.shape[1] != instance.length or value.is_floating_point()):
        raise ValueError(
            f"documents must be whole numbers of shape [rows or 1, {instance.length}], not {value.dtype} {list(value.shape)}: "
            "numbers of all positions of the sequence, in its own order, on every rank"
        )


@attrs.frozen(eq=False)
class SequenceAxis:
    """The ranks among which sequences are cut, in which layout, and what masks go with the positions of this batch.

    ``T.sequence`` makes one for each batch, and ``axis("sp")`` is it inside of the step.

    Attributes:
        group: the ranks; in ``layout.inner`` neighbours share one rank of the layout.
        layout: which positions each of them holds.
        length: of the whole sequence, padding included.
        documents: int [rows or 1, length], in the sequence's own order, the same on all ranks: positions attend to each other
            where their numbers are equal; -1 is padding, to which nothing attends. None: one document, no padding. It varies
            between data-parallel ranks and is replicated over ``group``.
    """

    group: Group
    layout: SequenceLayout
    length: int
    documents: Tensor | None = attrs.field(default=None, kw_only=True, validator=_whole, repr=tree.summary)

    def __attrs_post_init__(self) -> None:
        self.layout.check(self.length, self.group.size)

    def positions(self, device: torch.device | str | None = None) -> Tensor:
        """This rank's positions in the whole sequence, int64 [length / ranks]."""
        return self.layout.positions(self.length, self.group.size, self.group.rank, device=device)

    def cut(self, whole: Tensor, *, dim: int = 1) -> Tensor:
        """This rank's piece of a tensor of the whole sequence along ``dim``.

        Raises:
            ValueError: its size along ``dim`` is not the sequence's length.
        """
        if whole.shape[dim] != self.length:
            raise ValueError(f"a tensor of shape {list(whole.shape)}: dim {dim} must be the sequence's length {self.length}")
        return whole.index_select(dim, self.positions(whole.device))


def sequence_axis(what: str) -> SequenceAxis:
    """The axis of the running step.

    Raises:
        ValueError: the step has no such axis, or none runs.
    """
    found = axis(AXIS)
    if not isinstance(found, SequenceAxis):
        raise ValueError(f"{what}: sequences are not cut here; pass a group, or run it in a step with T.sequence(group)")
    return found
