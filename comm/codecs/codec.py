"""Codecs, which compress values for communication and restore them."""

from collections.abc import Callable, Sequence
from math import ceil
from typing import Protocol

import attrs
import torch
import torch.nn.functional as F
from torch import Tensor

from functional_ds.base.torch_private import is_fake


class Codec(Protocol):
    """A pair of pure functions on rows [n, m] of floating point, which act on each row separately.

    Any object with these two methods is a codec. A row with an inf or a NaN must decode to a row with one, so that all ranks
    detect an overflow.
    """

    def encode(self, rows: Tensor) -> Sequence[Tensor]:
        """The payload: tensors [n, ...], in which row i encodes row i."""
        ...

    def decode(self, payload: Sequence[Tensor], size: int, dtype: torch.dtype) -> Tensor:
        """The rows [n, size] of a payload."""
        ...


@attrs.frozen
class Cast:
    """Casts to a narrower floating-point dtype; values of a dtype that is not wider are unchanged.

    Values out of range are cast as by torch: to inf in fp16, to NaN in float8_e4m3fn.

    Raises:
        ValueError: the dtype is not floating point.

    >>> Cast(torch.float16).encode(torch.tensor([[0.1, 70000.0]]))[0].tolist()
    [[0.0999755859375, inf]]
    """

    dtype: torch.dtype = attrs.field(default=torch.bfloat16)

    @dtype.validator
    def _floating(self, attribute: object, value: torch.dtype) -> None:
        if not value.is_floating_point:
            raise ValueError(
                f"dtype={value!r} is not a floating-point dtype; use torch.bfloat16 or torch.float16, or Blocks(8)"
            )

    def encode(self, rows: Tensor) -> Sequence[Tensor]:
        """[n, m] in the dtype."""
        return (rows.to(self.dtype) if rows.element_size() > self.dtype.itemsize else rows,)

    def decode(self, payload: Sequence[Tensor], size: int, dtype: torch.dtype) -> Tensor:
        """[n, m] in ``dtype``."""
        return payload[0].to(dtype)


