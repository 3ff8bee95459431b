"""A group of ranks, and the world that carries out its collectives."""

import os
import sys
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache, lru_cache
from time import monotonic
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

import attrs
import torch
from torch import Tensor

from functional_ds.comm.table.collective import Call, Handle
from functional_ds.comm.table.variance import Variance

from .ledger import Ledger

if TYPE_CHECKING:
    from functional_ds.comm.backends.malloc import HostMemory

__all__ = [
    "Beside",
    "Group",
    "Ready",
    "Solo",
    "ValueWatch",
    "World",
    "at_site",
    "call_site",
    "check_ranks_per_node",
    "last",
    "poll_all",
]


class Beside(Protocol):
    """Steps that the world carries out beside the program."""

    def wait(self) -> Any:
        """Blocks until the last step is done; returns its value."""
        ...

    def poll(self, timeout: float) -> bool:
        """Whether a wait would return at once; waits up to ``timeout`` seconds for that."""
        ...


class ValueWatch(Protocol):
    """Follows what a rank's values are along groups, in a simulation that checks it."""

    def declare(
        self, kind: Variance, leaves: Sequence[Tensor], group: "Group", names: Sequence[str], *, distinct: bool = False
    ) -> None:
        """Holds the leaves to what they are declared to be along the group."""
        ...

    def start(
        self, call: Call, leaves: Sequence[Tensor], group: "Group", begin: Callable[[], Handle], transposed: str | None
    ) -> Handle:
        """Starts a collective by ``begin``; ``transposed`` is the line of the call whose transpose it is."""
        ...


@attrs.define(eq=False)
class World(ABC):
    """The ranks that run together, as one of them sees them. A subclass says how they exchange values: ``start``.

    Attributes:
        rank: this rank.
        ledgers: those that are open on this rank; each records every call.
        watch: follows the rank's values, in a simulation with ``variance=True``.
        made_for: what the calls on a group are made for, which all its ranks must have alike, by the group's ranks and name.
        ranks_per_node: how many ranks each node has, in the order of the ranks; 1 where that is unknown or differs.
        host: what may be done with the memory of the rank's process; None where that is the user's choice, or one of several
            ranks of a process.
    """

    rank: int
    ledgers: list[Ledger] = attrs.field(factory=list, init=False)
    watch: ValueWatch | None = attrs.field(default=None, init=False)
    made_for: dict[tuple[tuple[int, ...], str], str] = attrs.field(factory=dict, init=False)
    ranks_per_node: int = attrs.field(default=1, init=False)
    host: "HostMemory | None" = attrs.field(default=None, init=False)

    @property
    def device(self) -> torch.device:
        """Where the library's own small tensors are, such as sizes and pickled objects."""
        return torch.device("cpu")

    @property
    def compares(self) -> bool:
        """Whether ranks compare their calls."""
        return False

    def purpose(self, group: "Group") -> str:
        """What this rank's calls on the group are made for; empty where nothing says so."""
        return self.made_for.get((group.ranks, group.name), "") if self.made_for else ""

    @property
    def at_once(self) -> bool:
        """Whether messages take no time, so that one call may stand for the rounds of an algorithm; the same on all ranks."""
        return False

    @abstractmethod
    def start(self, call: Call, tensors: Sequence[Tensor], group: "Group", *, beside: bool) -> Handle:
        """Starts a collective of this rank's tensors; without ``beside`` the caller waits for it at once."""

    def step(self) -> AbstractContextManager[None]:
        """Within it a step runs, which is one on all ranks: a rank that fails in its collectives goes on only if all do."""
        return nullcontext()

    def batch(self) -> AbstractContextManager[None]:
        """Point-to-point messages that are started within this context form one batch, so they cannot block each other."""
        return nullcontext()

    def in_launch_order(self, device: torch.device) -> bool:
        """Whether calls on tensors there run in the order in which each rank starts them, as on NCCL: ranks need one order."""
        return False

    def connect(self, edges: "Sequence[tuple[int, int]]", group: "Group", device: torch.device) -> None:
        """Prepares messages between this rank and others, where two ranks that first use a connection wait for each other.

        All ranks that have an edge must call it, before any message on it.

        Args:
            edges: a tag, and a rank of the group, of each.
            group: the group of the messages.
            device: where their tensors are.
        """
        return None

    def beside(self, steps: Callable[[], Iterator[Any]], lane: "Group", device: torch.device) -> Beside:
        """Carries out ``steps()`` beside the program, after those of the lane before; the last value is the result.

        Here nothing waits for another rank, so the steps are done when this returns.
        """
        return Ready(last(steps()))

    def repeat(self, times: int, body: Callable[[int], None]) -> None:
        """``body(0)``, ``body(1)``, ..., ``body(times - 1)``; without values, one run that counts as all of them."""
        for i in range(times):
            body(i)

    def agreed(self, text: str, group: "Group") -> None:
        """Notes what all ranks of a group must say alike, where ranks run one after another and cannot ask."""
        return None

    def group(self, ranks: Sequence[int], name: str) -> "Group":
        """A group of these ranks; on any other rank, a group whose collectives raise."""
        return Group(tuple(ranks), list(ranks).index(self.rank) if self.rank in ranks else -1, name, self)

    def channel(self, group: "Group", name: str) -> "Group":
        """The same ranks, with an order of collectives of its own."""
        return Group(group.ranks, group.rank, f"{group.name}/{name}", group.world)


