"""Groups of ranks, and the worlds that perform their collectives."""

import os
import sys
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache, cached_property, lru_cache
from time import monotonic
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn, Protocol

import attrs
import torch
from torch import Tensor

from functional_ds.base.tree import setting
from functional_ds.comm.table.collective import Call, Handle, Variance

from .ledger import Ledger

if TYPE_CHECKING:
    from functional_ds.comm.backends.malloc import HostMemory


class Beside(Protocol):
    """Steps that the world runs in the background."""

    def wait(self) -> Any:
        """Blocks until the last step has ended; returns its value."""
        ...

    def poll(self, timeout: float) -> bool:
        """Whether the last step has ended; waits up to ``timeout`` seconds for it."""
        ...


class ValueWatch(Protocol):
    """Checks a rank's declarations of variance, in a simulation with ``variance=True``."""

    def declare(
        self, variance: Variance, leaves: Sequence[Tensor], group: "Group", names: Sequence[str], *, distinct: bool = False
    ) -> None:
        """Records a declaration of leaves along the group, to check it."""
        ...

    def start(
        self, call: Call, leaves: Sequence[Tensor], group: "Group", begin: Callable[[], Handle], transposed: str | None
    ) -> Handle:
        """Starts a collective with ``begin``; ``transposed`` is the forward call's source line, in a backward pass."""
        ...


@attrs.define(eq=False)
class World(ABC):
    """The ranks that run together, as seen by one of them. Subclasses implement how they exchange values (``start``).

    Attributes:
        rank: this rank.
        ledgers: the open ledgers of this rank, each of which records all calls.
        watch: checks declarations of variance, in a simulation with ``variance=True``.
        made_for: the function that calls on a group are made for, and its arguments, by the group's ranks and name (``alike``).
        ranks_per_node: how many consecutive ranks each node has; 1 if that is unknown or differs.
        host: manages the memory of the rank's process; None if the user does, or if the process has several ranks.
        has_peers: whether the other ranks run, with values of their own; not so under ``comm.symmetric``.
    """

    has_peers: ClassVar[bool] = True
    rank: int
    ledgers: list[Ledger] = attrs.field(factory=list, init=False)
    watch: ValueWatch | None = attrs.field(default=None, init=False)
    made_for: dict[tuple[tuple[int, ...], str], str] = attrs.field(factory=dict, init=False)
    ranks_per_node: int = attrs.field(default=1, init=False)
    host: "HostMemory | None" = attrs.field(default=None, init=False)

    @property
    def device(self) -> torch.device:
        """The device of the library's small tensors, such as sizes and pickled objects."""
        return torch.device("cpu")

    @property
    def compares(self) -> bool:
        """Whether ranks compare their calls."""
        return False

    def purpose(self, group: "Group") -> str:
        """The function that this rank's calls on the group are made for, as text; empty if none is known."""
        return self.made_for.get((group.ranks, group.name), "") if self.made_for else ""

    @property
    def at_once(self) -> bool:
        """Whether messages take no time, so that one call may replace the rounds of an algorithm; the same on all ranks."""
        return False

    @abstractmethod
    def start(self, call: Call, tensors: Sequence[Tensor], group: "Group", *, beside: bool) -> Handle:
        """Starts a collective on this rank's tensors; without ``beside`` the caller waits for it at once."""

    def step(self) -> AbstractContextManager[None]:
        """Runs a training step inside the block; a rank whose step raises may continue only if all ranks' steps raise."""
        return nullcontext()

    def batch(self) -> AbstractContextManager[None]:
        """Makes the messages that are started inside the block one batch, so that they cannot block each other."""
        return nullcontext()

    def in_launch_order(self, device: torch.device) -> bool:
        """Whether calls on that device run in the order in which they are started, as on NCCL, so all ranks need one order."""
        return False

    def connect(self, edges: "Sequence[tuple[int, int]]", group: "Group", device: torch.device) -> None:
        """Connects this rank to others, on back ends where the first message between two ranks blocks both.

        All ranks that have an edge must call it before they send a message on it.

        Args:
            edges: (tag, rank of the group) pairs.
            group: the group of the messages.
            device: the device of the tensors.
        """
        return None

    def beside(self, steps: Callable[[], Iterator[Any]], lane: "Group", device: torch.device) -> Beside:
        """Runs ``steps()`` in the background, after earlier ones of the lane; the last value is the result.

        This implementation, for worlds that do not wait for other ranks, runs them before it returns.
        """
        return Ready(last(steps()))

    def repeat(self, times: int, body: Callable[[int], None]) -> None:
        """Calls ``body(i)`` for i in ``range(times)``; on shapes only, runs it once and counts it ``times`` times."""
        for i in range(times):
            body(i)

    def agreed(self, text: str, group: "Group") -> None:
        """Logs a text that must be the same on all ranks of a group, for simulations on shapes only."""
        return None

    def group(self, ranks: Sequence[int], name: str) -> "Group":
        """A group of these ranks; on any other rank, a group whose collectives raise."""
        return Group(tuple(ranks), list(ranks).index(self.rank) if self.rank in ranks else -1, name, self)

    def channel(self, group: "Group", name: str) -> "Group":
        """A group of the same ranks, with a separate order of collectives."""
        return Group(group.ranks, group.rank, f"{group.name}/{name}", group.world)


