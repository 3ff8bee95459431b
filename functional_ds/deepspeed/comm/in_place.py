"""In-place collectives with torch.distributed's arguments; ``src`` and ``dst`` are ranks of the world.

Each is a collective of ``functional_ds.comm`` on detached tensors, followed by a copy. For gradients, and to avoid the copy,
call that one.
"""

from collections.abc import Iterable, Sequence
from enum import Enum
from functools import partial
from typing import Any

import torch
from torch import Tensor

from functional_ds import comm

from .comms_log import logged
from .joining import group_of, place_in
from .works import InPlace, Work, in_place

__all__ = [
    "ReduceOp",
    "all_gather",
    "all_gather_coalesced",
    "all_gather_into_tensor",
    "all_gather_object",
    "all_reduce",
    "all_reduce_coalesced",
    "all_to_all",
    "all_to_all_single",
    "allgather_fn",
    "barrier",
    "broadcast",
    "broadcast_object_list",
    "gather",
    "inference_all_reduce",
    "monitored_barrier",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_fn",
    "reduce_scatter_tensor",
    "scatter",
]


class ReduceOp(Enum):
    """DeepSpeed's names. Bitwise reductions raise an error when they are used."""

    SUM = 0
    PRODUCT = 1
    MIN = 2
    MAX = 3
    BAND = 4
    BOR = 5
    BXOR = 6
    AVG = 7
    UNUSED = 8


_WORDS = {"SUM": "sum", "PRODUCT": "product", "MIN": "min", "MAX": "max", "AVG": "avg"}


def word_of(op: Any) -> str:
    """This library's name for a reduction.

    Raises:
        ValueError: there is none.

    >>> import torch
    >>> word_of(ReduceOp.AVG), word_of(torch.distributed.ReduceOp.MAX), word_of("sum")
    ('avg', 'max', 'sum')
    """
    name = getattr(op, "name", None) or str(op).rpartition(".")[2]
    if name.upper() not in _WORDS:
        raise ValueError(f"op={op!r}: ranks' values combine by {', '.join(f'ReduceOp.{word}' for word in _WORDS)}")
    return _WORDS[name.upper()]


def _flat(tensor: Tensor) -> Tensor:
    return tensor.detach().reshape(-1)


def _need(count: int, needed: int, what: str) -> None:
    if count != needed:
        raise ValueError(f"{what}: {count} where the group needs {needed}")


@in_place
def all_reduce(tensor: Tensor, op: Any = ReduceOp.SUM, group: Any = None, async_op: bool = False) -> InPlace:
    """Reduces the ranks' tensors, into each of them.

    >>> def program():
    ...     x = torch.tensor([1.0, comm.world().rank])
    ...     all_reduce(x, ReduceOp.MAX)
    ...     return x.tolist()
    >>> comm.simulate(program, world_size=2)
    [[1.0, 1.0], [1.0, 1.0]]
    """
    return partial(comm.all_reduce, tensor.detach(), group, op=word_of(op)), [tensor]


inference_all_reduce = all_reduce


@in_place
def all_reduce_coalesced(
    tensors: Iterable[Tensor], op: Any = ReduceOp.SUM, group: Any = None, async_op: bool = False
) -> InPlace:
    """``all_reduce`` of several tensors in one call."""
    held = list(tensors)
    return partial(comm.all_reduce, [tensor.detach() for tensor in held], group, op=word_of(op)), held


@in_place
def reduce(tensor: Tensor, dst: int, op: Any = ReduceOp.SUM, group: Any = None, async_op: bool = False) -> InPlace:
    """Reduces the ranks' tensors into that of rank ``dst``; the others are unchanged."""
    place = place_in(group, dst, "dst")
    targets = [tensor] if group.rank == place else []
    return partial(comm.reduce, tensor.detach(), place, group, op=word_of(op)), targets


@in_place
def broadcast(tensor: Tensor, src: int, group: Any = None, async_op: bool = False) -> InPlace:
    """Copies rank ``src``'s tensor into each rank's."""
    return partial(comm.broadcast, tensor.detach(), place_in(group, src, "src"), group), [tensor]


@in_place
def all_gather(tensor_list: Sequence[Tensor], tensor: Tensor, group: Any = None, async_op: bool = False) -> InPlace:
    """Gathers the ranks' tensors into ``tensor_list``."""
    _need(len(tensor_list), group.size, "tensor_list")
    return partial(comm.all_gather, tensor.detach(), group, tiled=False), tensor_list


@in_place
def all_gather_into_tensor(output_tensor: Tensor, tensor: Tensor, group: Any = None, async_op: bool = False) -> InPlace:
    """Concatenates the ranks' tensors in ``output_tensor``."""
    _need(output_tensor.numel(), group.size * tensor.numel(), "elements of output_tensor")
    return partial(comm.all_gather, _flat(tensor), group), [output_tensor]


@logged
def allgather_fn(output_tensor: Tensor, input_tensor: Tensor, group: Any = None, async_op: bool = False) -> Work | None:
    """``all_gather_into_tensor``."""
    return all_gather_into_tensor(output_tensor, input_tensor, group, async_op)


@in_place
def all_gather_coalesced(
    output_tensors: Sequence[Tensor], input_tensors: Sequence[Tensor], group: Any = None, async_op: bool = False
) -> InPlace:
    """``all_gather_into_tensor`` of several tensors in one call."""
    _need(len(output_tensors), len(input_tensors), "output_tensors")
    for output, tensor in zip(output_tensors, input_tensors, strict=True):
        _need(output.numel(), group.size * tensor.numel(), "elements of output_tensors")
    return partial(comm.all_gather, [_flat(tensor) for tensor in input_tensors], group), output_tensors


