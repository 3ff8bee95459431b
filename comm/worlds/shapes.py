"""Simulations on shapes only: runs a program on meta tensors, rank after rank, to count the traffic of thousands of ranks.

``symmetric`` runs a single rank, and assumes that all others behave like it.

The shape of a collective's result follows from this rank's input, so ranks do not wait for each other. Each rank logs its
calls, and the logs are compared afterwards. Collectives on channels named "control", by which the library's ranks agree with
each other, have values: each rank receives its own value from all others.
"""

from array import array
from collections.abc import Callable, Hashable, Sequence
from typing import TypeVar, TypeVarTuple

import attrs
import torch
from torch import Tensor

from functional_ds.comm.record.group import Group, Ready, World
from functional_ds.comm.table.collective import Call, CallContext, Handle
from functional_ds.comm.table.errors import MismatchError

from .current import enter, exclusive_simulation
from .rng_state import kept_rng

T = TypeVar("T")
Ts = TypeVarTuple("Ts")


@attrs.define(eq=False)
class SymmetricWorld(World):
    """The world of a rank whose peers pass the same inputs to every collective."""

    has_peers = False

    def start(self, call: Call, tensors: Sequence[Tensor], group: Group, *, beside: bool) -> Ready:
        return Ready([self._result(call, tensor.detach(), group) for tensor in tensors])

    def _result(self, call: Call, tensor: Tensor, group: Group) -> Tensor:
        if tensor.is_meta:
            return call.collective.on_shapes(tensor, CallContext(call.options, group.rank, group.size))
        options = call.merged([call.private()] * group.size)
        return call.collective.denotation([tensor.contiguous()] * group.size, options)[group.rank]


def is_symmetric(group: Group) -> bool:
    """Whether the group belongs to ``comm.symmetric``, where only this rank runs.

    Checks that ranks differ, such as in their data, must be skipped there.

    >>> from functional_ds import comm
    >>> symmetric(lambda: is_symmetric(comm.world()), world_size=2), is_symmetric(comm.world())
    (True, False)
    """
    return not group.world.has_peers


def symmetric(program: Callable[[*Ts], T], *args: *Ts, world_size: int, rank: int = 0) -> T:
    """Runs ``program(*args)`` as one rank, assuming that all ranks pass the same inputs to every collective.

    Only this rank runs, so the cost does not grow with ``world_size``. Results of meta tensors have shapes only. Other results
    are computed as if all ranks had passed this rank's values: right for values that are equal on all ranks, such as the order
    of a model's layers, and wrong for others. Random generators are restored afterwards.

    Args:
        program: the program.
        args: its arguments.
        world_size: the number of ranks that the program sees.
        rank: the rank that it runs as.

    Raises:
        ValueError: ``rank`` is not in 0..world_size - 1.

    >>> import torch
    >>> from functional_ds import comm
    >>> def program():
    ...     whole = comm.all_gather(torch.empty(10**6, device="meta"))
    ...     return whole.shape[0], comm.all_reduce(torch.tensor(1)).item()
    >>> symmetric(program, world_size=1024)
    (1024000000, 1024)
    """
    if type(world_size) is not int or not 0 <= rank < world_size:
        raise ValueError(f"rank={rank!r}, world_size={world_size!r}: the ranks of a world are 0 to world_size - 1")
    with exclusive_simulation(), kept_rng(), enter(SymmetricWorld(rank), range(world_size)):
        return program(*args)


Order = tuple[tuple[int, ...], str, Hashable]  # a sequence of calls: the group's ranks and name, and the row's ``order``


@attrs.define(eq=False)
class _SharedLog:
    """The calls of all ranks.

    Attributes:
        numbers: numbers of distinct calls.
        texts: the text of each, for messages.
        logs: by order and rank, the numbers of its calls.
        members: the ranks that take part in an order.
        private: by order and index in it, the ranks' calls that have private options.
    """

    numbers: dict[Hashable, int] = attrs.field(factory=dict)
    texts: list[str] = attrs.field(factory=list)
    logs: dict[Order, dict[int, "array[int]"]] = attrs.field(factory=dict)
    members: dict[Order, tuple[int, ...]] = attrs.field(factory=dict)
    private: dict[tuple[Order, int], dict[int, Call]] = attrs.field(factory=dict)

    def number(self, description: Hashable, text: Callable[[], str]) -> int:
        """The number of a call; ``text`` is called for a new one."""
        number = self.numbers.get(description)
        if number is None:
            number = self.numbers[description] = len(self.numbers)
            self.texts.append(text())
        return number

    def compare(self) -> None:
        """Raises MismatchError if the members of an order made different calls, or a different number of them."""
        for order, logs in self.logs.items():
            first, *others = self.members[order]
            mine = logs.get(first, array("I"))
            for other in others:
                theirs = logs.get(other, array("I"))
                if mine != theirs:
                    raise MismatchError(self._difference(order, first, mine, other, theirs))
        for (order, _), calls in self.private.items():
            members = self.members[order]
            if all(rank in calls for rank in members):  # a loop logs private options of its first iteration only
                calls[members[0]].merged([calls[rank].private() for rank in members])  # raises if they contradict each other

    def _difference(self, order: Order, first: int, mine: "array[int]", other: int, theirs: "array[int]") -> str:
        turn = next((i for i, (a, b) in enumerate(zip(mine, theirs, strict=False)) if a != b), min(len(mine), len(theirs)))
        here, there = (self.texts[log[turn]] if turn < len(log) else "nothing more" for log in (mine, theirs))
        return (
            f"the ranks of group {order[1]!r} called different collectives: as number {turn}, "
            f"rank {first} called {here}, rank {other} called {there}"
        )


