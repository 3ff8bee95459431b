"""What ``T.balance`` and a mixture tell each other: the biases of routers, and how many tokens chose each expert."""

from collections.abc import Mapping
from typing import Any

import attrs
from torch import Tensor

from functional_ds.comm.worlds.current import runs_on_shapes
from functional_ds.sharding.path_patterns import nearest
from functional_ds.step.axes import axis
from functional_ds.step.pass_scope import current_pass

from .routing import Routing

__all__ = ["Demands", "RouterBiases", "count_choices", "count_demand", "router_bias"]


@attrs.frozen(eq=False)
class Demands:
    """How many choices each expert has got in a pass: [E] integers by router."""

    by_router: dict[str, Tensor] = attrs.field(factory=dict)

    def add(self, router: str, counts: Tensor) -> None:
        """Counts more choices."""
        before = self.by_router.get(router)
        self.by_router[router] = counts if before is None else before + counts

    def take(self, others: "Demands") -> None:
        """Counts the choices of others, which has none then."""
        for router, counts in others.by_router.items():
            self.add(router, counts)
        others.by_router.clear()


@attrs.frozen(eq=False)
class RouterBiases:
    """The axis "balance" of a running step.

    Attributes:
        biases: [E] by router, added to the scores for the choice of experts alone.
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
            raise ValueError(f"router={router!r} is none of the step's balance; {nearest(router, self.biases)}")
        return router


def router_bias(router: str) -> Tensor | None:
    """The bias of a router of the running step, [E], for ``route(..., bias=...)``; None where no ``T.balance`` runs.

    It is the same on all ranks, takes part in the choice alone, and gets no gradient.

    Raises:
        ValueError: the step's balance has no such router.
    """
    found: RouterBiases | None = axis("balance")
    return None if found is None else found.biases[found.check(router)]


def count_demand(router: str, demand: Tensor) -> None:
    """Tells ``T.balance`` how many of this rank's choices fell on each expert; does nothing where none runs.

    A recomputation in the backward pass does not count again, nor does an evaluation.

    Args:
        router: its name.
        demand: [E] integers, as ``routing.demand(mask)`` has them: dropped choices included, those of padding not.

    Raises:
        ValueError: the step's balance has no such router, or one of another number of experts.
    """
    found: RouterBiases | None = axis("balance")
    if found is None or runs_on_shapes(demand):
        return
    bias = found.biases[found.check(router)]
    if demand.shape != bias.shape:
        raise ValueError(f"demand has shape {list(demand.shape)}, and the router {router!r} {len(bias)} experts")
    found.demands.add(router, demand.detach().long())


def count_choices(experts: Any, routing: Routing) -> None:
    """``count_demand`` for a module of experts whose router's bias is a buffer beside it, as in DeepSeek-V3: of all its tokens.

    Args:
        experts: the module.
        routing: what it was given.
    """
    found: RouterBiases | None = axis("balance")
    if found is None:
        return
    block = (_path(experts) or "").rpartition(".")[0]
    for router in [name for name in found.biases if block and name.startswith(f"{block}.")]:
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
