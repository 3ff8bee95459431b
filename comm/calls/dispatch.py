"""Calls collectives on pytrees, with autograd, and chains them."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial, wraps
from itertools import repeat
from operator import itemgetter
from typing import Any, ParamSpec, TypeVar

import optree
import torch
from torch import Tensor

from functional_ds.base import tree as pytree
from functional_ds.base.marks import is_dtensor
from functional_ds.base.torch_private import has_tangent, is_fake
from functional_ds.comm.record.group import Group, Ready, call_site, poll_all
from functional_ds.comm.record.ledger import LedgerCall, begin
from functional_ds.comm.record.pending import Pending, Request
from functional_ds.comm.table.collective import Call, CallContext, Handle
from functional_ds.comm.table.errors import CommError
from functional_ds.comm.worlds.current import recorder, world

from .autograd_node import CallsInGraph, StartedCall, Transposed, is_differentiable

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")


_NOTHING: AbstractContextManager[None] = nullcontext()
_ALONE: optree.PyTreeSpec = pytree.structure(0)  # the structure of a single tensor


def check_avg(leaves: Sequence[Tensor], op: str) -> None:
    """Raises ValueError for means of integer and bool tensors, which are unsupported."""
    for leaf in leaves:
        if op == "avg" and not is_differentiable(leaf):
            raise ValueError(f"op='avg' of an integer or bool tensor ({leaf.dtype}): use sum, or cast it first")


def _in_inference_mode() -> bool:
    """Whether to leave inference mode, so that results are normal tensors in any thread."""
    return not torch.is_grad_enabled() and torch.is_inference_mode_enabled()


def start_call(
    call: Call, leaves: Sequence[Tensor], group: Group, *, beside: bool, early: bool = False, transposed: str | None = None
) -> StartedCall:
    """Starts a call on leaves, without autograd; its handle gives the results.

    Args:
        call: the collective and its options.
        leaves: this rank's values.
        group: the ranks.
        beside: whether it may run concurrently with other calls.
        early: whether the caller continues before it waits.
        transposed: for a backward pass, the source line of the forward call.
    """
    if _in_inference_mode():
        with torch.inference_mode(False), torch.no_grad():
            return start_call(call, leaves, group, beside=beside, early=early, transposed=transposed)
    if group.rank < 0:
        raise CommError(f"{call.shown(-1)}: rank {world().rank} is not in {group!r}; only its ranks may call its collectives")
    call = call.on_nodes(group.ranks_per_node)
    here, watch = check_call(call, leaves, group), group.world.watch
    if watch is None:
        return StartedCall(call, leaves, _begin(call, leaves, group, here, beside, early))
    handle = watch.start(call, leaves, group, partial(_begin, call, leaves, group, here, beside, early), transposed)
    return StartedCall(call, leaves, handle, call_site())


def check_call(call: Call, leaves: Sequence[Tensor], group: Group, prefix: str = "") -> CallContext:
    """Checks a call on this rank and returns its ``CallContext``; raises ValueError, with ``prefix`` before the message."""
    here = CallContext(call.options, group.rank, group.size)
    try:
        for leaf in leaves:
            if leaf.layout is not torch.strided:
                raise ValueError(f"a tensor of layout {leaf.layout} cannot be sent: pass leaf.to_dense(), or its parts")
            if is_dtensor(leaf):
                raise ValueError("a DTensor cannot be sent: pass this rank's part, leaf.to_local(), or all, leaf.full_tensor()")
            if has_tangent(leaf):
                raise ValueError(
                    "forward mode (torch.func.jvp, jacfwd) does not go through collectives: its derivative would be zero; use "
                    "torch.autograd.grad, or detach the tensor"
                )
            call.collective.check(leaf, here)
    except ValueError as error:
        raise ValueError(f"{prefix}{call.shown(group.rank)} on rank {group.rank} of {group.name!r}: {error}") from None
    return here


def _begin(call: Call, leaves: Sequence[Tensor], group: Group, here: CallContext, beside: bool, early: bool) -> Handle:
    row = call.collective
    if row.alone is not None:
        return Ready([row.alone(leaf.detach().contiguous(), here) for leaf in leaves])
    if (taker := recorder()).records:
        return taker.start(call, leaves, group, here, beside=beside, early=early)
    if any(map(is_fake, leaves)):
        return Ready([outline(call, leaf, here) for leaf in leaves])
    ledgers = group.world.ledgers
    began = begin(ledgers, leaves) if ledgers else 0.0
    handle = group.world.start(call, leaves, group, beside=beside)
    for ledger in ledgers:
        handle = ledger.record(LedgerCall(call, leaves, here, group.name, group.ranks), handle, began, early=early)
    return handle


def outline(call: Call, leaf: Tensor, here: CallContext) -> Tensor:
    """The result of a call on fake tensors, assuming that all ranks pass the same shapes; nothing is sent."""
    if call.collective.private:  # other ranks' sizes differ; this rank's options give the shape of its result
        return call.collective.on_shapes(leaf.detach(), here)
    members = list(call.collective.members(here.options, here.n))
    outputs = call.collective.denotation([leaf.detach()] * len(members), call.merged([call.private()] * len(members)))
    return outputs[members.index(here.rank)]


def _finish(started: Sequence[StartedCall], group: Group) -> list[list[Tensor]]:
    """Waits for the calls' results; the differentiable calls become one node of the autograd graph."""
    if _in_inference_mode():
        with torch.inference_mode(False), torch.no_grad():
            return _finish(started, group)
    smooth = [one for one in started if any(leaf.requires_grad for leaf in one.leaves)] if torch.is_grad_enabled() else []
    if not smooth:
        return [one.handle.wait() for one in started]
    leaves = (leaf for one in smooth for leaf in one.leaves)
    outputs: Iterator[Tensor] = iter(CallsInGraph.apply(smooth, group, _carry_out_transposed, *leaves))
    return [[next(outputs) for _ in one.leaves] if one in smooth else one.handle.wait() for one in started]


