"""Rows of the table of collectives: all_to_all, permute, messages and Megatron's four; ``TABLE`` itself."""

from collections.abc import Sequence
from itertools import product

import attrs
import torch
from torch import Tensor

from functional_ds.comm.backends import gloo, nccl
from functional_ds.comm.backends.primitives import Options

from .collective import Call, CallContext, Collective, Traffic, Variance
from .errors import MismatchError
from .packing import pack_cut, pack_rows, piece_shape, unpack_joined, unpack_rows
from .rooted_rows import BARRIER, GATHER, SCATTER, nothing
from .rows import ALL_GATHER, ALL_REDUCE, BROADCAST, REDUCE, REDUCE_SCATTER, as_sent, but, sent_of
from .tiling import check_cut, check_dim

# -- exchanges --------------------------------------------------------------------------------------------------------


def _all_to_all(xs: Sequence[Tensor], options: Options) -> list[Tensor]:
    cuts = [x.tensor_split(len(xs), options["split_dim"]) for x in xs]
    return [torch.cat([pieces[rank] for pieces in cuts], options["concat_dim"]) for rank in range(len(xs))]


def _check_all_to_all(leaf: Tensor, here: CallContext) -> None:
    check_cut(leaf, here, "split_dim")
    check_dim(leaf, here, "concat_dim")


def _all_to_all_rows(xs: Sequence[Tensor], options: Options) -> list[Tensor]:
    cuts = [x.split(list(splits), options["dim"]) for x, splits in zip(xs, options["input_splits"], strict=True)]
    return [torch.cat([pieces[rank] for pieces in cuts], options["dim"]) for rank in range(len(xs))]


def _reconcile_splits(options: Options) -> None:
    sent, expected = options["input_splits"], options["output_splits"]
    for src, dst in product(range(len(sent)), repeat=2):
        if sent[src][dst] != expected[dst][src]:
            raise MismatchError(
                f"all_to_all: rank {src} of the group sends {sent[src][dst]} rows to rank {dst} (input_splits="
                f"{list(sent[src])}), which expects {expected[dst][src]} (output_splits={list(expected[dst])})"
            )


def _check_rows(leaf: Tensor, here: CallContext) -> None:
    rows = leaf.shape[check_dim(leaf, here)]
    for name in ("input_splits", "output_splits"):
        splits = here[name]
        if len(splits) != here.n or any(size < 0 for size in splits):
            raise ValueError(f"{name}={list(splits)}: a group of {here.n} needs {here.n} sizes >= 0, one for each rank")
    if sum(here["input_splits"]) != rows:
        raise ValueError(
            f"input_splits={list(here['input_splits'])} add up to {sum(here['input_splits'])}, "
            f"and dim={here['dim']} of a tensor of shape {list(leaf.shape)} has size {rows}"
        )


def _rows_title(options: Options, rank: int) -> tuple[str, Options]:
    dims = {"split_dim": options["dim"], "concat_dim": options["dim"]}
    return "all_to_all", {**dims, **but(options, "dim")}


def _rows_adjoint(options: Options) -> Call:
    splits = {"input_splits": options["output_splits"], "output_splits": options["input_splits"]}
    return Call(ALL_TO_ALL_ROWS, {**options, **splits})


def _permute(xs: Sequence[Tensor], options: Options) -> list[Tensor]:
    source = options["perm"].source
    return [xs[source[rank]].clone() if rank in source else torch.zeros_like(x) for rank, x in enumerate(xs)]


def _check_permute(leaf: Tensor, here: CallContext) -> None:
    if here["perm"].ranks > here.n:
        raise ValueError(f"perm={here['perm']} names rank {here['perm'].ranks - 1}; the group's ranks are 0..{here.n - 1}")


