"""What all implementations of attention over split sequences share: arguments, positions and masks."""

from collections.abc import Callable, Sequence

import attrs
import torch.nn.functional as F
from torch import Tensor

from functional_ds.base.torch_private import disable_torch_function
from functional_ds.comm.agreement.alike import alike
from functional_ds.comm.record.group import Group
from functional_ds.step.axes import is_for_shapes

from .axis import check_pieces, resolve_axis
from .blockwise import AttentionMask, checked_qkv, mask_of, resolved_scale, without_autocast
from .sequence_layout import SequenceLayout

Attention = Callable[..., Tensor]


@attrs.frozen(eq=False)
class CutSequence:
    """The whole sequence, as one call of attention knows it.

    Attributes:
        group: the ranks.
        layout: which positions each of them holds.
        length: of the whole sequence.
        mask: which positions attend to which.
        scale: of scores.
    """

    group: Group
    layout: SequenceLayout
    length: int
    mask: AttentionMask
    scale: float

    def runs(self, ahead: int = 0) -> tuple[range, ...]:
        """The positions of the rank that is ``ahead`` ranks after this one, around the group."""
        return self.layout.runs(self.length, self.group.size, (self.group.rank + ahead) % self.group.size)


def cut_attention(
    what: str,
    compute: Callable[[CutSequence, Tensor, Tensor, Tensor], Tensor],
    *,
    group: Group | None,
    layout: SequenceLayout | str | None,
) -> Attention:
    """An attention function (q, k, v, ...) for sequences split over ranks, with the arguments of ``attention``.

    Args:
        what: its name in errors.
        compute: the attention of this rank's q, k and v, after checks.
        group: the ranks; None for those of the step's ``T.sequence``, with its layout and documents.
        layout: which positions each of them holds, or its name.
    """

    def attend(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        causal: bool = False,
        window: int | None = None,
        documents: Tensor | Sequence[int] | None = None,
        scale: float | None = None,
    ) -> Tensor:
        if is_for_shapes():
            return shape_of_attention(q, k, v)
        ranks, how, numbers = resolve_axis(what, group, layout, documents=documents)
        q, k, v = checked_qkv(what, q, k, v)
        length = q.shape[2] * ranks.size
        check_pieces(what, length, ranks, window)
        how.check(length, ranks.size)
        documents = numbers if documents is None else documents
        mask = mask_of(causal, window, documents, length=length, rows=q.shape[0], layout=how)
        same = {"heads": (q.shape[1], k.shape[1]), "causal": causal, "window": window, "documents": documents, "scale": scale}
        with without_autocast(q), alike(what, ranks, **same, layout=how):
            return compute(CutSequence(ranks, how, length, mask, resolved_scale(q, scale)), q, k, v)

    return attend


def shape_of_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """A result with the right shape, for tracing a module; hidden from the trace, so that it cannot replace attention there.

    A call inside of a module that runs as a whole is not traced. The trace raises an error for one between such modules.
    """
    with disable_torch_function():
        return F.scaled_dot_product_attention(q, k, v, enable_gqa=True)
