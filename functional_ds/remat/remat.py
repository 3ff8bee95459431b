"""Recomputation, offload and partition of what a function's backward pass needs."""

import difflib
import functools
from collections.abc import Callable, Collection
from typing import Any, TypeVar

from torch import Tensor, nn

from functional_ds import comm

from .policy import Saving
from .region import called, current_region, run

__all__ = ["check_group", "check_names", "checkpoint_name", "remat"]

R = TypeVar("R")


def remat(
    function: Callable[..., R], *, policy: str | Saving = "recompute", group: comm.Group | None = None, name: str | None = None
) -> Callable[..., R]:
    """``function``, whose backward pass finds what it needs as the policy says.

    Law 28: value and gradients are the function's, dropout included: torch's random state and autocast are as they were when it
    runs again. It must do the same then, as ``torch.utils.checkpoint`` asks, and what it reads beside its arguments must not
    have changed. What it writes there is written again, but for the buffers of a module that it is, or a method of, or calls
    by ``fds.functional``'s ``apply``. Remats nest: what is saved inside an inner one is its own affair, its inputs are the
    outer one's.

    Tensors in its arguments, nested or by keyword, are its inputs. Leaves that require grad (params) stay where they are.

    Args:
        function: any; it may return any tree.
        policy: a ``Saving``, or its text: "recompute", "save", "offload" or "partition", then exceptions, as in
            "recompute,inputs=offload,attn_out=save". A named value that is kept is not computed again: the operation that gave
            it is left out of the second run.
        group: for "partition": ranks on which the function computes the same, a tensor-parallel group say. Each keeps 1/n of a
            value, plus padding; the backward pass gathers it. All its ranks must come to their gathers in one order; within a
            step they compare, before the backward pass, what they have divided, and an error on all says where they differ.
        name: for reports; by default the function's.

    Raises:
        ValueError: a word of the policy is unknown; it partitions and there is no group, or the other way round; when called,
            it speaks of a name that no value got.

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
    saving = Saving.parse(policy)
    check_group(saving, group)
    part = name or str(getattr(function, "__name__", type(function).__name__))
    owner = getattr(function, "__self__", function)
    inside = called(owner, function) if isinstance(owner, nn.Module) else function

    @functools.wraps(function, updated=())
    def rematted(*args: Any, **kwargs: Any) -> R:
        found: R = run(inside, args, kwargs, saving=saving, group=group, part=part, seen=functools.partial(check_names, saving))
        return found

    return rematted


def checkpoint_name(value: Tensor, name: str) -> Tensor:
    """The value; inside of a ``remat``, policies may speak of it by this name.

    Outside it does nothing. A name speaks of the operation that made the value: with "save", "offload" or "partition" a
    recomputation does not run it again.

    Raises:
        ValueError: a policy is to keep it where the rest is recomputed, and nothing differentiated made it, or something wrote
            into it since.
    """
    if not isinstance(value, Tensor):
        raise TypeError(f"checkpoint_name: value={value!r} is no tensor; name tensors, one by one")
    region = current_region()
    if region is not None:
        region.name(value, name)
    return value


def check_group(saving: Saving, group: comm.Group | None) -> None:
    """Refuses a partition without a group, and a group without one."""
    if group is not None and not isinstance(group, comm.Group):
        raise TypeError(f"group={group!r} is no group: pass mesh['tp'], say")
    if saving.partitions and group is None:
        raise ValueError(f"policy='{saving}' partitions, so it needs group=: ranks with the same activations, mesh['tp'] say")
    if group is not None and not saving.partitions:
        raise ValueError(f"group={group.name!r} would change nothing: policy='{saving}' partitions nothing")


def check_names(saving: Saving, seen: Collection[str]) -> None:
    """Refuses a policy that speaks of a name that no value got."""
    for name in saving.names:
        if name not in seen:
            near = difflib.get_close_matches(name, seen, n=1)
            meant = f"did you mean {near[0]!r}? " if near else ""
            named = ", ".join(sorted(seen)) or "none at all"
            raise ValueError(f"policy='{saving}': no value is named {name!r}; {meant}the names are: {named}")
