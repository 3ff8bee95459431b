"""Primitives, by which a back end performs a collective: functions of a communicator, the payload and the options."""

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

import attrs
from torch import Tensor
from torch.distributed import ProcessGroup, Work

Options = Mapping[str, Any]


@attrs.define(eq=False)
class Started:
    """A started primitive: torch's work objects, and the computation that follows them."""

    works: Sequence[Work]
    finish: Callable[[], Tensor]
    ended: float | None = None

    def wait(self) -> Tensor:
        """Waits for the works; returns the result."""
        for work in self.works:
            work.wait()
        return self.finish()

    def poll(self, timeout: float) -> bool:
        """Always True: a worker has waited for Gloo's works, and over NCCL the host does not wait."""
        return True


@attrs.frozen(eq=False)
class Prepared:
    """A primitive with its memory allocated; ``post`` posts its messages, and ``finish`` computes the result after them."""

    post: Callable[[], Sequence[Work]]
    finish: Callable[[], Tensor]

    def start(self) -> Started:
        """Posts the messages."""
        return Started(self.post(), self.finish)

    def run(self) -> Tensor:
        """Posts the messages and waits for them."""
        return self.start().wait()


@attrs.frozen(eq=False, slots=False)
class Communicator:
    """Sends a group's messages over the world's process group, with a tag that separates them from other groups' messages.

    Attributes:
        pg: the world's process group.
        ranks: the group's ranks.
        rank: this process's rank in the group.
        tag: the tag of the group's messages.
    """

    pg: ProcessGroup
    ranks: tuple[int, ...]
    rank: int
    tag: int

    @property
    def size(self) -> int:
        """The number of ranks in the group."""
        return len(self.ranks)

    @cached_property
    def peers(self) -> list[int]:
        """The other ranks, starting after this one, so that not all ranks send to the same rank first."""
        return [(self.rank + k) % self.size for k in range(1, self.size)]

    def nodes(self, ranks_per_node: int) -> "tuple[Communicator, Communicator]":
        """Communicators of this rank's node, and of the ranks at its position on all nodes."""
        node, place = divmod(self.rank, ranks_per_node)
        mine = self.ranks[node * ranks_per_node : (node + 1) * ranks_per_node]
        return attrs.evolve(self, ranks=mine, rank=place), attrs.evolve(
            self, ranks=self.ranks[place::ranks_per_node], rank=node
        )

    def send(self, tensor: Tensor, peer: int) -> list[Work]:
        """Starts sending a contiguous tensor."""
        return [self.pg.send([tensor], self.ranks[peer], self.tag)] if tensor.numel() else []

    def recv(self, tensor: Tensor, peer: int) -> list[Work]:
        """Starts receiving into a contiguous tensor."""
        return [self.pg.recv([tensor], self.ranks[peer], self.tag)] if tensor.numel() else []


GlooPrimitive = Callable[[Communicator, Tensor, Options], Prepared]
NcclPrimitive = Callable[[ProcessGroup, Tensor, Options], Started]
