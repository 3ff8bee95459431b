"""Guards of a loss's graph: what would lose gradients without an error is refused, in each new kind of graph."""

from collections.abc import Mapping, Sequence
from typing import TypeVar

from torch import Tensor, nn

from functional_ds.base.torch_private import has_late_hooks

__all__ = ["bypassed", "inspect_graph", "refuse_late_hooks", "watched"]

T = TypeVar("T", bound=Tensor)

_WATCHED = "_fds_watched"  # on leaves of views: a loss may go through the functions of several steps


def watched(leaf: T) -> T:
    """The leaf, marked as one that some step trains."""
    setattr(leaf, _WATCHED, True)
    return leaf


def inspect_graph(roots: Sequence[Tensor], placeholders: Mapping[int, str]) -> None:
    """Refuses graphs that lose gradients.

    Three things go past what a view can see: reentrant checkpoints, whose inside is not part of the graph; functions that
    take a placeholder of a parameter as if it were the parameter; and parameters that are no params of the step.

    Args:
        roots: what the backward pass begins at.
        placeholders: paths of the tensors that stand for a parameter, by id.

    Raises:
        RuntimeError: with what would do.
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
                f"the loss uses a parameter of shape {list(variable.shape)} that is none of the step's params, so it would not "
                "be trained: with apply, params = fds.functional(module), call apply(params, ...) in the loss instead of the "
                "module; put further parameters into params, and run what is not trained under torch.no_grad()"
            )
        following = dict.fromkeys(
            before for before, _ in node.next_functions if before is not None
        )  # in order, so errors do not vary
        todo.extend(before for before in following if before not in seen)
        seen.update(following)


def bypassed(path: str) -> RuntimeError:
    """What to raise where a function took a placeholder in place of its leaf."""
    return RuntimeError(
        f"the parameter {path!r} went straight into a custom autograd.Function, a compiled function or a transform of "
        "torch.func, where its gradient would be lost; pass p.view_as(p) instead of p"
    )


def refuse_late_hooks(leaves: Sequence[Tensor]) -> None:
    """Refuses hooks that would never run.

    Raises:
        RuntimeError: the loss has registered one.
    """
    for leaf in leaves:
        if has_late_hooks(leaf):
            raise RuntimeError(
                f"the loss registered a hook on a parameter of shape {list(leaf.shape)} by "
                "register_post_accumulate_grad_hook, which would never run, because gradients are not accumulated in "
                ".grad; use register_hook"
            )
