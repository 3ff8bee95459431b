"""Collectives composed of other collectives, which can be started asynchronously."""

import inspect
from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor

from functional_ds.base import tree
from functional_ds.comm.calls.dispatch import relay
from functional_ds.comm.record.group import Group
from functional_ds.comm.record.pending import Pending, Request

from .calls.dispatch import collective, resolve_group

P = ParamSpec("P")
R = TypeVar("R")


def composed(function: Callable[P, R]) -> Callable[P, R]:
    """Makes a function that calls collectives, such as a custom all-reduce, into a collective that ``comm.start`` can start.

    Law: ``start(f, x, group).wait() = f(x, group)``; called directly, it is the function. Once started it runs in the
    background, on separate channels of the groups in its arguments, after calls of it that were started earlier on the same
    group. ``T.zero(all_reduce=..., all_gather=..., reduce_scatter=...)`` accepts such functions, and wraps plain ones.

    Args:
        function: takes its groups as arguments, and calls collectives on those groups only. ``group=None`` means all ranks.

    >>> from functional_ds import comm
    >>> @comm.table.composed
    ... def spread(x, group=None):
    ...     return comm.all_reduce(x, group, op="max") - comm.all_reduce(x, group, op="min")
    >>> def program():
    ...     x = torch.tensor(float(comm.world().rank))
    ...     return spread(x).item(), comm.start(spread, x).wait().item()
    >>> comm.simulate(program, world_size=3)[0]
    (2.0, 2.0)
    """
    signature, name = inspect.signature(function), getattr(function, "__name__", type(function).__name__)

    @wraps(function)
    def described(*args: P.args, **kwargs: P.kwargs) -> Request[R]:
        given = signature.bind(*args, **kwargs)
        if given.arguments.get("group") is None and "group" in signature.parameters:
            given.arguments["group"] = resolve_group(None)
        groups = [value for value in given.arguments.values() if isinstance(value, Group)] or [resolve_group(None)]

        def begin() -> Pending[R]:
            values = [value for value in tree.leaves([*given.arguments.values()]) if isinstance(value, Tensor)]
            device = values[0].device if values else groups[0].world.device
            arguments = {key: x.channel(name) if isinstance(x, Group) else x for key, x in given.arguments.items()}
            late, with_grad = inspect.BoundArguments(signature, arguments), torch.is_grad_enabled()

            def run(_: None) -> Pending[R]:
                with torch.set_grad_enabled(with_grad):
                    return Pending.of(function(*late.args, **late.kwargs))

            return relay(Pending.of(None), run, lane=groups[0].channel(name), device=device)

        return Request(lambda: function(*given.args, **given.kwargs), begin)

    return collective(described)
