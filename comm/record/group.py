"""Groups of ranks, and the worlds they live in."""

import os
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import NoReturn, Protocol

import attrs
import torch
from torch import Tensor

from .collective import Call, Handle
from .ledger import Ledger

__all__ = ["Group", "Ready", "Solo", "World", "call_site", "each", "place_in"]


class World(Protocol):
    """Where a rank lives: what carries out the collectives of its groups."""

    books: list[Ledger]

    @property
    def device(self) -> torch.device:
        """Where small messages of the library's own live: sizes, objects."""
        ...

    def together(self) -> AbstractContextManager[None]:
        """Calls that are started inside go on at once, whichever way they face."""
        ...

    def repeat(self, times: int, body: Callable[[int], None]) -> None:
        """``body(0)``, ``body(1)``, ...; without values, once for all."""
        ...

    def start(self, call: Call, tensors: Sequence[Tensor], group: "Group", *, ahead: bool) -> Handle:
        """Begins a collective of this rank's tensors; ``ahead`` says that the caller will not wait for it at once."""
        ...

    def group(self, ranks: Sequence[int], name: str) -> "Group":
        """A group of these ranks; on a rank that is none of them, one whose collectives raise."""
        ...

    def channel(self, group: "Group", name: str) -> "Group":
        """The same ranks, with an order of collectives of their own."""
        ...


@attrs.frozen(repr=False)
class Group:
    """Some ranks of a world, as seen by one of them.

    Attributes:
        ranks: the members as ranks of the world, in group order.
        rank: this rank's place in the group; -1 where it is not in it, and then calling a collective is an error.
        name: the mesh axis that the group lies along, "world", or what ``new_group`` was given; channels stand behind a slash.
        world: what carries out its collectives.
    """

    ranks: tuple[int, ...]
    rank: int
    name: str
    world: World = attrs.field(eq=id)

    @property
    def size(self) -> int:
        """How many ranks the group has."""
        return len(self.ranks)

    def channel(self, name: str) -> "Group":
        """A twin of this group whose collectives are ordered among themselves only.

        Collectives of one group must be called in one order on all ranks. Where two kinds of them have each its own order
        (gathers as the forward pass needs them, reductions as gradients become ready), each kind takes a channel.
        """
        return self.world.channel(self, name)

    def __getstate__(self) -> NoReturn:
        raise TypeError(
            f"{self!r} belongs to its rank and cannot be copied or pickled; pass its ranks on, and comm.new_group(ranks)"
        )

    def __repr__(self) -> str:
        place = f"rank {self.rank} of {self.size}" if self.rank >= 0 else "not a member"
        return f"Group({self.name!r}, {place}, ranks {list(self.ranks)})"


@attrs.define(eq=False)
class Ready:
    """A collective that is over."""

    results: list[Tensor]
    ended: float | None = None

    def wait(self) -> list[Tensor]:
        return self.results

    def poll(self, patience: float) -> bool:
        return True


@attrs.define(eq=False)
class Solo:
    """The world of one rank: a collective is its denotation for n = 1."""

    books: list[Ledger] = attrs.field(factory=list)

    @property
    def device(self) -> torch.device:
        return torch.device("cpu")

    def together(self) -> AbstractContextManager[None]:
        return nullcontext()

    def repeat(self, times: int, body: Callable[[int], None]) -> None:
        each(times, body)

    def start(self, call: Call, tensors: Sequence[Tensor], group: Group, *, ahead: bool) -> Ready:
        options = call.merged([call.private()])
        return Ready([call.collective.denotation([t.detach().contiguous()], options)[0] for t in tensors])

    def group(self, ranks: Sequence[int], name: str) -> Group:
        return Group(tuple(ranks), place_in(ranks, 0), name, self)

    def channel(self, group: Group, name: str) -> Group:
        return attrs.evolve(group, name=f"{group.name}/{name}")


def each(times: int, body: Callable[[int], None]) -> None:
    """``body(0)``, ``body(1)``, ..., ``body(times - 1)``."""
    for i in range(times):
        body(i)


def place_in(ranks: Sequence[int], rank: int) -> int:
    """The rank's place among them, or -1."""
    return list(ranks).index(rank) if rank in ranks else -1


_LIBRARIES = ("functional_ds", "torch", "optree", "threading")


def call_site() -> str:
    """The file and line that called into this library: the nearest frame that is neither ours nor torch's."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in _LIBRARIES:
        frame = frame.f_back
    return f"{frame.f_code.co_filename.rpartition(os.sep)[2]}:{frame.f_lineno}"
