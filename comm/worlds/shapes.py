"""Ranks without values: a program on meta tensors, one rank after the other, to count what thousands of ranks would send.

What a collective returns has a shape that follows from this rank's own part, so no rank has to wait for another. Each
keeps a log of its calls; afterwards the logs must agree as the calls of a run with values would have to.
"""

from array import array
from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import attrs
import torch
from torch import Tensor

from functional_ds.comm.record.collective import Call, Collective, Here
from functional_ds.comm.record.errors import MismatchError
from functional_ds.comm.record.group import Group, Ready, place_in
from functional_ds.comm.record.ledger import Ledger

from .current import HERE, only_simulation
from .rng_state import Ambient

__all__ = ["result_on_shapes", "run_on_shapes"]

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

Thread = tuple[tuple[int, ...], str, Hashable]  # calls of one order: group, name, thread


@attrs.define(eq=False)
class _Books:
    """What all ranks share: kinds of calls, numbered, and each rank's log of their numbers by thread.

    Calls whose options may differ between ranks are kept, by thread and turn, each rank's.
    """

    kinds: dict[Hashable, int] = attrs.field(factory=dict)
    texts: list[str] = attrs.field(factory=list)
    logs: dict[Thread, dict[int, "array[int]"]] = attrs.field(factory=dict)
    members: dict[Thread, tuple[int, ...]] = attrs.field(factory=dict)
    varied: dict[tuple[Thread, int], dict[int, Call]] = attrs.field(factory=dict)

    def compare(self) -> None:
        """Raises where two members of a thread called different things, or a different number of them."""
        for thread, logs in self.logs.items():
            first, *others = self.members[thread]
            mine = logs.get(first, array("I"))
            for other in others:
                theirs = logs.get(other, array("I"))
                if mine != theirs:
                    raise MismatchError(self._difference(thread, first, mine, other, theirs))
        for (thread, _), found in self.varied.items():
            members = self.members[thread]
            if all(rank in found for rank in members):  # in a loop that ran once, later turns are not there
                found[members[0]].merged([found[rank].private() for rank in members])  # raises where they contradict each other

    def _difference(self, thread: Thread, first: int, mine: "array[int]", other: int, theirs: "array[int]") -> str:
        turn = next((i for i, (a, b) in enumerate(zip(mine, theirs, strict=False)) if a != b), min(len(mine), len(theirs)))
        here, there = (self.texts[log[turn]] if turn < len(log) else "nothing more" for log in (mine, theirs))
        return (
            f"the ranks of group {thread[1]!r} called different collectives: as number {turn}, "
            f"rank {first} called {here}, rank {other} called {there}"
        )


@attrs.define(eq=False)
class ShapesWorld:
    """The world as one rank without values sees it."""

    rank: int
    shared: _Books
    books: list[Ledger] = attrs.field(factory=list)
    logs: "dict[Thread, array[int]]" = attrs.field(factory=dict)

    @property
    def device(self) -> torch.device:
        return torch.device("meta")

    def together(self) -> AbstractContextManager[None]:
        return nullcontext()

    def repeat(self, times: int, body: Callable[[int], None]) -> None:
        """Runs the body once, and counts and logs what it called as often as it would have been called."""
        if times < 1:
            return
        marks = [(log, len(log)) for log in self._logs()]
        counts = [book.snapshot() for book in self.books]
        body(0)
        for log, start in [*marks, *((log, 0) for log in self._logs()[len(marks) :])]:
            log.extend(log[start:] * (times - 1))
        for book, before in zip(self.books, counts, strict=True):
            book.multiply(before, times)

    def _logs(self) -> "list[array[int]]":
        return list(self.logs.values())

    def start(self, call: Call, tensors: Sequence[Tensor], group: Group, *, ahead: bool) -> Ready:
        row, here = call.collective, Here(call.options, group.rank, group.size)
        for tensor in tensors:
            if not tensor.is_meta:
                raise ValueError(
                    f"{call.shown(group.rank)} on rank {self.rank}: a tensor is on {tensor.device}; "
                    "with shapes_only=True tensors have no values, so make them on device='meta'"
                )
        thread = (group.ranks, group.name, row.order(call.options))
        self._log(thread, call, tensors, here, group)
        return Ready([result_on_shapes(row, tensor.detach(), here) for tensor in tensors])

    def _log(self, thread: Thread, call: Call, tensors: Sequence[Tensor], here: Here, group: Group) -> None:
        shared, agreement = self.shared, call.agreement(tensors, here)
        number = shared.kinds.get(agreement)
        if number is None:
            number = shared.kinds[agreement] = len(shared.kinds)
            shared.texts.append(call.signature(tensors, here))
        logs = shared.logs.get(thread)
        if logs is None:
            logs = shared.logs[thread] = {}
            members = call.collective.members(call.options, group.size)
            shared.members[thread] = tuple(group.ranks[member] for member in members)
        log = self.logs.get(thread)
        if log is None:
            log = self.logs[thread] = logs[self.rank] = array("I")
        if call.collective.private:
            shared.varied.setdefault((thread, len(log)), {})[self.rank] = call
        log.append(number)

    def group(self, ranks: Sequence[int], name: str) -> Group:
        return Group(tuple(ranks), place_in(ranks, self.rank), name, self)

    def channel(self, group: Group, name: str) -> Group:
        return attrs.evolve(group, name=f"{group.name}/{name}")


def result_on_shapes(row: Collective, tensor: Tensor, here: Here) -> Tensor:
    """What a collective returns for a tensor without values: another such."""
    payload = row.pack(tensor, here)
    piece = payload.new_empty(list(_RESULTS[row.primitive](payload.shape, here)))
    return row.unpack(piece, tensor, here)


def run_on_shapes(program: Callable[..., Any], args: tuple[Any, ...], world_size: int) -> list[Any]:
    """The ranks' results, one rank after the other on the caller's thread."""
    shared, results, everyone = _Books(), [], tuple(range(world_size))
    with only_simulation(), torch.inference_mode(False), torch.enable_grad():  # each rank begins as a thread does
        outer, ambient = getattr(HERE, "group", None), Ambient.now()
        try:
            for rank in everyone:
                ambient.twins(1)[0].restore()
                HERE.group = Group(everyone, rank, "world", ShapesWorld(rank, shared))
                try:
                    results.append(program(*args))
                except BaseException as error:
                    error.add_note(f"raised on rank {rank} of {world_size}, on shapes only")
                    raise
        finally:
            HERE.group = outer
            ambient.restore()
    shared.compare()
    return results