def _carry_out_transposed(calls: Sequence[Transposed], group: Group) -> list[list[Tensor]]:
    """Results of the transposes of calls that were started together; they too are started together."""
    with recorder().batch(group.world):
        started = [start_call(call, xs, group, beside=len(calls) > 1, transposed=site) for call, xs, site in calls]
    return _finish(started, group)


def resolve_group(group: Group | None) -> Group:
    """The group; for None, all ranks."""
    if group is None:
        return world()
    if not isinstance(group, Group):
        raise TypeError(f"group={group!r} is not a group: pass mesh['dp'], comm.new_group(ranks), comm.world() or None")
    return group


def flatten(name: str, tree: Any) -> tuple[list[Tensor], optree.PyTreeSpec]:
    """The leaves and structure of a pytree of tensors; raises TypeError for other leaves."""
    if isinstance(tree, Tensor):
        return [tree], _ALONE
    leaves, spec = pytree.flatten(tree)
    if not all(map(isinstance, leaves, repeat(Tensor))):
        path, leaf = next((path, leaf) for path, leaf in zip(spec.paths(), leaves, strict=True) if not isinstance(leaf, Tensor))
        where = "".join(f"[{entry!r}]" for entry in path) or "the value itself"
        raise TypeError(f"{name}: every leaf must be a tensor; {where} is {type(leaf).__name__} {leaf!r}")
    return leaves, spec


def request(call: Call, tree: T, group: Group | None = None) -> Request[T]:
    """Requests a call on all leaves of a tree, over the ranks of a group; None for all ranks."""
    return _requested([(call, tree)], resolve_group(group), itemgetter(0))


def request_all(calls: Sequence[tuple[Call, Any]], group: Group | None = None) -> Request[list[Any]]:
    """Requests several calls, each on a tree, as one batch; the result is the list of their results."""
    return _requested(calls, resolve_group(group), list)


def _requested(calls: Sequence[tuple[Call, Any]], group: Group, given: Callable[[list[Any]], R]) -> Request[R]:
    return Request(partial(_carry_out, calls, group, given), partial(_start, calls, group, given))


def _carry_out(calls: Sequence[tuple[Call, Any]], group: Group, given: Callable[[list[Any]], R]) -> R:
    started, specs = _start_calls(calls, group, early=False)
    return given([*map(pytree.unflatten, specs, _finish(started, group))])


def _start(calls: Sequence[tuple[Call, Any]], group: Group, given: Callable[[list[Any]], R]) -> Pending[R]:
    started, specs = _start_calls(calls, group, early=True)
    return Pending(
        lambda: given([*map(pytree.unflatten, specs, _finish(started, group))]),
        partial(poll_all, [one.handle for one in started]),
        lambda: f"{', '.join(one.call.shown(group.rank) for one in started)} on {group}",
    )


