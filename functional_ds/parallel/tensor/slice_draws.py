"""Random draws on slices: the indices of this rank's part of an activation."""

import attrs
import torch
from torch import Tensor

from functional_ds import comm
from functional_ds.base.prng import Places
from functional_ds.base.torch_private import disable_dispatch_modes, has_values, is_transformed

from .pairs import tensor_group

Drawn = tuple[str, list[int], list[float]]  # a draw's name, the shape of what it is for, numbers that tell its values apart


def places(x: Tensor, dim: int, *, group: comm.Group | None = None) -> Places:
    """The indices of this rank's part of an activation along an evenly split dim, for draws by ``Key``.

    ``key.dropout(x_r, p, name, places=places(x_r, dim))`` is this rank's part of ``key.dropout(x, p, name)``. A
    replicated activation needs no places: all ranks draw the same.

    Args:
        x: this rank's part: what ``column`` returns, with its features as the last dim; between blocks that are split along the
            sequence, an activation with the sequence as its dim.
        dim: that is split.
        group: the ranks; None for those of the running step's ``T.tensor_parallel``.

    >>> import torch
    >>> from functional_ds.base.prng import Key
    >>> def program():
    ...     here, key, whole = comm.world(), Key.of(0), torch.ones(2, 4)
    ...     part = whole.chunk(here.size, 1)[here.rank]
    ...     return key.dropout(part, 0.5, "mlp", places=places(part, 1, group=here)), key.dropout(whole, 0.5, "mlp")
    >>> (one, whole), (other, _) = comm.simulate(program, world_size=2)
    >>> torch.equal(torch.cat([one, other], 1), whole)
    True
    """
    here = tensor_group(group, "tp.places")
    if not -x.dim() <= dim < x.dim():
        raise ValueError(f"tp.places: dim={dim} is not a dim of x, of shape {list(x.shape)}")
    size = x.shape[dim]
    return {dim % x.dim(): (range(here.rank * size, (here.rank + 1) * size), size * here.size)}


@attrs.define(eq=False)
class DrawLog:
    """Records what draws without ``places`` were made for in a pass, for comparison over ranks: a key's ``watch``.

    Attributes:
        recorded: the draws of the current pass; None if nothing is recorded.
        known: names of draws that ranks have compared.
    """

    recorded: list[Drawn] | None = None
    known: set[str] = attrs.field(factory=set)

    def __call__(self, x: Tensor, name: str) -> None:
        """Records a value, unless it is known or has no values."""
        if self.recorded is None or name in self.known or not has_values(x) or is_transformed(x) or not x.numel():
            return
        with disable_dispatch_modes(), torch.no_grad():
            self.recorded.append((name, list(x.shape), told_apart(x.detach())))


def told_apart(x: Tensor) -> list[float]:
    """Three statistics that distinguish the values of real tensors: the norm, and two sums of at most its size."""
    flat = x.double().flatten()
    mixed = flat @ torch.arange(1.0, len(flat) + 1, dtype=flat.dtype, device=flat.device).cos()
    numbers: list[float] = torch.stack([flat.norm(), flat.sum() / len(flat) ** 0.5, mixed / len(flat) ** 0.5]).tolist()
    return numbers