@attrs.define(eq=False)
class ShapesWorld(World):
    """The world of a rank on shapes only."""

    shared: _SharedLog
    logs: "dict[Order, array[int]]" = attrs.field(factory=dict)
    control: "_ControlWorld | None" = None

    @property
    def device(self) -> torch.device:
        return torch.device("meta")

    @property
    def compares(self) -> bool:
        return True

    def channel(self, group: Group, name: str) -> Group:
        made = super().channel(group, name)
        if name.rpartition("/")[2] != "control":
            return made
        if self.control is None:
            self.control = _ControlWorld(self.rank, whole=self)
        return attrs.evolve(made, world=self.control)

    def repeat(self, times: int, body: Callable[[int], None]) -> None:
        """Runs the body once and counts its calls ``times`` times."""
        if times < 1:
            return
        marks = [(log, len(log)) for log in self.logs.values()]
        counts = [ledger.snapshot() for ledger in self.ledgers]
        body(0)
        for log, start in [*marks, *((log, 0) for log in [*self.logs.values()][len(marks) :])]:
            log.extend(log[start:] * (times - 1))
        for ledger, before in zip(self.ledgers, counts, strict=True):
            ledger.multiply(before, times)

    def start(self, call: Call, tensors: Sequence[Tensor], group: Group, *, beside: bool) -> Handle:
        for tensor in tensors:
            if not tensor.is_meta:
                raise ValueError(
                    f"{call.shown(group.rank)} on rank {self.rank}: a tensor is on {tensor.device}; "
                    "with shapes_only=True tensors have no values, so make them on device='meta'"
                )
        self.log(call, tensors, group)
        return self.carried(call, tensors, group)

    def carried(self, call: Call, tensors: Sequence[Tensor], group: Group) -> Handle:
        """A call's results, which are available at once."""
        here = CallContext(call.options, group.rank, group.size)
        return Ready([call.collective.on_shapes(tensor.detach(), here) for tensor in tensors])

    def log(self, call: Call, tensors: Sequence[Tensor], group: Group) -> None:
        """Logs a call, to compare it with the other ranks' calls."""
        here = CallContext(call.options, group.rank, group.size)
        order = (group.ranks, group.name, call.collective.order(call.options))
        members = call.collective.members(call.options, group.size)
        log = self._log(order, members, group)
        if call.collective.private:
            self.shared.private.setdefault((order, len(log)), {})[self.rank] = call
        purpose = self.purpose(group)
        description = (*call.agreement(tensors, here), purpose)
        log.append(
            self.shared.number(description, lambda: call.signature(tensors, here) + (f", for {purpose}" if purpose else ""))
        )

    def agreed(self, text: str, group: Group) -> None:
        log = self._log((group.ranks, group.name, ()), range(group.size), group)
        log.append(self.shared.number(text, lambda: text))

    def _log(self, order: Order, members: Sequence[int], group: Group) -> "array[int]":
        logs = self.shared.logs.get(order)
        if logs is None:
            logs = self.shared.logs[order] = {}
            self.shared.members[order] = tuple(group.ranks[member] for member in members)
        log = self.logs.get(order)
        if log is None:
            log = self.logs[order] = logs[self.rank] = array("I")
        return log


@attrs.define(eq=False)
class _ControlWorld(SymmetricWorld):
    """The world of the channels named "control", whose collectives have values."""

    whole: ShapesWorld = attrs.field(kw_only=True)

    def __attrs_post_init__(self) -> None:
        self.ledgers = self.whole.ledgers  # one list

    def start(self, call: Call, tensors: Sequence[Tensor], group: Group, *, beside: bool) -> Ready:
        self.whole.log(call, tensors, group)
        return super().start(call, tensors, group, beside=beside)

    def agreed(self, text: str, group: Group) -> None:
        self.whole.agreed(text, group)


def run_on_shapes(program: Callable[[*Ts], T], args: tuple[*Ts], world_size: int, ranks_per_node: int = 1) -> list[T]:
    """Runs the ranks one after another on the caller's thread; returns their results in rank order."""
    shared, results, ranks = _SharedLog(), [], tuple(range(world_size))
    with exclusive_simulation(), kept_rng() as rng, torch.inference_mode(False), torch.enable_grad():  # as in a new thread
        for rank in ranks:
            rng.copies(1)[0].restore()
            try:
                world = ShapesWorld(rank, shared)
                world.ranks_per_node = ranks_per_node
                with enter(world, ranks):
                    results.append(program(*args))
            except BaseException as error:
                error.add_note(f"raised on rank {rank} of {world_size}, on shapes only")
                raise
    shared.compare()
    return results


def rank_on_shapes(
    program: Callable[[*Ts], T],
    *args: *Ts,
    world_size: int,
    rank: int,
    kind: type[ShapesWorld] = ShapesWorld,
    ranks_per_node: int = 1,
) -> T:
    """Runs a program on shapes only as one rank, without the others; calls are not compared.

    Args:
        program: the program.
        args: its arguments.
        world_size: the number of ranks that the program sees.
        rank: the rank that it runs as.
        kind: the class of the world.
        ranks_per_node: how many consecutive ranks share a node; 1 where they do not fill several.

    >>> from functional_ds import comm
    >>> def program():
    ...     return comm.world().rank, comm.all_gather(torch.empty(3, device="meta")).shape[0]
    >>> rank_on_shapes(program, world_size=1000, rank=7)
    (7, 3000)
    """
    world = kind(rank, _SharedLog())
    world.ranks_per_node = ranks_per_node
    with exclusive_simulation(), kept_rng(), torch.inference_mode(False), torch.enable_grad(), enter(world, range(world_size)):
        return program(*args)
