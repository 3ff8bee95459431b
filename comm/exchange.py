"""The flat primitives as point-to-point exchanges: how collectives of CPU tensors run over Gloo.

Gloo's own reduce_scatter is an all-reduce and a slice, its all_gather copies through a staging buffer, and its
reductions sum in an order of their own. Direct exchanges read from and write into the caller's tensors, and leave the
reduction to ``fold``, so that the bits are those of the denotation.

Every rank sends all its messages at once; a message is the raw bytes of a contiguous tensor, so any dtype will do. Only an
all-reduce has two rounds.
"""

from collections.abc import Callable, Sequence
from itertools import pairwise

import attrs
import torch
from torch import Tensor
from torch.distributed import ProcessGroup, Work

from .collective import Options
from .table import chunk_bounds, fold

__all__ = ["EXCHANGES", "Started"]

_TAG = 0  # messages between two ranks keep their order


@attrs.frozen(eq=False)
class Started:
    """A primitive under way: the transport's works, then what is left to compute once they are done."""

    works: Sequence[Work]
    finish: Callable[[], Tensor]

    def wait(self) -> Tensor:
        """The result."""
        for work in self.works:
            work.wait()
        return self.finish()

    def poll(self, patience: float) -> bool:
        """True: over Gloo it is done by now, over NCCL a wait is the device's."""
        return True


def _bytes(tensor: Tensor) -> list[Tensor]:
    return [tensor.view(torch.uint8)]


def _send(pg: ProcessGroup, tensor: Tensor, peer: int) -> list[Work]:
    return [pg.send(_bytes(tensor), peer, _TAG)] if tensor.numel() else []


def _recv(pg: ProcessGroup, tensor: Tensor, peer: int) -> list[Work]:
    return [pg.recv(_bytes(tensor), peer, _TAG)] if tensor.numel() else []


def _peers(pg: ProcessGroup) -> list[int]:
    """The other ranks, each rank starting with its successor, so that no rank is everybody's first."""
    rank, n = pg.rank(), pg.size()
    return [(rank + k) % n for k in range(1, n)]


def _all_gather_into(pg: ProcessGroup, rows: Sequence[Tensor]) -> list[Work]:
    """Sends ``rows[rank]`` to all and receives the others' rows in place."""
    own = rows[pg.rank()]
    works = [work for peer in _peers(pg) for work in _recv(pg, rows[peer], peer)]
    return works + [work for peer in _peers(pg) for work in _send(pg, own, peer)]


def _reduce_rows(pg: ProcessGroup, rows: Sequence[Tensor], op: str, *, out: Tensor | None = None) -> Started:
    """Row ``rank`` of the sum of all ranks' rows; the rows are read until the wait is over."""
    rank = pg.rank()
    own = rows[rank]
    pieces = [own if peer == rank else torch.empty_like(own) for peer in range(pg.size())]
    works = [work for peer in _peers(pg) for work in _recv(pg, pieces[peer], peer)]
    works += [work for peer in _peers(pg) for work in _send(pg, rows[peer], peer)]
    if out is None and len(pieces) > 1:
        out = pieces[1 if rank == 0 else 0]  # what was received is ours to write into
    return Started(works, lambda: fold(pieces, op, out=out))


def all_gather(pg: ProcessGroup, piece: Tensor, options: Options) -> Started:
    """[m] -> [n, m]."""
    rows = piece.new_empty(pg.size(), piece.numel())
    rows[pg.rank()].copy_(piece)
    return Started(_all_gather_into(pg, rows.unbind(0)), lambda: rows)


def reduce_scatter(pg: ProcessGroup, rows: Tensor, options: Options) -> Started:
    """[n, m] -> [m]."""
    return _reduce_rows(pg, rows.contiguous().unbind(0), options["op"])


def all_reduce(pg: ProcessGroup, piece: Tensor, options: Options) -> Started:
    """[m] -> [m]; a reduce-scatter and a gather of pieces, written where they belong."""
    total = torch.empty_like(piece)
    bounds = list(pairwise(chunk_bounds(piece.numel(), pg.size())))
    rows = [total[a:b] for a, b in bounds]
    scattered = _reduce_rows(pg, [piece[a:b] for a, b in bounds], options["op"], out=rows[pg.rank()])

    def gather() -> Tensor:
        scattered.finish()
        return Started(_all_gather_into(pg, rows), lambda: total).wait()

    return Started(scattered.works, gather)


def broadcast(pg: ProcessGroup, piece: Tensor, options: Options) -> Started:
    """[m] -> [m]; the root sends to each."""
    if pg.rank() == options["src"]:
        return Started([work for peer in _peers(pg) for work in _send(pg, piece, peer)], piece.clone)
    received = torch.empty_like(piece)
    return Started(_recv(pg, received, options["src"]), lambda: received)


def reduce(pg: ProcessGroup, piece: Tensor, options: Options) -> Started:
    """[m] -> [m]; each sends to the root."""
    root, op = options["dst"], options["op"]
    if pg.rank() != root:
        return Started(_send(pg, piece, root), lambda: torch.zeros_like(piece))
    pieces = [piece if peer == root else torch.empty_like(piece) for peer in range(pg.size())]
    works = [work for peer in _peers(pg) for work in _recv(pg, pieces[peer], peer)]
    return Started(works, lambda: fold(pieces, op))


def barrier(pg: ProcessGroup, piece: Tensor, options: Options) -> Started:
    """Nobody leaves before all have come: each sends one byte to each."""
    token = torch.zeros(pg.size(), dtype=torch.uint8)
    return Started(_all_gather_into(pg, token.view(-1, 1).unbind(0)), lambda: piece)


Primitive = Callable[[ProcessGroup, Tensor, Options], Started]

EXCHANGES: dict[str, Primitive] = {
    "all_gather": all_gather,
    "reduce_scatter": reduce_scatter,
    "all_reduce": all_reduce,
    "broadcast": broadcast,
    "reduce": reduce,
    "barrier": barrier,
}
