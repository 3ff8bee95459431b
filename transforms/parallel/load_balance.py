"""Auxiliary-loss-free load balancing of experts (Wang et al. 2024, arXiv:2408.15664)."""

import re
from collections.abc import Mapping
from typing import Any

import attrs
import torch
from torch import Tensor

from functional_ds import comm
from functional_ds.base import tree
from functional_ds.base.torch_private import backward_pass
from functional_ds.base.weighted import Weighted
from functional_ds.parallel.experts.router_bias import Demands, RouterBiases
from functional_ds.sharding.path_patterns import check_expression
from functional_ds.step.axes import with_axis
from functional_ds.step.compose import wrap
from functional_ds.step.over_ranks.mesh_axes import Axis, AxisRole
from functional_ds.step.phase_signatures import Metrics, Passed
from functional_ds.step.phases import Trait
from functional_ds.step.state.buffers import BUFFERS, Buffers
from functional_ds.step.state.state import State
from functional_ds.step.step import Step, Transform


def balance(rate: float, routers: Mapping[str, int] | str, *, over: comm.Group | None = None) -> Transform:
    """Balances experts by router biases, once an update, as DeepSeek-V3 does, without an auxiliary loss.

    ```
    b_i ← b_i + rate · sign(mean of c - c_i)        c_i: tokens routed to expert i in the whole batch
    ```

    A router selects experts by its scores plus b, and weights them by the scores alone. The loss function reads b with
    ``fds.moe.router_bias(name)`` and reports its choices with ``fds.moe.count_demand(name, routing.demand())``.

    The biases equal the single-device ones bitwise: c is counted over all micro-batches and ranks, and compared with
    its mean as integers. Recomputation is not counted twice, and a skipped update moves no bias.

    Put it after ``offload``. The metric ``max_violation`` is the largest (c_i - mean) / mean of all routers.

    Cost: one all-reduce an update, of 8 bytes per expert and router. The biases are a slot, saved and loaded with the state.

    Args:
        rate: how far a bias moves; 0.001 in DeepSeek-V3, whose scores are between 0 and 1.
        routers: the number of experts by router name; or, if the biases are module buffers, a regular expression for them,
            ``"e_score_correction_bias$"`` for Hugging Face's DeepSeek-V3.
        over: further ranks with other tokens, in addition to those over which the step sums its metrics: tensor-parallel ranks
            whose routers each see a part of the sequence.

    Raises:
        ValueError: a rate that is not positive, no routers, an invalid regular expression, or a number of experts below 1; in
            the first step: the loss reported no choices of a router, or no buffer matches.
        TypeError: ``over`` is not a ``comm.Group``.

    >>> import functional_ds as fds
    >>> def loss(p, x):
    ...     routing = fds.moe.route(x @ p["router"], 1, bias=fds.moe.router_bias("router"))
    ...     fds.moe.count_demand("router", routing.demand())
    ...     return routing.weights.sum()
    >>> step = balance(0.5, {"router": 2})(fds.train_step(loss, fds.sgd(0.0)))
    >>> state, metrics = step(step.init({"router": torch.eye(2)}), torch.tensor([[2.0, 0.0], [1.0, 0.0], [0.0, 1.0]]))
    >>> state.slots["balance"].bias["router"].tolist(), round(metrics["max_violation"].item(), 3)
    ([-0.5, 0.5], 0.333)
    """
    if not rate > 0:
        raise ValueError(f"rate={rate!r}: the step of a bias must be positive")
    if isinstance(routers, str):
        check_expression("routers=", routers)
    else:
        for name, experts in routers.items():
            if type(experts) is not int or experts < 1:
                raise ValueError(f"routers: {name!r} has {experts!r} experts, and must have at least 1")
        if not routers:
            raise ValueError("routers: there is none; name each router with its number of experts")
    if over is not None and not isinstance(over, comm.Group):
        raise TypeError(f"over={over!r} is not a group: pass mesh['tp']")
    return _Balance(float(rate), routers if isinstance(routers, str) else dict(routers), over).transform()


@tree.record
class Balanced:
    """balance's slot in the state.

    Attributes:
        bias: [E], of each router; empty if the biases are module buffers.
        demand: within a step, this rank's tokens per expert so far, by router.
        counting: collects the demands of the current pass; None where nothing is counted.
    """

    bias: dict[str, Tensor]
    demand: dict[str, Tensor] = attrs.field(factory=dict)
    counting: Demands | None = tree.static(default=None)


