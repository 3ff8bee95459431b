"""Which of NCCL's communicators carries a call."""

import hashlib
from typing import cast

import attrs

from functional_ds.comm.record.group import Group
from functional_ds.comm.table.collective import Call

__all__ = ["CommunicatorKey"]


@attrs.frozen(order=True)
class CommunicatorKey:
    """What names a communicator on all its ranks, whatever else each of them has connected before.

    A group has one communicator for its collectives. Between two of its ranks there is one for each direction and tag of
    messages: NCCL knows no tags, and one communicator runs its work in order, so messages that face each other would wait for
    each other. Keys are ordered, and a rank that needs several connects them in that order, so no two ranks wait crosswise.

    Attributes:
        ends: its ranks in ascending order.
        group: the ranks of the group, in the group's order.
        name: the group's.
        tag: of messages; -1 for collectives.
        messages: whether it carries messages.
        ranks: its ranks, as ranks of the world, in its own order; for messages (source, destination).
    """

    ends: tuple[int, ...]
    group: tuple[int, ...]
    name: str
    messages: bool
    tag: int
    ranks: tuple[int, ...]

    @staticmethod
    def of(call: Call, group: Group) -> "CommunicatorKey":
        """The communicator of a call on a group."""
        if not call.collective.is_message:
            return CommunicatorKey(tuple(sorted(group.ranks)), group.ranks, group.name, False, -1, group.ranks)
        src, dst, tag = cast(tuple[int, int, int], call.collective.order(call.options))
        return CommunicatorKey.between(group, src, dst, tag)

    @staticmethod
    def between(group: Group, src: int, dst: int, tag: int) -> "CommunicatorKey":
        """The communicator of messages from one rank of a group to another."""
        ranks = group.ranks[src], group.ranks[dst]
        return CommunicatorKey(tuple(sorted(ranks)), group.ranks, group.name, True, tag, ranks)

    def connected_together(self) -> "list[CommunicatorKey]":
        """Those to connect at the first use of this one: for messages both directions, since either may come first."""
        if not self.messages:
            return [self]
        return sorted([self, attrs.evolve(self, ranks=self.ranks[::-1])])

    def digest(self) -> str:
        """A short name, equal on all ranks."""
        return hashlib.sha1(repr(attrs.astuple(self)).encode(), usedforsecurity=False).hexdigest()
