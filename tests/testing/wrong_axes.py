"""Transforms of a model's axis that are wrong, each in one way, and the law that must notice. Processes can import them."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

import functional_ds as fds
from functional_ds import comm, testing
from functional_ds.step import Axis, AxisRole, axis
from tests.testing.model_axes import (
    batches,
    error,
    feature_loss,
    features,
    flat_problem,
    normal,
    own_positions,
    prefix_loss,
    prefix_problem,
    sliced_loss,
    slices,
)

__all__ = ["WRONG_OVER_AXES"]


# -- tensor parallelism ----------------------------------------------------------------------------------------------------


def unsummed() -> dict[str, Any]:
    """The loss forgets the sum over the axis."""
    return {"problem": flat_problem(partial(feature_loss, sums=False), feature_loss)}


def own_gradients(group: comm.Group) -> fds.Transform:
    """Ranks keep the gradients of their own features, and drift apart."""
    return features(group, lambda grads, group: grads)


def twice_the_mean(group: comm.Group) -> fds.Transform:
    """Right on two ranks alone."""
    return features(group, lambda grads, group: [2 * grad for grad in comm.all_reduce(grads, group, op="avg")])


def of_the_world(group: comm.Group) -> fds.Transform:
    """Sums over the data-parallel ranks, too, which have the sums already."""
    return features(group, lambda grads, group: comm.all_reduce(grads))


def own_norm(group: comm.Group) -> fds.Transform:
    """Its norm is that of this rank's slices."""
    return slices(group, parts=None)


def unmarked(group: comm.Group) -> fds.Transform:
    """No checkpoint knows its slices."""
    return slices(group, cut=lambda leaf, cut: leaf.chunk(group.size, cut.dim)[group.rank].contiguous())


# -- sequences -------------------------------------------------------------------------------------------------------------


def mean_of_means(group: comm.Group) -> fds.Transform:
    """Ranks weigh equally, however many positions count."""
    return own_positions(
        group, lambda found: fds.Weighted(found.sum / found.weight.clamp(min=1), torch.ones_like(found.weight))
    )


def from_the_neighbour(totals: Tensor, group: comm.Group) -> Tensor:
    """The sum of one rank's positions, and not of all before: right on two ranks alone."""
    return totals[group.rank - 1] if group.rank else torch.zeros_like(totals[0])


# -- experts ---------------------------------------------------------------------------------------------------------------


def whole_experts(ep: comm.Group, edp: comm.Group) -> fds.Transform:
    """Each rank has all experts, and uses its own."""
    return fds.wrap("whole_experts", axes=[Axis(ep, AxisRole.EXPERTS, name="own_ep"), Axis(edp)])


def gated_loss(p: Any, x: Tensor, sent: Callable[[Tensor], Tensor] = lambda x: x, summed: bool = True) -> Tensor:
    """All ranks' tokens are gathered; each rank's experts compute their part of all results."""
    hidden, group = x + torch.tanh(x @ p["embed"]), axis("own_ep")
    gates = (hidden @ p["router"]).softmax(-1)
    if group is None:
        return error(torch.einsum("re,rw,ewv->rv", gates, hidden, p["experts"]), x)
    here, ranks = group.rank, group.size
    hidden, gates = comm.all_gather((sent(hidden), gates), group)
    y = torch.einsum("re,rw,ewv->rv", gates.chunk(ranks, 1)[here], hidden, p["experts"].chunk(ranks)[here])
    return error(comm.reduce_scatter(y, group) if summed else y.chunk(ranks)[here], x)


def gated(**options: Any) -> dict[str, Any]:
    params = {"embed": normal(0, 4, 4), "router": normal(1, 4, 4), "experts": normal(2, 4, 4, 4)}
    return {"problem": testing.Problem(params=params, loss=partial(gated_loss, **options), plain=gated_loss, batches=batches())}


# The method, its axis, the law that must notice, and what ``holds`` is told.
WRONG_OVER_AXES: dict[str, tuple[Callable[..., fds.Transform], str, str, dict[str, Any]]] = {
    "loss without the sum": (features, "tp", "stages", unsummed()),
    "own gradients": (own_gradients, "tp", "stages", {"problem": flat_problem()}),
    "right on two ranks": (twice_the_mean, "tp", "stages", {"problem": flat_problem()}),
    "sums of the world": (of_the_world, "tp", "stages", {"problem": flat_problem()}),
    "own norm": (own_norm, "tp", "clip before", {"problem": flat_problem(sliced_loss)}),
    "skips alone": (own_norm, "tp", "skipped steps", {"problem": flat_problem(sliced_loss)}),
    "unknown slices": (unmarked, "tp", "checkpoints", {"problem": flat_problem(sliced_loss)}),
    "mean of means": (mean_of_means, "sp", "stages", {"problem": prefix_problem()}),
    "neighbour alone": (
        own_positions,
        "sp",
        "stages",
        {"problem": prefix_problem(partial(prefix_loss, before=from_the_neighbour))},
    ),
    "results of own experts": (whole_experts, "ep", "stages", gated(summed=False)),
    "no gradients through the exchange": (whole_experts, "ep", "stages", gated(sent=torch.detach)),
}
