"""Checks each new autograd graph of a loss for gradients that would be lost silently; bit sums that detect writes."""

from collections.abc import Callable, Mapping, Sequence
from itertools import compress
from operator import ne
from typing import TypeVar

import attrs
import torch
from torch import Tensor, nn

from functional_ds.base.torch_private import disable_dispatch_modes, has_late_hooks, has_values, version_of
from functional_ds.base.weighted import Weighted

T = TypeVar("T", bound=Tensor)

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by the bytes of an element
_WATCHED = "_fds_watched"  # on leaves of views: a loss may go through the functions of several steps


def watched(leaf: T) -> T:
    """The leaf, marked as trained by some step."""
    setattr(leaf, _WATCHED, True)
    return leaf


def check_graph(loss: Weighted, leaves: Sequence[Tensor]) -> None:
    """Raises an error for a loss that trains nothing. One of weight zero is allowed.

    Raises:
        RuntimeError: as ``backward`` does.
    """
    if leaves and not loss.sum.requires_grad and bool(torch.as_tensor(loss.weight != 0)):
        raise RuntimeError(
            f"the loss {loss.sum} has no graph, so it would train nothing: it does not depend on params, or was computed under "
            "torch.no_grad() or torch.inference_mode(), or taken out by detach() or item(). Return the tensor itself; a batch "
            "without targets weighs nothing: return fds.Weighted(torch.zeros(()), 0)"
        )


def inspect_graph(roots: Sequence[Tensor], placeholders: Mapping[int, str]) -> None:
    """Raises an error for graphs that lose gradients.

    A view cannot see three things: the inside of reentrant checkpoints, which is not part of the graph; functions that use a
    lazy placeholder as if it were the parameter; and parameters that are not params of the step.

    Args:
        roots: where the backward pass begins.
        placeholders: paths of the tensors that stand for a parameter, by id.

    Raises:
        RuntimeError: with what to do instead.
    """
    todo = [root.grad_fn for root in roots if root.grad_fn is not None]
    seen = set(todo)
    while todo:
        node = todo.pop()
        if node.name() == "CheckpointFunctionBackward":
            raise RuntimeError(
                "torch.utils.checkpoint with use_reentrant=True gives no gradients to what it recomputes here; "
                "pass use_reentrant=False"
            )
        variable = getattr(node, "variable", None)
        if variable is not None and id(variable) in placeholders:
            raise bypassed(placeholders[id(variable)])
        if isinstance(variable, nn.Parameter) and variable.requires_grad and not hasattr(variable, _WATCHED):
            raise RuntimeError(
                f"the loss uses a parameter of shape {list(variable.shape)} that is not one of the step's params, so it would "
                "not be trained: with apply, params = fds.functional(module), call apply(params, ...) in the loss instead of "
                "the module; put further parameters into params, and run what is not trained under torch.no_grad()"
            )
        following = dict.fromkeys(
            before for before, _ in node.next_functions if before is not None
        )  # in order, so errors do not vary
        todo.extend(before for before in following if before not in seen)
        seen.update(following)


def bypassed(path: str) -> RuntimeError:
    """The error for a function that used a placeholder instead of its leaf."""
    return RuntimeError(
        f"the parameter {path!r} went straight into a custom autograd.Function, a compiled function or a transform of "
        "torch.func, where its gradient would be lost; pass p.view_as(p) instead of p"
    )


def refuse_late_hooks(leaves: Sequence[Tensor]) -> None:
    """Raises an error for hooks that would never run.

    Raises:
        RuntimeError: the loss has registered one.
    """
    for leaf in filter(has_late_hooks, leaves):
        raise RuntimeError(
            f"the loss registered a hook on a parameter of shape {list(leaf.shape)} by register_post_accumulate_grad_hook, "
            "which would never run, because gradients are not accumulated in .grad; use register_hook"
        )


def check_version(tensor: Tensor, version: int) -> None:
    """Raises RuntimeError if a tensor that autograd saved was written to since it was at this version."""
    if version_of(tensor) != version:
        raise RuntimeError(
            f"a tensor of shape {list(tensor.shape)} that the backward pass needs has been modified by an inplace operation: "
            f"it is at version {version_of(tensor)}, expected {version}; use the out-of-place one"
        )


_SUMMED = 2**17  # elements whose bits are summed at a time


def bit_sums(param: Tensor) -> tuple[Tensor, ...]:
    """Sums of the elements' bits, along the first and the last dim."""
    with torch.no_grad(), disable_dispatch_modes():  # no recorder takes it for what the module computes
        x = param.detach()
        bits = (torch.view_as_real(x) if x.is_complex() else x).contiguous().view(_BITS[x.real.element_size()])
        if not bits.dim():
            return (bits.to(torch.int64),)
        parts = bits.split(max(1, _SUMMED * len(bits) // max(1, bits.numel())))  # torch sums a copy in int64
        total = sum(part.sum(0, dtype=torch.int64) for part in parts)
        return (total,) if bits.dim() < 2 else (total, torch.cat([part.sum(-1, dtype=torch.int64) for part in parts]))


_Noted = tuple[Mapping[int, Tensor], list[int], Mapping[int, tuple[Tensor, ...]]]  # leaves, versions, sums of their bits


@attrs.frozen(eq=False)
class WriteGuard:
    """Compares leaves at the end of a forward pass, or when they are freed, with what they were when it got them.

    Attributes:
        path: of a leaf, by its place.
        sums: whether to compare values too: a write by NumPy or through ``data`` does not change the version counter.
    """

    path: Callable[[int], str]
    sums: bool = attrs.field(kw_only=True)
    _units: dict[int, _Noted] = attrs.field(factory=dict)  # of each unit

    def note(self, unit: int, leaves: Mapping[int, Tensor]) -> None:
        """Records the leaves of a unit."""
        sums = {place: bit_sums(leaf) for place, leaf in leaves.items() if _has_bits(leaf)} if self.sums else {}
        self._units[unit] = leaves, [*map(version_of, leaves.values())], sums

    def check(self, unit: int) -> None:
        """Checks the leaves of a unit.

        Raises:
            RuntimeError: a leaf was written to; names its path.
        """
        leaves, versions, sums = self._units.pop(unit, ({}, [], {}))
        written = [*compress(leaves, map(ne, versions, map(version_of, leaves.values())))]
        if sums and not written:
            written = [place for place, before in sums.items() if not all(map(torch.equal, before, bit_sums(leaves[place])))]
        if written:
            raise RuntimeError(
                f"the loss wrote into the parameter {self.path(written[0])!r} in place, and a forward pass may write buffers "
                "alone: compute the weight from the parameter instead, or change params after the update, in a transform: "
                "fds.wrap(..., update=...)"
            )

    def check_all(self) -> None:
        """Checks all leaves, at the end of a forward pass."""
        for unit in [*self._units]:
            self.check(unit)


def _has_bits(leaf: Tensor) -> bool:
    return leaf.layout == torch.strided and not leaf.is_quantized and has_values(leaf)
