"""Who writes what: every element of every tensor once, by one of the ranks that have it."""

import zlib
from collections.abc import Sequence
from itertools import pairwise

import attrs
import torch
from torch import Tensor

from functional_ds.state_dict.describe import Held

from .errors import CheckpointError

__all__ = ["Offer", "Share", "copies", "divide", "marked", "marks", "offers", "own_name"]

_SHORT = 4096  # elements; of a longer stretch it is first asked whether there are copies
_WIDE, _ROWS = 512, 16384  # elements of a row; rows that are widened at once
_BITS = {1: torch.uint8, 2: torch.int16}  # by the size of an element; larger ones as several of int32
_SPLIT = 4 << 20  # bytes; copies of at least so much are cut up among the ranks that have them


@attrs.frozen
class Offer:
    """What a rank could write: a ``Held`` without its values; ``mark`` differs where copies' values do."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    itemsize: int
    offset: int
    numel: int
    apart: bool
    mark: int

    @property
    def stop(self) -> int:
        """Where it ends in the flattened global tensor."""
        return self.offset + self.numel


@attrs.frozen
class Share:
    """What a rank writes: ``numel`` elements of its offer ``index``, as elements of ``name`` from ``offset`` on."""

    name: str
    index: int
    offset: int
    numel: int


def own_name(name: str, rank: int) -> str:
    """The name of a rank's own value, where ranks have different ones."""
    return f"{name}@{rank}"


def offers(held: Sequence[Held]) -> list[Offer]:
    """What this rank could write. Longer ones have no mark yet: it takes a look at every element, and few have copies."""
    short = [i for i, h in enumerate(held) if h.view.numel() <= _SHORT]
    found = dict(zip(short, marks([held[i].view for i in short]), strict=True))
    return [
        Offer(h.name, h.shape, str(h.view.dtype).removeprefix("torch."), h.view.element_size(), h.offset, n, h.apart, mark)
        for i, h in enumerate(held)
        for n, mark in ((h.view.numel(), found.get(i, 0)),)
    ]


def copies(ranks: Sequence[Sequence[Offer]]) -> list[list[int]]:
    """Of each rank's offers those without a mark that another rank has as well."""
    having: dict[tuple[str, int, int], list[tuple[int, int]]] = {}
    for rank, own in enumerate(ranks):
        for index, offer in enumerate(own):
            if offer.numel > _SHORT and not offer.apart:
                having.setdefault((offer.name, offer.offset, offer.numel), []).append((rank, index))
    found: list[list[int]] = [[] for _ in ranks]
    for rank, index in (pair for pairs in having.values() if len(pairs) > 1 for pair in pairs):
        found[rank].append(index)
    return found


def marked(own: Sequence[Offer], indices: Sequence[int], found: Sequence[int]) -> list[Offer]:
    """A rank's offers with the marks that were found for some of them."""
    new = dict(zip(indices, found, strict=True))
    return [attrs.evolve(offer, mark=new[i]) if i in new else offer for i, offer in enumerate(own)]


def marks(views: Sequence[Tensor]) -> list[int]:
    """Checksums of all elements; of what lies on a device, of sums that are made there."""
    packed = [(view if view.device.type == "cpu" else _folded(view)).contiguous().view(torch.uint8) for view in views]
    far = [i for i, folded in enumerate(packed) if folded.device.type != "cpu"]
    if far:  # one copy from the device instead of one for each
        there = torch.cat([packed[i] for i in far]).cpu().split([packed[i].numel() for i in far])
        for i, folded in zip(far, there, strict=True):
            packed[i] = folded
    return [zlib.crc32(folded.numpy().data) for folded in packed]


def _folded(view: Tensor) -> Tensor:
    """Sums of a long flat tensor's rows of bits, as integers with odd weights drawn at random; a short one as it is.

    Two rows that differ have the same sum about as likely as two numbers of 32 bits are the same.
    """
    if view.numel() <= _SHORT:
        return view
    bits = view.view(_BITS.get(view.element_size(), torch.int32))
    whole = bits.numel() // _WIDE * _WIDE
    weights = torch.randint(0, 1 << 62, (_WIDE,), generator=torch.Generator().manual_seed(1)) * 2 + 1
    weights = weights.to(view.device)
    rows = [(part.to(torch.int64) * weights).sum(1) for part in bits[:whole].view(-1, _WIDE).split(_ROWS)]
    return torch.cat([*rows, bits[whole:].to(torch.int64)])


