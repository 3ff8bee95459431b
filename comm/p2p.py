"""Differentiable point-to-point messages.

A message is a collective of two ranks, whose result is zeros on the sender and the value on the receiver. Its backward pass is
a message from the receiver to the sender, and both must take part: the sender adds the zeros to its loss, and the receiver's
``like`` requires grad.
"""

from collections.abc import Sequence
from typing import Any, TypeVar

import attrs

from functional_ds.base import tree
from functional_ds.comm.record.group import Group
from functional_ds.comm.record.pending import Request
from functional_ds.comm.table.collective import Call
from functional_ds.comm.table.exchanges import TRANSFER

from .calls.dispatch import collective, request, request_all, resolve_group

T = TypeVar("T")


@attrs.frozen
class Send:
    """A send of ``value`` to rank ``dst``, for ``batch_p2p``."""

    value: Any = attrs.field(repr=tree.summary)
    dst: int
    tag: int = 0


@attrs.frozen
class Recv:
    """A receive of a value with the shapes of ``like`` from rank ``src``, for ``batch_p2p``."""

    like: Any = attrs.field(repr=tree.summary)
    src: int
    tag: int = 0


def _call(op: Send | Recv, group: Group) -> tuple[Call, Any]:
    name, side, peer = ("send", "dst", op.dst) if isinstance(op, Send) else ("recv", "src", op.src)
    wrong = _what_is_wrong(side, peer, op.tag, group)
    if wrong:
        raise ValueError(f"{name}({side}={peer!r}) on rank {group.rank} of {group.name!r}: {wrong}")
    if isinstance(op, Send):
        return Call(TRANSFER, {"src": group.rank, "dst": peer, "tag": op.tag}), op.value
    return Call(TRANSFER, {"src": peer, "dst": group.rank, "tag": op.tag}), op.like


def _what_is_wrong(side: str, peer: Any, tag: Any, group: Group) -> str | None:
    if not isinstance(peer, int) or isinstance(peer, bool) or not 0 <= peer < group.size:
        return f"{side}={peer!r} is not a rank of the group; its ranks are 0..{group.size - 1}"
    if peer == group.rank:
        return f"{side}={peer} is this rank itself; use the value as it is"
    return None if isinstance(tag, int) else f"tag={tag!r} is not an integer"


@collective
def batch_p2p(ops: Sequence[Send | Recv], group: Group | None = None) -> Request[list[Any]]:
    """Performs a batch of sends and receives, in which opposing messages cannot deadlock.

    Law: swapping ``x`` between two ranks is ``permute(x, [(0, 1), (1, 0)])``; the transpose is the batch of the gradients.

    Args:
        ops: this rank's messages, ``Send(value, dst)`` and ``Recv(like, src)``; ranks count within the group.
        group: the ranks that take part; None for the whole world.

    Returns:
        One result per op, in order: zeros of the value's shape for a send, the value for a receive.

    Cost: this rank sends each value of its sends once.

    Raises:
        ValueError: ``dst`` or ``src`` is not another rank of the group.
        TypeError: an op is neither Send nor Recv.

    >>> import torch
    >>> from functional_ds import comm
    >>> def swap():
    ...     rank = comm.world().rank
    ...     x = torch.tensor(rank)
    ...     return comm.batch_p2p([comm.Send(x, 1 - rank), comm.Recv(x, 1 - rank)])[1].item()
    >>> comm.simulate(swap, world_size=2)
    [1, 0]
    """
    group = resolve_group(group)
    for op in ops:
        if not isinstance(op, (Send, Recv)):
            raise TypeError(f"batch_p2p: ops are Send(value, dst) and Recv(like, src), not {type(op).__name__} {op!r}")
    return request_all([_call(op, group) for op in ops], group)


@collective
def send(x: T, dst: int, group: Group | None = None, *, tag: int = 0) -> Request[T]:
    """Sends ``x`` to rank ``dst``; returns zeros of its shape, which take no memory.

    In the simulator it returns when the receiver has the value. Gloo and NCCL may return earlier; programs must not rely on
    that. Messages between two ranks with the same ``tag`` match in the order in which they are started.

    Law: the transpose is a message from ``dst``. Add the zeros to the loss to receive the gradient.

    Args:
        x: a pytree of tensors.
        dst: the receiver, a rank of the group.
        group: the group; None for the whole world.
        tag: messages with different tags match independently.

    Cost: this rank sends the value once.

    Raises:
        ValueError: ``dst`` is not another rank of the group.

    >>> import torch
    >>> from functional_ds import comm
    >>> def program():
    ...     here, x = comm.world(), torch.tensor([2.0], requires_grad=True)
    ...     if here.rank == 0:
    ...         loss = comm.send(x, dst=1).sum()
    ...     else:
    ...         loss = (comm.recv(x, src=0) * 5).sum()
    ...     loss.backward()
    ...     return loss.item(), x.grad.item()
    >>> comm.simulate(program, world_size=2)
    [(0.0, 5.0), (10.0, 0.0)]
    """
    return _one(Send(x, dst, tag), group)


@collective
def recv(like: T, src: int, group: Group | None = None, *, tag: int = 0) -> Request[T]:
    """Receives a value from rank ``src``.

    If ``like`` requires grad, the gradient is sent back to ``src``, whose loss must include the zeros that ``send`` returned.

    Args:
        like: a pytree of tensors with the structure, shapes and dtypes of the value; its values are not read.
        src: the sender, a rank of the group.
        group: the group; None for the whole world.
        tag: messages with different tags match independently.

    Cost: nothing on this rank.

    Raises:
        ValueError: ``src`` is not another rank of the group.

    >>> import torch
    >>> from functional_ds import comm
    >>> def program():
    ...     if comm.world().rank == 0:
    ...         comm.send(torch.tensor([1.0, 2.0]), 1)
    ...     else:
    ...         return comm.recv(torch.empty(2), 0).tolist()
    >>> comm.simulate(program, world_size=2)
    [None, [1.0, 2.0]]
    """
    return _one(Recv(like, src, tag), group)


def _one(op: Send | Recv, group: Group | None) -> Request[Any]:
    group = resolve_group(group)
    call, value = _call(op, group)
    return request(call, value, group)
