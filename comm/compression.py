"""Collectives that send less: a collective and a codec make one of the same signature; biased codecs take error feedback."""

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import attrs
import optree
import torch
import torch.nn.functional as F
from torch import Tensor

from .api import all_gather, all_reduce, all_to_all, reduce_scatter
from .applying import flatten, is_smooth, resolve_dim
from .codecs import Codec
from .collective import Call, Here
from .fold import fold
from .group import Group
from .table import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER
from .tiling import pack_cut, piece_shape, unpack_joined
from .world import world

__all__ = ["Compressed", "ErrorFeedback", "Residual", "compressed"]

_Program = Callable[..., Any]


def compressed(collective: Callable[..., Any], codec: Codec) -> "Compressed":
    """The collective, with what is sent made smaller by a codec; it is called as the collective is.

    With C for the codec, each rank's value encoded by itself:

    | collective | on every rank | values pass the codec |
    |---|---|---|
    | all_gather | ``AG(C(x))``, this rank's own piece as the others see it, too | once |
    | reduce_scatter | the fold of all ranks' ``C(piece)``, in rank order, by an all-to-all | once, whatever n is |
    | all_reduce | ``AG(C(RS(C(x))))`` | twice |

    All ranks get the same bits. Leaves that are not floating point go as they are, and so does everything in a group of one
    rank, where nothing is sent. Gradients pass straight through: the transpose is that of the plain collective.

    Args:
        collective: ``comm.all_gather``, ``comm.reduce_scatter`` or ``comm.all_reduce``.
        codec: ``Cast(dtype)``, ``Blocks(8)``, ``Blocks(4)``, or whatever has ``encode`` and ``decode``. ``OneBit`` and
            ``TopK`` are biased: use them with ``ErrorFeedback``.

    Cost: as the plain collective's, in bytes of the codec's payload. The second phase of an asynchronous all_reduce starts
    with its wait, on the channel "compressed": all ranks must wait for such calls in one order.

    Raises:
        ValueError: another collective; whatever the collective refuses.

    >>> from functional_ds import comm
    >>> gather = comm.compressed(comm.all_gather, comm.Blocks(8))
    >>> gather
    compressed(all_gather, Blocks(bits=8, size=256))
    >>> comm.simulate(lambda: gather(torch.tensor([127.0, 1.4]) * (comm.world().rank + 1)).tolist(), world_size=2)[0]
    [127.0, 1.0, 254.0, 2.0]
    """
    if collective not in _PROGRAMS:
        names = ", ".join(f"comm.{known.__name__}" for known in _PROGRAMS)
        raise ValueError(f"collective={collective!r} has no compressed form; use one of {names}")
    for method in ("encode", "decode"):
        if not callable(getattr(codec, method, None)):
            raise TypeError(f"codec={codec!r} has no {method}: use comm.Cast, comm.Blocks, or a record with encode and decode")
    return Compressed(collective, codec)


@attrs.frozen(repr=False)
class Compressed:
    """A collective with a codec; see ``compressed``."""

    collective: Callable[..., Any]
    codec: Codec

    def __call__(self, x: Any, group: Group | None = None, **options: Any) -> Any:
        group = group or world()
        if group.size == 1:
            return self.collective(x, group, **options)
        return _PROGRAMS[self.collective](self.codec, x, group, **options)

    def __repr__(self) -> str:
        return f"compressed({self.collective.__name__}, {self.codec!r})"


def _all_gather(codec: Codec, x: Any, group: Group, *, dim: int = 0, tiled: bool = True, async_op: bool = False) -> Any:
    options = {"dim": resolve_dim("all_gather", x, dim), "tiled": tiled}
    leaves, spec = _accepted(Call(ALL_GATHER, options), x, group)
    here, kinds = Here(options, group.rank, group.size), [(leaf.shape, leaf.dtype) for leaf in leaves]
    graft = _Graft.of(leaves, lambda grads: reduce_scatter(grads, group, **options))

    def whole(payloads: Sequence[Sequence[Tensor]]) -> Any:
        joined = []
        for parts, (shape, dtype) in zip(payloads, kinds, strict=True):
            rows = _decode(codec, parts, shape.numel(), dtype)  # [n, m], row r from rank r
            joined.append(unpack_joined(rows, shape, here))
        return optree.tree_unflatten(spec, graft(joined))

    sent = [_encode(codec, leaf.detach().reshape(1, -1)) for leaf in leaves]
    arrived = all_gather(sent, group, async_op=async_op)
    return arrived.then(whole) if async_op else whole(arrived)


