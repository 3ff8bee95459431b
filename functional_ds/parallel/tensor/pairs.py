"""Megatron's f and g (Shoeybi et al. 2019) without copies, and the group that tensor-parallel functions use."""

from typing import Any

import torch
from torch import Tensor

from functional_ds import comm
from functional_ds.step.axes import axis, note_asked

SLICES = "slices of weights over tp"


def tensor_group(group: comm.Group | None, what: str) -> comm.Group:
    """The group, by default that of the running step's ``T.tensor_parallel``.

    Raises:
        ValueError: there is neither; ``what`` names the function.
        TypeError: it is not a group.
    """
    ranks = axis("tp") if group is None else group
    if group is None and what != "tp.places":
        note_asked(SLICES)
    if ranks is None:
        raise ValueError(
            f"{what}: group=None, and no T.tensor_parallel is in the running step: pass the tensor-parallel group, mesh['tp'], "
            "or compose T.tensor_parallel(plan, mesh['tp'])"
        )
    if not isinstance(ranks, comm.Group):
        raise TypeError(f"{what}: group={ranks!r} is not a group: pass mesh['tp'], comm.world() or None")
    return ranks


def shared(x: Tensor, group: comm.Group) -> Tensor:
    """A replicated value for computations that differ between ranks, as ``comm.copy_to``; it shares memory with ``x``."""
    replica: Tensor = _Shared.apply(x, group)
    return replica


def summed(x: Tensor, group: comm.Group) -> Tensor:
    """The sum of the ranks' values, replicated, as ``comm.reduce_from``; its gradient passes through without a copy."""
    total: Tensor = _Summed.apply(x, group)
    return total


class _Shared(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: comm.Group) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return summed(grad, ctx.group), None


class _Summed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: comm.Group) -> Tensor:
        ctx.group = group
        return comm.all_reduce(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return shared(grad, ctx.group), None
