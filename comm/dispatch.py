"""Calls of collectives on pytrees, with autograd."""

from collections.abc import Sequence
from time import monotonic
from typing import Any

import attrs
import optree
import torch
from torch import Tensor

from functional_ds.base import tree as pytree
from functional_ds.base.marks import is_dtensor
from functional_ds.base.torch_private import is_fake
from functional_ds.comm.record.call_recorder import current_recorder
from functional_ds.comm.record.collective import Call, Handle, Here
from functional_ds.comm.record.errors import CommError
from functional_ds.comm.record.group import Group, Ready, call_site
from functional_ds.comm.record.ledger import begin
from functional_ds.comm.record.pending import Pending
from functional_ds.comm.worlds.current import world

__all__ = [
    "apply",
    "apply_all",
    "check_avg",
    "flatten",
    "is_differentiable",
    "outline",
    "resolve_dim",
    "resolve_group",
    "start",
]


class _Differentiable(torch.autograd.Function):
    """A node of the autograd graph for calls that are started together; its backward calls their adjoints, differentiably."""

    @staticmethod
    def forward(ctx: Any, started: "Sequence[_StartedCall]", group: Group, *leaves: Tensor) -> tuple[Tensor, ...]:
        ctx.calls, ctx.group = [(one.call, len(one.leaves), one.site) for one in started], group
        results = [result for one in started for result in one.handle.wait()]
        ctx.mark_non_differentiable(*(r for r in results if not is_differentiable(r)))
        token = torch.empty(0, device=leaves[0].device)
        ctx.save_for_backward(token)
        return (*results, token)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        *rest, _ = grads
        (token,), started = ctx.saved_tensors, []
        with ctx.group.world.batch():
            for call, count, site in ctx.calls:
                adjoint = call.collective.adjoint(call.options)
                if adjoint is None:
                    shown = call.shown(ctx.group.rank)
                    raise ValueError(f"{shown} has no transpose, so no gradient flows through it: detach its input")
                smooth = [_in_graph(grad, token) for grad in rest[:count] if is_differentiable(grad)]
                started.append(start(adjoint, smooth, ctx.group, async_op=len(ctx.calls) > 1, early=False, transposed=site))
                del rest[:count]
        back = iter([result for results in _finish(started, ctx.group) for result in results])
        return (None, None, *(next(back) if is_differentiable(grad) else None for grad in grads[:-1]))


def _in_graph(grad: Tensor, token: Tensor) -> Tensor:
    """The gradient as part of the graph, in a backward pass that is itself differentiated (``create_graph=True``).

    A gradient, such as a sender's, may be constant on one rank and not on another. The second backward pass must reach this
    call on both, since each needs the other's part. The token is an output of the call without elements; adding it links them.
    """
    return grad + token.sum().to(grad.dtype) if torch.is_grad_enabled() and not grad.requires_grad else grad


_ALONE: optree.PyTreeSpec = pytree.structure(0)  # a lone tensor's


def is_differentiable(tensor: Tensor) -> bool:
    """Whether tensors of its dtype have gradients."""
    return tensor.is_floating_point() or tensor.is_complex()


def check_avg(leaves: Sequence[Tensor], op: str) -> None:
    """Raises ValueError for means of integers and bools, which all worlds refuse."""
    for leaf in leaves:
        if op == "avg" and not is_differentiable(leaf):
            raise ValueError(f"op='avg' of an integer or bool tensor ({leaf.dtype}): use sum, or cast it first")


@attrs.frozen(eq=False)
class _StartedCall:
    """A call under way: its leaves and its handle; its line, where somebody follows values."""

    call: Call
    leaves: Sequence[Tensor]
    handle: Handle
    site: str | None = None

    @property
    def differentiable(self) -> bool:
        return any(leaf.requires_grad for leaf in self.leaves)


def _in_inference_mode() -> bool:
    """In every world results are tensors outside of it, whichever thread makes them."""
    return not torch.is_grad_enabled() and torch.is_inference_mode_enabled()


def start(
    call: Call,
    leaves: Sequence[Tensor],
    group: Group,
    *,
    async_op: bool,
    early: bool | None = None,
    transposed: str | None = None,
) -> _StartedCall:
    """Starts a call on leaves; its handle gives the results, without autograd."""
    if _in_inference_mode():
        with torch.inference_mode(False), torch.no_grad():
            return start(call, leaves, group, async_op=async_op, early=early, transposed=transposed)
    row, here = call.collective, Here(call.options, group.rank, group.size)
    if group.rank < 0:
        raise CommError(f"{call.shown(-1)}: rank {world().rank} is not in {group!r}; only its ranks may call its collectives")
    try:
        for leaf in leaves:
            if leaf.layout is not torch.strided:
                raise ValueError(f"a tensor of layout {leaf.layout} cannot travel: pass leaf.to_dense(), or its parts")
            if is_dtensor(leaf):
                raise ValueError("a DTensor cannot travel: pass this rank's part, leaf.to_local(), or all, leaf.full_tensor()")
            row.check(leaf, here)
    except ValueError as error:
        raise ValueError(f"{call.shown(group.rank)} on rank {group.rank} of {group.name!r}: {error}") from None
    watch = group.world.watch
    if watch is None:
        return _StartedCall(call, leaves, _begin(call, leaves, group, here, async_op, early))
    handle = watch.start(call, leaves, group, lambda: _begin(call, leaves, group, here, async_op, early), transposed)
    return _StartedCall(call, leaves, handle, call_site())


