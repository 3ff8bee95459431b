"""``PredictedStep``: a jitted step's predicted time, by component, and the measured one."""

from collections.abc import Callable
from statistics import median
from typing import Any

import attrs
from torch import Tensor

from functional_ds.base import tree
from functional_ds.base.device import repeated, seconds_of
from functional_ds.comm.worlds.current import simulated_world
from functional_ds.compiling.graphs.graph_cost import GraphCost
from functional_ds.step.state.state import State


@attrs.frozen
class PredictedStep:
    """A step's time on this rank.

    Law: ``seconds == compute + host + communication``.

    Attributes:
        cost: the graph's timeline, node by node.
        agreement: seconds in which the ranks agree on a graph, before each step.
        measured: the median seconds of a step; None if not measured.
    """

    cost: GraphCost
    agreement: float = 0.0
    measured: float | None = None

    @property
    def compute(self) -> float:
        """Seconds in which the device computes."""
        return self.cost.compute

    @property
    def host(self) -> float:
        """Seconds in which the device waits for the host, which starts operators."""
        return self.cost.host

    @property
    def communication(self) -> float:
        """Seconds in which the rank waits for others, or for links."""
        return sum(self.cost.exposed.values()) + self.agreement

    @property
    def seconds(self) -> float:
        """Of a whole step."""
        return self.cost.seconds + self.agreement

    @property
    def ratio(self) -> float | None:
        """Predicted / measured; None if nothing was measured."""
        return None if self.measured is None else self.seconds / self.measured

    def __str__(self) -> str:
        rows = [("compute", self.compute), ("host", self.host), ("exposed communication", self.communication)]
        rows.append(("predicted", self.seconds))
        lines = [f"{name:<21} {seconds * 1e3:>10.3f} ms" for name, seconds in rows]
        if self.measured is not None:
            lines.append(f"{'measured':<21} {self.measured * 1e3:>10.3f} ms  predicted / measured {self.ratio:.2f}")
        return "\n".join(lines)


def seconds_of_steps(step: Callable[[State, Any], tuple[State, Any]], state: State, batch: Any, *, steps: int) -> float:
    """The median time of so many steps, after a warmup step; the state is unchanged.

    Args:
        step: which donates its state.
        state: to begin with.
        batch: of each step.
        steps: how many.

    Raises:
        ValueError: on simulated ranks, of which only one runs at a time.
    """
    if simulated_world() is not None:
        raise ValueError(f"steps={steps}: simulated ranks take turns, so their steps have no times; steps=0 predicts alone")
    devices = {x.device for x in tree.leaves((state, batch)) if isinstance(x, Tensor)}
    run = repeated(step, state.clone(), batch)
    run()
    return median(seconds_of(run, devices) for _ in range(steps))
