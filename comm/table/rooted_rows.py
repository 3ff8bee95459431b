"""Rows of the table of collectives: gather and scatter, which are each other's transposes, and the barrier."""

from collections.abc import Sequence

from torch import Tensor

from functional_ds.comm.backends import gloo, nccl
from functional_ds.comm.backends.primitives import Options

from .collective import Call, CallContext, Collective, Traffic
from .packing import pack_cut, unpack_joined, unpack_piece
from .rows import as_sent, but, check_rank
from .tiling import check_cut, check_dim, cut, join


def nothing(like: Tensor, shape: Sequence[int]) -> Tensor:
    """Zeros of a shape that take no memory (an expanded scalar)."""
    return like.new_zeros(()).expand(list(shape))


def _gather(xs: Sequence[Tensor], options: Options) -> list[Tensor]:
    whole = join(xs, options)
    return [whole if rank == options["dst"] else nothing(whole, whole.shape) for rank in range(len(xs))]


def _pack_scattered(leaf: Tensor, here: CallContext) -> Tensor:
    if here.rank == here["src"]:
        return pack_cut(leaf, here)  # [n, m]
    return nothing(leaf, [leaf.numel() // here.n])  # [m], the shape of the result


def _check_scatter(leaf: Tensor, here: CallContext) -> None:
    check_rank("src", here)
    check_cut(leaf, here)


def _check_gather_to(leaf: Tensor, here: CallContext) -> None:
    check_rank("dst", here)
    check_dim(leaf, here)


GATHER: Collective = Collective(
    name="gather",
    denotation=_gather,
    adjoint=lambda options: Call(SCATTER, {"src": options["dst"], **but(options, "dst")}),
    volume=lambda leaf, here: 0 if here.rank == here["dst"] else leaf.numel(),
    shares=lambda here: {here["dst"]: 1},
    gloo=gloo.gather,
    nccl=nccl.gather,
    result=lambda shape, here: [here.n, *shape],
    traffic=Traffic("exchange", keeps_share=True, of_result=True),
    unpack=lambda rows, leaf, here: unpack_joined(rows, leaf.shape, here),
    check=_check_gather_to,
)


SCATTER: Collective = Collective(
    name="scatter",
    denotation=lambda xs, options: [piece.clone() for piece in cut(xs[options["src"]], len(xs), options)],
    adjoint=lambda options: Call(GATHER, {"dst": options["src"], **but(options, "src")}),
    volume=lambda leaf, here: (here.n - 1) * (leaf.numel() // here.n) if here.rank == here["src"] else 0,
    reads=lambda here: here.rank == here["src"],
    gloo=gloo.scatter,
    nccl=nccl.scatter,
    result=lambda shape, here: shape[-1:],
    traffic=Traffic("exchange", keeps_share=True),
    pack=_pack_scattered,
    unpack=unpack_piece,
    check=_check_scatter,
)


BARRIER: Collective = Collective(
    name="barrier",
    denotation=lambda xs, options: list(xs),
    volume=lambda leaf, here: 0,
    gloo=gloo.barrier,
    nccl=nccl.barrier,
    result=as_sent,
    traffic=Traffic("exchange"),
)
