"""Looking at a loss's graph for what would give wrong gradients without an error."""

from collections.abc import Mapping, Sequence

from torch import Tensor

__all__ = ["inspect_graph"]


def inspect_graph(roots: Sequence[Tensor], placeholders: Mapping[int, str]) -> None:
    """Refuses graphs that lose gradients.

    Two things go past what a tape can see: reentrant checkpoints, whose inside is not part of the graph, and functions that
    take a placeholder of a parameter (``placeholders``: paths by id) as if it were the parameter.

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
            raise RuntimeError(
                f"the parameter {placeholders[id(variable)]!r} went straight into a custom autograd.Function or a compiled "
                "function, where its gradient would be lost; pass p.view_as(p) instead of p"
            )
        fresh = {following for following, _ in node.next_functions if following is not None} - seen
        seen |= fresh
        todo.extend(fresh)
