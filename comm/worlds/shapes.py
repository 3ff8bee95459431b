"""Ranks without values: a program on meta tensors, one rank after another, to count what thousands of ranks would send.

The shape of a collective's result follows from this rank's own input, so no rank waits for another. Each rank logs its calls;
afterwards the logs are compared, as a run with values would compare the calls.
"""

from array import array
from collections.abc import Callable, Hashable, Sequence
from typing import TypeVar, TypeVarTuple

import attrs
import torch
from torch import Tensor

from functional_ds.comm.record.collective import Call, Collective, Here
from functional_ds.comm.record.errors import MismatchError
from functional_ds.comm.record.group import Group, Ready, World

from .current import enter, exclusive_simulation
from .rng_state import kept_rng

__all__ = ["result_on_shapes", "run_on_shapes"]

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

# From a payload's shape to that of the primitive's result.
_RESULTS: dict[str, Callable[[Sequence[int], Here], Sequence[int]]] = {
    "all_reduce": lambda shape, here: shape,
    "reduce": lambda shape, here: shape,
    "broadcast": lambda shape, here: shape,
    "all_gather": lambda shape, here: (
        [sum(here["sizes"]), shape[1]] if "sizes" in here.options else [here.n, *shape]  # [rows, m] or [m]
    ),
    "reduce_scatter": lambda shape, here: [here["sizes"][here.rank], shape[1]] if "sizes" in here.options else shape[1:],
    "gather": lambda shape, here: [here.n, *shape],
    "scatter": lambda shape, here: shape[-1:],
    "all_to_all": lambda shape, here: shape,
    "all_to_all_rows": lambda shape, here: [sum(here["output_splits"]), shape[1]],
    "permute": lambda shape, here: shape,
    "transfer": lambda shape, here: shape,
    "barrier": lambda shape, here: shape,
}

Order = tuple[tuple[int, ...], str, Hashable]  # what is called in one order: a group's ranks, its name, the row's own order


@attrs.define(eq=False)
class _SharedLog:
    """The calls of all ranks.

    Attributes:
        kinds: a number for each kind of call.
        texts: each kind as text, for messages.
        logs: for each order and rank, the numbers of its calls.
        members: the ranks that take part in an order.
        private: for each order and index in it, the ranks' calls that have private options.
    """

    kinds: dict[Hashable, int] = attrs.field(factory=dict)
    texts: list[str] = attrs.field(factory=list)
    logs: dict[Order, dict[int, "array[int]"]] = attrs.field(factory=dict)
    members: dict[Order, tuple[int, ...]] = attrs.field(factory=dict)
    private: dict[tuple[Order, int], dict[int, Call]] = attrs.field(factory=dict)

    def compare(self) -> None:
        """Raises MismatchError where the members of an order called different things, or a different number of them."""
        for order, logs in self.logs.items():
            first, *others = self.members[order]
            mine = logs.get(first, array("I"))
            for other in others:
                theirs = logs.get(other, array("I"))
                if mine != theirs:
                    raise MismatchError(self._difference(order, first, mine, other, theirs))
        for (order, _), found in self.private.items():
            members = self.members[order]
            if all(rank in found for rank in members):  # a loop that ran once has logged its first iteration alone
                found[members[0]].merged([found[rank].private() for rank in members])  # raises where they contradict each other

    def _difference(self, order: Order, first: int, mine: "array[int]", other: int, theirs: "array[int]") -> str:
        turn = next((i for i, (a, b) in enumerate(zip(mine, theirs, strict=False)) if a != b), min(len(mine), len(theirs)))
        here, there = (self.texts[log[turn]] if turn < len(log) else "nothing more" for log in (mine, theirs))
        return (
            f"the ranks of group {order[1]!r} called different collectives: as number {turn}, "
            f"rank {first} called {here}, rank {other} called {there}"
        )


@attrs.define(eq=False)
class ShapesWorld(World):
    """The world of a rank without values."""

    shared: _SharedLog
    logs: "dict[Order, array[int]]" = attrs.field(factory=dict)

    @property
    def device(self) -> torch.device:
        return torch.device("meta")

    def repeat(self, times: int, body: Callable[[int], None]) -> None:
        """Runs the body once and counts its calls ``times`` times."""
        if times < 1:
            return
        marks = [(log, len(log)) for log in self._logs()]
        counts = [ledger.snapshot() for ledger in self.ledgers]
        body(0)
        for log, start in [*marks, *((log, 0) for log in self._logs()[len(marks) :])]:
            log.extend(log[start:] * (times - 1))
        for ledger, before in zip(self.ledgers, counts, strict=True):
            ledger.multiply(before, times)

    def _logs(self) -> "list[array[int]]":
        return list(self.logs.values())

    def start(self, call: Call, tensors: Sequence[Tensor], group: Group, *, async_op: bool) -> Ready:
        row, here = call.collective, Here(call.options, group.rank, group.size)
        for tensor in tensors:
            if not tensor.is_meta:
                raise ValueError(
                    f"{call.shown(group.rank)} on rank {self.rank}: a tensor is on {tensor.device}; "
                    "with shapes_only=True tensors have no values, so make them on device='meta'"
                )
        order = (group.ranks, group.name, row.order(call.options))
        self._log(order, call, tensors, here, group)
        return Ready([result_on_shapes(row, tensor.detach(), here) for tensor in tensors])

    def _log(self, order: Order, call: Call, tensors: Sequence[Tensor], here: Here, group: Group) -> None:
        shared, agreement = self.shared, call.agreement(tensors, here)
        number = shared.kinds.get(agreement)
        if number is None:
            number = shared.kinds[agreement] = len(shared.kinds)
            shared.texts.append(call.signature(tensors, here))
        logs = shared.logs.get(order)
        if logs is None:
            logs = shared.logs[order] = {}
            members = call.collective.members(call.options, group.size)
            shared.members[order] = tuple(group.ranks[member] for member in members)
        log = self.logs.get(order)
        if log is None:
            log = self.logs[order] = logs[self.rank] = array("I")
        if call.collective.private:
            shared.private.setdefault((order, len(log)), {})[self.rank] = call
        log.append(number)


def result_on_shapes(row: Collective, tensor: Tensor, here: Here) -> Tensor:
    """The result of a collective for a tensor without values: a tensor of the right shape, without values."""
    payload = row.pack(tensor, here)
    piece = payload.new_empty(list(_RESULTS[row.primitive](payload.shape, here)))
    return row.unpack(piece, tensor, here)


def run_on_shapes(program: Callable[[*Ts], T], args: tuple[*Ts], world_size: int) -> list[T]:
    """Runs the ranks one after another on the caller's thread; returns their results in rank order."""
    shared, results, ranks = _SharedLog(), [], tuple(range(world_size))
    with exclusive_simulation(), kept_rng() as rng, torch.inference_mode(False), torch.enable_grad():  # as in a new thread
        for rank in ranks:
            rng.copies(1)[0].restore()
            try:
                with enter(ShapesWorld(rank, shared), ranks):
                    results.append(program(*args))
            except BaseException as error:
                error.add_note(f"raised on rank {rank} of {world_size}, on shapes only")
                raise
    shared.compare()
    return results
