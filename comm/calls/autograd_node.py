"""Collectives in the autograd graph: calls that start together are one node, whose backward pass calls their transposes."""

from collections.abc import Callable, Sequence
from typing import Any

import attrs
import torch
from torch import Tensor

from functional_ds.comm.record.group import Group
from functional_ds.comm.table.collective import Call, Handle

Transposed = tuple[Call, Sequence[Tensor], str | None]  # a transpose, the gradients, and the forward call's source line


@attrs.define(eq=False)
class StartedCall:
    """A started call: its leaves, its handle and, if variance is checked, its source line."""

    call: Call
    leaves: Sequence[Tensor]
    handle: Handle
    site: str | None = None


class CallsInGraph(torch.autograd.Function):
    """A node of the autograd graph for calls that were started together; its backward pass is differentiable, too.

    Its outputs are the calls' results, one after another, and a token. ``carry_out`` runs the transposes.
    """

    @staticmethod
    def forward(
        ctx: Any, started: Sequence[StartedCall], group: Group, carry_out: Callable[..., Any], *leaves: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.calls, ctx.group, ctx.carry_out = [(one.call, len(one.leaves), one.site) for one in started], group, carry_out
        results = [result for one in started for result in one.handle.wait()]
        ctx.mark_non_differentiable(*(r for r in results if not is_differentiable(r)))
        token = torch.empty(0, device=leaves[0].device)
        ctx.save_for_backward(token)
        return (*results, token)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        *rest, _ = grads
        (token,), transposed = ctx.saved_tensors, []
        for call, count, site in ctx.calls:
            adjoint = call.collective.adjoint(call.options)
            if adjoint is None:
                shown = call.shown(ctx.group.rank)
                raise ValueError(f"{shown} has no transpose, so no gradient flows through it: detach its input")
            transposed.append((adjoint, [_in_graph(grad, token) for grad in rest[:count] if is_differentiable(grad)], site))
            del rest[:count]
        back = iter([result for results in ctx.carry_out(transposed, ctx.group) for result in results])
        return (None, None, None, *(next(back) if is_differentiable(grad) else None for grad in grads[:-1]))


def _in_graph(grad: Tensor, token: Tensor) -> Tensor:
    """Connects a gradient to the graph in a backward pass with ``create_graph=True``.

    A gradient may be constant on one rank (as a sender's) and not on another, but the second backward pass must reach this call
    on both. The token, an empty output of the call, links them when it is added.
    """
    return grad + token.sum().to(grad.dtype) if torch.is_grad_enabled() and not grad.requires_grad else grad


def is_differentiable(tensor: Tensor) -> bool:
    """Whether the tensor's dtype supports gradients."""
    return tensor.is_floating_point() or tensor.is_complex()
