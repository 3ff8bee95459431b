"""What takes a thread's collectives: performs them, or records them while a step is traced."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar

import attrs
from torch import Tensor

from functional_ds.base.torch_private import disable_dispatch_modes, is_fake
from functional_ds.comm.table.collective import Call, CallContext, Handle

from .group import Group, Ready
from .ledger import LedgerCall, begin


@attrs.frozen
class UnitGathering:
    """How an eager step gathers units of sharded params, for graph passes that do the same.

    Attributes:
        live: how many units are gathered at once.
        reshard: whether the last units of the forward pass are freed before the backward pass.
        ahead: how many gathers may be prefetched.
        keeps_first_level: whether the result of a gather's first level of groups is kept (hpZ).
    """

    live: int
    reshard: bool
    ahead: int
    keeps_first_level: bool


@attrs.define(eq=False)
class TraceNotes:
    """What a step notes while it is traced, for graph passes and for the next state.

    Attributes:
        gathering: how units of params are gathered; None if the graph gathers none.
        modes: the modes of the modules that the loss runs.
        buffers: the graph's inputs for buffers that are not in the state, by module and name.
    """

    gathering: UnitGathering | None = None
    modes: dict[Any, tuple[int, ...]] = attrs.field(factory=dict)
    buffers: Mapping[tuple[Any, str], Tensor] = attrs.field(factory=dict)


def outline(call: Call, leaf: Tensor, here: CallContext) -> Tensor:
    """The result of a call on fake tensors, assuming that all ranks pass the same shapes; nothing is sent."""
    if call.collective.private:  # other ranks' sizes differ; this rank's options give the shape of its result
        return call.collective.on_shapes(leaf.detach(), here)
    members = list(call.collective.members(here.options, here.n))
    outputs = call.collective.denotation([leaf.detach()] * len(members), call.merged([call.private()] * len(members)))
    return outputs[members.index(here.rank)]


class CallRecorder:
    """Takes a rank's collectives. This one performs them; others record them while a step is traced.

    Attributes:
        records: whether it records, so that tensors have no values.
        traces: whether it records into a graph, which runs on values later.
    """

    records: ClassVar[bool] = False
    traces: ClassVar[bool] = False

    def start(
        self, call: Call, leaves: Sequence[Tensor], group: Group, here: CallContext, *, beside: bool, early: bool
    ) -> Handle:
        """Starts a call, or adds it to a graph; its handle gives the results."""
        if any(map(is_fake, leaves)):
            return Ready([outline(call, leaf, here) for leaf in leaves])
        ledgers = group.world.ledgers
        began = begin(ledgers, leaves) if ledgers else 0.0
        handle = group.world.start(call, leaves, group, beside=beside)
        for ledger in ledgers:
            handle = ledger.record(LedgerCall(call, leaves, here, group.name, group.ranks), handle, began, early=early)
        return handle

    def eager(self, function: Callable[..., Tensor], xs: Sequence[Tensor]) -> Tensor:
        """Calls a function; a graph has it as one call, as its inner shapes depend on values."""
        return function(*xs)

    def labelled(self, name: str) -> AbstractContextManager[None]:
        """Labels the collectives inside the block, and the operations around them."""
        return nullcontext()

    def recomputing(self) -> AbstractContextManager[None]:
        """Marks the block as recomputation, which must not be merged with the first computation."""
        return nullcontext()

    def unseen(self) -> AbstractContextManager[Any]:
        """Hides the block's operations from dispatch modes, so that no other recorder takes them; a graph has them as nodes."""
        return nullcontext() if self.records else disable_dispatch_modes()

    def gathers(self, gathering: UnitGathering) -> None:
        """Notes how units of params are gathered."""

    def ran(self, module: Any, modes: tuple[int, ...]) -> None:
        """Notes the modes in which the loss runs a module."""

    def buffer(self, module: Any, name: str, buffer: Tensor) -> Tensor:
        """A module's buffer that is not in the state, or the graph's input for it."""
        return buffer
