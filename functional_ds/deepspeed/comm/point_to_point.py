"""Point-to-point messages, which write into the receiver's tensor; ranks are those of the world."""

from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any

from torch import Tensor

from functional_ds import comm

from .comms_log import logged
from .joining import group_of, place_in
from .works import Work

__all__ = ["P2POp", "batch_isend_irecv", "irecv", "isend", "recv", "send"]


@logged
def isend(tensor: Tensor, dst: int, group: Any = None, tag: int = 0) -> Work:
    """Starts to send a tensor to rank ``dst``."""
    known = group_of(group)
    return Work(comm.start(comm.send, tensor.detach(), place_in(known, dst, "dst"), known, tag=tag), ())


@logged
def irecv(tensor: Tensor, src: int | None = None, group: Any = None, tag: int = 0) -> Work:
    """Starts to receive rank ``src``'s tensor; ``wait`` writes it into ``tensor``.

    Raises:
        ValueError: ``src`` is omitted; receiving from any rank is unsupported.
    """
    known = group_of(group)
    return Work(comm.start(comm.recv, tensor.detach(), _source(known, src), known, tag=tag), [tensor])


@logged
def send(tensor: Tensor, dst: int, group: Any = None, tag: int = 0) -> None:
    """Sends a tensor to rank ``dst``."""
    isend(tensor, dst, group, tag).wait()


@logged
def recv(tensor: Tensor, src: int | None = None, group: Any = None, tag: int = 0) -> int:
    """Receives rank ``src``'s tensor into ``tensor``; returns the sender's rank.

    Raises:
        ValueError: ``src`` is omitted; receiving from any rank is unsupported.
    """
    irecv(tensor, src, group, tag).wait()
    return -1 if src is None else src


def _source(group: comm.Group, src: int | None) -> int:
    if src is None:
        raise ValueError("recv without src: receiving from any rank is unsupported; pass src")
    return place_in(group, src, "src")


class P2POp:
    """A message of a batch: ``isend`` or ``irecv``, a tensor, and the other rank."""

    def __init__(self, op: Callable[..., Work], tensor: Tensor, peer: int, group: Any = None, tag: int = 0) -> None:
        if op not in (isend, irecv):
            raise ValueError(f"op={op!r}: deepspeed.comm's isend or irecv")
        self.op, self.tensor, self.peer, self.group, self.tag = op, tensor, peer, group, tag


@logged
def batch_isend_irecv(p2p_op_list: Sequence[P2POp]) -> list[Work]:
    """Starts the messages as one batch, so that opposing ones cannot block each other; a handle for each.

    Raises:
        ValueError: the messages are of several groups.
    """
    if not p2p_op_list:
        return []
    group = group_of(p2p_op_list[0].group)
    if any(group_of(p2p.group) != group for p2p in p2p_op_list):
        raise ValueError("batch_isend_irecv: the messages of a batch are of one group")
    ops = [
        (comm.Send if p2p.op is isend else comm.Recv)(p2p.tensor.detach(), place_in(group, p2p.peer, "peer"), p2p.tag)
        for p2p in p2p_op_list
    ]
    batch = comm.start(comm.batch_p2p, ops, group)
    return [
        Work(batch.then(itemgetter(index)), () if p2p.op is isend else [p2p.tensor]) for index, p2p in enumerate(p2p_op_list)
    ]