@attrs.frozen(repr=False)
class Group:
    """Some ranks of a world, as seen by one of them.

    Attributes:
        ranks: the members as ranks of the world, in group order.
        rank: this rank's place in the group. It is -1 on a rank that is not a member; its calls raise CommError.
        name: the mesh axis that the group lies along, "world", or the name given to ``new_group``; a channel's follows a slash.
        world: carries out the group's collectives.
    """

    ranks: tuple[int, ...]
    rank: int
    name: str
    world: World = attrs.field(eq=id)

    @property
    def size(self) -> int:
        """The number of ranks in the group."""
        return len(self.ranks)

    @property
    def ranks_per_node(self) -> int:
        """How many neighbours in the group share a node, where they are as many on each of several nodes; else 1.

        >>> from functional_ds import comm
        >>> def program():
        ...     mesh = comm.mesh(dp=2, tp=2)
        ...     return [group.ranks_per_node for group in (comm.world(), mesh["tp"], mesh["dp"])]
        >>> comm.simulate(program, world_size=4, ranks_per_node=2)[0]
        [2, 1, 1]
        """
        per_node = self.world.ranks_per_node
        return 1 if per_node == 1 else _per_node(self.ranks, per_node)

    def channel(self, name: str) -> "Group":
        """A group of the same ranks whose collectives are ordered among themselves only.

        All ranks of a group must call its collectives in one order. Use a channel for each kind of call that has an order of
        its own: gathers follow the forward pass, reductions follow the gradients.
        """
        return self.world.channel(self, name)

    def __getstate__(self) -> NoReturn:
        raise TypeError(
            f"{self!r} belongs to its rank and cannot be copied or pickled; pass its ranks on, and comm.new_group(ranks)"
        )

    def __repr__(self) -> str:
        place = f"rank {self.rank} of {self.size}" if self.rank >= 0 else "not a member"
        return f"Group({self.name!r}, {place}, ranks {list(self.ranks)})"


def check_ranks_per_node(ranks_per_node: int, world_size: int) -> None:
    """Raises ValueError where the ranks do not fill nodes of this size."""
    if type(ranks_per_node) is not int or ranks_per_node < 1 or world_size % ranks_per_node:
        raise ValueError(f"ranks_per_node={ranks_per_node!r}: {world_size} ranks do not fill nodes of as many; pass a divisor")


@lru_cache(maxsize=1024)
def _per_node(ranks: tuple[int, ...], per_node: int) -> int:
    return neighbours([rank // per_node for rank in ranks])


def neighbours(nodes: Sequence[Any]) -> int:
    """How many neighbours share a node, where they are as many on each of several nodes; else 1.

    >>> neighbours("aabb"), neighbours("abab"), neighbours("aab"), neighbours("aaaa")
    (2, 1, 1, 1)
    """
    count = nodes.count(nodes[0])
    whole = [node for node in nodes[::count] for _ in range(count)]
    return count if [*nodes] == whole and len({*nodes}) * count == len(nodes) > count else 1


def last(steps: Iterator[Any]) -> Any:
    """The last value."""
    return deque(steps, maxlen=1).pop()


class _Polled(Protocol):
    def poll(self, timeout: float) -> bool: ...


def poll_all(parts: Sequence[_Polled], timeout: float) -> bool:
    """Whether waits for all parts would return at once; waits up to ``timeout`` seconds for that."""
    deadline = monotonic() + timeout
    return all(part.poll(max(0.0, deadline - monotonic())) for part in parts)


@attrs.define(eq=False)
class Ready:
    """The handle of a collective that is complete."""

    results: Any
    ended: float | None = None

    def wait(self) -> Any:
        return self.results

    def poll(self, timeout: float) -> bool:
        return True


@attrs.define(eq=False)
class Solo(World):
    """The world of one rank: a collective is its denotation for n = 1."""

    rank: int = 0

    def start(self, call: Call, tensors: Sequence[Tensor], group: Group, *, beside: bool) -> Ready:
        options = call.merged([call.private()])
        return Ready([call.collective.denotation([t.detach().contiguous()], options)[0] for t in tensors])


_LIBRARIES = ("functional_ds", "torch", "optree", "threading")


@cache
def _is_library(module: str) -> bool:
    return module.partition(".")[0] in _LIBRARIES


class _SiteOfThread(threading.local):
    """What is known of the current thread: the site of the call that it goes on with."""

    site: str | None = None


_SITES = _SiteOfThread()


@contextmanager
def at_site(site: str) -> Iterator[None]:
    """Makes ``call_site`` of this thread return the site while the block runs."""
    _SITES.site = site
    try:
        yield
    finally:
        _SITES.site = None


def call_site() -> str:
    """The file and line of the user's call: the nearest frame outside this library and torch."""
    if _SITES.site:
        return _SITES.site
    frame = sys._getframe(1)
    while frame.f_back is not None and _is_library(frame.f_globals.get("__name__", "")):
        frame = frame.f_back
    return f"{frame.f_code.co_filename.rpartition(os.sep)[2]}:{frame.f_lineno}"