@attrs.frozen(repr=False)
class Group:
    """A group of ranks of a world, as seen by one of them.

    Attributes:
        ranks: the members as ranks of the world, in group order.
        rank: this process's rank in the group; -1 if it is not a member, and then calls raise CommError.
        name: the mesh axis, "world", or the name given to ``new_group``; for a channel, followed by a slash and its name.
        world: performs the group's collectives.
    """

    ranks: tuple[int, ...]
    rank: int
    name: str
    world: World = attrs.field(eq=id)
    _channels: "dict[str, Group]" = attrs.field(factory=dict, init=False, eq=False)

    @cached_property
    def size(self) -> int:
        """The number of ranks in the group."""
        return len(self.ranks)

    @property
    def compares(self) -> bool:
        """Whether there are other ranks with real values to compare with."""
        return self.size > 1 and self.world.has_peers

    @property
    def ranks_per_node(self) -> int:
        """How many consecutive ranks of the group share a node, if that is the same on each of several nodes; else 1.

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
        """A group of the same ranks whose collectives are ordered independently.

        All ranks of a group must call its collectives in one order. Use separate channels for calls in independent orders:
        gathers follow the forward pass, reductions follow the gradients.
        """
        if name not in self._channels:
            self._channels[name] = self.world.channel(self, name)
        return self._channels[name]

    def __getstate__(self) -> NoReturn:
        raise TypeError(
            f"{self!r} belongs to its rank and cannot be copied or pickled; pass its ranks on, and comm.new_group(ranks)"
        )

    def __repr__(self) -> str:
        place = f"rank {self.rank} of {self.size}" if self.rank >= 0 else "not a member"
        return f"Group({self.name!r}, {place}, ranks {list(self.ranks)})"


def check_ranks_per_node(ranks_per_node: int, world_size: int) -> None:
    """Raises ValueError if the ranks do not fill nodes of this size."""
    if type(ranks_per_node) is not int or ranks_per_node < 1 or world_size % ranks_per_node:
        raise ValueError(f"ranks_per_node={ranks_per_node!r}: {world_size} ranks do not fill nodes of as many; pass a divisor")


@lru_cache(maxsize=1024)
def _per_node(ranks: tuple[int, ...], per_node: int) -> int:
    return neighbours([rank // per_node for rank in ranks])


def neighbours(nodes: Sequence[Any]) -> int:
    """How many consecutive ranks share a node, if that is the same on each of several nodes; else 1.

    >>> neighbours("aabb"), neighbours("abab"), neighbours("aab"), neighbours("aaaa")
    (2, 1, 1, 1)
    """
    count = nodes.count(nodes[0])
    whole = [node for node in nodes[::count] for _ in range(count)]
    return count if [*nodes] == whole and len({*nodes}) * count == len(nodes) > count else 1


def last(steps: Iterator[Any]) -> Any:
    """Runs an iterator to its end; returns the last value."""
    return deque(steps, maxlen=1).pop()


def poll_all(parts: Sequence[Beside], timeout: float) -> bool:
    """Whether all parts have ended; waits up to ``timeout`` seconds for them."""
    deadline = monotonic() + timeout
    return all(part.poll(max(0.0, deadline - monotonic())) for part in parts)


@attrs.define(eq=False)
class Ready:
    """The handle of a completed collective."""

    results: Any
    ended: float | None = None

    def wait(self) -> Any:
        return self.results

    def poll(self, timeout: float) -> bool:
        return True


@attrs.define(eq=False)
class Solo(World):
    """The world of one rank: a collective is its reference implementation with n = 1."""

    rank: int = 0

    def start(self, call: Call, tensors: Sequence[Tensor], group: Group, *, beside: bool) -> Ready:
        options = call.merged([call.private()])
        return Ready([call.collective.denotation([t.detach().contiguous()], options)[0] for t in tensors])


_LIBRARIES = ("functional_ds", "torch", "optree", "threading")


@cache
def _is_library(module: str) -> bool:
    return module.partition(".")[0] in _LIBRARIES


@cache
def _site(path: str, line: int) -> str:
    return f"{path.rpartition(os.sep)[2]}:{line}"


class _SiteOfThread(threading.local):
    """State of the current thread: the call site that overrides its own."""

    site: str | None = None


_SITES = _SiteOfThread()


def at_site(site: str) -> AbstractContextManager[None]:
    """Makes ``call_site`` return the site in this thread, inside the block."""
    return setting(_SITES, site=site)


def call_site() -> str:
    """The file and line of the user's call: the innermost frame outside this library and torch."""
    if _SITES.site:
        return _SITES.site
    frame = sys._getframe(1)
    while _is_library(frame.f_globals.get("__name__", "")) and frame.f_back is not None:
        frame = frame.f_back
    return _site(frame.f_code.co_filename, frame.f_lineno)