def _begin(call: Call, leaves: Sequence[Tensor], group: Group, here: Here, async_op: bool, early: bool | None) -> Handle:
    row = call.collective
    if row.alone is not None:
        return Ready([row.alone(leaf.detach().contiguous(), here) for leaf in leaves])
    if (recorder := current_recorder()) is not None:
        return recorder.start(call, leaves, group, async_op=async_op, early=early)
    if any(map(is_fake, leaves)):
        return Ready([outline(call, leaf, here) for leaf in leaves])
    began = begin(group.world.ledgers, leaves)
    handle = group.world.start(call, leaves, group, async_op=async_op)
    for ledger in group.world.ledgers:
        going_on = async_op if early is None else early
        handle = ledger.record(call, leaves, here, group.name, group.ranks, handle, began, early=going_on)
    return handle


def outline(call: Call, leaf: Tensor, here: Here) -> Tensor:
    """The result of a call on fake tensors, as if all ranks had passed the same shapes; nothing is sent."""
    if call.collective.private:  # the others' sizes are not this rank's, and its own say what arrives
        return call.collective.on_shapes(leaf.detach(), here)
    members = list(call.collective.members(here.options, here.n))
    outputs = call.collective.denotation([leaf.detach()] * len(members), call.merged([call.private()] * len(members)))
    return outputs[members.index(here.rank)]


def _finish(started: Sequence[_StartedCall], group: Group) -> list[list[Tensor]]:
    """Waits for the calls' results. Differentiable calls become one node of the autograd graph."""
    if _in_inference_mode():
        with torch.inference_mode(False), torch.no_grad():
            return _finish(started, group)
    smooth = [one for one in started if one.differentiable] if torch.is_grad_enabled() else []
    if not smooth:
        return [one.handle.wait() for one in started]
    outputs = iter(_Differentiable.apply(smooth, group, *(leaf for one in smooth for leaf in one.leaves)))
    return [[next(outputs) for _ in one.leaves] if one in smooth else one.handle.wait() for one in started]


def resolve_group(group: Group | None) -> Group:
    """The group; None means the whole world."""
    if group is None:
        return world()
    if not isinstance(group, Group):
        raise TypeError(f"group={group!r} is no group: pass mesh['dp'], comm.new_group(ranks), comm.world() or None")
    return group


def flatten(name: str, tree: Any) -> tuple[list[Tensor], optree.PyTreeSpec]:
    """The leaves and the structure of a pytree of tensors."""
    if isinstance(tree, Tensor):
        return [tree], _ALONE
    leaves, spec = pytree.flatten(tree)
    if not all(isinstance(leaf, Tensor) for leaf in leaves):
        path, leaf = next((path, leaf) for path, leaf in zip(spec.paths(), leaves, strict=True) if not isinstance(leaf, Tensor))
        where = "".join(f"[{entry!r}]" for entry in path) or "the value itself"
        raise TypeError(f"{name}: every leaf must be a tensor; {where} is {type(leaf).__name__} {leaf!r}")
    return leaves, spec


def apply(call: Call, tree: Any, group: Group | None, async_op: bool) -> Any:
    """The call on every leaf of the tree: its result, or a ``Pending``."""
    group = resolve_group(group)
    leaves, spec = flatten(call.title(group.rank)[0], tree)
    started = [start(call, leaves, group, async_op=async_op)]
    if not async_op:
        return pytree.unflatten(spec, _finish(started, group)[0])
    return Pending(
        lambda: pytree.unflatten(spec, _finish(started, group)[0]),
        started[0].handle.poll,
        lambda: f"{call.shown(group.rank)} on {group}",
    )


def apply_all(
    calls: Sequence[tuple[Call, Any]], group: Group | None, *, async_op: bool = True, early: bool = True
) -> Pending[list[Any]]:
    """Starts all calls, each on its tree, as one batch; the results are in order.

    Args:
        calls: each with its tree.
        group: the ranks; None for the whole world.
        async_op: whether the calls may run beside each other.
        early: whether the caller goes on before it waits.
    """
    group = resolve_group(group)
    trees = [flatten(call.title(group.rank)[0], tree) for call, tree in calls]
    pairs = zip(calls, trees, strict=True)
    with group.world.batch():
        started = [start(call, leaves, group, async_op=async_op, early=early) for (call, _), (leaves, _) in pairs]

    def finish() -> list[Any]:
        results = _finish(started, group)
        return [pytree.unflatten(spec, found) for (_, spec), found in zip(trees, results, strict=True)]

    def poll(timeout: float) -> bool:
        deadline = monotonic() + timeout
        return all(one.handle.poll(max(0.0, deadline - monotonic())) for one in started)

    def text() -> str:
        return f"{', '.join(one.call.shown(group.rank) for one in started)} on {group}"

    return Pending(finish, poll, text)


def resolve_dim(name: str, tree: Any, dim: int) -> int:
    """A dim that may count from the end as one that counts from the start, the same for all leaves."""
    if type(dim) is not int:
        raise TypeError(f"{name}: dim={dim!r} is {type(dim).__name__}; a dim is an int")
    if dim >= 0:
        return dim
    leaves = flatten(name, tree)[0]
    if len({leaf.dim() for leaf in leaves}) > 1:
        dims = sorted({leaf.dim() for leaf in leaves})
        raise ValueError(f"{name}: dim={dim} counts from the end, but the leaves have {dims} dims; use a dim >= 0")
    for leaf in leaves:
        if 0 < leaf.dim() < -dim:
            raise ValueError(f"{name}: dim={dim} is out of range for a tensor of shape {list(leaf.shape)}")
    return dim + leaves[0].dim() if leaves else 0
