"""Collectives that are wrong, each in one way, and the law that must notice. Processes can import them."""

from collections.abc import Callable
from functools import partial
from typing import Any

import attrs
import torch
from torch import Tensor

from functional_ds import tree
from functional_ds.comm.table import (
    Call,
    Collective,
    Communicator,
    Options,
    Prepared,
    Request,
    Started,
    Traffic,
    collective,
    composed,
    request,
)

__all__ = ["SAYS", "WRONG", "plain", "right"]


def over_gloo(group: Communicator, payload: Tensor, options: Options, factor: float = 2.0) -> Prepared:
    other = torch.empty_like(payload)

    def post() -> list[Any]:
        by, n = options["by"], group.size
        return [*group.recv(other, (group.rank - by) % n), *group.send(payload, (group.rank + by) % n)]

    return Prepared(post, lambda: payload + factor * other)


def over_nccl(group: Any, payload: Tensor, options: Options) -> Started:
    raise NotImplementedError


SHIFT = Collective(
    name="shift",
    denotation=lambda xs, options: [xs[r] + 2.0 * xs[(r - options["by"]) % len(xs)] for r in range(len(xs))],
    adjoint=lambda options: Call(SHIFT, {"by": -options["by"]}),
    volume=lambda leaf, here: leaf.numel(),
    result=lambda shape, here: shape,
    traffic=Traffic("exchange"),
    gloo=over_gloo,
    nccl=over_nccl,
)


@collective
def right(x: Any, group: Any = None) -> Any:
    return request(Call(SHIFT, {"by": 1}), x, group)


def plain(x: Any) -> Any:
    """No collective: it cannot be started."""
    return right(x)


# -- rows --------------------------------------------------------------------------------------------------------------

HALVED = attrs.evolve(SHIFT, adjoint=lambda options: Call(HALVED_BACK, {"by": -options["by"]}))
HALVED_BACK = attrs.evolve(SHIFT, adjoint=lambda options: Call(HALVED, {"by": options["by"]}))
ROWS = {
    "adjoint": attrs.evolve(SHIFT, adjoint=lambda options: Call(SHIFT, options)),
    "second adjoint": HALVED,
    "shapes": attrs.evolve(SHIFT, result=lambda shape, here: [2 * shape[0]], unpack=lambda piece, leaf, here: piece),
    "processes": attrs.evolve(SHIFT, gloo=partial(over_gloo, factor=3.0)),
    "bytes": attrs.evolve(SHIFT, volume=lambda leaf, here: 2 * leaf.numel()),
}
SAYS = {
    "adjoint": "Is its own transpose.",
    "second adjoint": "Is not the transpose of its transpose.",
    "shapes": "Has other shapes on shapes alone.",
    "processes": "Computes something else between processes.",
    "bytes": "Counts twice what it sends.",
}


@collective
def of_row(x: Any, group: Any = None, *, name: str) -> Any:
    return request(Call(ROWS[name], {"by": 1}), x, group)


# -- functions ---------------------------------------------------------------------------------------------------------


@collective
def starts_another(x: Any, group: Any = None) -> Any:
    """Starts another exchange than it calls."""
    there, back = (request(Call(SHIFT, {"by": by}), x, group) for by in (1, -1))
    return Request(there.run, back.start)


@composed
def writes(x: Any, group: Any = None) -> Any:
    """Writes into its input."""
    with torch.no_grad():
        tree.map(lambda leaf: leaf.mul_(2), x)
    return right(x, group)


@composed
def mixes_leaves(x: Any, group: Any = None) -> Any:
    """Exchanges the leaves of a tree."""
    leaves, spec = tree.flatten(x)
    return right(tree.unflatten(spec, leaves[::-1]), group)


@composed
def reads_storage(x: Tensor, group: Any = None) -> Any:
    """Takes each tensor for contiguous."""
    return right(torch.as_strided(x, x.shape, torch.empty(x.shape).stride()), group)


@composed
def fills_empty(x: Tensor, group: Any = None) -> Any:
    """Gives an element for an empty tensor."""
    return right(x if x.numel() else x.new_zeros(1), group)


@composed
def always_fp32(x: Tensor, group: Any = None) -> Any:
    """Gives fp32 for every dtype."""
    return right(x.float(), group)


@composed
def reads_values(x: Tensor, group: Any = None) -> Any:
    """Reads values in Python, which cannot be traced."""
    return right(x if x.sum().item() > -1e9 else -x, group)


WRONG: dict[str, Callable[[Any], Any]] = {
    "start": starts_another,
    "input": writes,
    "leaves": mixes_leaves,
    "strides": reads_storage,
    "empty": fills_empty,
    "precision": always_fp32,
    "jit": reads_values,
    **{name: partial(of_row, name=name) for name in ROWS},
}