@in_place
def reduce_scatter_tensor(
    output_tensor: Tensor, tensor: Tensor, op: Any = ReduceOp.SUM, group: Any = None, async_op: bool = False
) -> InPlace:
    """Reduces the ranks' tensors and splits the result into equal pieces; rank r gets the r-th in ``output_tensor``."""
    _need(tensor.numel(), group.size * output_tensor.numel(), "elements of tensor")
    return partial(comm.reduce_scatter, _flat(tensor), group, op=word_of(op)), [output_tensor]


@logged
def reduce_scatter_fn(
    output_tensor: Tensor, tensor: Tensor, op: Any = ReduceOp.SUM, group: Any = None, async_op: bool = False
) -> Work | None:
    """``reduce_scatter_tensor``."""
    return reduce_scatter_tensor(output_tensor, tensor, op, group, async_op)


@in_place
def reduce_scatter(
    output: Tensor, input_list: Sequence[Tensor], op: Any = ReduceOp.SUM, group: Any = None, async_op: bool = False
) -> InPlace:
    """Reduces the ranks' r-th tensors into rank r's ``output``."""
    _need(len(input_list), group.size, "input_list")
    whole = torch.stack([tensor.detach() for tensor in input_list])
    return partial(comm.reduce_scatter, whole, group, op=word_of(op), tiled=False), [output]


@in_place
def all_to_all_single(
    output: Tensor,
    tensor: Tensor,
    output_split_sizes: Sequence[int] | None = None,
    input_split_sizes: Sequence[int] | None = None,
    group: Any = None,
    async_op: bool = False,
) -> InPlace:
    """Each rank splits its tensor along dim 0, sends piece r to rank r, and concatenates what it receives in ``output``."""
    sent = list(input_split_sizes) if input_split_sizes else _equal(tensor, group.size, "tensor")
    arriving = list(output_split_sizes) if output_split_sizes else _equal(output, group.size, "output")
    return partial(comm.all_to_all, tensor.detach(), group, input_splits=sent, output_splits=arriving), [output]


def _equal(tensor: Tensor, n: int, name: str) -> list[int]:
    if tensor.shape[0] % n:
        raise ValueError(
            f"{name} has {tensor.shape[0]} rows, which is not a multiple of {n} ranks: pass the sizes of its pieces"
        )
    return [tensor.shape[0] // n] * n


@in_place
def all_to_all(
    output_tensor_list: Sequence[Tensor], input_tensor_list: Sequence[Tensor], group: Any = None, async_op: bool = False
) -> InPlace:
    """Sends the r-th tensor to rank r; what rank r sends is received in the r-th output."""
    _need(len(input_tensor_list), group.size, "input_tensor_list")
    _need(len(output_tensor_list), group.size, "output_tensor_list")
    sent, arriving = ([tensor.numel() for tensor in held] for held in (input_tensor_list, output_tensor_list))
    whole = torch.cat([_flat(tensor) for tensor in input_tensor_list])
    return partial(comm.all_to_all, whole, group, input_splits=sent, output_splits=arriving), output_tensor_list


@in_place
def gather(
    tensor: Tensor, gather_list: Sequence[Tensor] | None = None, dst: int = 0, group: Any = None, async_op: bool = False
) -> InPlace:
    """Gathers the ranks' tensors in rank ``dst``'s ``gather_list``; the other ranks have none."""
    place = place_in(group, dst, "dst")
    if group.rank == place:
        _need(len(gather_list or ()), group.size, "gather_list")
    targets = gather_list or () if group.rank == place else ()
    return partial(comm.gather, tensor.detach(), place, group, tiled=False), targets


@in_place
def scatter(
    tensor: Tensor, scatter_list: Sequence[Tensor] | None = None, src: int = 0, group: Any = None, async_op: bool = False
) -> InPlace:
    """The r-th tensor of rank ``src``'s ``scatter_list`` in rank r's ``tensor``."""
    place = place_in(group, src, "src")
    if group.rank == place:
        _need(len(scatter_list or ()), group.size, "scatter_list")
    whole = torch.stack([part.detach() for part in scatter_list]) if scatter_list else None
    return partial(comm.scatter, whole, place, group, tiled=False, like=tensor.detach()), [tensor]


@logged
def barrier(group: Any = None, async_op: bool = False, device_ids: Any = None) -> Work | None:
    """Waits until all ranks of the group arrive. It is not asynchronous: with ``async_op`` the handle is complete."""
    comm.barrier(group_of(group))
    return Work(comm.Pending(lambda: None, lambda _: True, lambda: "barrier"), ()) if async_op else None


@logged
def monitored_barrier(group: Any = None, timeout: Any = None, wait_all_ranks: bool = False) -> None:
    """``barrier``; after the world's own timeout, the error names a missing rank."""
    comm.barrier(group_of(group))


@logged
def all_gather_object(object_list: list[Any], obj: Any, group: Any = None) -> None:
    """The ranks' objects, as pickles, in ``object_list``."""
    known = group_of(group)
    _need(len(object_list), known.size, "object_list")
    object_list[:] = comm.all_gather_object(obj, known)


@logged
def broadcast_object_list(object_list: list[Any], src: int, group: Any = None, device: Any = None) -> None:
    """Rank ``src``'s objects, as pickles, in each rank's list."""
    known = group_of(group)
    object_list[:] = comm.broadcast_object(list(object_list), place_in(known, src, "src"), known)
