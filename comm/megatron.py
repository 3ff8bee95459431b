"""Megatron's four collectives, whose transposes depend on how a value relates to the group.

A value is replicated (equal on all ranks, and counted once), varying, or a partial sum. The same forward pass has a different
transpose for each, so each pair of forward and backward has a name (Shoeybi et al., "Megatron-LM", 2019):

| forward | of a value that is | backward |
|---|---|---|
| ``copy_to``: nothing | replicated, used by varying computations | all-reduce |
| ``reduce_from``: all-reduce | a partial sum, to be replicated | nothing |
| ``scatter_to``: own slice | replicated, to be varying | all-gather |
| ``gather_from``: all-gather | varying, to be replicated | own slice |
"""

from typing import TypeVar

from functional_ds.comm.record.group import Group
from functional_ds.comm.record.pending import Request
from functional_ds.comm.table.collective import Call
from functional_ds.comm.table.exchanges import COPY_TO, GATHER_FROM, REDUCE_FROM, SCATTER_TO

from .dispatch import collective, request, resolve_dim

__all__ = ["copy_to", "gather_from", "reduce_from", "scatter_to"]

T = TypeVar("T")


@collective
def copy_to(x: T, group: Group | None = None) -> Request[T]:
    """Returns the value; the backward pass sums the ranks' gradients.

    Law: ``copy_toᵀ = AR``: a replicated value that each rank uses in its own way gets the gradients of all uses.

    Args:
        x: a pytree of tensors, with the same shapes and dtypes on all ranks.
        group: the ranks that take part; None for the whole world.

    Cost: nothing forward; 2 (n - 1) / n of the value backward.

    >>> import torch
    >>> from functional_ds import comm
    >>> def program():
    ...     x = torch.tensor(1.0, requires_grad=True)
    ...     (comm.copy_to(x) * (comm.world().rank + 1)).backward()
    ...     return x.grad.item()
    >>> comm.simulate(program, world_size=3)
    [6.0, 6.0, 6.0]
    """
    return request(Call(COPY_TO, {}), x, group)


@collective
def reduce_from(x: T, group: Group | None = None) -> Request[T]:
    """The sum of the ranks' values; the backward pass returns the gradient unchanged.

    Law: ``reduce_fromᵀ = id``: the sum is replicated, so each rank already has the gradient of the one value.

    Args:
        x: a pytree of tensors, with the same shapes and dtypes on all ranks.
        group: the ranks that take part; None for the whole world.

    Cost: 2 (n - 1) / n of the value forward; nothing backward.

    >>> import torch
    >>> from functional_ds import comm
    >>> def program():
    ...     x = torch.tensor(1.0, requires_grad=True)
    ...     (comm.reduce_from(x) * 5).backward()
    ...     return x.grad.item()
    >>> comm.simulate(program, world_size=3)
    [5.0, 5.0, 5.0]
    """
    return request(Call(REDUCE_FROM, {"op": "sum"}), x, group)


@collective
def scatter_to(x: T, group: Group | None = None, *, dim: int = 0) -> Request[T]:
    """This rank's slice along ``dim`` of a replicated value; the backward pass gathers the slices' gradients.

    Law: ``scatter_toᵀ = AG``.

    Args:
        x: a pytree of tensors, with the same shapes and dtypes on all ranks.
        group: the ranks that take part; None for the whole world.
        dim: the dim to slice.

    Cost: nothing forward; (n - 1) / n of the value backward.

    Raises:
        ValueError: the size along ``dim`` is no multiple of n.

    >>> import torch
    >>> from functional_ds import comm
    >>> comm.simulate(lambda: comm.scatter_to(torch.arange(4)).tolist(), world_size=2)
    [[0, 1], [2, 3]]
    """
    return request(Call(SCATTER_TO, {"dim": resolve_dim("scatter_to", x, dim)}), x, group)


@collective
def gather_from(x: T, group: Group | None = None, *, dim: int = 0) -> Request[T]:
    """The ranks' values concatenated along ``dim``; the backward pass takes this rank's slice of the gradient.

    Law: ``gather_fromᵀ`` = own slice: the whole is replicated, so each rank already has its gradient.

    Args:
        x: a pytree of tensors, with the same shapes and dtypes on all ranks.
        group: the ranks that take part; None for the whole world.
        dim: the dim to concatenate along.

    Cost: (n - 1) times the value forward; nothing backward.

    Raises:
        ValueError: ``dim`` is out of range, or the value is a scalar.

    >>> import torch
    >>> from functional_ds import comm
    >>> comm.simulate(lambda: comm.gather_from(torch.tensor([comm.world().rank])).tolist(), world_size=2)
    [[0, 1], [0, 1]]
    """
    return request(Call(GATHER_FROM, {"dim": resolve_dim("gather_from", x, dim), "tiled": True}), x, group)
