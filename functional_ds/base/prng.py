"""Random numbers that depend on an element's position in the global batch, and not on the number of ranks."""

import zlib
from collections.abc import Callable, Mapping

import attrs
import torch
from torch import Tensor

from . import tree
from .torch_private import constant_when_compiled

# By dim: the global indices of the local elements, and the dim's global size; None for a dim that is whole.
Places = Mapping[int, tuple[Tensor | range, int] | None]

# Multipliers and shifts of splitmix64's finalizer (Steele, Lea, Flood 2014), as signed 64-bit integers.
_M1, _M2 = -0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15
_GOLDEN = -0x61C8864680B583EB


def _mix(x: Tensor) -> Tensor:
    x = (x ^ ((x >> 30) & 0x3FFFFFFFF)) * _M1
    x = (x ^ ((x >> 27) & 0x1FFFFFFFFF)) * _M2
    return x ^ ((x >> 31) & 0x1FFFFFFFF)


@constant_when_compiled
def _salt(name: str) -> int:
    """A hash of the name, which makes draws of different names independent."""
    return zlib.crc32(name.encode())


def _beside(number: Tensor, device: torch.device) -> Tensor:
    """A scalar for computation on a device. CPU scalars are passed to kernels by value; a copy would block the host."""
    return number if number.device.type == "cpu" else number.to(device)


@tree.record
class Key:
    """A counter-based random key (compare ``jax.random.key``): a seed, the step, and the global index of the first row.

    A random number is a hash of (seed, step, name, global row, position in the row), so it does not depend on the number of
    ranks and micro-batches, and is the same when activations are recomputed. Draws with different names are independent: use a
    different name for each dropout of a model.

    For a slice of a tensor, pass ``places``: for each split dim, the global indices of the slice's elements and the dim's
    global size. The draws are then those of a single device for these elements, which may be features, sequence positions or
    experts, contiguous or not. A key may carry places: ``T.sequence`` passes the loss a key with this rank's positions along
    dim 1.

    A loss function with a parameter ``key`` gets a key from the step.

    Attributes:
        seed: the seed of the run.
        step: the number of updates so far.
        row: the global index of the first row.
        places: the slice of all draws, unless a draw passes ``places``.
        watch: called with each value that is drawn for without ``places``, and the draw's name; transforms use it for checks.
        constant: whether all draws are 0.5 and dropout is off, in checks that move tokens.
    """

    seed: Tensor
    step: Tensor
    row: Tensor
    places: Places = attrs.field(factory=dict)
    watch: Callable[[Tensor, str], None] | None = tree.static(default=None)
    constant: bool = tree.static(default=False)

    @staticmethod
    def of(seed: int | Tensor) -> "Key":
        """The key of a new run."""
        zero = torch.zeros((), dtype=torch.int64)
        return Key(torch.as_tensor(seed, dtype=torch.int64), zero, zero)

    def at(self, *, step: Tensor | None = None, rows: Tensor | int = 0, places: Places | None = None) -> "Key":
        """The key for a step, for rows from ``rows`` on, and with ``places`` added to those that it carries."""
        all_places, watch = (self.places, self.watch) if places is None else ({**self.places, **places}, None)
        return Key(self.seed, self.step if step is None else step, self.row + rows, all_places, watch, self.constant)

    def uniform(self, like: Tensor, name: str, *, places: Places | None = None) -> Tensor:
        """Uniform fp32 random numbers in [0, 1), in the shape of ``like``, whose dim 0 is the batch's rows.

        Law: the draws for ``x[:, at]`` with ``places={1: (at, x.shape[1])}`` are those for ``x``, at ``at``.

        Args:
            like: a tensor of the shape and device to draw for.
            name: draws with different names are independent.
            places: for each split dim of ``like``: the global indices, as a ``range`` or as integers [n] on ``like``'s device
                ([rows, n] if rows differ), and the dim's global size. For dim 0 they are rows of the global batch, and replace
                the key's. None marks a dim as whole although the key carries places for it.

        Raises:
            ValueError: ``places`` are for a dim that ``like`` lacks, on another device, or not as many as the dim's elements.

        >>> key, whole, heads = Key.of(0), torch.empty(2, 4, 3), torch.tensor([3, 0])
        >>> torch.equal(key.uniform(whole[:, heads], "a", places={1: (heads, 4)}), key.uniform(whole, "a")[:, heads])
        True
        """
        if like.requires_grad:  # otherwise it may be uninitialized memory of the right shape
            self._show(like, name, places)
        return self._drawn(like, name, places)

    def _show(self, x: Tensor, name: str, places: Places | None) -> None:
        if self.watch is not None and places is None and not torch.compiler.is_compiling():
            self.watch(x, name)

    def _drawn(self, like: Tensor, name: str, places: Places | None) -> Tensor:
        if self.constant:
            return torch.full(like.shape, 0.5, device=like.device)
        device, given = like.device, self.places if places is None else {**self.places, **places}
        split = _checked(given, like, name) if given else {}
        rows = like.shape[0] if like.dim() else 1
        columns = like.numel() // max(rows, 1)
        salt = _salt(name)
        seed, step, row = (_beside(number, device) for number in (self.seed, self.step, self.row))
        run = _mix(_mix(seed + _GOLDEN) + step * _GOLDEN + salt)
        at = split.pop(0)[0] if 0 in split else row + torch.arange(rows, device=device)
        per_row = _mix(run + at * _GOLDEN)
        column = _columns(like, split) if split else torch.arange(columns, device=device)
        bits = _mix(per_row[:, None] + column * _GOLDEN)  # [rows, columns]
        return ((bits >> 40) & 0xFFFFFF).to(torch.float32).mul_(2.0**-24).view(like.shape)

    def dropout(self, x: Tensor, p: float, name: str, *, places: Places | None = None) -> Tensor:
        """Dropout: zeroes each element of ``x`` with probability ``p`` and scales the rest by 1 / (1 - p).

        Args:
            x: a tensor whose dim 0 is the batch's rows.
            p: a probability in [0, 1).
            name: draws with different names are independent.
            places: as in ``uniform``, if ``x`` is a slice.

        Raises:
            ValueError: ``p`` is out of range, or as for ``uniform``.

        >>> key, x = Key.of(0), torch.ones(4, 3)
        >>> whole = key.dropout(x, 0.5, "mlp")
        >>> parts = [key.at(rows=i).dropout(x[i : i + 2], 0.5, "mlp") for i in (0, 2)]
        >>> torch.equal(whole, torch.cat(parts))
        True
        """
        if not 0 <= p < 1:
            raise ValueError(f"p={p} must be a probability in [0, 1)")
        if p == 0 or self.constant:
            return x
        self._show(x, name, places)
        return x * (self._drawn(x, name, places) >= p).to(x.dtype) / (1 - p)


