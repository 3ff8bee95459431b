"""From a loss on an open pass to a state and gradients."""

from collections.abc import Mapping

import torch

from functional_ds.base import tree
from functional_ds.base.weighted import Weighted

from .checks import check_graph
from .pass_scope import Pass
from .state.buffers import BUFFERS, BufferScope
from .state.state import State
from .state.unused import Summing, with_unused
from .view import Pulling

__all__ = ["detached", "differentiated", "with_buffers"]


def with_buffers(state: State, scope: BufferScope) -> State:
    """The state with the buffers that a pass has left."""
    found = scope.collect()
    return state if found is None else state.put(**{BUFFERS: found})


def differentiated(
    step: Summing,
    state: State,
    pass_: Pass,
    loss: Weighted,
    carry: Weighted | None,
    last: bool,
    *,
    retain_graph: bool = False,
    pulling: Pulling | None = None,
) -> tuple[State, Weighted]:
    """The state and the gradients after a backward pass from a loss; ``carry`` is added.

    Args:
        step: whose pass it is.
        state: as the forward pass has left it.
        pass_: is open, and current.
        loss: of its forward pass; where somebody else has differentiated it, its weight counts alone.
        carry: the sums of earlier micro-batches.
        last: whether no further one follows.
        retain_graph: whether another backward pass will go through this graph.
        pulling: what takes the gradients of a backward pass that somebody else has run.
    """
    if pulling is None:
        if pass_.graphs is not None:
            check_graph(loss, pass_)
        pulling = pass_.pull(loss.sum, None if carry is None else carry.sum, last, retain_graph=retain_graph)
    grads, unused = pulling.wait()
    pass_.inspect_again(loss.sum, tuple(unused))
    weight = loss.weight if carry is None else carry.weight + loss.weight
    return with_unused(step, state, unused), Weighted(grads, weight)


def detached(loss: Weighted, metrics: Mapping[str, Weighted]) -> dict[str, Weighted]:
    """A pass's metrics, the loss among them."""
    return tree.map(torch.detach, {"loss": loss, **metrics})  # type: ignore[no-any-return]
