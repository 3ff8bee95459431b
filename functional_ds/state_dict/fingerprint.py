"""Fingerprints of tensors, by which ranks check that their copies are equal."""

import zlib
from collections.abc import Sequence

import torch
from torch import Tensor

from .stored_view import StoredView

SHORT = 4096  # elements; longer tensors on a device are summed there before they are copied to the host
_COLUMNS, _ROWS = 512, 16384  # elements of a row; rows that are widened to int64 at once
_BITS = {1: torch.uint8, 2: torch.int16}  # the integers that an element of this size is read as; larger ones as several int32


def fingerprints(tensors: Sequence[Tensor | StoredView]) -> list[int]:
    """A CRC-32 for each flat tensor: of all its bytes on the host, else of weighted sums that its device computes."""
    memory = iter(_of_tensors([x for x in tensors if isinstance(x, Tensor)]))
    return [next(memory) if isinstance(x, Tensor) else _of_pieces(x) for x in tensors]


def _of_pieces(view: StoredView) -> int:
    checksum = 0
    for piece in view.pieces():
        checksum = zlib.crc32(piece.view(torch.uint8).numpy().data, checksum)
    return checksum


def _of_tensors(tensors: Sequence[Tensor]) -> list[int]:
    packed = [(x if x.device.type == "cpu" else _row_sums(x)).contiguous().view(torch.uint8) for x in tensors]
    remote = [i for i, x in enumerate(packed) if x.device.type != "cpu"]
    if remote:  # one copy from the device for all of them
        copied = torch.cat([packed[i] for i in remote]).cpu().split([packed[i].numel() for i in remote])
        for i, x in zip(remote, copied, strict=True):
            packed[i] = x
    return [zlib.crc32(x.numpy().data) for x in packed]


def _row_sums(tensor: Tensor) -> Tensor:
    """Sums of a long flat tensor's rows of bits, as int64 with odd random weights; a short tensor as it is.

    Two rows that differ have equal sums about as often as two random 32-bit numbers are equal.
    """
    if tensor.numel() <= SHORT:
        return tensor
    bits = tensor.view(_BITS.get(tensor.element_size(), torch.int32))
    whole = bits.numel() // _COLUMNS * _COLUMNS
    weights = torch.randint(0, 1 << 62, (_COLUMNS,), generator=torch.Generator().manual_seed(1)) * 2 + 1
    weights = weights.to(tensor.device)
    rows = [(part.to(torch.int64) * weights).sum(1) for part in bits[:whole].view(-1, _COLUMNS).split(_ROWS)]
    return torch.cat([*rows, bits[whole:].to(torch.int64)])
