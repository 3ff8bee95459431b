"""One collective of simulated ranks: the calls so far, and the results once all members have called."""

from typing import Any

import attrs
import torch
from torch import Tensor

from functional_ds.base.torch_private import disable_dispatch_modes
from functional_ds.comm.record.group import Group
from functional_ds.comm.table.collective import Call, Here

__all__ = ["GroupCall", "RankCall", "copied"]


@attrs.frozen(eq=False)
class RankCall:
    """One rank's part of a collective: its call, its inputs, the call site, and what the call is made for."""

    call: Call
    here: Here
    inputs: list[Tensor]
    site: str
    purpose: str = ""

    def __str__(self) -> str:
        return self.call.signature(self.inputs, self.here) + (f", for {self.purpose}" if self.purpose else "")


@attrs.define(eq=False)
class GroupCall:
    """One collective of one group: the calls so far, and the results once all members have called."""

    group: Group
    members: tuple[int, ...]  # ranks of the world, in the denotation's order
    agreement: tuple[Any, ...]
    arrivals: dict[int, RankCall] = attrs.field(factory=dict)
    outputs: dict[int, list[Tensor]] | None = None

    @property
    def done(self) -> bool:
        return self.outputs is not None

    def missing(self) -> list[int]:
        return [rank for rank in self.members if rank not in self.arrivals]

    def complete(self) -> None:
        """Applies the denotation to each leaf; by law 12 that is the meaning of a coalesced call."""
        arrivals = [self.arrivals[rank] for rank in self.members]
        call = arrivals[0].call
        options = call.merged([arrival.call.private() for arrival in arrivals])
        leaves = zip(*(arrival.inputs for arrival in arrivals), strict=True)
        with torch.inference_mode(False), torch.no_grad(), disable_dispatch_modes():  # those of the last rank see nothing of it
            results = [call.collective.denotation(xs, options) for xs in leaves]
        self.outputs = {rank: [result[i] for result in results] for i, rank in enumerate(self.members)}


def copied(tensor: Tensor) -> Tensor:
    """The values as a message would carry them: contiguous, and independent of the sender's modes."""
    if torch.is_inference_mode_enabled():
        with torch.inference_mode(False):
            return copied(tensor)
    return tensor.detach().clone(memory_format=torch.contiguous_format)