@attrs.frozen
class Blocks:
    """Block quantization to 8 or 4 bits, with an fp32 scale for each block of ``size`` values (ZeRO++, Wang et al. 2023).

    The scale is absmax / 127 (4 bits: absmax / 7); values are rounded to the nearest multiple, ties to even.

    Law: in each block ``|x - C(x)| ≤ absmax / 254`` (4 bits: absmax / 14), up to rounding in fp32. ``C`` is exact if absmax is
    127 (or 7) times a power of two and the values are multiples of that power.

    A block with an inf or a NaN decodes to NaN as a whole. A block whose scale would be subnormal (4 bits: absmax < 8.2e-38;
    8 bits: absmax < 1.5e-36) decodes to zeros.

    Cost: a row of m values takes m (4 bits: ⌈m / 2⌉) + 4 ⌈m / size⌉ bytes.

    Args:
        bits: 8 or 4.
        size: values per block; even for 4 bits.

    Raises:
        ValueError: ``bits`` or ``size`` is out of range.

    >>> codec = Blocks(8, size=4)
    >>> payload = codec.encode(torch.tensor([[127.0, 2.5, -3.0, 0.4, -254.0]]))
    >>> [part.tolist() for part in payload]
    [[[127, 2, -3, 0, -127]], [[1.0, 2.0]]]
    >>> codec.decode(payload, 5, torch.bfloat16).tolist()
    [[127.0, 2.0, -3.0, 0.0, -254.0]]
    """

    bits: int = attrs.field(default=8, validator=attrs.validators.in_((4, 8)))
    size: int = attrs.field(default=256, kw_only=True)

    @size.validator
    def _whole(self, attribute: object, value: int) -> None:
        if value < 1 or (self.bits == 4 and value % 2):
            raise ValueError(f"size={value}: a block has at least one value, and with 4 bits an even number of them")

    @property
    def top(self) -> int:
        """The largest integer: 127 or 7."""
        return int(2 ** (self.bits - 1) - 1)

    def encode(self, rows: Tensor) -> Sequence[Tensor]:
        """int8 [n, m], or uint8 [n, ⌈m/2⌉] with the earlier value in the low bits; scales fp32 [n, ⌈m/size⌉]."""
        n, m = rows.shape
        rows = rows.float() if rows.element_size() > 4 else rows
        values, scale = rows.new_empty(n, m, dtype=torch.int8), rows.new_empty(n, -(-m // self.size), dtype=torch.float32)
        for part, at in self._parts(m):
            blocks = _blocks(rows[:, part], self.size)  # [n, m'] -> [n, b, size]
            factor = torch.maximum(blocks.amax(2), -blocks.amin(2)).float() / self.top  # [n, b]
            factor = torch.where(factor < _TINY, 0.0, factor)
            factor = torch.where(factor.isfinite(), factor.clamp(max=_HUGE / self.top), torch.nan)
            scale[:, at] = factor
            inverse = torch.where(factor == 0, 1.0, factor).reciprocal()
            # NaN becomes an arbitrary integer, times a scale of NaN.
            _by_chunks(lambda x, inverse: (x * inverse).round_(), blocks, inverse, values[:, part])
        return (values if self.bits == 8 else _pack_nibbles(values)), scale

    def decode(self, payload: Sequence[Tensor], size: int, dtype: torch.dtype) -> Tensor:
        """The integers times their scales."""
        values, scale = payload
        whole = values if self.bits == 8 else _unpack_nibbles(values)[:, :size]
        rows = scale.new_empty(len(scale), size, dtype=dtype)
        for part, at in self._parts(size):
            _by_chunks(torch.mul, _blocks(whole[:, part], self.size), scale[:, at], rows[:, part])
        return rows

    def _parts(self, m: int) -> list[tuple[slice, slice]]:
        """The columns that fill whole blocks, with these blocks; then the remaining columns, if any, with theirs."""
        count = m // self.size
        whole = [(slice(0, count * self.size), slice(0, count))]
        return [*whole, (slice(count * self.size, m), slice(count, count + 1))] if m % self.size else whole


@attrs.frozen
class OneBit:
    """Quantization to signs, with the mean absolute value of each block of ``size`` values as an fp32 scale.

    Biased: use it with ``ErrorFeedback`` (1-bit SGD, Seide et al. 2014; EF-signSGD, Karimireddy et al. 2019).

    Law: in a block of d values ``‖x - C(x)‖² = ‖x‖² - ‖x‖₁² / d``, up to rounding. Zero counts as positive. All values of a
    block with an inf or a NaN decode to inf or NaN.

    Cost: a row of m values takes ⌈m / 8⌉ + 4 ⌈m / size⌉ bytes.

    >>> codec = OneBit(size=4)
    >>> payload = codec.encode(torch.tensor([[1.0, -2.0, 3.0, 0.0, -5.0]]))
    >>> [part.tolist() for part in payload]
    [[[13]], [[1.5, 5.0]]]
    >>> codec.decode(payload, 5, torch.float32).tolist()
    [[1.5, -1.5, 1.5, 1.5, -5.0]]
    """

    size: int = attrs.field(default=256, validator=attrs.validators.ge(1))

    def encode(self, rows: Tensor) -> Sequence[Tensor]:
        """uint8 [n, ⌈m/8⌉], the earliest value in the lowest bit; scales fp32 [n, ⌈m/size⌉]."""
        size = rows.shape[1]
        total = _blocks(rows.float().abs(), self.size).sum(2)  # [n, b]
        counts = torch.full_like(total, self.size)
        counts[:, -1:] -= total.shape[1] * self.size - size  # the last block may be short
        bits = _blocks((rows >= 0).to(torch.float32), 8)  # [n, m] -> [n, ⌈m/8⌉, 8]
        return (bits @ 2.0 ** _places(bits)).to(torch.uint8), total / counts

    def decode(self, payload: Sequence[Tensor], size: int, dtype: torch.dtype) -> Tensor:
        """The signs times the blocks' scales."""
        packed, scale = payload
        bits = (packed[..., None] >> _places(packed)) & 1  # [n, ⌈m/8⌉, 8]
        signs = bits.flatten(1)[:, :size].to(torch.float32) * 2 - 1
        return (_blocks(signs, self.size) * scale[..., None]).flatten(1)[:, :size].to(dtype)


@attrs.frozen
class TopK:
    """Top-k sparsification: the ``k = ⌈fraction · m⌉`` values of largest magnitude in a row of m; the others become zero.

    Biased: use it with ``ErrorFeedback`` (Deep Gradient Compression, Lin et al. 2018; Stich et al. 2018). NaN counts as
    largest, so it is always sent.

    Law: ``‖x - C(x)‖² ≤ (1 - k/m) ‖x‖²``.

    Cost: k values and k int32 indices (int64 for rows of 2³¹ values or more).

    Raises:
        ValueError: the fraction is not in (0, 1].

    >>> [part.tolist() for part in TopK(0.5).encode(torch.tensor([[1.0, -4.0, 2.0]]))]
    [[[-4.0, 2.0]], [[1, 2]]]
    """

    fraction: float = attrs.field(default=0.01)

    @fraction.validator
    def _part(self, attribute: object, value: float) -> None:
        if not 0 < value <= 1:
            raise ValueError(f"fraction={value!r} of the values: it must be above 0 and at most 1")

    def kept(self, size: int) -> int:
        """How many of ``size`` values are sent."""
        return min(size, ceil(self.fraction * size - 1e-9))  # 0.07 of 100 are 7, although the product rounds up

    def encode(self, rows: Tensor) -> Sequence[Tensor]:
        """Values [n, k] and their indices [n, k], in ascending order of indices."""
        size = rows.shape[1]
        places = rows.abs().topk(self.kept(size), dim=1).indices.sort(1).values
        return rows.gather(1, places), places.to(torch.int32 if size < 2**31 else torch.int64)

    def decode(self, payload: Sequence[Tensor], size: int, dtype: torch.dtype) -> Tensor:
        """The values at their indices, zeros elsewhere."""
        values, places = payload
        return values.new_zeros(len(values), size).scatter_(1, places.to(torch.int64), values).to(dtype)


_TINY = torch.finfo(torch.float32).tiny  # the smallest scale with full precision
_HUGE = torch.finfo(torch.float32).max * (1 - 2**-23)  # so that top * fl(_HUGE / top) is finite
_CACHED = 2**17  # values: half a megabyte in fp32


def _by_chunks(compute: Callable[[Tensor, Tensor], Tensor], blocks: Tensor, scale: Tensor, out: Tensor) -> None:
    """Writes ``compute(blocks, scale)`` into ``out``: [n, b, size], [n, b] -> [n, m], where b blocks hold m values.

    On a CPU it processes few enough blocks at a time for the intermediate results to stay in a core's cache.
    """
    n, count, size = blocks.shape
    at_once = max(1, _CACHED // max(1, n * size)) if blocks.device.type == "cpu" and not is_fake(blocks) else max(1, count)
    for first in range(0, count, at_once):
        some = slice(first, first + at_once)
        into = out[:, first * size : (first + at_once) * size]
        into.copy_(compute(blocks[:, some], scale[:, some, None]).flatten(1)[:, : into.shape[1]])


def _blocks(rows: Tensor, size: int) -> Tensor:
    """[n, m] -> [n, ⌈m/size⌉, size], zero-padded at the end."""
    n, m = rows.shape
    count = -(-m // size)
    return (F.pad(rows, (0, count * size - m)) if m % size else rows).reshape(n, count, size)


def _pack_nibbles(values: Tensor) -> Tensor:
    pairs = _blocks((values + 8).view(torch.uint8), 2)  # -7..7 -> 1..15
    return pairs[..., 0] | pairs[..., 1] << 4


def _unpack_nibbles(packed: Tensor) -> Tensor:
    return torch.stack([packed & 15, packed >> 4], dim=2).flatten(1).view(torch.int8) - 8


def _places(like: Tensor) -> Tensor:
    return torch.arange(8, dtype=like.dtype, device=like.device)
