"""Collectives one after the other, each on what the one before it gave."""

from collections.abc import Callable
from time import monotonic
from typing import Any

import attrs

from .pending import Pending

__all__ = ["relay"]


@attrs.define(eq=False)
class _Relay:
    """A chain under way. A hop starts when the one before it is over and somebody looks, in ``poll`` or in ``wait``."""

    now: Pending[Any]
    rest: list[Callable[[Any], Pending[Any]]]

    def wait(self) -> Any:
        while self.rest:
            self._go_on()
        return self.now.wait()

    def poll(self, patience: float) -> bool:
        deadline = monotonic() + patience
        while self.now.poll(max(0.0, deadline - monotonic())):
            if not self.rest:
                return True
            self._go_on()
        return False

    def _go_on(self) -> None:
        value = self.now.wait()
        self.now = self.rest.pop(0)(value)


def relay(first: Pending[Any], *rest: Callable[[Any], Pending[Any]]) -> Pending[Any]:
    """The result of a chain of collectives, each a function from what the one before gave to what is pending.

    All ranks must look at such chains in one order: the later hops of two chains start in the order in which somebody looks.

    >>> import torch
    >>> from functional_ds import comm
    >>> def program():
    ...     rank = torch.tensor([float(comm.world().rank)])
    ...     chain = relay(comm.all_reduce(rank, async_op=True), lambda total: comm.all_gather(total + rank, async_op=True))
    ...     return chain.wait().tolist()
    >>> comm.simulate(program, world_size=2)
    [[1.0, 2.0], [1.0, 2.0]]
    """
    if not rest:
        return first
    chain = _Relay(first, list(rest))
    return Pending(chain.wait, chain.poll, lambda: repr(chain.now))
