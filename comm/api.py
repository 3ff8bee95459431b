"""The collectives as functions: from a pytree to a new pytree, differentiable wherever a transpose exists."""

from collections.abc import Sequence
from typing import Any, Generic, TypeVar

import attrs
import optree
import torch
from torch import Tensor

from .collective import Call, Handle
from .group import Group
from .pytree import NAMESPACE
from .table import ALL_GATHER, ALL_REDUCE, BARRIER, BROADCAST, REDUCE, REDUCE_SCATTER
from .world import world

__all__ = ["Pending", "all_gather", "all_reduce", "barrier", "broadcast", "reduce", "reduce_scatter"]

T = TypeVar("T")


@attrs.define(eq=False, repr=False)
class Pending(Generic[T]):
    """A collective under way: ``wait()`` gives its result, the same one each time."""

    _call: Call
    _group: Group
    _handle: Handle
    _leaves: list[Tensor]
    _spec: optree.PyTreeSpec
    _result: list[Tensor] | None = None

    def wait(self) -> T:
        """Blocks (on CUDA: makes the current stream wait) until the result is there."""
        if self._result is None:
            self._result = _finish(self._call, self._group, self._handle, self._leaves)
        result: T = optree.tree_unflatten(self._spec, self._result)  # type: ignore[assignment]
        return result

    def poll(self, patience: float = 0.0) -> bool:
        """Whether ``wait`` would not block. Waits for that, at most ``patience`` seconds; simulated, while others can go on.

        What a program makes of the answer can depend on the interleaving, as on the transport's speed.
        """
        return self._result is not None or self._handle.poll(patience)

    def __repr__(self) -> str:
        return f"Pending({self._call} on {self._group}, {'done' if self._result is not None else 'under way'})"


class _Differentiable(torch.autograd.Function):
    """Hangs a finished collective into the autograd graph; its backward is the adjoint, differentiable again."""

    @staticmethod
    def forward(ctx: Any, call: Call, group: Group, handle: Handle, *leaves: Tensor) -> tuple[Tensor, ...]:
        ctx.call, ctx.group = call, group
        results = handle.wait()
        ctx.mark_non_differentiable(*(r for r in results if not _is_smooth(r)))
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        adjoint = ctx.call.collective.adjoint(ctx.call.options)
        if adjoint is None:
            raise ValueError(f"{ctx.call} has no transpose, so no gradient flows through it: detach its input")
        smooth = [grad for grad in grads if _is_smooth(grad)]
        back = iter(_finish(adjoint, ctx.group, _start(adjoint, smooth, ctx.group), smooth))
        return (None, None, None, *(next(back) if _is_smooth(grad) else None for grad in grads))


