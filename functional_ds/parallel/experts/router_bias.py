"""What ``T.balance`` and a mixture tell each other: the biases of routers, and how many tokens chose each expert."""

import difflib
from collections.abc import Mapping

import attrs
from torch import Tensor

from functional_ds.base.torch_private import backward_pass
from functional_ds.step.axes import axis

__all__ = ["Demands", "RouterBiases", "count_demand", "router_bias"]


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
        demands: of this pass; None where nobody counts, as in an evaluation.
    """

    biases: Mapping[str, Tensor]
    demands: Demands | None

    def check(self, router: str) -> str:
        """The router's name.

        Raises:
            ValueError: there is no such router.
        """
        if router not in self.biases:
            near = difflib.get_close_matches(router, self.biases, 1, 0.0)
            raise ValueError(f"router={router!r} is none of the step's balance; the nearest is {near[0] if near else 'none'!r}")
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
    if found is None or found.demands is None or demand.is_meta or backward_pass() >= 0:
        return
    bias = found.biases[found.check(router)]
    if demand.shape != bias.shape:
        raise ValueError(f"demand has shape {list(demand.shape)}, and the router {router!r} {len(bias)} experts")
    found.demands.add(router, demand.detach().long())
