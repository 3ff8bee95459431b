"""The shape of a collective's result, which follows from this rank's own input."""

from collections.abc import Callable, Sequence

from torch import Tensor

from .collective import Collective, Here

__all__ = ["result_on_shapes"]

# From a payload's shape to that of the primitive's result.
_RESULTS: dict[str, Callable[[Sequence[int], Here], Sequence[int]]] = {
    "all_reduce": lambda shape, here: shape,
    "reduce": lambda shape, here: shape,
    "broadcast": lambda shape, here: shape,
    "all_gather": lambda shape, here: (
        [sum(here["sizes"]), shape[1]] if "sizes" in here.options else [here.n, *shape]  # [rows, m] or [m]
    ),
    "reduce_scatter": lambda shape, here: [here["sizes"][here.rank], shape[1]] if "sizes" in here.options else shape[1:],
    "gather": lambda shape, here: [here.n, *shape],
    "scatter": lambda shape, here: shape[-1:],
    "all_to_all": lambda shape, here: shape,
    "all_to_all_rows": lambda shape, here: [sum(here["output_splits"]), shape[1]],
    "permute": lambda shape, here: shape,
    "transfer": lambda shape, here: shape,
    "barrier": lambda shape, here: shape,
}


def result_on_shapes(row: Collective, tensor: Tensor, here: Here) -> Tensor:
    """The result of a collective for a tensor without values: a tensor of the right shape, without values."""
    payload = row.pack(tensor, here)
    piece = payload.new_empty(list(_RESULTS[row.primitive](payload.shape, here)))
    return row.unpack(piece, tensor, here)
