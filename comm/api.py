"""The common collectives as functions from a pytree to a new pytree, differentiable where a transpose exists.

Others are in ``exchange`` (all_to_all, permute), ``rooted`` (reduce, gather, scatter), ``p2p``, ``objects`` and ``megatron``.
``start(all_reduce, x)`` is the asynchronous form: it returns a ``Pending``, whose ``wait()`` returns the result.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import attrs
import torch

from functional_ds.base import tree as pytree
from functional_ds.base.byte_ranges import begin_together
from functional_ds.comm.record.group import Group
from functional_ds.comm.record.pending import Request
from functional_ds.comm.table.collective import Call, Variance
from functional_ds.comm.table.rooted_rows import BARRIER
from functional_ds.comm.table.rows import ALL_GATHER, ALL_REDUCE, BROADCAST, REDUCE_SCATTER

from .calls.dispatch import check_avg, collective, flatten, request, resolve_dim, resolve_group
from .calls.uneven import all_gather_uneven

T = TypeVar("T")


def reducing(call: Call, tree: T, group: Group | None) -> Request[T]:
    """Requests a reduction; "avg" is the sum, divided by n afterwards, on every back end."""
    if call.options["op"] != "avg":
        return request(call, tree, group)
    group = resolve_group(group)
    leaves = flatten(call.collective.name, tree)[0]
    check_avg(leaves, "avg")
    if group.world.watch is not None:  # the mean of a replicated value is that value, so it need not be a partial sum
        group.world.watch.declare(Variance.VARYING, leaves, group, [""] * len(leaves))

    def divided(total: T) -> T:
        mean: T = pytree.map(lambda leaf: leaf / group.size, total)
        return mean

    return request(attrs.evolve(call, options={**call.options, "op": "sum"}), tree, group).then(divided)


@collective
def all_reduce(x: T, group: Group | None = None, *, op: str = "sum", donate: bool = False) -> Request[T]:
    """Reduces the ranks' values elementwise; every rank gets the result.

    Law: ``AR = AG ∘ RS``; for sums it is its own transpose. Values are reduced in rank order, so Gloo and the simulator agree
    bitwise.

    Args:
        x: a pytree of tensors, with the same shapes and dtypes on all ranks.
        group: the ranks that take part; None for the whole world.
        op: "sum", "avg", "min", "max" or "product".
        donate: allows the results to reuse the values' memory; do not read the values afterwards. Without autograd only.

    Cost: each rank sends 2 (n - 1) / n of the value.

    Raises:
        ValueError: ``op`` is unknown, or not defined for the dtype; a donated value requires grad.

    >>> from functional_ds import comm
    >>> comm.simulate(lambda: comm.all_reduce(torch.tensor([1.0, comm.world().rank])).tolist(), world_size=3)
    [[3.0, 3.0], [3.0, 3.0], [3.0, 3.0]]
    """
    rooms = flatten("all_reduce", x)[0] if donate else None
    if rooms is not None and torch.is_grad_enabled() and any(room.requires_grad for room in rooms):
        raise ValueError(
            "all_reduce: donate=True would detach its values from the autograd graph; leave it out, or detach them"
        )
    return reducing(Call(ALL_REDUCE, {"op": op}, rooms), x, group)


@collective
def all_gather(
    x: T, group: Group | None = None, *, dim: int = 0, tiled: bool = True, uneven: bool = False, out: T | None = None
) -> Request[T]:
    """Gathers the ranks' values on every rank, concatenated along ``dim`` or, with ``tiled=False``, stacked on a new one.

    Law: ``AG ∘ shard = id``; the transpose is reduce_scatter.

    Args:
        x: a pytree of tensors, with the same shapes and dtypes on all ranks.
        group: the ranks that take part; None for the whole world.
        dim: the dim to concatenate along; with ``tiled=False`` it must be 0.
        tiled: False stacks the values on a new leading dim.
        uneven: allows sizes along ``dim`` to differ between ranks. The sizes are exchanged first, which blocks the host.
        out: tensors to write the results into, which are returned. A value may be a view of this rank's piece of one. For
            dim 0, without autograd.

    Cost: each rank sends (n - 1) times its value; with ``uneven``, also 16 (n - 1) bytes per leaf.

    Raises:
        ValueError: ``dim`` is out of range; the value is a scalar and ``tiled``; ``out`` does not fit the results.
        MismatchError: with ``uneven``, dtypes or the other dims differ between ranks.

    >>> from functional_ds import comm
    >>> comm.simulate(lambda: comm.all_gather(torch.tensor([comm.world().rank])).tolist(), world_size=3)
    [[0, 1, 2], [0, 1, 2], [0, 1, 2]]
    >>> comm.simulate(lambda: comm.all_gather(torch.ones(comm.world().rank), uneven=True).tolist(), world_size=3)[0]
    [1.0, 1.0, 1.0]
    """
    dim = resolve_dim("all_gather", x, dim)
    if out is not None:
        return _gathered_into(out, x, resolve_group(group), {"dim": dim, "tiled": tiled}, uneven)
    if not uneven:
        return request(Call(ALL_GATHER, {"dim": dim, "tiled": tiled}), x, group)
    if not tiled:
        raise ValueError("uneven=True with tiled=False: pieces of different sizes do not stack; gather them along a dim")
    return all_gather_uneven(x, resolve_group(group), dim)


def _gathered_into(out: T, x: T, group: Group, options: dict[str, Any], uneven: bool) -> Request[T]:
    rooms, values = flatten("all_gather", out)[0], flatten("all_gather", x)[0]
    if uneven or options["dim"]:
        raise ValueError(f"all_gather: out= with uneven={uneven}, dim={options['dim']}; it is for even pieces along dim 0")
    if len(rooms) != len(values):
        raise ValueError(f"all_gather: out= has {len(rooms)} tensors for {len(values)} values")
    for room, value in zip(rooms, values, strict=True):
        tiled = options["tiled"] and value.dim()
        whole = (group.size * len(value), *value.shape[1:]) if tiled else (group.size, *value.shape)
        if tuple(room.shape) != whole or room.dtype != value.dtype or not room.is_contiguous():
            raise ValueError(
                f"all_gather: out= is {room.dtype} {list(room.shape)}, and the result {value.dtype} {list(whole)}; pass a "
                "contiguous tensor like the result"
            )
        if torch.is_grad_enabled() and (room.requires_grad or value.requires_grad):
            raise ValueError("all_gather: out= would detach its values from the autograd graph; leave it out, or detach them")

    def written(results: T) -> T:
        for room, result in zip(rooms, flatten("all_gather", results)[0], strict=True):
            if not begin_together(room, result):
                room.copy_(result)
        return out

    return request(Call(ALL_GATHER, options, rooms), x, group).then(written)


@collective
def reduce_scatter(x: T, group: Group | None = None, *, dim: int = 0, op: str = "sum", tiled: bool = True) -> Request[T]:
    """Reduces the ranks' values elementwise and splits the result along ``dim``: rank r gets the r-th of n pieces.

    Law: ``RS = shard ∘ AR``; the transpose of the sum is all_gather.

    Args:
        x: a pytree of tensors, with the same shapes and dtypes on all ranks.
        group: the ranks that take part; None for the whole world.
        dim: the dim to split.
        op: "sum", "avg", "min", "max" or "product".
        tiled: False splits a leading dim of size n and removes it.

    Cost: each rank sends (n - 1) / n of the value.

    Raises:
        ValueError: the size along ``dim`` is not a multiple of n; ``op`` is unknown, or not defined for the dtype.

    >>> from functional_ds import comm
    >>> comm.simulate(lambda: comm.reduce_scatter(torch.arange(4)).tolist(), world_size=2)
    [[0, 2], [4, 6]]
    """
    options = {"dim": resolve_dim("reduce_scatter", x, dim), "op": op, "tiled": tiled}
    return reducing(Call(REDUCE_SCATTER, options), x, group)


@collective
def broadcast(x: T, src: int = 0, group: Group | None = None) -> Request[T]:
    """Sends rank ``src``'s value to every rank.

    Law: the transpose is ``reduce`` to ``src``.

    Args:
        x: a pytree of tensors, with the same shapes and dtypes on all ranks; only the values on ``src`` are read.
        src: the sender, a rank of the group.
        group: the ranks that take part; None for the whole world.

    Cost: ``src`` sends the value n - 1 times.

    Raises:
        ValueError: ``src`` is not a rank of the group.

    >>> from functional_ds import comm
    >>> comm.simulate(lambda: comm.broadcast(torch.tensor(comm.world().rank), src=1).item(), world_size=3)
    [1, 1, 1]
    """
    return request(Call(BROADCAST, {"src": src}), x, group)


def repeat(times: int, body: Callable[[int], None], group: Group | None = None) -> None:
    """Calls ``body(i)`` for i in ``range(times)``; every iteration must call the same collectives on the same shapes.

    Law: ``repeat(k, body)`` is ``for i in range(k): body(i)``. In ``simulate(shapes_only=True)`` the body runs once and is
    counted k times, so a loop over thousands of ranks is cheap.

    Args:
        times: the number of iterations.
        body: one iteration.
        group: a group of the world in which the loop runs; None for the current world.

    Cost: k times the cost of the body.

    Raises:
        ValueError: ``times`` is negative.

    >>> from functional_ds import comm
    >>> def around():
    ...     ring, x = comm.Permutation.shift(comm.world().size), [torch.empty(5, device="meta")]
    ...     with comm.ledger() as sent:
    ...         comm.repeat(999, lambda i: x.append(comm.permute(x.pop(), ring)))
    ...     return sent.calls, sent.elements
    >>> comm.simulate(around, world_size=1000, shapes_only=True)[7]
    (999, 4995)
    """
    if times < 0:
        raise ValueError(f"times={times}: a loop runs 0 times or more")
    resolve_group(group).world.repeat(times, body)


@collective
def barrier(group: Group | None = None) -> Request[None]:
    """Blocks until every rank of the group has called it.

    >>> from functional_ds import comm
    >>> comm.simulate(comm.barrier, world_size=2)
    [None, None]
    """
    group = resolve_group(group)
    nothing = torch.empty(0, dtype=torch.float32, device=group.world.device)
    return request(Call(BARRIER), nothing, group).then(lambda _: None)
