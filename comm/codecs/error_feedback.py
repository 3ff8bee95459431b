"""Error feedback for biased codecs: the compression error of a step is added to the next step's value."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import attrs
import optree
import torch
from torch import Tensor

from functional_ds.base import tree as pytree
from functional_ds.comm.api import all_gather
from functional_ds.comm.backends.reduction import fold
from functional_ds.comm.calls.dispatch import check_avg, flatten, resolve_dim, resolve_group
from functional_ds.comm.exchange import all_to_all
from functional_ds.comm.record.group import Group
from functional_ds.comm.table.collective import Call, CallContext
from functional_ds.comm.table.packing import pack_cut, pad_rows, piece_shape, unpack_joined
from functional_ds.comm.table.rows import ALL_REDUCE, REDUCE_SCATTER

from .codec import Codec
from .compressed import check_leaves, crop, decode_leaf, encode_leaf, sum_dtype


class Residual(NamedTuple):
    """The accumulated compression error: two trees like the value, in fp32 for leaves in half precision.

    Attributes:
        own: the error of encoding this rank's values, in their shapes.
        piece: the error of encoding this rank's piece of the sum; each leaf is flat, 1/n of the value's elements, rounded up.
    """

    own: Any
    piece: Any

    def __repr__(self) -> str:
        return f"Residual(own={pytree.summary(self.own)}, piece={pytree.summary(self.piece)})"


@attrs.frozen
class ErrorFeedback:
    """Compressed sums over ranks with error feedback: each step's compression error is added to the next step's value.

    Its methods are pure: the caller passes and stores the residual, as in a slot of the training state. Ranks have different
    residuals.

    Law: for all values encoded by C, ``Σ C(pₜ) = Σ gₜ + e₀ - e_T``, where ``pₜ = gₜ + eₜ`` and ``eₜ₊₁ = pₜ - C(pₜ)`` (Seide et
    al. 2014; Stich and Karimireddy 2019; for both phases, Tang et al. 2019).

    An inf or a NaN stays in the residual, so after a step that overflowed and is skipped, continue with the residual from
    before it.

    Raises:
        ValueError: ``op`` is neither "sum" nor "avg".

    >>> from functional_ds import comm
    >>> feedback = comm.codecs.ErrorFeedback(comm.codecs.TopK(0.5))
    >>> def program():
    ...     gradient = torch.tensor([3.0, 2.0])
    ...     residual, sums = feedback.init(gradient), []
    ...     for _ in range(4):
    ...         total, residual = feedback.all_reduce(gradient, residual)
    ...         sums.append(total.tolist())
    ...     return sums
    >>> comm.simulate(program, world_size=1)[0]
    [[3.0, 0.0], [0.0, 4.0], [6.0, 0.0], [0.0, 4.0]]
    """

    codec: Codec

    def init(self, x: Any, group: Group | None = None) -> Residual:
        """A residual of zeros for values of the structure and shapes of ``x``."""
        n = resolve_group(group).size
        leaves, spec = flatten("error feedback", x)
        errors = [torch.zeros_like(leaf, dtype=sum_dtype(leaf.dtype), requires_grad=False) for leaf in leaves]
        piece = [e.new_zeros(-(-e.numel() // n)) for e in errors]
        return Residual(pytree.unflatten(spec, errors), pytree.unflatten(spec, piece))

    def all_reduce(self, x: Any, residual: Residual, group: Group | None = None, *, op: str = "sum") -> tuple[Any, Residual]:
        """The sum over the ranks, bitwise equal on all of them, and the new residual.

        Cost: in bytes of the encoded payload, each rank sends (n - 1) / n of its value and (n - 1) times its piece.
        """
        group = resolve_group(group)
        leaves, spec = _summable(Call(ALL_REDUCE, {"op": "sum"}), x, group, op)
        owed, late = _like(spec, residual.own), _like(spec, residual.piece)
        with torch.no_grad():
            values = [pad_rows(leaf + e, group.size) for leaf, e in zip(leaves, owed, strict=True)]  # [n, m]
            sent, errors = self._send(values, [rows.dtype for rows in values])
            pieces = [(self._total(p, e) + e)[None] for p, e in zip(all_to_all(sent, group), late, strict=True)]  # [1, m]
            back, piece = self._send(pieces, [leaf.dtype for leaf in leaves])
            totals = []
            for parts, leaf, e in zip(all_gather(back, group), leaves, late, strict=True):
                total = crop(decode_leaf(self.codec, parts, e.numel(), leaf.dtype), leaf.shape)
                totals.append(total / group.size if op == "avg" else total)
        lost = [_cropped(e, leaf.shape) for e, leaf in zip(errors, leaves, strict=True)]
        updated = Residual(pytree.unflatten(spec, lost), pytree.unflatten(spec, [e[0] for e in piece]))
        return pytree.unflatten(spec, totals), updated

    def reduce_scatter(
        self, x: Any, residual: Residual, group: Group | None = None, *, dim: int = 0, op: str = "sum", tiled: bool = True
    ) -> tuple[Any, Residual]:
        """This rank's piece of the sum over the ranks, and the new residual, whose ``piece`` is unchanged.

        In half precision the sum is rounded, and the residual does not contain that error.

        Cost: in bytes of the encoded payload, each rank sends (n - 1) / n of its value.
        """
        group = resolve_group(group)
        options = {"dim": resolve_dim("reduce_scatter", x, dim), "op": "sum", "tiled": tiled}
        leaves, spec = _summable(Call(REDUCE_SCATTER, options), x, group, op)
        owed, here = _like(spec, residual.own), CallContext(options, group.rank, group.size)
        with torch.no_grad():
            values = [pack_cut(leaf + e, here) for leaf, e in zip(leaves, owed, strict=True)]  # [n, m]
            sent, errors = self._send(values, [rows.dtype for rows in values])
            totals, lost = [], []
            for parts, leaf, e in zip(all_to_all(sent, group), leaves, errors, strict=True):
                shape = piece_shape(leaf, here)
                total = self._total(parts, e[0]).to(leaf.dtype).reshape(shape)
                totals.append(total / group.size if op == "avg" else total)
                lost.append(unpack_joined(e, shape, here))
        return pytree.unflatten(spec, totals), residual._replace(own=pytree.unflatten(spec, lost))

    def _send(self, values: Sequence[Tensor], dtypes: Sequence[torch.dtype]) -> tuple[list[Sequence[Tensor]], list[Tensor]]:
        """Payloads of rows [n, m], and their errors when decoded to these dtypes."""
        sent = [encode_leaf(self.codec, rows) for rows in values]
        told = [decode_leaf(self.codec, p, v.shape[1], d) for p, v, d in zip(sent, values, dtypes, strict=True)]
        return sent, [value - other for value, other in zip(values, told, strict=True)]

    def _total(self, parts: Sequence[Tensor], like: Tensor) -> Tensor:
        """The sum of a payload's decoded rows, each like ``like`` [m]."""
        return fold(decode_leaf(self.codec, parts, like.numel(), like.dtype).unbind(), "sum")


def _cropped(rows: Tensor, shape: torch.Size) -> Tensor:
    """The cropped rows in memory of their size, since they are kept."""
    cropped = crop(rows, shape)
    return cropped if cropped.numel() == rows.numel() else cropped.clone()


def _like(spec: optree.PyTreeSpec, tree: Any) -> list[Tensor]:
    leaves, structure = flatten("residual", tree)
    if structure != spec:
        raise ValueError(f"residual: its structure is {structure}, and the value's {spec}; make one with init")
    return leaves


def _summable(call: Call, x: Any, group: Group, op: str) -> tuple[list[Tensor], optree.PyTreeSpec]:
    """The leaves and structure of a value; raises ValueError if error feedback does not apply to the call."""
    if op not in ("sum", "avg"):
        raise ValueError(f"op={op!r} with error feedback: a residual can be added only to sums; use sum or avg")
    leaves, spec = check_leaves(call, x, group)
    check_avg(leaves, op)
    return leaves, spec
