"""Random draws that depend on where a row stands in the global batch, not on how many ranks share it."""

import zlib

import torch
from torch import Tensor

from . import tree

__all__ = ["Key"]

# Multipliers and shifts of splitmix64's finalizer (Steele, Lea, Flood 2014), as signed 64-bit integers.
_M1, _M2 = -0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15
_GOLDEN = -0x61C8864680B583EB


def _mix(x: Tensor) -> Tensor:
    x = (x ^ ((x >> 30) & 0x3FFFFFFFF)) * _M1
    x = (x ^ ((x >> 27) & 0x1FFFFFFFFF)) * _M2
    return x ^ ((x >> 31) & 0x1FFFFFFFF)


def _beside(number: Tensor, device: torch.device) -> Tensor:
    """A number to compute with on a device. One on the host goes with each kernel by value; a copy would stop the host."""
    return number if number.device.type == "cpu" else number.to(device)


@tree.record
class Key:
    """Where random numbers come from: a seed, the step, and the global index of the batch's first row.

    A draw is a hash of (seed, step, name, global row, position in the row), so it is the same on any number of ranks and
    micro-batches (law 29), and the same again when an activation is recomputed. ``name`` keeps draws apart: give each
    dropout of a model its own.

    A loss function that has a parameter ``key`` gets it from the step.
    """

    seed: Tensor
    step: Tensor
    row: Tensor

    @staticmethod
    def of(seed: int) -> "Key":
        """The key of a fresh run."""
        zero = torch.zeros((), dtype=torch.int64)
        return Key(torch.tensor(seed, dtype=torch.int64), zero, zero)

    def at(self, *, step: Tensor | None = None, rows: Tensor | int = 0) -> "Key":
        """The key of a step, and of the rows that begin ``rows`` further on."""
        return Key(self.seed, self.step if step is None else step, self.row + rows)

    def uniform(self, like: Tensor, name: str) -> Tensor:
        """Uniform fp32 numbers in [0, 1) of ``like``'s shape; its dim 0 counts the batch's rows."""
        device = like.device
        rows = like.shape[0] if like.dim() else 1
        columns = like.numel() // max(rows, 1)
        salt = zlib.crc32(name.encode())
        seed, step, row = (_beside(number, device) for number in (self.seed, self.step, self.row))
        run = _mix(_mix(seed + _GOLDEN) + step * _GOLDEN + salt)
        per_row = _mix(run + (row + torch.arange(rows, device=device)) * _GOLDEN)
        bits = _mix(per_row[:, None] + torch.arange(columns, device=device) * _GOLDEN)  # [rows, columns]
        return ((bits >> 40) & 0xFFFFFF).to(torch.float32).mul_(2.0**-24).view(like.shape)

    def dropout(self, x: Tensor, p: float, name: str) -> Tensor:
        """``x`` with each element zeroed with probability ``p`` and the rest scaled by 1 / (1 - p).

        >>> key, x = Key.of(0), torch.ones(4, 3)
        >>> whole = key.dropout(x, 0.5, "mlp")
        >>> parts = [key.at(rows=i).dropout(x[i : i + 2], 0.5, "mlp") for i in (0, 2)]
        >>> torch.equal(whole, torch.cat(parts))
        True
        """
        if not 0 <= p < 1:
            raise ValueError(f"p={p} must be a probability in [0, 1)")
        return x if p == 0 else x * (self.uniform(x, name) >= p).to(x.dtype) / (1 - p)
