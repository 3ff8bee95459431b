"""The interface between ``T.balance`` and a mixture of experts: router biases, and tokens per expert."""

from collections.abc import Mapping
from typing import Any

import attrs
from torch import Tensor

from functional_ds.comm.worlds.current import runs_on_shapes
from functional_ds.sharding.path_patterns import nearest
from functional_ds.step.axes import axis
from functional_ds.step.pass_scope import current_pass

from .routing import Routing


@attrs.frozen(eq=False)
class Demands:
    """How many choices each expert got in a pass: [E] integers by router."""

    by_router: dict[str, Tensor] = attrs.field(factory=dict)

    def add(self, router: str, counts: Tensor) -> None:
        """Counts more choices."""
        before = self.by_router.get(router)
        self.by_router[router] = counts if before is None else before + counts

    def take(self, others: "Demands") -> None:
        """Moves the counts of ``others`` here."""
        for router, counts in others.by_router.items():
            self.add(router, counts)
        others.by_router.clear()


@attrs.frozen(eq=False)
class RouterBiases:
    """The axis "balance" of a running step.

    Attributes:
        biases: [E] by router, added to the scores only for the choice of experts.
        demands: of this call of the loss function, or of a pipeline's stage.
    """

    biases: Mapping[str, Tensor]
    demands: Demands

    def check(self, router: str) -> str:
        """The router's name.

        Raises:
            ValueError: there is no such router.
        """
        if router not in self.biases:
            raise ValueError(f"router={router!r} is not one of the step's balance; {nearest(router, self.biases)}")
        return router


def router_bias(router: str) -> Tensor | None:
    """The bias of a router of the running step, [E], for ``route(..., bias=...)``; None without ``T.balance``.

    It is the same on all ranks, affects only the choice of experts, and gets no gradient.

    Raises:
        ValueError: the step's balance has no such router.
    """
    balance: RouterBiases | None = axis("balance")
    return None if balance is None else balance.biases[balance.check(router)]


def count_demand(router: str, demand: Tensor) -> None:
    """Reports to ``T.balance`` how many of this rank's choices fell on each expert; does nothing without it.

    Recomputations in the backward pass and evaluations are not counted.

    Args:
        router: its name.
        demand: [E] integers, from ``routing.demand(mask)``: including dropped choices, without those of padding.

    Raises:
        ValueError: the step's balance has no such router, or one with another number of experts.
    """
    balance: RouterBiases | None = axis("balance")
    if balance is None or runs_on_shapes(demand):
        return
    bias = balance.biases[balance.check(router)]
    if demand.shape != bias.shape:
        raise ValueError(f"demand has shape {list(demand.shape)}, and the router {router!r} {len(bias)} experts")
    balance.demands.add(router, demand.detach().long())


def count_choices(experts: Any, routing: Routing) -> None:
    """``count_demand`` for a module of experts whose router's bias is a module buffer, as in DeepSeek-V3: of all its tokens.

    Args:
        experts: the module.
        routing: its input.
    """
    balance: RouterBiases | None = axis("balance")
    if balance is None:
        return
    block = (_path(experts) or "").rpartition(".")[0]
    for router in [name for name in balance.biases if block and name.startswith(f"{block}.")]:
        count_demand(router, routing.demand())


def _path(module: Any) -> str | None:
    """The path of a module of the running pass, in the params' tree."""
    pass_ = current_pass()
    for apply, leased in [] if pass_ is None else pass_.modules.items():
        held = None if pass_ is None or pass_.buffers is None else pass_.buffers.buffers
        key = "" if held is None else held.known.keys.get(apply, "")
        for skeleton, _ in leased:
            for path, owner in skeleton.owners.items():
                if owner is module:
                    return f"{key}.{path}" if key else path
    return None