@attrs.frozen(eq=False)
class _Balance:
    rate: float
    routers: Mapping[str, int] | str
    over: comm.Group | None

    def transform(self) -> Transform:
        """The phases that balance wraps."""
        return wrap(
            str(self),
            slot="balance",
            traits=[Trait.RESIDENT_SLOT, Trait.HEEDS_SKIPS],
            axes=[] if self.over is None else [Axis(self.over)],
            init=self.init,
            forward=self.forward,
            gradients=self.gradients,
            update=self.update,
        )

    def __str__(self) -> str:
        shown = repr(self.routers) if isinstance(self.routers, str) else f"{len(self.routers)} routers"
        return f"balance({self.rate}, {shown}{'' if self.over is None else f', over={self.over.name!r}'})"

    def init(self, inner: Any, step: Step, params: Any) -> State:
        """Biases of zero."""
        state: State = inner(step, params)
        sizes = {} if isinstance(self.routers, str) else self.routers
        return state.put(balance=Balanced({name: torch.zeros(size, device=state.step.device) for name, size in sizes.items()}))

    def forward(self, inner: Any, step: Step, state: State, function: Any, batch: Any) -> Any:
        """The function, run with an ``axis("balance")`` that has the biases and collects the demands."""
        counting: Demands | None = state.slots["balance"].counting
        demands = Demands()

        def counted(given: Any) -> Any:
            result = function(given)  # which may fail and run again from the start
            if counting is not None and backward_pass() < 0:  # a recomputation does not count again
                counting.take(demands)
            return result

        return inner(step, state, with_axis("balance", RouterBiases(self._biases(state), demands), counted), batch)

    def gradients(self, inner: Any, step: Step, state: State, batch: Any, carry: Weighted | None, last: bool) -> Passed:
        """The inner gradients; adds this micro-batch's demands to the earlier ones."""
        slot: Balanced = state.slots["balance"]
        demands = Demands(dict(slot.demand))
        state, grads, metrics = inner(step, state.put(balance=tree.replace(slot, counting=demands)), batch, carry, last)
        biases = self._biases(state)
        if state.batch is None and not state.step.is_meta and not step.has(AxisRole.STAGES):
            self._check_counted(biases, demands.by_router)
        none = {name: torch.zeros_like(bias, dtype=torch.int64) for name, bias in biases.items()}
        return state.put(balance=tree.replace(slot, demand=none | demands.by_router)), grads, metrics

    def _check_counted(self, biases: Mapping[str, Tensor], counted: Mapping[str, Tensor]) -> None:
        missing = biases.keys() - counted.keys()
        if missing or not biases:
            which = ", ".join(map(repr, sorted(missing))) or f"buffers that match {self.routers!r}, of which there are none,"
            raise ValueError(
                f"{self}: the loss counted no choices of {which}; call fds.moe.count_demand(router, routing.demand()) where it "
                "routes"
            )

    def update(self, inner: Any, step: Step, state: State, grads: Weighted) -> tuple[State, Metrics]:
        """The inner update; then the biases, unless it was skipped."""
        slot, skip = state.slots["balance"], state.skip
        demand = step.sum_over_ranks(state, slot.demand)
        demand = demand if self.over is None else comm.all_reduce(demand, self.over)
        state, metrics = inner(step, state, grads)
        biases = {name: self._moved(bias, demand[name], skip) for name, bias in self._biases(state).items()}
        most = [(c.max() * len(c) - c.sum()) / c.sum().clamp(min=1) for c in demand.values()]
        further = {"max_violation": torch.stack(most).amax()} if most else {}
        return self._with_biases(state, biases), {**metrics, **further}

    def _moved(self, bias: Tensor, demand: Tensor, skip: Tensor | None) -> Tensor:
        step = (demand.sum() - len(demand) * demand).sign() * self.rate  # E times the mean, minus E times the count
        return bias + (step if skip is None else torch.where(skip, 0.0, step)).to(bias.dtype)

    # -- where the biases are ------------------------------------------------------------------------------------------

    def _biases(self, state: State) -> dict[str, Tensor]:
        if not isinstance(self.routers, str):
            return state.slots["balance"].bias  # type: ignore[no-any-return]
        held, pattern = state.slots.get(BUFFERS), self.routers
        by_module = held.values.items() if isinstance(held, Buffers) else ()
        named = ((f"{key}.{name}" if key else name, buffer) for key, values in by_module for name, buffer in values.items())
        return {name: buffer for name, buffer in named if buffer is not None and re.search(pattern, name)}

    def _with_biases(self, state: State, biases: Mapping[str, Tensor]) -> State:
        if not isinstance(self.routers, str):
            return state.put(balance=Balanced(dict(biases)))
        held: Buffers | None = state.slots.get(BUFFERS)
        if held is None:
            return state.put(balance=Balanced({}))
        values = {
            key: {name: biases.get(f"{key}.{name}" if key else name, buffer) for name, buffer in its.items()}
            for key, its in held.values.items()
        }
        return state.put(balance=Balanced({}), **{BUFFERS: tree.replace(held, values=values)})