def _start_calls(
    calls: Sequence[tuple[Call, Any]], group: Group, *, early: bool
) -> tuple[list[StartedCall], list[optree.PyTreeSpec]]:
    """Starts calls, each on the leaves of its tree; returns them and the trees' structures."""
    several, started, specs = len(calls) > 1, [], []
    with recorder().batch(group.world) if several else _NOTHING:
        for call, tree in calls:
            leaves, spec = flatten(call.title(group.rank)[0], tree)
            started.append(start_call(call, leaves, group, beside=early or several, early=early))
            specs.append(spec)
    return started, specs


def collective(describe: Callable[P, Request[R]]) -> Callable[P, R]:
    """Decorates a function that returns a ``Request``: calling the result performs it, and ``comm.start`` starts it.

    >>> from functional_ds import comm
    >>> @comm.table.collective
    ... def largest(x, group=None):
    ...     return comm.table.prepare(comm.all_reduce, x.abs().amax(), group, op="max").then(float)
    >>> comm.simulate(lambda: (largest(torch.ones(2)), comm.start(largest, -torch.ones(3)).wait()), world_size=2)[0]
    (1.0, 1.0)
    """

    @wraps(describe)
    def carried_out(*args: P.args, **kwargs: P.kwargs) -> R:
        return describe(*args, **kwargs).run()

    carried_out.request = describe  # type: ignore[attr-defined]
    return carried_out


def prepare(collective: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> Request[R]:
    """``collective(*args, **kwargs)`` as a ``Request``, which has not been started.

    Raises:
        TypeError: ``collective`` is not a collective.
    """
    describe: Callable[P, Request[R]] | None = getattr(collective, "request", None)
    if describe is None:
        raise TypeError(
            f"{collective!r} is not a collective: pass comm.all_gather or its like, or a function under @comm.table.collective"
        )
    return describe(*args, **kwargs)


def start(collective: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> Pending[R]:
    """Starts a collective asynchronously and returns a ``Pending``, whose ``wait()`` returns the result.

    Law: ``start(f, x).wait() = f(x)`` for every collective f of this package, and for compressed and composed ones.

    Args:
        collective: ``comm.all_reduce``, ``comm.send``, ``comm.batch_p2p``, ...
        args: its arguments.
        kwargs: its options.

    Raises:
        TypeError: ``collective`` is not a collective.

    >>> from functional_ds import comm
    >>> comm.simulate(lambda: comm.start(comm.all_reduce, torch.ones(2), op="max").wait().tolist(), world_size=2)
    [[1.0, 1.0], [1.0, 1.0]]
    """
    return prepare(collective, *args, **kwargs).start()


def resolve_dim(name: str, tree: Any, dim: int) -> int:
    """Converts a negative dim to one that counts from the start, the same for all leaves."""
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


def relay(first: Pending[Any], *rest: Callable[[Any], Pending[Any]], lane: Group, device: torch.device) -> Pending[Any]:
    """Chains collectives: each function gets the previous result and returns a ``Pending``.

    The chain runs in the background, independent of this rank's calls of ``poll`` and ``wait``; the chains of a lane run one
    after another. All ranks must start the chains of a lane in one order, and nothing else may use the channels of a chain's
    later collectives.

    Args:
        first: the first collective.
        rest: functions that start the later ones.
        lane: identifies the lane; usually the channel of a later collective.
        device: the tensors' device. On CUDA all collectives of the chain are launched at once, on the lane's stream.

    >>> from functional_ds import comm
    >>> def program():
    ...     rank, late = torch.tensor([float(comm.world().rank)]), comm.world().channel("late")
    ...     total = comm.start(comm.all_reduce, rank)
    ...     gather = lambda x: comm.start(comm.all_gather, x + rank, late)
    ...     chain = relay(total, gather, lane=late, device=rank.device)
    ...     return chain.wait().tolist()
    >>> comm.simulate(program, world_size=2)
    [[1.0, 2.0], [1.0, 2.0]]
    """
    if not rest:
        return first
    if recorder().records:
        for start in rest:
            first = start(first.wait())
        return first

    def steps() -> Iterator[Any]:
        value = first.wait()
        for start in rest:
            yield value
            value = start(value).wait()
        yield value

    chain = lane.world.beside(steps, lane, device)
    return Pending(chain.wait, chain.poll, lambda: f"a chain of collectives on {lane}")