def _reduce_scatter(
    codec: Codec, x: Any, group: Group, *, dim: int = 0, op: str = "sum", tiled: bool = True, async_op: bool = False
) -> Any:
    place = {"dim": resolve_dim("reduce_scatter", x, dim), "tiled": tiled}
    options = {**place, "op": "sum" if op == "avg" else op}
    leaves, spec = _accepted(Call(REDUCE_SCATTER, options), x, group)
    _check_avg(leaves, op)
    here = Here(options, group.rank, group.size)
    pieces = [(torch.Size(piece_shape(leaf, here)), leaf.dtype) for leaf in leaves]
    graft = _Graft.of(leaves, lambda grads: all_gather(grads, group, **place) if options["op"] == "sum" else _no_transpose(op))

    def folded(payloads: Sequence[Sequence[Tensor]]) -> Any:
        totals = []
        for parts, (shape, dtype) in zip(payloads, pieces, strict=True):
            rows = _decode(codec, parts, shape.numel(), _wide(dtype))  # [n, m], row r from rank r
            totals.append(fold(rows.unbind(), options["op"]).to(dtype).reshape(shape))
        totals = graft(totals)
        return optree.tree_unflatten(spec, [total / group.size for total in totals] if op == "avg" else totals)

    sent = [_encode(codec, pack_cut(leaf.detach(), here)) for leaf in leaves]  # [n, m], row r for rank r
    arrived = all_to_all(sent, group, async_op=async_op)
    return arrived.then(folded) if async_op else folded(arrived)


def _all_reduce(codec: Codec, x: Any, group: Group, *, op: str = "sum", async_op: bool = False) -> Any:
    leaves, spec = _accepted(Call(ALL_REDUCE, {"op": "sum" if op == "avg" else op}), x, group)
    shapes, late = [leaf.shape for leaf in leaves], group.channel("compressed")

    def whole(pieces: list[Tensor]) -> Any:
        flats = _all_gather(codec, pieces, late)
        return optree.tree_unflatten(spec, [_crop(flat, shape) for flat, shape in zip(flats, shapes, strict=True)])

    rows = [_rows(leaf, group.size) for leaf in leaves]
    scattered = _reduce_scatter(codec, rows, group, op=op, tiled=False, async_op=async_op)
    return scattered.then(whole) if async_op else whole(scattered)


_PROGRAMS: Mapping[Callable[..., Any], _Program] = MappingProxyType(
    {all_gather: _all_gather, reduce_scatter: _reduce_scatter, all_reduce: _all_reduce}
)


# -- error feedback ---------------------------------------------------------------------------------------------------


class Residual(NamedTuple):
    """What error feedback still owes: two trees like the value, fp32 where that is in half precision.

    Attributes:
        own: what this rank's values lost on their way out, in the value's shapes.
        piece: what this rank's piece of the sum lost on its way back; each leaf flat, 1/n of the value's, rounded up.
    """

    own: Any
    piece: Any


