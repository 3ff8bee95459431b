"""Activation checkpointing of functions: saved tensors are recomputed, offloaded or partitioned."""

import functools
from collections.abc import Callable, Collection
from typing import Any, TypeVar

from torch import Tensor, nn

from functional_ds import comm
from functional_ds.sharding.path_patterns import nearest

from .entered import called, current_region
from .policy import RematPolicy
from .region import run

R = TypeVar("R")


def remat(
    function: Callable[..., R],
    *,
    policy: str | RematPolicy = "recompute",
    group: comm.Group | None = None,
    name: str | None = None,
) -> Callable[..., R]:
    """Activation checkpointing: ``function`` with its saved tensors recomputed, offloaded or partitioned, by a policy.

    Value and gradients are the function's, dropout included: a second run has torch's random state and the autocast of
    the first. As for ``torch.utils.checkpoint``, the function must compute the same each time, so what it reads besides its
    arguments must not change. Its side effects happen in every run, except writes to module buffers: of a module that the
    function is, is a method of, or calls by ``fds.functional``'s ``apply``. Remats nest: the inner policy applies to tensors
    saved inside, the outer one to the inner function's inputs.

    The function's inputs are the tensors in its arguments, nested or by keyword. Leaves that require grad (params) always stay
    in place.

    Args:
        function: any; it may return any tree.
        policy: a ``RematPolicy``, or its text: "recompute", "save", "offload" or "partition", then exceptions, as in
            "recompute,inputs=offload,attn_out=save". The second run skips the operation that made a kept named tensor.
        group: for "partition": ranks on which the function computes the same, for example a tensor-parallel group. Each rank
            keeps 1/n of a tensor, plus padding, and the backward pass all-gathers it, in the same order on all ranks. Within a
            step the ranks compare, before the backward pass, what they partitioned; if they differ, all raise an error.
        name: for reports; by default the function's.

    Raises:
        ValueError: an unknown word in the policy; the policy partitions and there is no group, or the reverse; when called: the
            policy names a tensor that ``checkpoint_name`` did not name.

    >>> import torch
    >>> w, x = torch.ones(3, 3, requires_grad=True), torch.ones(2, 3)
    >>> def block(x):
    ...     return torch.tanh(checkpoint_name(x @ w, "product"))
    >>> by_hand = torch.autograd.grad(block(x).sum(), w)[0]
    >>> again = torch.autograd.grad(remat(block, policy="recompute,product=offload")(x).sum(), w)[0]
    >>> torch.equal(by_hand, again)
    True
    """
    if not callable(function):
        raise TypeError(f"function={function!r} is not callable")
    parsed = RematPolicy.parse(policy)
    check_group(parsed, group)
    part = name or str(getattr(function, "__name__", type(function).__name__))
    owner = getattr(function, "__self__", function)
    inside = called(owner, function) if isinstance(owner, nn.Module) else function

    @functools.wraps(function, updated=())
    def rematted(*args: Any, **kwargs: Any) -> R:
        output: R = run(
            inside, args, kwargs, policy=parsed, group=group, part=part, seen=functools.partial(check_names, parsed)
        )
        return output

    return rematted


def checkpoint_name(value: Tensor, name: str) -> Tensor:
    """Names a value for policies of the enclosing ``remat``, as ``jax.ad_checkpoint.checkpoint_name`` does.

    The name refers to the operation that made the value: if it is saved, offloaded or partitioned, a second run skips the
    operation. Outside a ``remat`` the function returns the value unchanged.

    Raises:
        ValueError: the policy keeps the value while it recomputes others, and no differentiated operation made the value, or
            one wrote into it since.

    >>> import torch
    >>> import functional_ds as fds
    >>> block = fds.remat(lambda w, x: checkpoint_name(x @ w, "product").tanh(), policy="recompute,product=save")
    >>> w = torch.ones(2, 2, requires_grad=True)
    >>> with fds.remat_report() as report:
    ...     block(w, torch.ones(1, 2)).sum().backward()
    >>> [(row.what, row.keep.value) for row in report.rows]
    [('inputs', 'save'), ('inside', 'recompute'), ('product', 'save')]
    """
    if not isinstance(value, Tensor):
        raise TypeError(f"checkpoint_name: value={value!r} is not a tensor; name tensors, one by one")
    region = current_region()
    if region is not None:
        region.name(value, name)
    return value


def check_group(policy: RematPolicy, group: comm.Group | None) -> None:
    """Raises an error for a policy that partitions without a group, and a group that no policy uses."""
    if group is not None and not isinstance(group, comm.Group):
        raise TypeError(f"group={group!r} is not a group: pass a group, such as mesh['tp']")
    if policy.partitions and group is None:
        raise ValueError(
            f"policy='{policy}' partitions, so it needs group=: ranks with the same activations, such as mesh['tp']"
        )
    if group is not None and not policy.partitions:
        raise ValueError(f"group={group.name!r} would change nothing: policy='{policy}' partitions nothing")


def check_names(policy: RematPolicy, seen: Collection[str]) -> None:
    """Raises an error for a policy with a name that no value got."""
    for name in policy.names:
        if name not in seen:
            of = f", of {', '.join(sorted(seen))}" if seen else ""
            raise ValueError(f"policy='{policy}': no value is named {name!r}; {nearest(name, sorted(seen))}{of}")
