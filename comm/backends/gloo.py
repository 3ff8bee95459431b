"""Collectives of CPU tensors over Gloo, as point-to-point messages.

Gloo's reduce_scatter is an all-reduce and a slice, its all_gather copies through a staging buffer, and its reductions use
another order. Messages read from and write to the caller's tensors, and ``fold`` computes the reductions, so results are
bitwise those of the reference implementation.

Each rank posts all its messages at once. A message is the raw bytes of a contiguous tensor, so all dtypes are supported. An
all-reduce has two rounds; for two ranks and small values it has one, in which they exchange values and both reduce them.

If a group's ranks fill nodes (``Group.ranks_per_node``), reductions sum within each node first, and gathers cross between nodes
first. A node then sends 1/m of the bytes to other nodes, with m ranks per node, and as many bytes in all.

Memory is allocated on the caller's thread, also if another thread posts the messages: allocators keep freed memory per thread,
so what a worker allocated could not be reused by the caller.
"""

from collections.abc import Sequence
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor
from torch.distributed import Work

from functional_ds.base.byte_ranges import begin_together

from .primitives import Communicator, Options, Prepared, Started
from .reduction import chunk_bounds, fold

_SWAPPED = 2**22  # bytes: for larger donated values two rounds take half the memory; all ranks must choose the same


def _all_gather_into(comm: Communicator, row: Tensor, rows: Sequence[Tensor]) -> list[Work]:
    """Sends ``own`` to all other ranks and receives their rows in place."""
    works = [work for peer in comm.peers for work in comm.recv(rows[peer], peer)]
    return works + [work for peer in comm.peers for work in comm.send(row, peer)]


def _reduce_rows(comm: Communicator, rows: Sequence[Tensor], op: str, *, out: Tensor | None = None) -> Prepared:
    """Reduces all ranks' row ``rank``. The rows must not change before the wait ends; ``out`` may be that row."""
    rank = comm.rank
    mine = rows[rank]
    pieces = [mine if peer == rank else torch.empty_like(mine) for peer in range(comm.size)]
    spare = None if comm.size == 1 else pieces[1 if rank == 0 else 0]  # a received piece may be overwritten

    def post() -> list[Work]:
        works = [work for peer in comm.peers for work in comm.recv(pieces[peer], peer)]
        return works + [work for peer in comm.peers for work in comm.send(rows[peer], peer)]

    def finish() -> Tensor:
        if out is mine and rank > 1:  # the preceding pieces are reduced first
            return out.copy_(fold(pieces, op, out=spare))
        return fold(pieces, op, out=spare if out is None else out)

    return Prepared(post, finish)


def _swap(comm: Communicator, sent: Sequence[Tensor], received: Sequence[Tensor]) -> list[Work]:
    """Sends ``sent[p]`` to each other rank p and receives ``received[p]`` from it; copies this rank's part."""
    works = [work for peer in comm.peers for work in comm.recv(received[peer], peer)]
    works += [work for peer in comm.peers for work in comm.send(sent[peer], peer)]
    received[comm.rank].copy_(sent[comm.rank])
    return works


def all_gather(comm: Communicator, piece: Tensor, options: Options) -> Prepared:
    """[m] -> [n, m]; uneven, [rows, m] -> [all rows, m]."""
    if "sizes" in options:
        whole = piece.new_empty(sum(options["sizes"]), piece.shape[1])
        rows = whole.split(list(options["sizes"]))
    else:
        whole = options["out"].view(comm.size, -1) if "out" in options else piece.new_empty(comm.size, piece.numel())
        rows = whole.unbind(0)

    per_node = options.get("ranks_per_node", 1)
    inner, outer = comm.nodes(per_node) if per_node > 1 else (None, comm)

    def post() -> list[Work]:
        works = _all_gather_into(outer, piece, rows if inner is None else rows[inner.rank :: per_node])
        if rows[comm.rank].data_ptr() != piece.data_ptr():
            rows[comm.rank].copy_(piece)
        return works

    def share() -> Tensor:
        if inner is not None:
            nodes = [rows[first : first + per_node] for first in range(0, comm.size, per_node)]
            works = [work for node in nodes for work in _all_gather_into(inner, node[inner.rank], node)]
            Started(works, lambda: whole).wait()
        return whole

    return Prepared(post, share)


def reduce_scatter(comm: Communicator, rows: Tensor, options: Options) -> Prepared:
    """[n, m] -> [m]; uneven, [all rows, m] -> [rows, m]."""
    pieces = rows.contiguous().split(list(options["sizes"])) if "sizes" in options else rows.contiguous().unbind(0)
    per_node = options.get("ranks_per_node", 1)
    if per_node == 1:
        return _reduce_rows(comm, pieces, options["op"])
    inner, outer = comm.nodes(per_node)
    columns = [torch.cat(pieces[place::per_node]) for place in range(per_node)]  # by position in a node, the pieces for it
    mine = columns[inner.rank]
    within = _reduce_rows(inner, columns, options["op"], out=mine)  # into the copy
    across = _reduce_rows(outer, mine.split([len(piece) for piece in pieces[inner.rank :: per_node]]), options["op"])

    def finish() -> Tensor:
        within.finish()
        return across.run()

    return Prepared(within.post, finish)


