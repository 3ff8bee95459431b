"""The sequence-parallel axis of a running step."""

from collections.abc import Sequence
from typing import Any

import attrs
import torch
from torch import Tensor

from functional_ds.base import tree
from functional_ds.comm.record.group import Group
from functional_ds.step.axes import IN_ORDER, axes, note_asked
from functional_ds.step.pass_scope import current_pass

from .sequence_layout import SequenceLayout

AXIS = "sp"
IN_DOCUMENTS = "sp, for attention within its documents"  # what the functions here ask for; ``axis("sp")`` does not reveal it


def _whole(instance: "SequenceAxis", attribute: "attrs.Attribute[Tensor | None]", value: Tensor | None) -> None:
    if value is not None and (value.dim() != 2 or value.shape[1] != instance.length or value.is_floating_point()):
        raise ValueError(
            f"documents must be whole numbers of shape [rows or 1, {instance.length}], not {value.dtype} {list(value.shape)}: "
            "numbers of all positions of the sequence, in its own order, on every rank"
        )


@attrs.frozen(eq=False)
class SequenceAxis:
    """The ranks over which sequences are split, their layout, and the documents of this batch, for masks.

    ``T.sequence`` makes one for each batch; inside the step ``axis("sp")`` returns it.

    Attributes:
        group: the ranks; with ``layout.inner`` > 1 neighbours share one rank of the layout.
        layout: which positions each of them holds.
        length: of the whole sequence, padding included.
        documents: int [rows or 1, length], in the sequence's own order, the same on all ranks: positions attend to each other
            if their numbers are equal; -1 is padding, to which no position attends. None: one document, no padding. It differs
            between data-parallel ranks.
        ring_group: if ``layout.inner`` > 1, the ranks of this rank's ring, in the layout's order.
        ulysses_group: if ``layout.inner`` > 1, the neighbours that share one of its ranks.

    >>> from functional_ds import comm, seq
    >>> def program():
    ...     axis = SequenceAxis(comm.world(), seq.SequenceLayout.of("zigzag"), 8)
    ...     return axis.positions().tolist(), axis.cut(torch.arange(8).view(1, 8) * 10).tolist()
    >>> comm.simulate(program, world_size=2)[0]
    ([0, 1, 6, 7], [[0, 10, 60, 70]])
    """

    group: Group
    layout: SequenceLayout
    length: int
    documents: Tensor | None = attrs.field(default=None, kw_only=True, validator=_whole, repr=tree.summary)
    ring_group: Group | None = attrs.field(default=None, kw_only=True)
    ulysses_group: Group | None = attrs.field(default=None, kw_only=True)

    def __attrs_post_init__(self) -> None:
        self.layout.check(self.length, self.group.size)
        sizes = tuple(None if group is None else group.size for group in (self.ring_group, self.ulysses_group))
        if sizes not in ((None, None), (self.group.size // self.layout.inner, self.layout.inner)):
            raise ValueError(
                f"ring_group and ulysses_group have {sizes} ranks; {self.layout!r} on {self.group.size} ranks needs "
                f"{(self.group.size // self.layout.inner, self.layout.inner)}"
            )

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


INSIDE_ULYSSES = "inside of ulysses"  # the slot of a pass, while Ulysses runs its attention over the step's own ranks


def sequence_axis(what: str) -> SequenceAxis:
    """The axis of the running step.

    Raises:
        ValueError: the step has no such axis, or none runs.

    >>> import functional_ds as fds
    >>> from functional_ds import comm, transforms as T
    >>> def loss(params, batch):
    ...     positions = sequence_axis("loss").positions()  # of this rank's tokens
    ...     return fds.Weighted((params["w"] * positions).sum(), torch.tensor(len(positions)))
    >>> def program():
    ...     step = fds.compose(T.zero(1), T.sequence(tokenwise=True))(fds.train_step(loss, fds.sgd(0.1)))
    ...     return step(step.init({"w": torch.ones(())}), {"input_ids": torch.zeros(1, 8).long()})[1]["loss"].item()
    >>> comm.simulate(program, world_size=2)
    [3.5, 3.5]
    """
    note_asked(IN_DOCUMENTS)
    axis = axes().get(AXIS)
    if not isinstance(axis, SequenceAxis):
        raise ValueError(f"{what}: sequences are not split here; pass a group, or run it in a step with T.sequence(group)")
    return axis


def documents_of(attention_mask: Tensor | None = None, *, position_ids: Tensor | None = None) -> Tensor | None:
    """The document numbers for ``SequenceAxis``, from a batch's mask or positions; None without either.

    Args:
        attention_mask: [rows, length], 0 for padding.
        position_ids: [rows, length]; a document begins wherever a position is not the previous one plus 1.

    >>> documents_of(torch.tensor([[1, 1, 1, 0]]), position_ids=torch.tensor([[0, 1, 0, 0]])).tolist()
    [[0, 0, 1, -1]]
    """
    documents = None
    if position_ids is not None:
        documents = torch.nn.functional.pad((position_ids.diff(dim=1) != 1).cumsum(1), (1, 0))
    if attention_mask is not None:
        documents = torch.zeros_like(attention_mask, dtype=torch.int64) if documents is None else documents
        documents = documents.masked_fill(attention_mask == 0, -1)
    return documents


def resolve_axis(
    what: str,
    group: Group | None,
    layout: SequenceLayout | str | None,
    *,
    documents: Tensor | Sequence[int] | None = None,
    other: bool = False,
) -> tuple[Group, SequenceLayout, Tensor | None]:
    """The group, the layout and the documents: those given, else those of the running step.

    A given group that is the step's, or its ring, in its layout, is treated as the step's.

    Args:
        what: the caller, for errors.
        group: as given.
        layout: as given.
        documents: of the call, if given.
        other: whether the call may attend otherwise than within them.

    Raises:
        ValueError: there is no group, or a layout without one.
    """
    known: Any = axes().get(AXIS)
    theirs = getattr(known, "documents", None)
    plain = not other and (documents is None or documents is theirs)
    steps = _of_the_step(known, group, layout) if group is not None and plain else None
    if group is not None and steps is not None:
        note_asked(IN_DOCUMENTS)
        return group, steps, theirs
    if (group is not None or other or documents is not None) and documents is not theirs:
        note_asked(IN_ORDER)  # it does not attend in the step's documents
    if group is not None:
        return group, SequenceLayout.of("contiguous" if layout is None else layout), None
    if layout is not None:
        raise ValueError(
            f"{what}: layout={layout!r} without a group: pass both, or none to take those of the step's T.sequence"
        )
    axis, pass_ = sequence_axis(what), current_pass()
    if pass_ is not None and pass_.slots.get(INSIDE_ULYSSES):
        raise ValueError(
            f"{what}: Ulysses splits this attention's heads over the ranks of the step's T.sequence already, so it cannot "
            "take the same ranks: pass the two axes, fds.seq.ulysses(fds.seq.ring(mesh['ring'], layout=kind), mesh['heads']), "
            "and T.sequence(mesh['ring', 'heads'], layout=SequenceLayout(kind, inner=2)), where inner is the size of 'heads'"
        )
    return axis.group, axis.layout, axis.documents


def check_pieces(what: str, length: int, group: Group, window: int | None) -> None:
    """Raises ValueError where an attention over these positions is not one over the sequence of the step.

    Args:
        what: the caller, for the error.
        length: of all pieces on the ranks of ``group``.
        group: the ranks that attend to each other.
        window: the attention's. One of two parts neighbours that the step's check of orders moves apart.
    """
    if window == 2:
        note_asked(IN_ORDER)
    known = axes().get(AXIS)
    if not isinstance(known, SequenceAxis) or known.group.size == 1:
        return
    if length > known.length or (length < known.length and group.ranks != known.group.ranks):
        raise ValueError(
            f"{what}: the pieces on the {group.size} ranks of {group.name!r} have {length} positions together, and the "
            f"sequence of the step's T.sequence {known.length} on {known.group.size} ranks. Leave the group out; for Ulysses "
            "over a ring pass two, fds.seq.ulysses(fds.seq.ring(mesh['ring'], layout=kind), mesh['heads']); and see that "
            "T.sequence(dims=...) splits all leaves that are sequences"
        )


def _of_the_step(known: Any, group: Group, layout: SequenceLayout | str | None) -> SequenceLayout | None:
    """The layout, if these are the ranks of the step's axis, or of its ring inside of Ulysses, in their layout."""
    how = SequenceLayout.of("contiguous" if layout is None else layout)
    if isinstance(known, SequenceAxis):
        if group.ranks == known.group.ranks and how == known.layout:
            return known.layout
        if (
            known.ring_group is not None
            and group.ranks == known.ring_group.ranks
            and how == attrs.evolve(known.layout, inner=1)
        ):
            return how
    return None