def _is_smooth(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _start(call: Call, leaves: Sequence[Tensor], group: Group, *, ahead: bool = False) -> Handle:
    for leaf in leaves:
        call.collective.check(leaf, group.size, call.options)
    for book in group.world.books:
        book.record(call, leaves, group)
    return group.world.start(call, leaves, group, ahead=ahead)


def _finish(call: Call, group: Group, handle: Handle, leaves: list[Tensor]) -> list[Tensor]:
    if torch.is_grad_enabled() and any(leaf.requires_grad for leaf in leaves):
        return list(_Differentiable.apply(call, group, handle, *leaves))
    return handle.wait()


def _leaves(name: str, tree: Any) -> tuple[list[Tensor], optree.PyTreeSpec]:
    paths, leaves, spec = optree.tree_flatten_with_path(tree, namespace=NAMESPACE)
    for path, leaf in zip(paths, leaves, strict=True):
        if not isinstance(leaf, Tensor):
            where = "".join(f"[{p!r}]" for p in path) or "the value itself"
            raise TypeError(f"{name}: every leaf must be a tensor; {where} is {type(leaf).__name__} {leaf!r}")
    return leaves, spec


def _apply(call: Call, tree: T, group: Group | None, async_op: bool) -> Any:
    leaves, spec = _leaves(call.collective.name, tree)
    group = group or world()
    pending: Pending[T] = Pending(call, group, _start(call, leaves, group, ahead=async_op), leaves, spec)
    return pending if async_op else pending.wait()


def _reducing(call: Call, tree: T, group: Group | None, async_op: bool) -> Any:
    """avg is the sum over n, divided after the exchange, in every world alike."""
    if call.options["op"] != "avg":
        return _apply(call, tree, group, async_op)
    if async_op:
        raise ValueError("op='avg' with async_op=True: ask for the sum and divide by the group's size after the wait")
    group = group or world()
    for leaf in _leaves(call.collective.name, tree)[0]:
        if not _is_smooth(leaf):
            raise ValueError(f"op='avg' of an integer or bool tensor ({leaf.dtype}): use sum, or cast it first")
    total = _apply(Call(call.collective, {**call.options, "op": "sum"}), tree, group, False)
    return optree.tree_map(lambda leaf: leaf / group.size, total, namespace=NAMESPACE)


def _dim(name: str, tree: Any, dim: int) -> int:
    """A negative dim counts from the end; all leaves share it."""
    if dim >= 0:
        return dim
    leaves = _leaves(name, tree)[0]
    if len({leaf.dim() for leaf in leaves}) > 1:
        dims = sorted({leaf.dim() for leaf in leaves})
        raise ValueError(f"dim={dim} counts from the end, but the leaves have {dims} dims; use a dim >= 0")
    for leaf in leaves:
        if 0 < leaf.dim() < -dim:
            raise ValueError(f"dim={dim} is out of range for a tensor of shape {list(leaf.shape)}")
    return dim + leaves[0].dim() if leaves else 0


def all_reduce(x: T, group: Group | None = None, *, op: str = "sum", async_op: bool = False) -> Any:
    """The ranks' values combined elementwise, on every rank.

    Law: ``AR = AG ∘ RS``; its own transpose for sums. The pieces combine in rank order, so Gloo and the simulator agree
    bit for bit.

    Args:
        x: a pytree of tensors with the same shapes and dtypes on all ranks.
        group: who takes part; None for the whole world.
        op: sum, avg, min, max or product.
        async_op: return a ``Pending`` at once.

    Cost: each rank sends 2 (n - 1) / n of the value.

    Raises:
        ValueError: an unknown op, or one that the dtype does not have.

    >>> from functional_ds import comm
    >>> comm.simulate(lambda: comm.all_reduce(torch.tensor([1.0, comm.world().rank])).tolist(), world_size=3)
    [[3.0, 3.0], [3.0, 3.0], [3.0, 3.0]]
    """
    return _reducing(Call(ALL_REDUCE, {"op": op}), x, group, async_op)


def all_gather(x: T, group: Group | None = None, *, dim: int = 0, tiled: bool = True, async_op: bool = False) -> Any:
    """The ranks' values concatenated along ``dim``, on every rank; ``tiled=False`` stacks them on a new leading axis.

    Law: ``AG ∘ shard = id``; the transpose is reduce_scatter.

    Cost: each rank sends (n - 1) times its value.

    Raises:
        ValueError: ``dim`` is out of range, or the value is a scalar and tiled.

    >>> from functional_ds import comm
    >>> comm.simulate(lambda: comm.all_gather(torch.tensor([comm.world().rank])).tolist(), world_size=3)
    [[0, 1, 2], [0, 1, 2], [0, 1, 2]]
    """
    return _apply(Call(ALL_GATHER, {"dim": _dim("all_gather", x, dim), "tiled": tiled}), x, group, async_op)


def reduce_scatter(
    x: T,
    group: Group | None = None,
    *,
    dim: int = 0,
    op: str = "sum",
    tiled: bool = True,
    async_op: bool = False,
) -> Any:
    """The ranks' values combined elementwise and cut along ``dim``: rank r keeps the r-th of n pieces.

    Law: ``RS = shard ∘ AR``; the transpose of the sum is all_gather. ``tiled=False`` expects a leading axis of size n and
    drops it.

    Cost: each rank sends (n - 1) / n of the value.

    Raises:
        ValueError: the size along ``dim`` is no multiple of n; an unknown op.

    >>> from functional_ds import comm
    >>> comm.simulate(lambda: comm.reduce_scatter(torch.arange(4)).tolist(), world_size=2)
    [[0, 2], [4, 6]]
    """
    options = {"dim": _dim("reduce_scatter", x, dim), "op": op, "tiled": tiled}
    return _reducing(Call(REDUCE_SCATTER, options), x, group, async_op)


def broadcast(x: T, src: int = 0, group: Group | None = None, *, async_op: bool = False) -> Any:
    """Rank ``src``'s value, on every rank; the others pass a value of the same shapes and dtypes.

    Law: the transpose is ``reduce`` to ``src``. ``src`` counts within the group.

    Cost: ``src`` sends n - 1 times the value.

    >>> from functional_ds import comm
    >>> comm.simulate(lambda: comm.broadcast(torch.tensor(comm.world().rank), src=1).item(), world_size=3)
    [1, 1, 1]
    """
    return _apply(Call(BROADCAST, {"src": src}), x, group, async_op)


def reduce(x: T, dst: int = 0, group: Group | None = None, *, op: str = "sum", async_op: bool = False) -> Any:
    """The ranks' values combined elementwise, on rank ``dst``; zeros elsewhere.

    Law: the transpose of the sum is ``broadcast`` from ``dst``. ``dst`` counts within the group.

    Cost: every rank but ``dst`` sends its value once.

    >>> from functional_ds import comm
    >>> comm.simulate(lambda: comm.reduce(torch.tensor(2), dst=1).item(), world_size=3)
    [0, 6, 0]
    """
    return _reducing(Call(REDUCE, {"dst": dst, "op": op}), x, group, async_op)


def barrier(group: Group | None = None) -> None:
    """Returns once every rank of the group has called it.

    >>> from functional_ds import comm
    >>> comm.simulate(comm.barrier, world_size=2)
    [None, None]
    """
    _apply(Call(BARRIER), (torch.empty(0),), group, False)