def divide(ranks: Sequence[Sequence[Offer]]) -> list[list[Share]]:
    """What each rank writes, the same on all of them.

    Laws: the shares of a tensor are disjoint and together all of it; a rank writes only what it has. Copies are shared out
    so that all ranks write about equally much. Where copies differ (error feedback, ranks that do steps by themselves), each
    rank writes its own, under a name of its own.

    Raises:
        CheckpointError: ranks have tensors of one name and other shapes or dtypes; nobody has some elements.

    >>> from functional_ds.checkpointing.shard_plan import Offer, divide
    >>> both, left = Offer("a", (4,), "uint8", 1, 0, 4, False, 7), Offer("b", (2,), "uint8", 1, 0, 2, False, 7)
    >>> [[share.name for share in shares] for shares in divide([[both, left], [both]])]
    [['b'], ['a']]
    """
    found: dict[str, list[tuple[int, int, Offer]]] = {}
    for rank, own in enumerate(ranks):
        for index, offer in enumerate(own):
            found.setdefault(offer.name, []).append((rank, index, offer))
    shares: list[list[Share]] = [[] for _ in ranks]
    load = [0] * len(ranks)
    copies: list[tuple[int, int, list[tuple[int, int, Offer]]]] = []
    for name, holders in found.items():
        _agree(name, holders)
        if _differ(holders):
            for rank, index, offer in holders:
                shares[rank].append(Share(own_name(name, rank), index, offer.offset, offer.numel))
                load[rank] += offer.numel * offer.itemsize
            continue
        for low, high, having in _cover(name, holders):
            if len(having) == 1:
                rank, index, offer = having[0]
                shares[rank].append(Share(name, index, low, high - low))
                load[rank] += (high - low) * offer.itemsize
            else:
                copies.append((low, high, having))
    for low, high, having in sorted(copies, key=lambda copy: (copy[0] - copy[1]) * copy[2][0][2].itemsize):
        for first, last, (rank, index, offer) in _dealt(low, high, having, load):
            shares[rank].append(Share(offer.name, index, first, last - first))
            load[rank] += (last - first) * offer.itemsize
    return [sorted(own, key=lambda share: (share.index, share.offset)) for own in shares]


def _agree(name: str, holders: Sequence[tuple[int, int, Offer]]) -> None:
    first_rank, _, first = holders[0]
    for rank, _, offer in holders:
        if (offer.shape, offer.dtype) != (first.shape, first.dtype):
            raise CheckpointError(
                f"{name} is {offer.dtype}{list(offer.shape)} on rank {rank} and {first.dtype}{list(first.shape)} on rank "
                f"{first_rank}; is this the state of one step on all ranks?"
            )


def _differ(holders: Sequence[tuple[int, int, Offer]]) -> bool:
    marks: dict[tuple[int, int], int] = {}
    return any(
        offer.apart or marks.setdefault((offer.offset, offer.numel), offer.mark) != offer.mark for _, _, offer in holders
    )


def _cover(name: str, holders: Sequence[tuple[int, int, Offer]]) -> list[tuple[int, int, list[tuple[int, int, Offer]]]]:
    """Neighbouring stretches from the tensor's beginning to its end, each with those who have it."""
    total = 1
    for side in holders[0][2].shape:
        total *= side
    if not total:
        return [(0, 0, list(holders))]
    edges = sorted({edge for _, _, offer in holders if offer.numel for edge in (offer.offset, offer.stop)} | {0, total})
    if len(edges) == 2:
        return [(0, total, [h for h in holders if h[2].numel])]
    found = []
    waiting = sorted((h for h in holders if h[2].numel), key=lambda h: h[2].offset)
    active: list[tuple[int, int, Offer]] = []
    place = 0
    for low, high in pairwise(edges):
        while place < len(waiting) and waiting[place][2].offset <= low:
            active.append(waiting[place])
            place += 1
        active = [h for h in active if h[2].stop > low]
        if not active:
            raise CheckpointError(f"no rank has the elements {low} to {high} of {name}; call save on all ranks of the state")
        found.append((low, high, list(active)))
    return found


def _dealt(
    low: int, high: int, having: list[tuple[int, int, Offer]], load: list[int]
) -> list[tuple[int, int, tuple[int, int, Offer]]]:
    """A stretch among those who have it: much of it in equal pieces, else to the one with least to write."""
    if (high - low) * having[0][2].itemsize < _SPLIT:
        return [(low, high, min(having, key=lambda h: (load[h[0]], h[0])))]
    piece = -(-(high - low) // len(having))
    cuts = [(low + i * piece, min(high, low + (i + 1) * piece)) for i in range(len(having))]
    return [(first, last, h) for (first, last), h in zip(cuts, having, strict=True) if last > first]
