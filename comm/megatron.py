"""Megatron-LM's four collectives for tensor parallelism.

The transpose of a forward pass depends on how its input and result relate to the group (see ``Variance``), so each pair of
forward and backward pass has a name (Shoeybi et al., "Megatron-LM", 2019):

| forward | from | to | backward |
|---|---|---|---|
| ``copy_to``: identity | invariant | replicated | all-reduce |
| ``reduce_from``: all-reduce | partial | invariant | identity |
| ``scatter_to``: this rank's slice | invariant | varying | all-gather |
| ``gather_from``: all-gather | varying | invariant | this rank's slice |
"""

from typing import TypeVar

from functional_ds.comm.record.group import Group
from functional_ds.comm.record.pending import Request
from functional_ds.comm.table.collective import Call
from functional_ds.comm.table.exchanges import COPY_TO, GATHER_FROM, REDUCE_FROM, SCATTER_TO

from .calls.dispatch import collective, request, resolve_dim

T = TypeVar("T")


@collective
def copy_to(x: T, group: Group | None = None) -> Request[T]:
    """Returns the value unchanged; the backward pass sums the gradient over the ranks.

    Law: ``copy_toᵀ = AR``: if each rank uses a value differently, its gradient is the sum over all uses.

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
    """Sums the ranks' values; the backward pass returns the gradient unchanged.

    Law: ``reduce_fromᵀ = id``: all ranks use the sum in the same way, so each rank already has its whole gradient.

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
    """Takes this rank's slice along ``dim``; the backward pass all-gathers the slices' gradients.

    Law: ``scatter_toᵀ = AG``.

    Args:
        x: a pytree of tensors, with the same shapes and dtypes on all ranks.
        group: the ranks that take part; None for the whole world.
        dim: the dim to slice.

    Cost: nothing forward; (n - 1) / n of the value backward.

    Raises:
        ValueError: the size along ``dim`` is not a multiple of n.

    >>> import torch
    >>> from functional_ds import comm
    >>> comm.simulate(lambda: comm.scatter_to(torch.arange(4)).tolist(), world_size=2)
    [[0, 1], [2, 3]]
    """
    return request(Call(SCATTER_TO, {"dim": resolve_dim("scatter_to", x, dim)}), x, group)


@collective
def gather_from(x: T, group: Group | None = None, *, dim: int = 0) -> Request[T]:
    """All-gathers the ranks' values along ``dim``; the backward pass takes this rank's slice of the gradient.

    Law: ``gather_fromᵀ = shard``: all ranks use the result in the same way, so each rank already has its whole gradient.

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