ALL_TO_ALL: Collective = Collective(
    name="all_to_all",
    denotation=_all_to_all,
    adjoint=lambda o: Call(ALL_TO_ALL, {"split_dim": o["concat_dim"], "concat_dim": o["split_dim"]}),
    volume=lambda leaf, here: (here.n - 1) * (leaf.numel() // here.n),
    gloo=gloo.all_to_all,
    nccl=nccl.all_to_all,
    result=as_sent,
    traffic=Traffic("exchange", keeps_share=True),
    pack=lambda leaf, here: pack_cut(leaf, here, here["split_dim"]),
    unpack=lambda rows, leaf, here: unpack_joined(rows, piece_shape(leaf, here, here["split_dim"]), here, here["concat_dim"]),
    check=_check_all_to_all,
)

ALL_TO_ALL_ROWS: Collective = Collective(
    name="all_to_all_rows",
    denotation=_all_to_all_rows,
    adjoint=_rows_adjoint,
    volume=lambda leaf, here: sent_of(leaf, here, here["input_splits"]),
    shares=lambda here: {rank: rows for rank, rows in enumerate(here["input_splits"]) if rank != here.rank},
    gloo=gloo.all_to_all_rows,
    nccl=nccl.all_to_all_rows,
    result=lambda shape, here: [sum(here["output_splits"]), shape[1]],
    traffic=Traffic("exchange", keeps_share=True),
    pack=pack_rows,
    unpack=unpack_rows,
    check=_check_rows,
    shape=lambda leaf, here: [*leaf.shape[: here["dim"]], "*", *leaf.shape[here["dim"] + 1 :]],
    private=("input_splits", "output_splits"),
    reconcile=_reconcile_splits,
    title=_rows_title,
)

PERMUTE: Collective = Collective(
    name="permute",
    denotation=_permute,
    adjoint=lambda options: Call(PERMUTE, {"perm": options["perm"].inverse}),
    volume=lambda leaf, here: leaf.numel() if here["perm"].target.get(here.rank, here.rank) != here.rank else 0,
    shares=lambda here: {here["perm"].target.get(here.rank, here.rank): 1},
    reads=lambda here: here.rank in here["perm"].target,
    gloo=gloo.permute,
    nccl=nccl.permute,
    result=as_sent,
    traffic=Traffic("exchange"),
    check=_check_permute,
)


# -- point to point ---------------------------------------------------------------------------------------------------


def _transfer_title(options: Options, rank: int) -> tuple[str, Options]:
    name, peer = ("send", "dst") if rank == options["src"] else ("recv", "src")
    return name, {peer: options[peer], **({"tag": options["tag"]} if options["tag"] else {})}


# One message between two ranks, which p2p has checked. The sender gets zeros, through which the gradient comes back.
TRANSFER: Collective = Collective(
    name="transfer",
    denotation=lambda xs, options: [nothing(xs[0], xs[0].shape), xs[0].clone()],
    adjoint=lambda options: Call(TRANSFER, {**options, "src": options["dst"], "dst": options["src"]}),
    volume=lambda leaf, here: leaf.numel() if here.rank == here["src"] else 0,
    shares=lambda here: {here["dst"]: 1},
    reads=lambda here: here.rank == here["src"],
    gloo=gloo.transfer,
    nccl=nccl.transfer,
    result=as_sent,
    traffic=Traffic("message"),
    members=lambda options, n: (options["src"], options["dst"]),
    order=lambda options: (options["src"], options["dst"], options["tag"]),
    title=_transfer_title,
)


# -- Megatron's four, in pairs of transposes ----------------------------------------------------------------------------


def _own_slice(x: Tensor, here: CallContext) -> Tensor:
    return x.tensor_split(here.n, here["dim"])[here.rank].clone()


COPY_TO: Collective = Collective(
    name="copy_to",
    denotation=lambda xs, options: [x.clone() for x in xs],
    adjoint=lambda options: Call(REDUCE_FROM, {"op": "sum"}),
    alone=lambda x, here: x.clone(),
    takes=Variance.INVARIANT,
    gives=Variance.REPLICATED,
)

REDUCE_FROM: Collective = attrs.evolve(
    ALL_REDUCE, name="reduce_from", adjoint=lambda options: Call(COPY_TO, {}), gives=Variance.INVARIANT
)

SCATTER_TO: Collective = Collective(
    name="scatter_to",
    denotation=lambda xs, options: [_own_slice(x, CallContext(options, rank, len(xs))) for rank, x in enumerate(xs)],
    adjoint=lambda options: Call(GATHER_FROM, {**options, "tiled": True}),
    check=check_cut,
    alone=_own_slice,
    takes=Variance.INVARIANT,
)

GATHER_FROM: Collective = attrs.evolve(
    ALL_GATHER,
    name="gather_from",
    adjoint=lambda options: Call(SCATTER_TO, but(options, "tiled")),
    joins=False,
    gives=Variance.INVARIANT,
)

TABLE: tuple[Collective, ...] = (
    *(ALL_REDUCE, REDUCE, BROADCAST, ALL_GATHER, REDUCE_SCATTER, GATHER, SCATTER, ALL_TO_ALL, ALL_TO_ALL_ROWS),
    *(PERMUTE, TRANSFER, BARRIER),
    *(COPY_TO, REDUCE_FROM, SCATTER_TO, GATHER_FROM),
)