@attrs.frozen
class ErrorFeedback:
    """Sums over ranks through a biased codec: what it leaves out in one step is added to the next one's value.

    Pure: the residual goes in and comes out, and the caller stores it (in a state's slot, say), one on each rank.

    Law 38, of everything that passes the codec C: ``Σ C(pₜ) = Σ gₜ + e₀ - e_T`` where ``pₜ = gₜ + eₜ`` and
    ``eₜ₊₁ = pₜ - C(pₜ)`` (Seide et al. 2014; Stich and Karimireddy 2019; both ways, Tang et al. 2019).

    An inf or a NaN stays in the residual for good. Whoever skips a step that overflowed goes on with the residual from
    before it.

    Raises:
        ValueError: an op other than sum and avg.

    >>> from functional_ds import comm
    >>> feedback = comm.ErrorFeedback(comm.TopK(0.5))
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
        """Nothing is owed yet, for values like ``x``."""
        n = (group or world()).size
        leaves, spec = flatten("error feedback", x)
        own = [torch.zeros_like(leaf, dtype=_wide(leaf.dtype), requires_grad=False) for leaf in leaves]
        piece = [e.new_zeros(-(-e.numel() // n)) for e in own]
        return Residual(optree.tree_unflatten(spec, own), optree.tree_unflatten(spec, piece))

    def all_reduce(self, x: Any, residual: Residual, group: Group | None = None, *, op: str = "sum") -> tuple[Any, Residual]:
        """The sum over the ranks as the codec tells it, the same on all of them, and the new residual.

        Cost: in bytes of the payload, each rank sends (n - 1) / n of its value and (n - 1) times its piece.
        """
        group = group or world()
        leaves, spec = _summable(Call(ALL_REDUCE, {"op": "sum"}), x, group, op)
        owed, late = _like(spec, residual.own), _like(spec, residual.piece)
        with torch.no_grad():
            sent, own = self._send([_rows(leaf + e, group.size) for leaf, e in zip(leaves, owed, strict=True)])
            arrived = all_to_all(sent, group)
            back, piece = self._send([(self._total(p, e) + e)[None] for p, e in zip(arrived, late, strict=True)])
            totals = []
            for parts, leaf, e in zip(all_gather(back, group), leaves, late, strict=True):
                total = _crop(_decode(self.codec, parts, e.numel(), e.dtype), leaf.shape).to(leaf.dtype)  # from [n, m]
                totals.append(total / group.size if op == "avg" else total)
        lost = [_crop(e, leaf.shape) for e, leaf in zip(own, leaves, strict=True)]
        found = Residual(optree.tree_unflatten(spec, lost), optree.tree_unflatten(spec, [e[0] for e in piece]))
        return optree.tree_unflatten(spec, totals), found

    def reduce_scatter(
        self, x: Any, residual: Residual, group: Group | None = None, *, dim: int = 0, op: str = "sum", tiled: bool = True
    ) -> tuple[Any, Residual]:
        """This rank's piece of the sum over the ranks, and the new residual, whose ``piece`` stays as it is.

        Cost: in bytes of the payload, each rank sends (n - 1) / n of its value.
        """
        group = group or world()
        options = {"dim": resolve_dim("reduce_scatter", x, dim), "op": "sum", "tiled": tiled}
        leaves, spec = _summable(Call(REDUCE_SCATTER, options), x, group, op)
        owed, here = _like(spec, residual.own), Here(options, group.rank, group.size)
        with torch.no_grad():
            sent, own = self._send([pack_cut(leaf + e, here) for leaf, e in zip(leaves, owed, strict=True)])
            totals, lost = [], []
            for parts, leaf, e in zip(all_to_all(sent, group), leaves, own, strict=True):
                shape = piece_shape(leaf, here)
                total = self._total(parts, e[0]).to(leaf.dtype).reshape(shape)
                totals.append(total / group.size if op == "avg" else total)
                lost.append(unpack_joined(e, shape, here))
        return optree.tree_unflatten(spec, totals), residual._replace(own=optree.tree_unflatten(spec, lost))

    def _send(self, values: Sequence[Tensor]) -> tuple[list[Sequence[Tensor]], list[Tensor]]:
        """Payloads of rows [n, m], and what they leave out."""
        sent = [_encode(self.codec, rows) for rows in values]
        left = [v - _decode(self.codec, parts, v.shape[1], v.dtype) for v, parts in zip(values, sent, strict=True)]
        return sent, left

    def _total(self, parts: Sequence[Tensor], like: Tensor) -> Tensor:
        """The sum over the ranks of what a payload's rows stand for, each a row as ``like`` [m]."""
        return fold(_decode(self.codec, parts, like.numel(), like.dtype).unbind(), "sum")


