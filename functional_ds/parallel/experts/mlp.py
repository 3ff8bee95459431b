"""Expert functions: MLPs of all local experts at once, whole or split over tensor-parallel ranks."""

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor

from functional_ds import comm

from .grouped import RowGroups, grouped_linear
from .token_exchange import ExpertFunction

Activation = Callable[[Tensor], Tensor]


def gated_mlp(
    gate_up: Tensor, down: Tensor, *, activation: Activation = F.silu, tp: comm.Group | None = None
) -> ExpertFunction:
    """A gated MLP, ``down_e (activation(gate_e x) · up_e x)``, for the rows of each local expert e.

    Args:
        gate_up: [experts, 2 I, M], the gate's rows first.
        down: [experts, M, I].
        activation: of the gate.
        tp: the ranks over which every expert is split: ``gate_up`` by columns of both blocks (``LeafSlice.even(1, [I, I], n,
            rank)``), ``down`` by rows (``LeafSlice.even(2, I, n, rank)``). They have the same rows and results. Cost: one
            all-reduce of [R, M] forward, one backward. None: experts are whole.

    >>> import torch
    >>> from functional_ds.parallel.experts import RowGroups
    >>> f = gated_mlp(torch.ones(2, 6, 4), torch.ones(2, 4, 3))
    >>> f(torch.ones(5, 4), RowGroups.of([2, 3])).shape
    torch.Size([5, 4])
    """

    def gated(hidden: Tensor) -> Tensor:
        gate, up = hidden.chunk(2, -1)
        return activation(gate) * up

    return mlp(gate_up, down, activation=gated, tp=tp)


def mlp(up: Tensor, down: Tensor, *, activation: Activation = F.gelu, tp: comm.Group | None = None) -> ExpertFunction:
    """An MLP, ``down_e activation(up_e x)``, for the rows of each local expert e.

    Args:
        up: [experts, I, M].
        down: [experts, M, I].
        activation: between the two.
        tp: the ranks over which every expert is split, ``up`` along dim 1 and ``down`` along dim 2, as in ``gated_mlp``.

    >>> import torch
    >>> from functional_ds.parallel.experts import RowGroups
    >>> f = mlp(torch.ones(2, 3, 4), torch.ones(2, 4, 3), activation=torch.relu)
    >>> f(torch.ones(2, 4), RowGroups.of([1, 1])).tolist()
    [[12.0, 12.0, 12.0, 12.0], [12.0, 12.0, 12.0, 12.0]]
    """

    def run(rows: Tensor, groups: RowGroups) -> Tensor:
        hidden = activation(grouped_linear(rows if tp is None else comm.copy_to(rows, tp), up, groups))
        out = grouped_linear(hidden, down, groups)
        return out if tp is None else comm.reduce_from(out, tp)

    return run