def _checked(places: Places, like: Tensor, name: str) -> dict[int, tuple[Tensor, int]]:
    """The places of the split dims, with their indices as tensors."""
    checked: dict[int, tuple[Tensor, int]] = {}
    shape = list(like.shape)
    for dim, place in places.items():
        if place is None:
            continue
        where = f"the draw {name!r} for a tensor of shape {shape}: places"
        if not 0 <= dim < len(shape):
            raise ValueError(
                f"{where} has dim {dim}, which it lacks; pass places={{{dim}: None}} for a tensor that is not split along it"
            )
        given, size = place
        at = torch.arange(given.start, given.stop, given.step, device=like.device) if isinstance(given, range) else given
        fits = at.shape == (shape[dim],) or (dim > 0 and at.shape == (shape[0], shape[dim]))
        if not fits:
            raise ValueError(
                f"{where}[{dim}] are {list(at.shape)} global indices of {size}, and dim {dim} has {shape[dim]} elements; give "
                f"one for each, or places={{{dim}: None}} where this dim is whole or is not the one that is split"
            )
        if at.device != like.device or at.is_floating_point():
            given_as = f"{at.dtype} on {at.device}"
            raise ValueError(f"{where}[{dim}] are {given_as}; give integers on {like.device}, where the draw is made")
        checked[dim] = at, size
    return checked


def _columns(like: Tensor, places: Mapping[int, tuple[Tensor, int]]) -> Tensor:
    """The global positions in the row: [columns], or [rows, columns] if rows differ."""
    positions, stride = torch.zeros((), dtype=torch.int64, device=like.device), 1
    for dim in reversed(range(1, like.dim())):
        size = like.shape[dim]
        at, size = places[dim] if dim in places else (torch.arange(size, device=like.device), size)
        after = (1,) * (like.dim() - 1 - dim)
        shaped = at.view(-1, *after) if at.dim() == 1 else at.view(len(at), *(1,) * (dim - 1), -1, *after)
        positions = positions + shaped * stride  # broadcast over the dims before
        stride *= size
    per_row = any(at.dim() > 1 for at, _ in places.values())
    return positions.reshape(like.shape[0], -1) if per_row else positions.reshape(-1)