# -- leaves -----------------------------------------------------------------------------------------------------------


def _encode(codec: Codec, rows: Tensor) -> Sequence[Tensor]:
    return codec.encode(rows) if rows.is_floating_point() else (rows,)


def _decode(codec: Codec, parts: Sequence[Tensor], size: int, dtype: torch.dtype) -> Tensor:
    return codec.decode(parts, size, dtype) if dtype.is_floating_point else parts[0]


def _wide(dtype: torch.dtype) -> torch.dtype:
    """What sums are carried in."""
    return torch.float32 if dtype.is_floating_point and dtype.itemsize < 4 else dtype


def _rows(leaf: Tensor, n: int) -> Tensor:
    """[n, m], zeros at the end."""
    size = -(-leaf.numel() // n)
    return F.pad(leaf.reshape(-1), (0, n * size - leaf.numel())).view(n, size)


def _crop(rows: Tensor, shape: torch.Size) -> Tensor:
    """The inverse of ``_rows``."""
    return rows.flatten()[: shape.numel()].reshape(shape)


def _like(spec: optree.PyTreeSpec, tree: Any) -> list[Tensor]:
    leaves, found = flatten("residual", tree)
    if found != spec:
        raise ValueError(f"residual: its structure is {found}, and the value's {spec}; make one with init")
    return leaves


def _accepted(call: Call, x: Any, group: Group) -> tuple[list[Tensor], optree.PyTreeSpec]:
    """The leaves and structure of what the plain collective would accept."""
    leaves, spec = flatten(call.collective.name, x)
    here = Here(call.options, group.rank, group.size)
    try:
        for leaf in leaves:
            call.collective.check(leaf, here)
    except ValueError as error:
        raise ValueError(f"compressed {call.shown(group.rank)} on rank {group.rank} of {group.name!r}: {error}") from None
    return leaves, spec


def _summable(call: Call, x: Any, group: Group, op: str) -> tuple[list[Tensor], optree.PyTreeSpec]:
    """What error feedback would accept."""
    if op not in ("sum", "avg"):
        raise ValueError(f"op={op!r} with error feedback: what is owed can be added to sums alone; use sum or avg")
    leaves, spec = _accepted(call, x, group)
    _check_avg(leaves, op)
    return leaves, spec


def _check_avg(leaves: Sequence[Tensor], op: str) -> None:
    for leaf in leaves:
        if op == "avg" and not is_smooth(leaf):
            raise ValueError(f"op='avg' of an integer or bool tensor ({leaf.dtype}): use sum, or cast it first")


def _no_transpose(op: str) -> list[Tensor]:
    raise ValueError(
        f"compressed reduce_scatter(op={op!r}) has no transpose, so no gradient flows through it: detach its input"
    )


# -- gradients --------------------------------------------------------------------------------------------------------


@attrs.frozen(eq=False)
class _Graft:
    """Hangs results into the graph of the leaves that they came from; ``back`` takes the gradients of one to the other's."""

    leaves: Sequence[Tensor]
    back: Callable[[list[Tensor]], list[Tensor]]

    @staticmethod
    def of(leaves: Sequence[Tensor], back: Callable[[list[Tensor]], list[Tensor]]) -> "_Graft":
        wanted = torch.is_grad_enabled() and any(leaf.requires_grad for leaf in leaves)
        return _Graft(leaves if wanted else (), back)

    def __call__(self, results: list[Tensor]) -> list[Tensor]:
        smooth = [i for i, leaf in enumerate(self.leaves) if is_smooth(leaf)]
        grafted = (
            _StraightThrough.apply(self.back, [results[i] for i in smooth], *(self.leaves[i] for i in smooth)) if smooth else ()
        )
        found = dict(zip(smooth, grafted, strict=True))
        return [found.get(i, result) for i, result in enumerate(results)]


class _StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, back: Callable[..., Any], results: Sequence[Tensor], *leaves: Tensor) -> tuple[Tensor, ...]:
        ctx.back = back
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return (None, None, *ctx.back(list(grads)))
