"""Compressed collectives, which encode what they send with a codec."""

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import attrs
import optree
import torch
from torch import Tensor

from functional_ds.base import tree as pytree
from functional_ds.comm.api import all_gather, all_reduce, reduce_scatter
from functional_ds.comm.backends.reduction import fold
from functional_ds.comm.calls.dispatch import check_avg, check_call, flatten, prepare, relay, resolve_dim, resolve_group
from functional_ds.comm.declare import varying
from functional_ds.comm.exchange import all_to_all
from functional_ds.comm.graft import Graft
from functional_ds.comm.record.group import Group
from functional_ds.comm.record.pending import Pending, Request
from functional_ds.comm.table.collective import Call, CallContext
from functional_ds.comm.table.packing import pack_cut, pad_rows, piece_shape, unpack_joined
from functional_ds.comm.table.rows import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER

from .codec import Codec

_Program = Callable[..., Request[Any]]


def compressed(collective: Callable[..., Any], codec: Codec) -> "Compressed":
    """Makes a compressed version of a collective, which is called as the collective is.

    Let C be the codec, applied to each rank's value separately:

    | collective | result | values are encoded |
    |---|---|---|
    | all_gather | ``AG(C(x))``, including this rank's piece | once |
    | reduce_scatter | the ranks' ``C(piece)`` from an all-to-all, reduced in rank order | once |
    | all_reduce | ``AG(C(RS(C(x))))`` | twice |

    All ranks get the same bits. Leaves that are not floating point are not encoded, nor is anything in a group of one rank.
    Gradients are straight-through: the transpose is that of the plain collective.

    Args:
        collective: ``comm.all_gather``, ``comm.reduce_scatter`` or ``comm.all_reduce``.
        codec: ``Cast(dtype)``, ``Blocks(8)``, ``Blocks(4)``, or any object with ``encode`` and ``decode``. ``OneBit`` and
            ``TopK`` are biased: use them with ``ErrorFeedback``.

    Cost: that of the plain collective, in bytes of the encoded payload. An asynchronous all_reduce starts its second phase in
    the background when the first has ended, on the channel "compressed".

    Raises:
        ValueError: the collective has no compressed version. Calls raise the errors of the collective.
        TypeError: the codec lacks ``encode`` or ``decode``.

    >>> from functional_ds import comm
    >>> gather = comm.codecs.compressed(comm.all_gather, comm.codecs.Blocks(8))
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
            raise TypeError(
                f"codec={codec!r} has no {method}: use comm.codecs.Cast, comm.codecs.Blocks, or a record with encode and decode"
            )
    return Compressed(collective, codec)


@attrs.frozen(repr=False)
class Compressed:
    """A collective with a codec; see ``compressed``."""

    collective: Callable[..., Any]
    codec: Codec

    def __call__(self, x: Any, group: Group | None = None, **options: Any) -> Any:
        return self.request(x, group, **options).run()

    def request(self, x: Any, group: Group | None = None, **options: Any) -> Request[Any]:
        """The request that ``comm.start`` starts."""
        group = resolve_group(group)
        if group.size == 1:
            return prepare(self.collective, x, group, **options)
        return _PROGRAMS[self.collective](self.codec, x, group, **options)

    def __repr__(self) -> str:
        return f"compressed({self.collective.__name__}, {self.codec!r})"


def _all_gather(codec: Codec, x: Any, group: Group, *, dim: int = 0, tiled: bool = True) -> Request[Any]:
    options: dict[str, Any] = {"dim": resolve_dim("all_gather", x, dim), "tiled": tiled}
    leaves, spec = check_leaves(Call(ALL_GATHER, options), x, group)
    here, kinds = CallContext(options, group.rank, group.size), [(leaf.shape, leaf.dtype) for leaf in leaves]
    graft = Graft.of(leaves, lambda grads: reduce_scatter(grads, group, **options))

    def whole(payloads: Sequence[Sequence[Tensor]]) -> Any:
        joined = []
        for parts, (shape, dtype) in zip(payloads, kinds, strict=True):
            rows = decode_leaf(codec, parts, shape.numel(), dtype)  # [n, m], row r from rank r
            joined.append(unpack_joined(rows, shape, here))
        return pytree.unflatten(spec, graft(joined))

    sent = [encode_leaf(codec, leaf.detach().reshape(1, -1)) for leaf in leaves]
    return prepare(all_gather, sent, group).then(whole)


def _reduce_scatter(codec: Codec, x: Any, group: Group, *, dim: int = 0, op: str = "sum", tiled: bool = True) -> Request[Any]:
    place: dict[str, Any] = {"dim": resolve_dim("reduce_scatter", x, dim), "tiled": tiled}
    options = {**place, "op": "sum" if op == "avg" else op}
    leaves, spec = check_leaves(Call(REDUCE_SCATTER, options), x, group)
    check_avg(leaves, op)
    here = CallContext(options, group.rank, group.size)
    pieces = [(torch.Size(piece_shape(leaf, here)), leaf.dtype) for leaf in leaves]
    graft = Graft.of(leaves, lambda grads: all_gather(grads, group, **place) if options["op"] == "sum" else _no_transpose(op))

    def folded(payloads: Sequence[Sequence[Tensor]]) -> Any:
        totals = []
        for parts, (shape, dtype) in zip(payloads, pieces, strict=True):
            rows = decode_leaf(codec, parts, shape.numel(), sum_dtype(dtype))  # [n, m], row r from rank r
            totals.append(fold(rows.unbind(), options["op"]).to(dtype).reshape(shape))
        totals = graft(totals)
        return pytree.unflatten(spec, [total / group.size for total in totals] if op == "avg" else totals)

    sent = [encode_leaf(codec, pack_cut(leaf.detach(), here)) for leaf in leaves]  # [n, m], row r for rank r
    return prepare(all_to_all, sent, group).then(folded)


def _all_reduce(codec: Codec, x: Any, group: Group, *, op: str = "sum") -> Request[Any]:
    plain = "sum" if op == "avg" else op
    leaves, spec = check_leaves(Call(ALL_REDUCE, {"op": plain}), x, group)
    check_avg(leaves, op)
    shapes, late = [leaf.shape for leaf in leaves], group.channel("compressed")

    def whole(flats: list[Tensor]) -> Any:
        totals = [crop(flat, shape) for flat, shape in zip(flats, shapes, strict=True)]
        return pytree.unflatten(spec, [total / group.size for total in totals] if op == "avg" else totals)

    rows = [pad_rows(leaf, group.size) for leaf in leaves]
    scatter = _reduce_scatter(codec, rows, group, op=plain, tiled=False)
    device = leaves[0].device if leaves else group.world.device

    def chain() -> Pending[Any]:
        return relay(scatter.start(), lambda pieces: _all_gather(codec, pieces, late).start(), lane=late, device=device)

    return Request(lambda: _all_gather(codec, scatter.run(), late).run(), chain).then(whole)


_PROGRAMS: Mapping[Callable[..., Any], _Program] = MappingProxyType(
    {all_gather: _all_gather, reduce_scatter: _reduce_scatter, all_reduce: _all_reduce}
)


# -- leaves -----------------------------------------------------------------------------------------------------------


def encode_leaf(codec: Codec, rows: Tensor) -> Sequence[Tensor]:
    """The payload of rows; rows that are not floating point are not encoded."""
    return codec.encode(rows) if rows.is_floating_point() else (rows,)


def decode_leaf(codec: Codec, parts: Sequence[Tensor], size: int, dtype: torch.dtype) -> Tensor:
    """The rows [n, size] of a payload."""
    return codec.decode(parts, size, dtype) if dtype.is_floating_point else parts[0]


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which sums are computed: at least fp32 for floating point."""
    return torch.float32 if dtype.is_floating_point and dtype.itemsize < 4 else dtype


def crop(rows: Tensor, shape: torch.Size) -> Tensor:
    """The inverse of ``pad_rows``."""
    return rows.flatten()[: shape.numel()].reshape(shape)


def check_leaves(call: Call, x: Any, group: Group) -> tuple[list[Tensor], optree.PyTreeSpec]:
    """The leaves and structure of a value; raises the errors of the plain collective."""
    varying(x, group)  # a codec acts on the terms of a partial sum separately, which is not linear
    leaves, spec = flatten(call.collective.name, x)
    check_call(call, leaves, group, "compressed ")
    return leaves, spec


def _no_transpose(op: str) -> list[Tensor]:
    raise ValueError(
        f"compressed reduce_scatter(op={op!r}) has no transpose, so no gradient flows through it: detach its input"
    )