def all_reduce(comm: Communicator, piece: Tensor, options: Options) -> Prepared:
    """[m] -> [m]; a reduce-scatter and an all-gather of pieces, in place if the value is donated."""
    in_place = "out" in options and begin_together(options["out"], piece)
    if comm.size == 2 and piece.numel() * piece.element_size() <= _SWAPPED:
        return _reduce_rows(comm, [piece, piece], options["op"], out=piece if in_place else None)
    total = piece if in_place else torch.empty_like(piece)
    across: Prepared | None = None
    per_node = options.get("ranks_per_node", 1)
    if per_node > 1:
        comm, outer = comm.nodes(per_node)
    bounds = list(pairwise(chunk_bounds(piece.numel(), comm.size)))
    rows = [total[a:b] for a, b in bounds]
    sent = rows if in_place else [piece[a:b] for a, b in bounds]
    mine = rows[comm.rank]
    scattered = _reduce_rows(comm, sent, options["op"], out=mine)
    if per_node > 1:
        across = all_reduce(outer, mine, {"op": options["op"], "out": mine})

    def gather() -> Tensor:
        scattered.finish()
        if across is not None:
            across.run()
        return Started(_all_gather_into(comm, mine, rows), lambda: total).wait()

    return Prepared(scattered.post, gather)


def broadcast(comm: Communicator, piece: Tensor, options: Options) -> Prepared:
    """[m] -> [m]; the root sends to all others."""
    result = torch.empty_like(piece)
    if comm.rank != options["src"]:
        return Prepared(lambda: comm.recv(result, options["src"]), lambda: result)

    def post() -> list[Work]:
        works = [work for peer in comm.peers for work in comm.send(piece, peer)]
        result.copy_(piece)
        return works

    return Prepared(post, lambda: result)


def reduce(comm: Communicator, piece: Tensor, options: Options) -> Prepared:
    """[m] -> [m]; all others send to the root."""
    root, op = options["dst"], options["op"]
    if comm.rank != root:
        return Prepared(lambda: comm.send(piece, root), lambda: torch.zeros_like(piece))
    pieces = [piece if peer == root else torch.empty_like(piece) for peer in range(comm.size)]
    return Prepared(lambda: [work for peer in comm.peers for work in comm.recv(pieces[peer], peer)], lambda: fold(pieces, op))


def gather(comm: Communicator, piece: Tensor, options: Options) -> Prepared:
    """[m] -> [n, m] at the root, to which all others send; they get zeros."""
    root, n = options["dst"], comm.size
    if comm.rank != root:
        return Prepared(lambda: comm.send(piece, root), lambda: piece.new_zeros(()).expand(n, piece.numel()))
    rows = piece.new_empty(n, piece.numel())

    def post() -> list[Work]:
        works = [work for peer in comm.peers for work in comm.recv(rows[peer], peer)]
        rows[root].copy_(piece)
        return works

    return Prepared(post, lambda: rows)


def scatter(comm: Communicator, payload: Tensor, options: Options) -> Prepared:
    """[n, m] at the root, which sends a row to each rank -> [m]; the others' payloads give the shape."""
    root = options["src"]
    if comm.rank != root:
        received = torch.empty_like(payload)
        return Prepared(lambda: comm.recv(received, root), lambda: received)
    rows = payload.contiguous()
    row = torch.empty_like(rows[root])

    def post() -> list[Work]:
        works = [work for peer in comm.peers for work in comm.send(rows[peer], peer)]
        row.copy_(rows[root])
        return works

    return Prepared(post, lambda: row)


def all_to_all(comm: Communicator, rows: Tensor, options: Options) -> Prepared:
    """[n, m] -> [n, m]; row p goes to rank p."""
    source, result = rows.contiguous(), torch.empty_like(rows, memory_format=torch.contiguous_format)
    return Prepared(lambda: _swap(comm, source.unbind(0), result.unbind(0)), lambda: result)


def all_to_all_rows(comm: Communicator, rows: Tensor, options: Options) -> Prepared:
    """[rows sent, m] -> [rows received, m]."""
    source, sent, expected = rows.contiguous(), list(options["input_splits"]), list(options["output_splits"])
    result = rows.new_empty(sum(expected), rows.shape[1])
    return Prepared(lambda: _swap(comm, source.split(sent), result.split(expected)), lambda: result)


def permute(comm: Communicator, piece: Tensor, options: Options) -> Prepared:
    """[m] -> [m]; a message to the destination and one from the source."""
    rank, perm = comm.rank, options["perm"]
    source, target = perm.source.get(rank), perm.target.get(rank)
    send = (list) if target in (None, rank) else partial(comm.send, piece, target)
    if source is None:
        return Prepared(send, lambda: torch.zeros_like(piece))
    if source == rank:
        return Prepared(send, piece.clone)
    received = torch.empty_like(piece)
    return Prepared(lambda: comm.recv(received, source) + send(), lambda: received)


def transfer(comm: Communicator, piece: Tensor, options: Options) -> Prepared:
    """[m] -> [m] at the destination; the sender gets zeros."""
    if comm.rank == options["src"]:
        return Prepared(lambda: comm.send(piece, options["dst"]), lambda: piece.new_zeros(()).expand(piece.shape))
    received = torch.empty_like(piece)
    return Prepared(lambda: comm.recv(received, options["src"]), lambda: received)


def barrier(comm: Communicator, piece: Tensor, options: Options) -> Prepared:
    """Returns when all ranks have called it: each sends one byte to all others."""
    tokens = torch.zeros(comm.size, 1, dtype=torch.uint8).unbind(0)
    return Prepared(lambda: _all_gather_into(comm, tokens[comm.rank], tokens), lambda: piece)
